"""Runs a test of the crate `data` that measures, in a process of its own. Needs cargo."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]


def measure(test: str, **variables: str) -> dict[str, float]:
    """One round of a test: the figures that it prints, under these variables of the environment."""
    reported = subprocess.run(
        ["cargo", "test", "--quiet", "--release", "-p", "data", "--lib", test, "--", "--ignored", "--nocapture"],
        cwd=ROOT, check=True, text=True, capture_output=True, env={**os.environ, **variables},
    )  # fmt: skip
    line = next(line for line in reported.stdout.splitlines() if line.startswith("FIGURES "))
    return json.loads(line.removeprefix("FIGURES "))
