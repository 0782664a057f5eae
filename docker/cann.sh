#!/usr/bin/env bash
# Installs the CANN toolkit into /usr/local/Ascend from its installer, where one is named; without one it does nothing.
# Usage: docker/cann.sh [URL of Ascend-cann-toolkit_*_linux-ARCH.run]
set -euo pipefail
installer=${1:-}
if [ -z "$installer" ]; then
    echo "no CANN toolkit named: kernels for Ascend are left out"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
curl --fail --silent --show-error --location --output "$work/cann.run" "$installer"
bash "$work/cann.run" --quiet --install --install-path=/usr/local/Ascend
