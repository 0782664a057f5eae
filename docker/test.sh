#!/usr/bin/env bash
# Tries the wheels of a folder, for each Python named, where nothing can be compiled: what users get when they run pip install.
# The test stage of every image runs it, and so can any machine.
# Usage: docker/test.sh TARGET FOLDER PYTHON...   (TARGET: a folder of docker/, or "host" for a machine that has a compiler)
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: docker/test.sh TARGET FOLDER PYTHON..." >&2
    exit 2
fi
target=$1
wheels=$(realpath "$2")
shift 2
cd "$(dirname "$0")/.."
if [ "$target" != host ]; then
    for compiler in cc gcc g++ clang cmake; do
        if command -v "$compiler" >/dev/null; then
            echo "docker/test.sh: $compiler is here, and this image must show that the wheels need none" >&2
            exit 1
        fi
    done
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
number=0
for python in "$@"; do
    number=$((number + 1))
    tools=$work/$number
    "$python" -m venv "$tools"
    needed=(packaging pyelftools tomli)
    # With the history at hand, older siblings are built from their releases; an image has none.
    if [ -e .git ]; then
        needed+=(build hatchling pybind11 scikit-build-core)
    fi
    "$tools/bin/python" -m pip install --quiet --no-compile --constraint build/constraints.txt "${needed[@]}"
    "$tools/bin/python" build/try_wheels.py "$wheels"
done
