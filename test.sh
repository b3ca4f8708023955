#!/usr/bin/env bash
# Every test that needs no GPU, on a clean clone: rules of the house, Rust tests, the wheel, Python tests.
#
# Needs rustc with cargo, a C compiler, git and python3 (3.11 or newer), and a way to crates.io and PyPI. Everything
# heavy is built once, with the release profile, into the usual target folder. Stops at the first failure. Knows the
# order of the stages, not what is in them. Reference numbers in ../shared are used where they lie next to the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

started=$SECONDS
current=start
trap 'code=$?; [ "$code" -eq 0 ] || printf "\n== %s: FAILED, exit code %d\n" "$current" "$code" >&2' EXIT

stage() { # stage NAME COMMAND...: runs it, says how long it took
  local before=$SECONDS
  current=$1
  shift
  printf '\n== %s\n' "$current"
  "$@"
  printf '== %s: ok, %d s\n' "$current" $((SECONDS - before))
}

venv=${SUROGATE_VENV:-.venv}
python=$venv/bin/python

make_environment() {
  [ -x "$python" ] || python3 -m venv "$venv"
  # The compiler of kernels comes as a wheel; no GPU and no driver is needed to run it.
  "$python" -m pip install --quiet --disable-pip-version-check "nvidia-cuda-nvrtc==13.0.88"
}

install_wheel() { # not editable: what is tested is what a user installs
  "$python" -m pip install --quiet --disable-pip-version-check ".[dev]"
}

stage "environment" make_environment
SUROGATE_SITE_PACKAGES=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
export SUROGATE_SITE_PACKAGES

stage "format" cargo fmt --all -- --check
stage "house" cargo xtask tidy
stage "generated files" cargo xtask generate --check
stage "kernels" cargo xtask kernels
stage "rust tests" cargo test --release --workspace
stage "wheel" install_wheel
stage "python tests" "$python" -m pytest -q -rs

printf '\nall stages passed in %d s\n' $((SECONDS - started))
