#!/usr/bin/env bash
# Tests that need no GPU, on a clean clone: rules of the house, Rust tests, the wheel, Python tests.
#
# `./test.sh --all` also compiles every kernel for every architecture and runs the long forms of tests.
#
# Needs rustc with cargo, a C compiler, git and python3 (3.11 or newer), and a way to crates.io and PyPI. Each crate is
# built once, with the release profile, into the usual target folder: every call of cargo names the whole workspace, as
# cargo chooses the features of dependencies by the packages that are named. Stops at the first failure. Knows the order of
# the stages, not what is in them. No test passes unrun: what needs something is ignored unless it is named here and fails
# without it, or is skipped by pytest, which lists it. ../shared, which is no part of the repository, has the stages that
# read it where it lies next to the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

case "${1:-}" in
  "") all= ;;
  --all) all=--all && export SUROGATE_TEST_ALL=1 ;;
  *) printf 'usage: ./test.sh [--all]\n' >&2 && exit 2 ;;
esac
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
  # The compilers of kernels come as wheels; no GPU and no driver is needed to run them. All but the first are for AMD GPUs:
  # its compiler, and the declarations that tables of functions are compared with.
  "$python" -m pip install --quiet --disable-pip-version-check \
    "nvidia-cuda-nvrtc==13.0.88" "ziglang==0.17.1" "rocm-llvm-python==7.2.2.562.46" \
    "rocm-bindings-hip==10.0.0.0.1.2" "rocm-bindings-libraries==10.0.0.0.1.2" "rocm-bindings-systems==10.0.0.0.1.2"
}

install_wheel() { # not editable: what is tested is what a user installs
  "$python" -m pip install --quiet --disable-pip-version-check ".[dev]"
}

stage "environment" make_environment
SUROGATE_SITE_PACKAGES=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
export SUROGATE_SITE_PACKAGES

house() {
  cargo build --quiet --release --workspace --bin xtask
  xtask=${CARGO_TARGET_DIR:-target}/release/xtask
  "$xtask" tidy
  "$xtask" generate --check
}

kernels() {
  "$xtask" kernels $all
  "$xtask" kernels --vendor amd $all
  cargo test --release --workspace --test it -- --ignored nvrtc::
}

stage "format" cargo fmt --all -- --check
stage "lints" cargo clippy --release --workspace --all-targets -- --deny warnings
stage "house" house
stage "kernels" kernels
stage "rust tests" cargo test --release --workspace
[ -z "$all" ] || stage "long tests" cargo test --release --workspace --test it -- --ignored \
  --skip gpu:: --skip cudnn_plans:: --skip nvrtc:: --skip families:: --skip real_data:: --skip tokenizers::
if [ -d ../shared ]; then
  stage "real data" cargo test --release --workspace --test it --lib -- --ignored \
    families:: real_data:: tokenizers:: fast_encoder:: spellings::
else
  printf '\nNot run without ../shared: real data.\n'
fi
stage "wheel" install_wheel
# Many tests wait for processes: one worker more than cores keeps these busy.
not_long="${all:+long or }not long"
stage "python tests" "$python" -m pytest -q -rs -m "($not_long) and not ray" \
  --numprocesses $(($(nproc) + 1)) --dist loadgroup
# Ray gives up the start of its processes after a time in which a busy machine does not come to them.
stage "ray" "$python" -m pytest -q -rs -m "($not_long) and ray"

printf '\nall stages passed in %d s\n' $((SECONDS - started))
