#!/bin/bash
# Runs test binaries of the cuda crate on a machine with a GPU:  gpu_tests.sh BINARY...
# Every argument is a test binary built elsewhere; NVIDIA's pip wheels are found through python3.
# Knows nothing of how the binaries came here. Exit status: 0 only if all of them passed.
set -u
sites=$(python3 - <<'PY'
import site, sys
print(":".join(dict.fromkeys([*site.getsitepackages(), site.getusersitepackages(), *sys.path[1:]])))
PY
)
export SUROGATE_SITE_PACKAGES=$sites RUST_BACKTRACE=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
failed=0
for binary in "$@"; do
  chmod +x "$binary"
  timeout "${TEST_TIMEOUT:-300}" "$binary" --include-ignored --test-threads=1 --nocapture || failed=1
done
exit $failed
