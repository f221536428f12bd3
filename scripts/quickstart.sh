#!/usr/bin/env bash
# From a bare machine to a report: makes .venv, installs the pinned packages, runs the embedded EAGLE-3 default.
#
#   bash scripts/quickstart.sh                                    # arguments go to `draftsmith run`
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu bash scripts/quickstart.sh      # another build of torch
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "$0")/.."
. scripts/common.sh

ensure_environment
# The embedded models are too small to share a matrix product between cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$VENV/bin/draftsmith" run --recipe recipes/eagle3/tiny.yaml "$@"
