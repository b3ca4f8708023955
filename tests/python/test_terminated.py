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


def test_while_the_tokens_of_a_teacher_are_kept(tmp_path):
    """A table that is not whole has no use: it goes, and the next run makes it again."""
    rows, output, run = tmp_path / "rows", tmp_path / "output", tmp_path / "run.yaml"
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": [3 + (i * k) % 500 for k in range(64)]}) + "\n" for i in range(20_000)))
    stories = str(REPOSITORY / "examples" / "stories" / "model")
    options = {
        "task": "distil", "model": stories, "teacher": stories, "beta": 0.0, "loss_top_k": 8, "precompute_teacher": True,
        "device": "cpu", "sequence_len": 64, "datasets": [{"path": str(data), "type": "tokens"}], "data_cache": str(rows),
        "output_dir": str(output), "max_steps": 1,
    }  # fmt: skip
    run.write_text(json.dumps(options))
    table = lambda: [of for of in rows.glob("*") if of.is_file() and of.suffix != ".lock" and of.stat().st_size > 0]  # noqa: E731
    code, text = terminated(["sft", run], table)
    assert code == 143 and "no step was started" in text, text
    assert not table() and (not output.exists() or not os.listdir(output))
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:100]))
    done = subprocess.run([sys.executable, "-m", "surogate", "sft", str(run)], capture_output=True, text=True)
    assert done.returncode == 0 and len(list(rows.glob("*.values"))) == 1, done.stdout + done.stderr


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


#: Seconds within which a signal is answered on a busy machine: what the engine is given is one.
ANSWERED = 15.0


@pytest.mark.parametrize("after", [0.2, 0.6])
def test_before_the_first_step_whatever_takes_long(tmp_path, after):
    """The rank is one that no one means: planning, compiling and drawing the adapter take longer than anyone waits."""
    data, output = tmp_path / "data.jsonl", tmp_path / "output"
    data.write_text("".join(json.dumps({"input_ids": list(range(1, 13))}) + "\n" for _ in range(8)))
    run = tmp_path / "run.yaml"
    options = {
        "model": str(REPOSITORY / "examples" / "stories" / "model"),
        "device": "cpu",
        "lora_rank": 65_536,
        "datasets": [{"path": str(data), "type": "tokens"}],
        "sequence_len": 16,
        "max_steps": 2,
        "output_dir": str(output),
    }
    run.write_text(json.dumps(options))
    arguments = [sys.executable, "-m", "surogate", "sft", str(run)]
    with subprocess.Popen(arguments, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        line = process.stdout.readline()
        assert "Run" in line or "Note" in line, line
        time.sleep(after)
        assert process.poll() is None, process.stdout.read()
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        text = process.communicate(timeout=60)[0]
    assert process.returncode == 143 and "no step was started, nothing was saved" in text, text
    assert time.monotonic() - begin < ANSWERED, text
    assert not output.exists() or not os.listdir(output)


def test_within_a_long_step_the_run_says_when_it_ends(tmp_path):
    data, output, run = tmp_path / "texts.txt", tmp_path / "output", tmp_path / "run.yaml"
    data.write_text("\n\n".join("Once upon a time there was a cat. " * 40 for _ in range(200)))
    options = {
        "model": str(REPOSITORY / "examples" / "stories" / "model"), "device": "cpu", "max_steps": 2, "sequence_len": 256,
        "datasets": [{"path": str(data), "type": "text"}], "per_device_train_batch_size": 4, "report_to": [],
        "gradient_accumulation_steps": 60, "num_epochs": 100, "output_dir": str(output), "validation_split_ratio": 0,
    }  # fmt: skip
    run.write_text(json.dumps(options))
    arguments = [sys.executable, "-m", "surogate", "sft", str(run)]
    with subprocess.Popen(arguments, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert any(line.startswith("Starting step 0") for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert any("SIGTERM: the run ends after what it is doing, with a checkpoint" in line for line in process.stdout)
        assert time.monotonic() - begin < ANSWERED
        process.stdout.read()
    assert process.returncode == 143 and (output / "checkpoint-1" / "state.json").exists()


ENDLESS = "hashlib.pbkdf2_hmac('sha256', b'', b'', {})"

ANSWER = """
import hashlib, os, signal, sys
from surogate.cli import watch
def end(*_):
    print("answered", flush=True)
    os._exit(3)
watch.answer_in_time({signal.SIGINT: end, signal.SIGTERM: signal.default_int_handler})
if len(sys.argv) > 1:
    signal.signal(signal.SIGTERM, lambda *_: None)
print("ready", flush=True)
WORK
"""


@pytest.mark.parametrize(
    ("work", "number", "others", "code"),
    [
        # A function of C that looks for no signal and lets other threads run, as the engine does; and what Python answers by itself.
        (ENDLESS.format(2 * 10**9), signal.SIGINT, [], 130),
        (ENDLESS.format(2 * 10**9), signal.SIGTERM, [], 143),
        ("while True: pass", signal.SIGINT, [], 3),
        # A handler that others have set meanwhile is theirs to answer.
        (ENDLESS.format(10**7) + "; os._exit(4)", signal.SIGTERM, ["others"], 4),
    ],
)
def test_a_command_whose_engine_does_not_look_is_ended(work, number, others, code):
    arguments = [sys.executable, "-c", ANSWER.replace("WORK", work), *others]
    with subprocess.Popen(arguments, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(number)
        begin = time.monotonic()
        text = process.communicate(timeout=60)[0]
    assert (process.returncode, "answered" in text) == (code, code == 3)
    assert time.monotonic() - begin < ANSWERED or code == 4


def left(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.name.startswith(".")]


def test_while_a_result_takes_another_form(tmp_path, large):
    place = tmp_path / "forms"
    place.mkdir()
    words = ["export", large, "--format", "gguf", "--encoding", "q8_0", "--output", place / "model.gguf"]
    code, text = terminated(words, lambda: left(place))
    assert (code, text, os.listdir(place)) == (143, "", [])
