#!/usr/bin/env bash
# Every operation's examples on the GPU under compute-sanitizer:  sanitize.sh [TOOL...]
# Tools: memcheck racecheck initcheck synccheck; all of them without arguments. Needs `surogate` importable by python3,
# and compute-sanitizer: named by COMPUTE_SANITIZER, on the PATH, in a toolkit, or from the pip package
# nvidia-cuda-sanitizer-api.
# Kernels of libraries are left out where a tool cannot see into them (SANITIZE_ALL=1 takes them in): what is checked is
# the project's own. Racecheck alone is given the operations that call no library: it ends with an error of its own where a
# kernel of clusters is launched that it must leave out. SANITIZE_ONLY=NAME,… takes the operations whose names begin
# so, SANITIZE_SECONDS=N begins with none after that time under a tool (each operation's first example comes first);
# SUROGATE_CUDA_ARCH=sm_80 checks what an older GPU would run. Each tool's report is written to $OUT, or the working
# folder. Exit status: 0 only if all are clean. Several may run at once, with folders of their own: SANITIZE_WARM=0 leaves
# out the run before the tools.
set -uo pipefail
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck initcheck synccheck)
out=${OUT:-.}
find_tool() {
  local candidate
  local wheel='import glob, sys; print(*(f for p in sys.path for f in glob.glob(p + "/nvidia/cu*/bin/compute-sanitizer")))'
  for candidate in "${COMPUTE_SANITIZER:-}" "$(command -v compute-sanitizer)" /usr/local/cuda/bin/compute-sanitizer \
    "$(python3 -c "$wheel")"; do
    [ -n "$candidate" ] && [ -x "$candidate" ] && { printf '%s\n' "$candidate"; return 0; }
  done
  echo "sanitize.sh: compute-sanitizer was not found: put it on the PATH or name it with COMPUTE_SANITIZER" >&2
  return 1
}
sanitizer=$(find_tool) || exit 2
"$sanitizer" --version | head -2
of_operations=(--operations)
[ -z "${SANITIZE_ONLY:-}" ] || of_operations+=(--only "$SANITIZE_ONLY")
# Outside the sanitizer first: kernels are compiled and algorithms chosen by then.
if [ "${SANITIZE_WARM:-1}" != 0 ]; then
  python3 -m surogate doctor "${of_operations[@]}" | tail -3 || exit 1
fi
own=()
for name in $(python3 - "$(dirname "$0")/../../crates" <<'PY'
import pathlib, re, sys

entry = re.compile(r'extern "C" __global__ void\s+(?:__\w+__\((?:[^()]|\([^()]*\))*\)\s+)*(?:#[^\n]*\s+)*(\w+)')
texts = [file.read_text() for file in pathlib.Path(sys.argv[1]).rglob("*.cu")]
names = [name for text in texts for name in entry.findall(text)]
if len(names) != sum(text.count('extern "C" __global__') for text in texts) or any(name.startswith("__") for name in names):
    sys.exit("sanitize.sh: a kernel's head is not understood")
print(*sorted(set(names)))
PY
); do own+=(--kernel-name "kernel_substring=$name"); done
[ ${#own[@]} -gt 0 ] || { echo "sanitize.sh: no kernels next to the script" >&2; exit 2; }
failed=0
for tool in "${tools[@]}"; do
  options=(--tool "$tool" --error-exitcode 9 --print-limit 40 --target-processes all)
  # Libraries read padding that no one wrote, order their own work by means that racecheck does not follow, and have
  # kernels that it cannot run.
  if [ -z "${SANITIZE_ALL:-}" ] && [ "$tool" != memcheck ]; then
    options+=("${own[@]}")
  fi
  # Calls that libraries make to see what the driver can do are no errors; the engine looks at the answers of its own.
  [ "$tool" = memcheck ] && options+=(--leak-check no --report-api-errors no)
  examples=("${of_operations[@]}")
  [ -z "${SANITIZE_SECONDS:-}" ] || examples+=(--seconds "$SANITIZE_SECONDS")
  [ "$tool" = racecheck ] && [ -z "${SANITIZE_ALL:-}" ] && examples+=(--own-kernels)
  before=$SECONDS
  timeout "${TOOL_TIMEOUT:-400}" "$sanitizer" "${options[@]}" python3 -m surogate doctor "${examples[@]}" \
    >"$out/sanitize-$tool.txt" 2>&1
  code=$?
  grep -E "ERROR SUMMARY|RACECHECK SUMMARY|operations on|Internal|not supported" "$out/sanitize-$tool.txt" | tail -4
  if [ $code -eq 0 ]; then
    printf '%s: clean, %d s\n' "$tool" $((SECONDS - before))
  else
    printf '%s: FAILED with %d after %d s; the first findings:\n' "$tool" $code $((SECONDS - before))
    grep -E "^========= (Invalid|Uninitialized|Race|Error|Potential|Barrier|Program hit)" -A6 "$out/sanitize-$tool.txt" | head -40
    failed=1
  fi
done
exit $failed
