"""Special tokens that a model gets, from the command line to a run that trains them."""

from __future__ import annotations

import json

import pytest
import surogate
from conftest import REPOSITORY
from surogate.cli import main

STORIES = REPOSITORY / "examples" / "stories"


def test_a_model_is_extended_trained_and_asked(tmp_path, capsys):
    output = tmp_path / "extended"
    words = ["extend", str(STORIES / "model"), "--tokens", "<|note|>", "<|end|>", "--multiple", "8", "--output", str(output)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "2 new tokens with ids 512 to 513; model.embed_tokens.weight: 520 rows instead of 512" in out, out
    assert "modules_to_save: [embed_tokens]" in out
    rows = [{"text": "<|note|> a b c <|end|>"}] * 40
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model": str(output),
        "datasets": [{"path": str(tmp_path / "data.jsonl"), "type": "text"}],
        "modules_to_save": ["embed_tokens"],
        "lora_dora": True,
        "device": "cpu",
        "sequence_len": 64,
        "learning_rate": 1e-2,
        "max_steps": 30,
        "output_dir": str(tmp_path / "run"),
        "merge_adapter": True,
    }
    (tmp_path / "run.yaml").write_text(json.dumps(options))
    assert main(["sft", str(tmp_path / "run.yaml"), "--quiet"]) == 0
    capsys.readouterr()
    adapted = surogate.load(str(output), adapter=str(tmp_path / "run" / "adapter"))
    merged = surogate.load(str(tmp_path / "run" / "merged"))
    answers = [model.generate("<|note|>", max_new_tokens=6, temperature=0) for model in (adapted, merged)]
    assert answers[0] == answers[1] and answers[0].strip().startswith("a b c"), answers
    assert main(["export", str(tmp_path / "run"), "--format", "gguf", "--output", str(tmp_path / "run.gguf")]) == 0


@pytest.mark.parametrize(
    ("tokens", "problem"), [(["<s>"], "is a token already, 1"), (["<|x|>", "<|x|>"], "given twice")]
)
def test_what_cannot_be_a_new_token_is_named(tmp_path, capsys, tokens, problem):
    assert main(["extend", str(STORIES / "model"), "--tokens", *tokens, "--output", str(tmp_path / "out")]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
