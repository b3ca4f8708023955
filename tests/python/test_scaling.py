"""Scaling over the GPUs of one host: the script on ranks of the CPU, restarted, and its picture."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from conftest import REPOSITORY

SCRIPT = REPOSITORY / "bench" / "device" / "scaling.py"


def scaling(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--commit", "abc", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def test_ranks_are_measured_beside_one_and_a_second_call_goes_on(tmp_path):
    words = ["--only", "full-0.6b-zero3", "--seconds", "0.4", "--warm-up", "0.1", "--out", tmp_path / "out"]
    done = scaling(*words, "--gpus", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = tmp_path / "out" / "scaling.jsonl"
    first = kept.read_text()
    done = scaling(*words, "--gpus", "1,2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert kept.read_text().startswith(first), "what was measured stays"
    one, two = (json.loads(line) for line in kept.read_text().splitlines())
    assert [(of["name"], of["gpus"], of["commit"]) for of in (one, two)] == [
        ("full-0.6b", 1, "abc"),
        ("full-0.6b-zero3", 2, "abc"),
    ]
    assert two["tokens_per_step"] == 2 * one["tokens_per_step"]
    row = next(line for line in done.stdout.splitlines() if line.startswith("| full-0.6b-zero3 | 2 |"))
    ratio = two["tokens_per_second"] / one["tokens_per_second"]
    assert row.split("|")[5].strip() == f"{ratio:.3f}"

    staged = scaling("--only", "lora-8b-stages", "--seconds", "0.2", "--gpus", "2", "--out", tmp_path / "stages")
    assert staged.returncode == 0, staged.stdout + staged.stderr
    assert "| lora-8b-stages | 2 |" in staged.stdout

    assert scaling("--record", kept, "--picture", tmp_path / "scaling.svg").returncode == 0
    drawn = ElementTree.parse(tmp_path / "scaling.svg").getroot()
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) >= 1
    assert "full-0.6b-zero3" in "".join(drawn.itertext())
