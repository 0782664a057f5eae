#!/usr/bin/env bash
# Builds every wheel into dist/ by `nox -s build`, as a developer does, once for each Python named; then tags and checks them.
# The build stage of every image runs it, and so can any machine with a compiler.
# Usage: docker/build.sh TARGET PYTHON...   (TARGET: a folder of docker/, or "host" for whatever this machine gives)
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: docker/build.sh TARGET PYTHON..." >&2
    exit 2
fi
cd "$(dirname "$0")/.."
target=$1
shift

# With a CANN toolkit in the image, its environment is what its own script says.
for script in /usr/local/Ascend/cann/set_env.sh /usr/local/Ascend/ascend-toolkit/set_env.sh; do
    if [ -f "$script" ]; then
        set +u
        # shellcheck disable=SC1090 # it is CANN's own
        source "$script"
        set -u
        break
    fi
done

export PIP_DISABLE_PIP_VERSION_CHECK=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sessions=(build)
number=0
for python in "$@"; do
    number=$((number + 1))
    home=$work/$number
    "$python" -m venv "$home"
    "$home/bin/python" -m pip install --quiet --no-compile --constraint build/constraints.txt nox
    "$home/bin/python" -m nox --session "${sessions[@]}"
    # Pure wheels serve every Python: the others only build what is compiled.
    mapfile -t sessions < <("$home/bin/python" build/workspace.py native | sed 's/.*/build(&)/')
    if [ ${#sessions[@]} -eq 0 ]; then
        break
    fi
done
"$home/bin/python" -m nox --session wheels -- --finish "$target"
