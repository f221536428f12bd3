#!/usr/bin/env bash
# From a bare machine to a report: makes .venv, installs the pinned packages, trains Medusa and EAGLE-3 heads for the
# embedded default on the same answers, and measures both with the target alone for comparison.
#
#   bash scripts/quickstart.sh                                    # arguments override keys of recipes/eagle3/tiny.yaml
#   bash scripts/quickstart.sh --redo train --fail-under tau=2.5  # and options of `draftsmith run` go to the step they are for
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu bash scripts/quickstart.sh      # another build of torch
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "$0")/.."
. scripts/common.sh

extract=(extract --recipe recipes/eagle3/tiny.yaml)
medusa=(train --recipe recipes/medusa/tiny.yaml)
eagle3=(train --recipe recipes/eagle3/tiny.yaml)
run=(run --recipe recipes/eagle3/tiny.yaml --evaluate.beside.medusa runs/medusa-tiny
    --evaluate.drafts '[{tree: chain}, {tree: medusa_63, heads: [medusa]}]')

# Keys of the recipe go to every step of EAGLE-3, and to Medusa's training where both heads learn from what they set.
shared=""
while [ $# -gt 0 ]; do
    word=$1
    shift
    case $word in
        --redo | --fail-under | --junit | --launch)
            [ $# -gt 0 ] || die "$word needs a value."
            word="$word=$1"
            shift
            ;;
    esac
    case $word in
        --redo=answers | --redo=features) extract+=("$word") medusa+=(--redo=train) ;;
        --redo=train) medusa+=("$word") eagle3+=("$word") ;;
        --redo=evaluate | --redo=export | --fail-under=* | --junit=*) run+=("$word") ;;
        --redo=*) extract+=("$word") ;; # it refuses a stage that does not exist or is not made here
        --launch=*) eagle3+=("$word") ;;
        *)
            case $word in
                --target.* | --data[._]* | --answers.* | --features.* | --seed*) shared=yes ;;
                --*) shared="" ;;
            esac
            extract+=("$word") eagle3+=("$word") run+=("$word")
            [ -z "$shared" ] || medusa+=("$word")
            ;;
    esac
done

ensure_environment
# The embedded models are too small to share a matrix product between cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Both heads learn from the same answers and hidden states, at the same time.
mkdir -p runs
"$VENV/bin/draftsmith" "${extract[@]}" >/dev/null
"$VENV/bin/draftsmith" "${medusa[@]}" >runs/medusa-tiny.log 2>&1 &
job=$!
trap 'kill "$job" 2>/dev/null || true' EXIT
"$VENV/bin/draftsmith" "${eagle3[@]}" >/dev/null
wait "$job" || die "the Medusa heads could not be trained: runs/medusa-tiny.log says why."
trap - EXIT
exec "$VENV/bin/draftsmith" "${run[@]}"
