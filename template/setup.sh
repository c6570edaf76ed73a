#!/bin/sh
# Makes the Python 3.12 environment of this repository.
#
#   ./setup.sh       install requirements.lock, hashes checked, into $VENV (default .venv); at once when it is there
#   ./setup.sh uv    only print the path of a usable uv, after installing one into $TOOLS (default .tools) if need be
#   ./setup.sh lock  write requirements.lock from requirements.in; with --upgrade take newer versions where allowed
#
# PYTHON=/path/to/python3.12 names the interpreter; otherwise uv, PATH and pyenv are asked, in this order.
set -eu

UV_MINIMUM=0.8.0   # first with `uv venv --clear`
UV_PINNED=0.13.9   # installed when there is none on PATH
PYTHON_VERSION=3.12

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
lock=$here/requirements.lock
venv=${VENV:-.venv}
tools=${TOOLS:-.tools}
case $tools in /*) ;; *) tools=$(pwd)/$tools ;; esac  # `lock` goes to another folder

say() {
    printf 'setup: %s\n' "$*" >&2
}

die() {
    say "$@"
    exit 1
}

# True when the program $1 is a uv of at least UV_MINIMUM.
is_usable_uv() {
    version=$("$1" --version 2>/dev/null | cut -d ' ' -f 2) || return 1
    [ -n "$version" ] || return 1
    oldest=$(printf '%s\n%s\n' "$UV_MINIMUM" "$version" | sort -t . -k 1,1n -k 2,2n -k 3,3n | head -n 1)
    [ "$oldest" = "$UV_MINIMUM" ]
}

# Prints the path of a usable uv; installs the pinned one with pip when there is none.
find_uv() {
    for candidate in uv "$tools/bin/uv"; do
        if is_usable_uv "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null ||
        die "no uv and no Python 3 on PATH: install one of them, then run this again (https://docs.astral.sh/uv)"
    say "no uv $UV_MINIMUM or newer on PATH: installing uv $UV_PINNED into $tools"
    python3 -m venv "$tools" >&2 ||
        die "python3 -m venv failed: install your system's python3-venv package, or uv itself, then run this again"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_PINNED" >&2 ||
        die "pip could not install uv: check the network and pip's index, or install uv yourself, then run this again"
    printf '%s\n' "$tools/bin/uv"
}

# True when the program $1 is a Python of PYTHON_VERSION that really runs: pyenv leaves shims that only print an error.
is_right_python() {
    [ "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$PYTHON_VERSION" ]
}

# Prints the path of a Python 3.12, downloading one with uv ($1) as the last resort.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_right_python "$PYTHON" || die "PYTHON=$PYTHON is not a working Python $PYTHON_VERSION: name one that is"
        command -v "$PYTHON"
        return
    fi
    by_uv=$("$1" python find --system --no-python-downloads "$PYTHON_VERSION" 2>/dev/null) || by_uv=
    for candidate in "$by_uv" "python$PYTHON_VERSION" python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/$PYTHON_VERSION".*/bin/python; do
        if is_right_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    say "no Python $PYTHON_VERSION here (asked uv, PATH and pyenv): uv downloads one"
    if "$1" python install "$PYTHON_VERSION" >&2; then
        "$1" python find --system --managed-python "$PYTHON_VERSION"
        return
    fi
    die "no Python $PYTHON_VERSION. Install it (Debian, Ubuntu: apt install python3.12-venv; macOS: brew install python@3.12;
       pyenv: pyenv install 3.12) or name one: PYTHON=/path/to/python3.12, then run this again"
}

# Writes the lock in two steps, because one cannot do: `lowest` over everything walks Ray's unbounded dependencies down
# to versions for Python 2, and `highest` takes a JAX that this MaxText was never tested with. "$@" goes to uv.
write_lock() {
    uv=$(find_uv)
    tested=$(mktemp)
    trap 'rm -f "$tested"' EXIT
    say "[1/2] the versions that MaxText was tested with: the lower bounds of its own requirements"
    # Ray 2.60.0 asks for aiohttp >= 3.14.4, one patch above MaxText's bound: the only pin that gives way.
    grep '^maxtext' "$here/requirements.in" |
        "$uv" pip compile --quiet --universal --python-version "$PYTHON_VERSION" --resolution lowest - |
        grep -v '^aiohttp==' >"$tested"
    say "[2/2] Ray and the rest, held to those versions"
    cd "$here"
    "$uv" pip compile --quiet --universal --python-version "$PYTHON_VERSION" --constraints "$tested" --generate-hashes \
        --no-annotate --custom-compile-command './setup.sh lock' --output-file requirements.lock "$@" requirements.in
    say "requirements.lock written; now let a rehearsal prove it"
}

case ${1:-} in
'') ;;
uv)
    find_uv
    exit
    ;;
lock)
    shift
    write_lock "$@"
    exit
    ;;
*) die "unknown argument '$1': give none, 'uv' or 'lock'" ;;
esac

# The environment keeps a copy of the lock that it was made from; written last, it also tells a finished one.
if [ -x "$venv/bin/python" ] && cmp -s "$lock" "$venv/requirements.lock"; then
    exit 0
fi

uv=$(find_uv)
if ! is_right_python "$venv/bin/python"; then
    python=$(find_python "$uv")
    say "[1/3] environment $venv with $python"
    # Only a broken environment is ever cleared; uv itself refuses a folder that is something else.
    if [ -f "$venv/pyvenv.cfg" ]; then set -- --clear; fi
    "$uv" venv --quiet --no-project --python "$python" "$@" "$venv" >&2
fi

say "[2/3] $(grep -c '^[A-Za-z0-9]' "$lock") packages from requirements.lock (2.7 GB; uv takes what its cache has)"
# One package has only a source distribution: the constraint pins what builds it.
"$uv" pip sync --python "$venv/bin/python" --require-hashes --build-constraints "$lock" "$lock" >&2 ||
    die "the packages could not be installed (the lines above say why); run this again to go on where it stopped"

# Left to the workers, each of them would compile the same modules at the same moment.
say "[3/3] importing the trainer's modules once, which writes their bytecode"
PYTHONDONTWRITEBYTECODE='' JAX_PLATFORMS=cpu "$venv/bin/python" -c '
import google.cloud.storage
import kubernetes
import maxtext.trainers.pre_train.train
import ray.train.v2.jax
' >"$venv/setup.log" 2>&1 || die "the installed packages do not import: see $venv/setup.log"

cp "$lock" "$venv/requirements.lock"
say "done"
