"""SIGTERM outside of steps: while data are read, while a result is written. Nothing that is half done stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY, tiny_llama


def terminated(words: list[object], is_time: Callable[[], object]) -> tuple[int, str]:
    """Runs a command until it is time, and sends SIGTERM: exit code and what it printed."""
    pipe = subprocess.PIPE
    arguments = [sys.executable, "-m", "surogate", *map(str, words)]
    with subprocess.Popen(arguments, text=True, stdout=pipe, stderr=subprocess.STDOUT) as process:
        while not is_time():
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        text = process.communicate(timeout=60)[0]
    return process.returncode, text


@pytest.mark.parametrize("command", ["sft", "tokenize"])
def test_while_data_are_read(tmp_path, command):
    data, rows, output = tmp_path / "texts.jsonl", tmp_path / "rows", tmp_path / "output"
    texts = ("".join(f"word {i * k % 97} " for k in range(20)) for i in range(40_000))
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run = tmp_path / "run.yaml"
    options = {
        "model": str(REPOSITORY / "examples" / "stories" / "model"),
        "device": "cpu",
        "sequence_len": 64,
        "datasets": [{"path": str(data), "type": "text"}],
        "data_cache": str(rows),
        "output_dir": str(output),
        "max_steps": 2,
    }
    run.write_text(json.dumps(options))
    code, text = terminated([command, run], lambda: list(rows.glob("*.partial")))
    assert code == 143, text
    assert ("no step was started" in text) == (command == "sft"), text
    assert not list(rows.glob("*.partial")) and not list(rows.glob("*/entry"))
    assert not output.exists() or not os.listdir(output)


@pytest.fixture
def large(make_model):
    """A model whose files take a while to write: 164 MB in four matrices and their layers."""
    return make_model(tiny_llama(vocab_size=80_000, hidden_size=256, head_dim=64))


def test_while_a_run_writes_its_result(tmp_path, large):
    data, output = tmp_path / "data.jsonl", tmp_path / "output"
    data.write_text("".join(json.dumps({"input_ids": list(range(1, 13))}) + "\n" for _ in range(8)))
    run = tmp_path / "run.yaml"
    options = {
        "model": str(large),
        "device": "cpu",
        "torch_dtype": "float32",
        "datasets": [{"path": str(data), "type": "tokens"}],
        "sequence_len": 16,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_steps": 1,
        "merge_adapter": True,
        "output_dir": str(output),
    }
    run.write_text(json.dumps(options))
    code, text = terminated(["sft", run], lambda: list(output.glob(".merged.*")))
    assert code == 143 and "merged is aborted" in text and "To resume this run" in text, text
    assert (output / "checkpoint-1" / "state.json").exists() and not (output / "merged").exists()
    assert not list(output.glob(".*"))
    again = [sys.executable, "-m", "surogate", "sft", str(run), "--resume-from-checkpoint", "true"]
    assert subprocess.run(again, capture_output=True).returncode == 0
    assert (output / "merged" / "model.safetensors").exists()


def left(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.name.startswith(".")]


def test_while_a_result_takes_another_form(tmp_path, large):
    place = tmp_path / "forms"
    place.mkdir()
    words = ["export", large, "--format", "gguf", "--encoding", "q8_0", "--output", place / "model.gguf"]
    code, text = terminated(words, lambda: left(place))
    assert (code, text, os.listdir(place)) == (143, "", [])
