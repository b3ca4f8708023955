"""A queue that takes a run's machine away again and again: the same command goes on by itself, on what it gets next."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, tiny_llama

STEPS = 24

#: Numbers of ranks that divide the rows of a step.
RANKS = (1, 2, 3, 4)


def options(folder: Path, **changes: object) -> Path:
    text = REPOSITORY / "examples/stories/data/shakespeare.txt"
    fields = {
        "model": str(REPOSITORY / "examples/stories/model"),
        "datasets": [{"path": str(text), "type": "text"}],
        "device": "cpu",
        "torch_dtype": "float32",
        "sequence_len": 64,
        "batch_size": 12,
        "micro_batch_size": 1,
        "max_steps": STEPS,
        "save_steps": 1000,
        "eval_strategy": "no",
        "lora": False,
        "optimizer": "adamw",
        "resume_from_checkpoint": True,
        "log_gpu_util": 0,
        **changes,
    }
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(json.dumps(fields))
    return folder / "run.yaml"


def start(run: Path, output: Path, ranks: int = 1) -> subprocess.Popen[str]:
    words = ["sft", str(run), "--output-dir", str(output), "--gpus", str(ranks)]
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-m", "surogate", *words], stdout=pipe, stderr=subprocess.STDOUT, text=True)


def events(output: Path) -> list[dict]:
    (log,) = output.glob("log-*.json")
    return [json.loads(line) for line in log.read_text().splitlines()]


def curve(output: Path) -> list[tuple[int, int, float]]:
    """Step, tokens and loss; of a repeated step the last."""
    steps = {event["step"]: event for event in events(output) if event["event"] == "step"}
    return [(step, of["tokens"], of["loss"]) for step, of in sorted(steps.items())]


def preempt(run: Path, output: Path, times: int, draw: random.Random) -> list[int]:
    """Gives the run a machine, takes it away after a few steps, and so on; the ranks that it had."""
    had: list[int] = []
    while True:
        ranks = draw.choice(RANKS)
        had.append(ranks)
        process = start(run, output, ranks)
        assert process.stdout
        lines, due = [], draw.randint(1, 2) if len(had) <= times else None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Step ") and due is not None:
                due -= 1
                if due == 0:
                    process.send_signal(draw.choice([signal.SIGTERM, signal.SIGUSR1]))
                    due = None
        code, text = process.wait(60), "".join(lines)
        if code == 0:
            return had
        assert code in (143, 138), text
        assert list(output.glob("checkpoint-*")), text


@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_that_is_preempted_on_changing_ranks_has_the_undisturbed_curve(tmp_path, times):
    steps = max(STEPS, 3 * times)
    whole = start(options(tmp_path / "whole", max_steps=steps), tmp_path / "whole/output")
    had = preempt(options(tmp_path / "run", max_steps=steps), tmp_path / "run/output", times, random.Random(times))
    text = whole.communicate(timeout=120)[0]
    assert whole.returncode == 0, text
    expected, found = curve(tmp_path / "whole/output"), curve(tmp_path / "run/output")
    assert len(had) > times // 2 and len(set(had)) > 1, had
    assert [of[:2] for of in found] == [of[:2] for of in expected], "the same samples"
    assert [of[2] for of in found] == pytest.approx([of[2] for of in expected], rel=1e-5)


def test_a_number_of_ranks_that_does_not_divide_the_rows_is_refused_before_the_run(tmp_path):
    process = start(options(tmp_path), tmp_path / "output", 5)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and "`batch_size: 12` is no multiple of 5" in text, text


@pytest.fixture
def slow(make_model):
    """A model whose step and checkpoint take seconds: 164 MB in two tables."""
    return make_model(tiny_llama(vocab_size=80_000, hidden_size=256, head_dim=64, max_position_embeddings=128))


def test_a_run_ends_within_its_grace_and_keeps_its_last_checkpoint(tmp_path, slow):
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text(json.dumps({"input_ids": list(range(1, 90))}) + "\n")
    changes = {"model": str(slow), "datasets": [{"path": str(tokens), "type": "tokens", "repeats": 1000}], "save_grace_seconds": 1}
    changes |= {"batch_size": 24, "validation_split_ratio": 0, "sequence_len": 128, "save_steps": 1, "max_steps": 20}
    process = start(options(tmp_path, **changes), tmp_path / "output")
    assert process.stdout
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("Saved "):
            break
    begun = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    lines += process.stdout.readlines()
    code, text, seconds = process.wait(60), "".join(lines), time.monotonic() - begun
    assert code == 143 and "`save_grace_seconds: 1` have passed since SIGTERM" in text, text
    assert re.search(r"A checkpoint of 4\d\d\.\d\d MiB takes about \d+\.\d s at \d+\.\d\d GB/s of this disk", text), text
    assert "more than `save_grace_seconds: 1`" in text, "the note of a checkpoint that takes longer"
    assert seconds < 6, seconds
    assert list((tmp_path / "output").glob("checkpoint-*")), text
    (saved,) = [event for event in events(tmp_path / "output") if event["event"] == "checkpoint"][:1]
    assert saved["bytes"] > 164e6 and saved["seconds"] > 0
