"""The loss curves of two devices beside each other: the CPU with itself, or with a GPU where tests run on one."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY

SCRIPT = REPOSITORY / "bench" / "device" / "curve.py"


def curve(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def test_equal_devices_have_equal_curves():
    done = curve("--devices", "cpu,cpu", "--steps", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^step ", done.stdout, re.M)) == 4 and "at most 0.000 % apart" in done.stdout
    refused = curve("--devices", "cpu,cpu", "--steps", 2, "--limit", "-1")
    assert refused.returncode == 1, "no difference is below nothing"


@pytest.mark.parametrize("work", ["full", "lora"])
def test_a_gpu_has_the_curve_of_the_cpu(work):
    if os.environ.get("SUROGATE_TEST_DEVICE") != "cuda":
        pytest.skip("needs a GPU: SUROGATE_TEST_DEVICE=cuda")
    done = curve("--work", work)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
