#!/bin/sh
# Prints the newest Python that can make a virtual environment for this project, or says what is missing and fails.
#
#     sh tools/find_python.sh             any of 3.14, 3.13, 3.12, 3.11, or a newer python3
#     sh tools/find_python.sh 3.12        that version only
#
# PYTHON=/path/to/python overrides the search. A candidate is not believed by its name: a shim of a version manager
# may exist for a version that is not active, and Debian ships a python3 without the modules that venv needs.

set -u

wanted=${1:-}
missing=""

works() { # NAME [VERSION]: whether NAME runs, is new enough (or VERSION), and can make environments; else says why not
    found=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || return 1
    if [ -n "${2:-}" ] && [ "$found" != "$2" ]; then
        missing="$missing
  $1 is Python $found, and $2 was asked for"
        return 1
    fi
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        missing="$missing
  $1 is Python $found, and 3.11 or newer is needed"
        return 1
    }
    "$1" -c 'import venv, ensurepip' 2>/dev/null || {
        missing="$missing
  $1 (Python $found) has no venv module: on Debian and Ubuntu, apt-get install python$found-venv"
        return 1
    }
}

if [ -n "${PYTHON:-}" ]; then
    candidates=$PYTHON
elif [ -n "$wanted" ]; then
    # The folders are those of pyenv and uv: there, a version that is installed need not be on PATH.
    candidates="python$wanted
$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$wanted".*/bin/python3 2>/dev/null)
$(ls -d "${XDG_DATA_HOME:-$HOME/.local/share}"/uv/python/cpython-"$wanted".*/bin/python3 2>/dev/null)
python3"
else
    candidates="python3.14 python3.13 python3.12 python3.11 python3 python"
fi

for candidate in $candidates; do
    if works "$candidate" "$wanted"; then
        # The real path, so that what is made from it does not depend on a shim's mood later on.
        "$candidate" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done

{
    echo "No usable Python found: taskgraph needs Python ${wanted:-3.11 or newer} with the venv module."
    echo "Tried:" $candidates
    [ -z "$missing" ] || echo "Found, but:$missing"
    echo "Install one (https://www.python.org/downloads/), or name one: make PYTHON=/path/to/python3 ..."
} >&2
exit 1
