#!/usr/bin/env bash
# Serves trained heads with real vLLM and llama.cpp on this machine's CPU, and holds what they draft and accept against
# draftsmith's own decoder and simulator.
#
#   bash scripts/test_engines.sh                                     # the embedded target, both engines: what CI runs
#   bash scripts/test_engines.sh --engine llama.cpp --only eagle3    # --help lists all options
#
#   bash scripts/test_engines.sh --engine vllm --vllm ~/vllm-0.33 --output docs/results/engines   # a row for an installed version
#
# The first run makes the engines (vLLM in an environment of its own, 3.4 GB; llama.cpp is built from its source
# distribution, 5 to 10 minutes on two cores) in $DRAFTSMITH_ENGINES, by default ~/.cache/draftsmith/engines; later
# runs reuse them. scripts/engine_versions.txt pins their versions.
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "$0")/.."
. scripts/common.sh
. scripts/engine_versions.txt

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline
ENGINES=${DRAFTSMITH_ENGINES:-${DRAFTSMITH_CACHE:-$HOME/.cache/draftsmith}/engines}
mkdir -p "$ENGINES"
ENGINES=$(cd "$ENGINES" && pwd)

# Newer pins make new folders, and a build belongs to the processor that it was made for.
PROCESSOR=$({ uname -m; grep -m 1 '^flags' /proc/cpuinfo || true; } 2>/dev/null | cksum | cut -d ' ' -f 1)
VLLM_HOME=$ENGINES/${VLLM/==/-}
LLAMA_HOME=$ENGINES/${LLAMA_CPP/==/-}-$PROCESSOR

# quietly LOG COMMAND...: the log is shown only where the command fails.
quietly() {
    local log=$1
    shift
    "$@" >"$log" 2>&1 || {
        tail -n 30 "$log" >&2
        die "\"$*\" failed; its whole log is $log."
    }
}

make_vllm() {
    local started=$SECONDS log=$ENGINES/vllm.log
    # torch's CPU build beside vLLM's; an index of its own may be needed for it, as in quickstart.sh.
    local index=(${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"})
    say "Making $VLLM_HOME (once; about 3 minutes, 3.4 GB)"
    rm -rf "$VLLM_HOME"
    quietly "$log" "$(find_python)" -m venv "$VLLM_HOME"
    local pip=("$VLLM_HOME/bin/python" -m pip --disable-pip-version-check)
    quietly "$log" "${pip[@]}" install "${index[@]}" "$VLLM_TORCH"
    quietly "$log" "${pip[@]}" install "${index[@]}" "$VLLM" "$VLLM_TORCH" "$VLLM_TORCHVISION"
    # Their builds do not load beside torch's CPU build, and text needs none of them.
    quietly "$log" "${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
    touch "$VLLM_HOME/finished"
    say "Made $VLLM_HOME in $((SECONDS - started)) s"
}

make_llama_cpp() {
    local started=$SECONDS log=$ENGINES/llama.cpp.log generator=() no_amx="" flags=()
    command -v cmake >/dev/null || die "building llama.cpp needs cmake and a C++ compiler: install both and try again."
    say "Building $LLAMA_HOME (once; 5 to 10 minutes on two cores)"
    rm -rf "$LLAMA_HOME"
    mkdir -p "$LLAMA_HOME"
    quietly "$log" "$VENV/bin/python" -m pip --disable-pip-version-check download --no-deps \
        --no-binary llama-cpp-python --dest "$LLAMA_HOME" "$LLAMA_CPP"
    quietly "$log" tar -xzf "$LLAMA_HOME"/*.tar.gz -C "$LLAMA_HOME" --strip-components 2 --wildcards '*/vendor/llama.cpp/*'
    if command -v ninja >/dev/null; then generator=(-G Ninja); fi
    # Its kernels with AMX ended the server with an invalid instruction, so none are made where the compiler would.
    if c++ -march=native -dM -E -x c++ /dev/null 2>/dev/null | grep __AMX_TILE__ >/dev/null; then
        no_amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
        flags=("-DCMAKE_C_FLAGS=$no_amx" "-DCMAKE_CXX_FLAGS=$no_amx")
    fi
    quietly "$log" cmake -S "$LLAMA_HOME/llama.cpp" -B "$LLAMA_HOME/build" "${generator[@]}" "${flags[@]}" -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    quietly "$log" cmake --build "$LLAMA_HOME/build" --parallel "$(env -u OMP_NUM_THREADS nproc)" --target llama-server llama-quantize
    touch "$LLAMA_HOME/finished"
    say "Built $LLAMA_HOME in $((SECONDS - started)) s"
}

# asked_for ENGINE: whether the options name it, or no engine at all, and no installed one in the place of the pinned.
asked_for() {
    case " $ARGUMENTS " in *" --${1/./-} "* | *" --${1/./-}="*) return 1 ;; esac
    case " $ARGUMENTS " in *" -h "* | *" --help "*) return 1 ;; *"--engine"*) ;; *) return 0 ;; esac
    case " $ARGUMENTS " in *" --engine $1 "* | *" --engine=$1 "*) return 0 ;; *) return 1 ;; esac
}

ARGUMENTS=$*
ensure_environment dev
exec 8>"$ENGINES/lock"
if command -v flock >/dev/null 2>&1 && ! flock -n 8; then
    say "Another run is at work in $ENGINES: waiting for it."
    flock 8
fi
# One waits for the network, the other for the processor.
vllm_job=""
if asked_for vllm && [ ! -e "$VLLM_HOME/finished" ]; then
    make_vllm &
    vllm_job=$!
fi
if asked_for llama.cpp && [ ! -e "$LLAMA_HOME/finished" ]; then make_llama_cpp; fi
if [ -n "$vllm_job" ]; then wait "$vllm_job"; fi
exec "$VENV/bin/python" -m scripts.bench.engines --work "$ENGINES/work" --vllm "$VLLM_HOME" --llama-cpp "$LLAMA_HOME" "$@"
