#!/usr/bin/env bash
# Fuzzes what reads foreign files, one target after another:  fuzz/run.sh MINUTES [TARGET...]
# Without targets: all of them. `fuzz/run.sh 0` only builds. Needs a C++ compiler (for libFuzzer, which is built from
# crates.io) and no nightly toolchain: the coverage comes from LLVM's own pass, which stable rustc takes by -Cpasses.
#
# Seeds are the fixtures of the repository and fuzz/corpus; what is new goes to $FUZZ_OUT (default fuzz/target/found),
# crashes to $FUZZ_OUT/TARGET-crashes. An input that takes over 10 seconds or 2 GiB is a finding like a crash. A finding
# becomes a test by being put into fuzz/corpus/TARGET: crates/train/tests/it/corpus.rs runs every file there.
# FUZZ_MERGE=1: instead, the smallest set of inputs with the same coverage is written to $FUZZ_OUT/TARGET-small.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
minutes=${1:?minutes for each target}
shift
coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
  -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing"
# The same versions as the workspace has; what the engine adds is resolved next to them.
cp "$here/../Cargo.lock" "$here/Cargo.lock"
# A target named on the command line keeps the flags away from build scripts.
host=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS=$coverage cargo build --release --quiet --manifest-path "$here/Cargo.toml" --target "$host" || exit 2
engine=$here/target/$host/release/fuzz
out=${FUZZ_OUT:-$here/target/found}
seeds=$out/seeds
mkdir -p "$seeds"
# Files that targets read are written and read thousands of times a second: in memory where there is a place for it.
TMPDIR=$(mktemp -d -p "$([ -w /dev/shm ] && echo /dev/shm || echo "${TMPDIR:-/tmp}")" surogate-fuzz-XXXXXX) || exit 2
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
FUZZ_SEEDS=$seeds "$engine" -runs=1 >/dev/null 2>&1 || { echo "run.sh: the seeds could not be written" >&2; exit 2; }
[ "$minutes" = 0 ] && [ -z "${FUZZ_MERGE:-}" ] && exit 0
[ $# -gt 0 ] || set -- $(ls "$seeds")
limits=(-timeout="${FUZZ_TIMEOUT:-10}" -rss_limit_mb=2048 -max_len="${FUZZ_MAX_LEN:-65536}" -verbosity=0 -print_final_stats=1)
failed=0
for target in "$@"; do
  corpus=$here/corpus/$target crashes=$out/$target-crashes
  mkdir -p "$out/$target" "$crashes" "$corpus"
  if [ -n "${FUZZ_MERGE:-}" ]; then
    mkdir -p "$out/$target-small"
    FUZZ_TARGET=$target "$engine" -merge=1 "${limits[@]}" "$out/$target-small" "$corpus" "$seeds/$target" "$out/$target" \
      2>"$out/$target-merge.log" || failed=1
    continue
  fi
  # After a finding the engine starts again, until the time is over: one defect must not hide the next.
  ends=$((SECONDS + minutes * 60)) runs=0 number=0 before=$SECONDS
  while left=$((ends - SECONDS)) && [ "$left" -gt 0 ]; do
    number=$((number + 1))
    log=$out/$target-$number.log
    FUZZ_TARGET=$target "$engine" -max_total_time="$left" "${limits[@]}" -artifact_prefix="$crashes/" \
      "$out/$target" "$corpus" "$seeds/$target" >"$log" 2>&1
    done=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -1)
    runs=$((runs + ${done:-0}))
    [ "$(ls "$crashes" | wc -l)" -ge "${FUZZ_MOST_CRASHES:-20}" ] && break
  done
  found=$(ls "$crashes" | wc -l)
  [ "$found" = 0 ] || failed=1
  printf '%s: %d executions in %d s, %d findings in %s\n' "$target" "$runs" $((SECONDS - before)) "$found" "$crashes"
done
exit $failed
