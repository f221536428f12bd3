#!/usr/bin/env bash
# What must hold before a commit: ruff, mypy, pytest, in the same .venv as quickstart.sh plus the dev extra.
#
#   bash scripts/test.sh                              # all but the tests marked slow; arguments go to pytest
#   bash scripts/test.sh --fast                       # without those marked full, too: what to run while you work
#   bash scripts/test.sh --all                        # everything, as CI does
#   bash scripts/test.sh -n 0 tests/heads -k eagle    # one process, some tests
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "$0")/.."
. scripts/common.sh

marks="not slow"
case ${1:-} in
    --fast) marks="not slow and not full" && shift ;;
    --all) marks="" && shift ;;
esac

# Two workers of one thread each: more threads per worker only fight for the cores. No test may use the network.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline

current="" seconds=""

finish() {
    local status=$?
    printf '\nSeconds: %s\n' "${seconds:-none}"
    if [ -n "$current" ]; then
        printf '%s: the step "%s" failed; what it found is above.\n' "$0" "$current" >&2
    fi
    exit "$status"
}
trap finish EXIT

step() {
    local started=$SECONDS
    current=$1
    shift
    printf '\n== %s\n' "$current"
    "$@"
    seconds="${seconds:+$seconds, }$current $((SECONDS - started))"
    current=""
}

step environment ensure_environment dev
step "ruff check" "$VENV/bin/ruff" check .
step "ruff format" "$VENV/bin/ruff" format --check .
step mypy "$VENV/bin/mypy"
step pytest "$VENV/bin/pytest" -n auto --maxprocesses 2 --dist loadfile --durations 25 ${marks:+-m "$marks"} "$@"
