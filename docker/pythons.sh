#!/usr/bin/env bash
# Installs Pythons into /opt/pythons, each as /opt/pythons/bin/python3.X: the same builds in every image, whatever Python its system
# has. They run on every glibc since 2.17, and a wheel takes nothing from them but headers.
# Usage: docker/pythons.sh BOOTSTRAP python3.X...   (BOOTSTRAP: a Python of the system that has pip)
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: docker/pythons.sh BOOTSTRAP python3.X..." >&2
    exit 2
fi
bootstrap=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$bootstrap" -m pip install --quiet --disable-pip-version-check --target "$work" uv==0.13.8
# An ARG without a value is an empty variable, which isn't the same as none.
[ -n "${UV_PYTHON_INSTALL_MIRROR:-}" ] || unset UV_PYTHON_INSTALL_MIRROR
export UV_PYTHON_INSTALL_DIR=/opt/pythons UV_PYTHON_PREFERENCE=only-managed
mkdir -p /opt/pythons/bin
for name in "$@"; do
    version=${name#python}
    "$work/bin/uv" python install --no-bin "$version"
    ln -sf "$("$work/bin/uv" python find "$version")" "/opt/pythons/bin/$name"
    "/opt/pythons/bin/$name" --version
done
