"""Drawn combinations of options: the CPU with itself, or with a GPU where tests run on one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY

DEVICE = os.environ.get("SUROGATE_TEST_DEVICE", "cpu")
SCRIPT = REPOSITORY / "bench" / "device" / "combinations.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("combinations", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drawn_combinations_agree():
    words = ["--devices", f"cpu,{DEVICE}", "--first", "1", "--count", "8", "--jobs", "2"]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.fullmatch(r"(\d+) ok(, \d+ rejected)?", done.stdout.splitlines()[-1])
    assert counted and int(counted[1]) >= 6, done.stdout


def test_a_difference_is_a_failure(script, monkeypatch):
    monkeypatch.setattr(script, "LIMITS", dict.fromkeys(script.LIMITS, 0.0))
    verdict, said = script.combination(2, script.GOLDEN, ["cpu", "cpu"])
    assert verdict == "FAILED" and "apart" in said
    # A run that is not the one that it continues.
    monkeypatch.setattr(script.Run, "equals", lambda run, other: False)
    assert script.combination(2, script.GOLDEN, ["cpu"])[0] == "FAILED"
