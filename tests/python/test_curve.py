"""The loss curves of two devices compared: the CPU with itself, or with a GPU where tests run on one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY

DEVICE = os.environ.get("SUROGATE_TEST_DEVICE", "cpu")
STEPS = 4 if DEVICE == "cpu" else 50
SCRIPT = REPOSITORY / "bench" / "device" / "curve.py"


def curve(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


#: Where both devices are the CPU, one of the four is enough for the script itself.
OTHERS = [pytest.mark.long] if DEVICE == "cpu" else []


@pytest.mark.parametrize(
    ("work", "recipe"),
    [("lora", "bf16"), *(pytest.param(*of, marks=OTHERS) for of in [("lora", "fp8_hybrid"), ("full", "bf16"), ("full", "fp8_hybrid")])],
)
def test_the_device_has_the_curve_of_the_cpu(work, recipe):
    done = curve("--work", work, "--devices", f"cpu,{DEVICE}", "--steps", STEPS, "--recipe", recipe)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^step ", done.stdout, re.M)) == STEPS
    assert DEVICE != "cpu" or "at most 0.000 % apart" in done.stdout


@pytest.mark.parametrize(("second", "code"), [([4.0, 3.0], 0), ([4.0, 3.05], 0), ([4.0, 3.1], 1)])
def test_a_difference_above_the_limit_is_a_failure(monkeypatch, second, code):
    """The limit is 2 %; of curves whose runs are not made."""
    spec = importlib.util.spec_from_file_location("curve", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    curves = iter([[4.0, 3.0], second])
    monkeypatch.setattr(script, "losses", lambda *_: next(curves))
    monkeypatch.setattr(sys, "argv", ["curve.py", "--devices", "cpu,cpu", "--steps", "2"])
    assert script.main() == code
