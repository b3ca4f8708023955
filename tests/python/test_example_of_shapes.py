"""The example with images: its data are what its script draws, and held-out answers become right."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import REPOSITORY

SHAPES = REPOSITORY / "examples/shapes"


def test_the_data_are_those_that_the_script_draws(tmp_path):
    script = (SHAPES / "draw.py").read_text()
    (tmp_path / "draw.py").write_text(script)
    subprocess.run([sys.executable, tmp_path / "draw.py"], check=True)
    drawn = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.json*"))
    assert [path.name for path in drawn] == [
        "config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "test.jsonl", "train.jsonl",
    ]  # fmt: skip
    for path in drawn:
        found, stored = (folder / path for folder in (tmp_path, SHAPES))
        if path.suffix == ".json":
            assert json.loads(found.read_text()) == json.loads(stored.read_text()), path
            continue
        # The bytes of a PNG file depend on the version of zlib.
        answers = [[json.loads(row)["messages"][1] for row in file.read_text().splitlines()] for file in (found, stored)]
        assert answers[0] == answers[1] and len(answers[0]) in (600, 60)


@pytest.mark.parametrize(("epochs", "least"), [(6, 30), pytest.param(16, 54, marks=pytest.mark.long)])
def test_answers_on_images_that_are_held_out_become_right(tmp_path, epochs, least):
    """None of 60 before the training, and nearly all after it: the page on images has the counts of all 16 epochs."""
    options = (REPOSITORY / "examples/shapes.yaml").read_text().replace("output/shapes", str(tmp_path / "output"))
    assert "num_epochs: 16\n" in options
    options = options.replace("num_epochs: 16\n", f"num_epochs: {epochs}\n")
    (tmp_path / "shapes.yaml").write_text(options)
    words = [sys.executable, SHAPES / "answers.py", tmp_path / "shapes.yaml"]
    printed = subprocess.run(words, check=True, capture_output=True, text=True, cwd=REPOSITORY).stdout
    before, after = (int(line.split()[1]) for line in printed.splitlines() if line.startswith(("before:", "after:")))
    assert before == 0 and after >= least, printed
