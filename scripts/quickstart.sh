#!/usr/bin/env bash
# From a bare machine to a report: makes .venv, installs the pinned packages, trains Medusa and EAGLE-3 heads for the
# embedded default on the same answers, and measures both beside the target alone.
#
#   bash scripts/quickstart.sh                                    # arguments go to `draftsmith run` of EAGLE-3
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu bash scripts/quickstart.sh      # another build of torch
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "$0")/.."
. scripts/common.sh

ensure_environment
# The embedded models are too small to share a matrix product between cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$VENV/bin/draftsmith" train --recipe recipes/medusa/tiny.yaml
exec "$VENV/bin/draftsmith" run --recipe recipes/eagle3/tiny.yaml \
    --evaluate.beside.medusa runs/medusa-tiny --evaluate.drafts '[{tree: chain}, {tree: medusa_63, heads: [medusa]}]' "$@"
