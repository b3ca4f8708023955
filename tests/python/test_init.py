"""`surogate init`: the file that it writes loads, runs, and is what the plan says of the machine."""

from __future__ import annotations

import re

import pytest
from conftest import REPOSITORY
from surogate import _native
from surogate.cli import main
from surogate.init import draft

MODEL = str(REPOSITORY / "examples/stories/model")
DATA = str(REPOSITORY / "examples/stories/data/shakespeare.txt")


def test_the_file_runs_and_is_not_overwritten(tmp_path, capfd):
    path = tmp_path / "run.yaml"
    words = ["init", MODEL, DATA, "--output", str(path), "--output-dir", str(tmp_path / "out"), "--sequence-len", "64"]
    assert main([*words, "--max-steps", "2"]) == 0, capfd.readouterr().err
    text = path.read_text()
    assert "recognised as text" in text and re.search(r"Planned for cpu: \d+\.\d\d of \d+ GiB", text)
    assert main(["sft", str(path), "--device", "cpu"]) == 0, capfd.readouterr().err
    assert (tmp_path / "out" / "adapter").is_dir()
    capfd.readouterr()
    assert main(words) == 1
    assert "is not overwritten" in capfd.readouterr().err and path.read_text() == text


@pytest.mark.parametrize("task", ["sft", "pt"])
def test_what_is_asked_for_wins_and_every_line_is_an_option(task):
    asked = [("learning_rate", "1e-3"), ("optimizer", "adamw"), ("sequence_len", "64")]
    text = draft(MODEL, DATA, task, "h200", asked)
    config = _native.Config.from_yaml(text, "run.yaml", task, [])
    resolved = config.resolved_yaml()
    assert "learning_rate: 0.001" in resolved and "optimizer: adamw " in resolved and "sequence_len: 64" in resolved
    assert f"lora: {'true' if task == 'sft' else 'false'}" in resolved and text.count("learning_rate:") == 1


def test_less_memory_gives_smaller_micro_batches():
    def rows(limit: str) -> int:
        text = draft(MODEL, DATA, "pt", "h200", [("sequence_len", "512"), ("memory_limit", limit)])
        size, count = (int(re.search(f"^{name}: (\\d+)$", text, re.MULTILINE)[1]) for name in names)
        assert size * count == 8
        return size

    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    much, little = rows("100GiB"), rows("612MiB")
    assert much > little


def test_a_mistake_is_reported_before_anything_is_written(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    assert main(["init", MODEL, str(tmp_path / "none.jsonl"), "--output", str(path)]) == 2
    assert main(["init", MODEL, DATA, "--output", str(path), "--learning-rte", "1"]) == 2
    assert "did you mean `learning_rate`" in capsys.readouterr().err and not path.exists()
