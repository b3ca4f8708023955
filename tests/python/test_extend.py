"""Special tokens that a model gets, from the command line to a run that trains them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import surogate
from conftest import REPOSITORY, tiny_gemma4, tiny_llama
from safetensors.numpy import load_file, save_file
from surogate.cli.commands import main

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


def test_a_table_for_the_layers_grows_with_the_vocabulary(make_model, tmp_path, capsys):
    folder = make_model(tiny_gemma4(vocab_size=512, vocab_size_per_layer_input=512))
    (folder / "tokenizer.json").write_bytes((STORIES / "model" / "tokenizer.json").read_bytes())
    assert main(["extend", str(folder), "--tokens", "<|note|>", "--output", str(tmp_path / "extended")]) == 0
    assert "model.embed_tokens.weight, model.embed_tokens_per_layer.weight" in capsys.readouterr().out
    fields = json.loads((tmp_path / "extended" / "config.json").read_text())
    assert fields["vocab_size"] == fields["vocab_size_per_layer_input"] > 512
    assert surogate.load(str(tmp_path / "extended")).forward([[5, 512, 7]]).shape[-1] == fields["vocab_size"]


def test_a_run_extends_its_model_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": "<|note|> a b c <|end|>"}) + "\n" for _ in range(40)))
    options = {
        "model": str(STORIES / "model"),
        "new_tokens": ["<|note|>", "<|end|>"],
        "datasets": [{"path": str(tmp_path / "data.jsonl"), "type": "text"}],
        "lora": True,
        "modules_to_save": ["embed_tokens"],
        "device": "cpu",
        "sequence_len": 64,
        "learning_rate": 1e-2,
        "max_steps": 30,
        "output_dir": str(tmp_path / "run"),
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(options))
    assert main(["plan", str(file)]) == 0
    assert main(["tokenize", str(file)]) == 0
    kept = tmp_path / "cache" / "surogate" / "extended"
    assert not list(kept.glob("*/*.safetensors"))
    assert main(["sft", str(file), "--quiet"]) == 0
    assert "ids from 512, 576 rows" in capsys.readouterr().err
    (whole,) = [folder for folder in kept.iterdir() if list(folder.glob("*.safetensors"))]
    adapter = tmp_path / "run" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(STORIES / "model")
    card = (adapter / "README.md").read_text()
    assert "resize_token_embeddings(576)" in card and "2 tokens" in card
    log = next((tmp_path / "run").glob("log-*.json"))
    assert log.name.startswith("log-model-") and f"\n# {log.stem.removeprefix('log-')}\n" in card
    for written in (*adapter.iterdir(), tmp_path / "run" / "resolved.yaml"):
        content = written.read_bytes()
        assert str(kept).encode() not in content and whole.name.encode() not in content, written
    assert main(["generate", str(tmp_path / "run"), "--prompt", "<|note|>", "--max-new-tokens", "6", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip().startswith("a b c")
    # Resumed: nothing is made again, and what was removed is.
    more = ["--resume-from-checkpoint", "--max-steps", "32", "--quiet"]
    assert main(["sft", str(file), *more]) == 0
    assert "ids from" not in capsys.readouterr().err
    for part in whole.iterdir():
        part.unlink()
    whole.rmdir()
    assert main(["sft", str(file), "--resume-from-checkpoint", "--max-steps", "34", "--quiet"]) == 0
    assert "ids from 512" in capsys.readouterr().err and whole.is_dir()
    # What another user could have written is not believed.
    assert whole.stat().st_mode & 0o077 == 0
    whole.chmod(0o777)
    (whole / "tokenizer.json").chmod(0o666)
    assert main(["sft", str(file), "--resume-from-checkpoint", "--max-steps", "36", "--quiet"]) == 0
    said = capsys.readouterr().err
    assert "in reach of other users" in said and "ids from 512" in said and whole.stat().st_mode & 0o077 == 0


def test_new_rows_travel_with_the_adapter(tmp_path, capsys, monkeypatch, make_model):
    """From its folder alone it is loaded, merged, exported, trained further; also where its tables have another length."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_model(tiny_llama(vocab_size=512, initializer_range=0.3))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((STORIES / "model" / name).read_bytes())
    (tmp_path / "data.jsonl").write_text('{"text": "<|note|> a b c"}\n' * 40)
    options = {
        "model": str(model),
        "new_tokens": ["<|note|>"],
        "datasets": [{"path": str(tmp_path / "data.jsonl"), "type": "text"}],
        "lora_rank": 2,
        "modules_to_save": ["embed_tokens"],
        "device": "cpu",
        "torch_dtype": "float32",
        "sequence_len": 32,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "output_dir": str(tmp_path / "run"),
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(options))
    assert main(["sft", str(file), "--quiet"]) == 2
    assert "rows of `new_tokens` in `lm_head` are not trained" in capsys.readouterr().err
    file.write_text(json.dumps(options | {"modules_to_save": ["embed_tokens", "lm_head"]}))
    assert main(["sft", str(file), "--quiet"]) == 0
    moved = tmp_path / "moved"
    (tmp_path / "run" / "adapter").rename(moved)
    shutil.rmtree(tmp_path / "cache")
    ids = [[5, 512, 9, 3]]
    expected = surogate.load(model, adapter=moved).forward(ids)
    assert expected.shape[-1] == 576
    assert main(["merge", str(moved), "--output", str(tmp_path / "merged")]) == 0
    np.testing.assert_allclose(surogate.load(tmp_path / "merged").forward(ids), expected, atol=2e-5)
    assert main(["export", str(moved), "--format", "gguf", "--output", str(tmp_path / "x.gguf")]) == 0
    further = {name: value for name, value in options.items() if name in ("model", "device", "torch_dtype")}
    trainer = surogate.Trainer(further | {"adapter": str(moved), "output_dir": str(tmp_path / "other")})
    trainer.export(tmp_path / "further")
    np.testing.assert_array_equal(surogate.load(model, adapter=tmp_path / "further").forward(ids), expected)
    # As resize_token_embeddings makes them: exactly as many rows as there are tokens.
    tensors = load_file(moved / "adapter_model.safetensors")
    short = {name: value[:513] if value.shape[0] == 576 else value for name, value in tensors.items()}
    save_file(short, moved / "adapter_model.safetensors")
    np.testing.assert_array_equal(surogate.load(model, adapter=moved).forward(ids), expected[..., :513])
    (moved / "tokenizer.json").unlink()
    with pytest.raises(surogate.ConfigError, match="its embedding has 513 rows, the model's 512"):
        surogate.load(model, adapter=moved)


@pytest.mark.parametrize(
    ("option", "problem"),
    [({"modules_to_save": []}, "rows of `new_tokens` are not trained"), ({"new_tokens": ["<s>"]}, "is a token already, 1")],
)
def test_new_tokens_that_a_run_cannot_have_are_refused(tmp_path, capsys, monkeypatch, option, problem):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    options = {
        "model": str(STORIES / "model"),
        "new_tokens": ["<|note|>"],
        "modules_to_save": ["embed_tokens"],
        "lora": True,
        "datasets": [{"path": str(tmp_path / "data.jsonl"), "type": "text"}],
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "run.yaml").write_text(json.dumps({**options, **option}))
    assert main(["sft", str(tmp_path / "run.yaml")]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("tokens", "problem"), [(["<s>"], "is a token already, 1"), (["<|x|>", "<|x|>"], "given twice")]
)
def test_what_cannot_be_a_new_token_is_named(tmp_path, capsys, tokens, problem):
    assert main(["extend", str(STORIES / "model"), "--tokens", *tokens, "--output", str(tmp_path / "out")]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
