#!/usr/bin/env bash
# Every test that needs no GPU, on a clean clone: rules of the house, Rust tests, the wheel, Python tests.
#
# Needs rustc with cargo, a C compiler, git and python3 (3.11 or newer), and a way to crates.io and PyPI. Everything
# heavy is built once, with the release profile, into the usual target folder. Stops at the first failure. Knows the
# order of the stages, not what is in them. No test passes unrun: what needs something is ignored unless it is named here
# and fails without it, or is skipped by pytest, which lists it. ../shared, which is no part of the repository, has the stages that read it where it lies next to
# the checkout.
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
stage "lints" cargo clippy --release --workspace --all-targets -- --deny warnings
stage "rust tests" cargo test --release --workspace
stage "kernels at run time" cargo test --release --workspace --test nvrtc -- --ignored
if [ -d ../shared ]; then
  stage "real data" cargo test --release --workspace --test families --test real_data --test tokenizers -- --ignored
  stage "real tokenizers" cargo test --release --workspace --lib -- --ignored fast_encoder
else
  printf '\nNot run without ../shared: real data, real tokenizers.\n'
fi
stage "wheel" install_wheel
stage "python tests" "$python" -m pytest -q -rs

printf '\nall stages passed in %d s\n' $((SECONDS - started))
