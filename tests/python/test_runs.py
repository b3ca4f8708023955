"""Several runs of one file: each is the file with its changes, rows are encoded once, mistakes are said first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import REPOSITORY
from surogate import _native
from surogate.cli.commands import main

STORIES = REPOSITORY / "examples" / "stories"


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """A file of two short runs, and a cache of rows of its own."""
    monkeypatch.setenv("SUROGATE_DATA_CACHE", str(tmp_path / "rows"))
    path = tmp_path / "runs.yaml"
    path.write_text(
        f"""\
model: {STORIES / "model"}
output_dir: {tmp_path / "out"}
device: cpu
datasets:
  - path: {STORIES / "data" / "shakespeare.txt"}
    type: text
sequence_len: 64
max_steps: 2
lora_rank: 2
runs:
  - run_name: small
  - run_name: large
    lora_rank: 4
"""
    )
    return path


def run(capsys, *words: object) -> tuple[int, str, str]:
    try:
        code = main([str(word) for word in words])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def rank(folder: Path) -> int:
    return json.loads((folder / "adapter" / "adapter_config.json").read_text())["r"]


def test_every_run_is_done_and_rows_are_encoded_once(capfd, file, tmp_path):
    code = main(["sft", str(file)])
    out, err = capfd.readouterr()
    assert code == 0, err
    first, second = out.split("Run 2 of 2: large\n")
    assert first.startswith("Run 1 of 2: small\n") and "rows of 1 set are from the cache" not in first
    assert "rows of 1 set are from the cache" in second
    # The time before the first run is no part of the second.
    assert "interpreter" not in second
    assert [rank(tmp_path / "out" / name) for name in ("small", "large")] == [2, 4]


def test_one_of_them(capsys, file, tmp_path):
    code, _, err = run(capsys, "sft", file, "--quiet", "--run", "large", "--max-steps", "1", "--output-dir", tmp_path / "new")
    assert code == 0, err
    assert rank(tmp_path / "new" / "large") == 4 and not (tmp_path / "out").exists()
    code, out, _ = run(capsys, "show", "config", file, "--run", "small")
    assert code == 0 and f"{tmp_path}/out/small" in out and "lora_rank: 2" in out


def test_mistakes_of_the_last_run_are_said_before_the_first(capsys, file, tmp_path):
    file.write_text(file.read_text() + "    learning_rat: 1e-3\n")
    code, _, err = run(capsys, "sft", file)
    assert code == 2 and "runs.yaml:14:5" in err and "learning_rate" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "choose one with `--run`: small, large"),
        (["tokenize", "--run", "medium"], "it has small, large"),
        (["sft", "--run", "medium"], "it has small, large"),
    ],
)
def test_a_run_is_chosen_by_its_name(capsys, file, words, said):
    code, _, err = run(capsys, words[0], file, *words[1:])
    assert code == 2 and said in err


def test_the_schema_knows_the_list():
    schema = json.loads(_native.config_schema())
    item = schema["properties"]["runs"]["items"]
    assert item["required"] == ["run_name"] and item["properties"]["lora_rank"] == {"$ref": "#/properties/lora_rank"}
    assert "runs" not in item["properties"]
