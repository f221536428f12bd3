#!/usr/bin/env bash
# From a bare machine to a report: makes .venv, installs the pinned packages, trains Medusa and EAGLE-3 heads for the
# embedded default on the same answers, and measures both beside the target alone.
#
#   bash scripts/quickstart.sh                                    # arguments override keys of recipes/eagle3/tiny.yaml
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu bash scripts/quickstart.sh      # another build of torch
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "$0")/.."
. scripts/common.sh

ensure_environment
# The embedded models are too small to share a matrix product between cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Both heads learn from the same answers and hidden states, at the same time.
mkdir -p runs
"$VENV/bin/draftsmith" extract --recipe recipes/eagle3/tiny.yaml "$@" >/dev/null
"$VENV/bin/draftsmith" train --recipe recipes/medusa/tiny.yaml >runs/medusa-tiny.log 2>&1 &
job=$!
trap 'kill "$job" 2>/dev/null || true' EXIT
"$VENV/bin/draftsmith" train --recipe recipes/eagle3/tiny.yaml "$@" >/dev/null
wait "$job" || die "the Medusa heads could not be trained: runs/medusa-tiny.log says why."
trap - EXIT
exec "$VENV/bin/draftsmith" run --recipe recipes/eagle3/tiny.yaml \
    --evaluate.beside.medusa runs/medusa-tiny --evaluate.drafts '[{tree: chain}, {tree: medusa_63, heads: [medusa]}]' "$@"
