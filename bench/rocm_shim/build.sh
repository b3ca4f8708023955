#!/bin/bash
# Builds the shim into a folder: `build.sh FOLDER`.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
mkdir -p "$1"
cc -O1 -shared -fPIC -Wall -Wextra -Werror -o "$1/libamdhip64.so.7" "$here/shim.c" -ldl
ln -sf libamdhip64.so.7 "$1/libhiprtc.so.7"
ln -sf libamdhip64.so.7 "$1/libhipblaslt.so.1"
cp "$here/../../crates/device/src/intrinsics_nvidia.cuh" "$1/"
