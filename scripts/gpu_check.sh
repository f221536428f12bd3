#!/usr/bin/env bash
# Checks draftsmith on a CUDA machine with Python 3.11 or newer, torch and transformers, without a network: the GPU
# tests, what a random target of 8 billion parameters and a head for it take (passes, answers, training steps, stores, a
# long document, the errors of its numbers), then EAGLE-3 on the embedded default from answers to decoding in bf16.
# Writes gpu_check.json and a log into the output folder (gpu-check), within 9 minutes; every part is a process of its own
# and keeps what it found.
#
#   bash scripts/gpu_check.sh [--wheels DIR] [--output DIR] [--minutes 9]       # --help lists all options
#   bash scripts/gpu_check.sh --device cpu --small --minutes 15                 # tries the check itself, anywhere
#
# What python lacks beyond torch and transformers comes from wheels in DIR: scripts/gpu_wheels.txt says how to get them.
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "$0")/.."

# Whether the packages are there, without the minute that a first import can take.
holds='import sys; from importlib.util import find_spec as find
sys.exit(sys.version_info < (3, 11) or not (find("torch") and find("transformers")))'
for python in python3 python3.12 python3.13 python3.11; do
    if "$python" -c "$holds" >/dev/null 2>&1; then
        exec "$python" -m scripts.bench.gpu "$@"
    fi
done
printf '%s\n' "$0: no python3 on PATH is 3.11 or newer and has torch and transformers: activate the environment" \
    "that holds them and try again." >&2
exit 2
