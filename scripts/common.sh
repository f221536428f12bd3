# Sourced by quickstart.sh and test.sh from the repository root: makes .venv with the pinned packages, or reuses it.
#
# .venv/draftsmith.state says what the environment was made for (base) and what was installed (packages, extra).
# It is removed before anything changes and written last, so an interrupted installation is never taken for a
# finished one. .venv/draftsmith.lock marks an environment made here and keeps two runs apart.

VENV=.venv
STATE=$VENV/draftsmith.state
LOCK=$VENV/draftsmith.lock
CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '%s\n' "$*"; }

die() {
    printf '%s: %s\n' "$0" "$*" >&2
    exit 1
}

# The rooms must be real links: an archive unpacked without link support leaves files of a few bytes.
check_rooms() {
    local room
    for room in data heads train eval recipes; do
        [ -d "draftsmith/$room" ] || die "draftsmith/$room should be a link to the folder $room but is not" \
            "(archives and some checkouts lose links): run" \
            "\"for room in data heads train eval recipes; do ln -sfn ../\$room draftsmith/\$room; done\" and try again."
    done
}

# Print the first interpreter that is new enough and can make an environment; never one inside an environment.
find_python() {
    local name version why=""
    for name in python3 python3.13 python3.12 python3.11; do
        command -v "$name" >/dev/null 2>&1 || continue
        version=$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        if ! "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            why="$why; $name is Python $version"
        elif ! "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            why="$why; $name lacks the venv module (on Debian and Ubuntu: apt install python$version-venv)"
        else
            "$name" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'
            return
        fi
    done
    die "Python 3.11 or newer with venv is needed, and none was found on PATH${why:-; there is no python3 at all}."
}

pip_install() {
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt "$@" ||
        die "pip could not finish (its own message is above); check the network, the index and the disk," \
            "then run the same command again."
}

# Print the versions of torch that pip could take, best first. Not `pip install --dry-run`, which downloads the wheels.
torch_versions() {
    "$VENV/bin/python" -m pip index versions torch 2>/dev/null | sed -n 's/^Available versions: //p' | tr -d ' ' | tr ',' '\n'
}

# warn_before_cuda PIN: on Linux only a local version such as 2.13.0+cpu says that a build comes without CUDA.
warn_before_cuda() {
    local version=${1#torch==} found
    [ "$(uname -s)" = Linux ] || return 0
    found=$(torch_versions | awk -v pin="$version" '!found && ($0 == pin || index($0, pin "+") == 1) { found = $0 }
        END { print found }') || found=""
    case $found in *+cpu) return 0 ;; esac
    say "WARNING: torch ${found:-$version} brings the CUDA libraries, a download of several gigabytes. For the small CPU" \
        "build stop now (Ctrl-C) and run: TORCH_INDEX=$CPU_INDEX bash $0"
}

# install_torch PIN INDEX. With an index of its own torch comes from there alone; what torch needs may come from both.
install_torch() {
    if [ -n "$2" ]; then
        say "Installing $1 from $2"
        pip_install --no-deps --index-url "$2" "$1"
        pip_install --extra-index-url "$2" "$1"
    else
        warn_before_cuda "$1"
        say "Installing $1"
        pip_install "$1"
    fi
}

# One value of the state file, or nothing.
recorded() {
    if [ -f "$STATE" ]; then sed -n "s|^$1=||p" "$STATE"; fi
}

# make_venv PYTHON: an empty environment in place of whatever an earlier run left there.
make_venv() {
    find "$VENV/" -mindepth 1 -maxdepth 1 ! -path "$VENV/${LOCK##*/}" -exec rm -rf {} +
    "$1" -m venv "$VENV" || die "$1 could not make $VENV; its own message is above."
}

# ensure_environment [EXTRA]: after it $VENV holds draftsmith (editable), its pinned packages, and those of EXTRA.
ensure_environment() {
    local extra index torch base packages python version started=$SECONDS
    check_rooms
    if [ -e "$VENV" ] && [ ! -e "$LOCK" ] && [ -n "$(ls -A "$VENV")" ]; then
        die "$VENV exists but was not made by this script, so it is left alone: move it away and try again."
    fi
    mkdir -p "$VENV"
    exec 9>"$LOCK"
    if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
        say "Another run is installing into $VENV: waiting for it."
        flock 9
    fi

    # Without TORCH_INDEX the choice of an earlier run stands; so does its extra.
    index=${TORCH_INDEX:-$(recorded index)}
    extra=${1:-$(recorded extra)}
    torch=$(grep '^torch==' constraints.txt)
    packages=$(cat pyproject.toml constraints.txt | cksum)
    version=$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=none
    base="Python $version, $torch from ${index:-the default index}, in $PWD"

    if [ -n "$(recorded base)" ] && [ "$(recorded base)" = "$base" ]; then
        if [ "$(recorded packages)" = "$packages" ] && [ "$(recorded extra)" = "$extra" ]; then
            say "Reusing $VENV ($base)."
            exec 9>&-
            return
        fi
        say "Updating $VENV: pyproject.toml, constraints.txt or the extra changed."
    else
        python=$(find_python)
        if [ -n "$(recorded base)" ]; then
            say "Making $VENV again: it was made for $(recorded base)."
        elif [ -e "$VENV/pyvenv.cfg" ]; then
            say "Making $VENV again: an earlier installation did not finish."
        fi
        rm -f "$STATE"
        make_venv "$python"
        version=$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        base="Python $version, $torch from ${index:-the default index}, in $PWD"
        say "Made $VENV with Python $version."
        install_torch "$torch" "$index"
    fi

    rm -f "$STATE"
    say "Installing draftsmith${extra:+ with the extra \"$extra\"} and the packages of constraints.txt"
    pip_install --editable ".${extra:+[$extra]}"
    printf '%s\n' "base=$base" "index=$index" "packages=$packages" "extra=$extra" >"$STATE.new"
    mv "$STATE.new" "$STATE"
    say "Installation took $((SECONDS - started)) s; the next run reuses $VENV."
    exec 9>&-
}
