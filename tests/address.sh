#!/usr/bin/env bash
# The tests of the crates with `unsafe` that need no GPU, under AddressSanitizer:  tests/address.sh [ARGUMENTS OF cargo test]
#
# Also with debug assertions, among them the standard library's checks of its unsafe functions. Works with the stable
# toolchain: RUSTC_BOOTSTRAP opens the one flag. C libraries inside of crates (zstd, Oniguruma) are not instrumented; what
# Miri would find beyond this (aliasing, uninitialised memory) is not looked for. Without arguments: all of `cpu` (arena,
# simd), the only crate with `unsafe` whose tests need no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Named, so that build scripts and macros are left as they are.
host=$(rustc -vV | sed -n 's/^host: //p')
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Cdebug-assertions"
run() {
  cargo test --release --target "$host" --target-dir target/address --config profile.release.opt-level=1 "$@"
}
if [ $# -gt 0 ]; then
  run "$@"
else
  run --package cpu
fi
