"""Adapters as other programs write them: one matcher for loading, generating, training further and merging."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import surogate
from conftest import tiny_gemma3, tiny_llama
from safetensors.numpy import load_file, save_file
from surogate import ConfigError
from surogate.cli.commands import main
from test_text_parts import IDS, whole_model

WEIGHTS = "adapter_model.safetensors"


def further(model: Path, adapter: Path, place: Path) -> Path:
    """The adapter that a run of no step makes of another."""
    options = {"model": str(model), "adapter": str(adapter), "device": "cpu", "torch_dtype": "float32"}
    surogate.Trainer(options | {"output_dir": str(place / "run")}).export(place / "further")
    return place / "further"


def check(model: Path, adapter: Path, place: Path) -> None:
    """Loaded, merged and trained further it is one function, which is not the base's."""
    adapted = surogate.load(model, adapter=adapter).forward(IDS)
    assert not np.allclose(adapted, surogate.load(model).forward(IDS), atol=1e-3)
    assert main(["merge", str(adapter), "--model", str(model), "--output", str(place / "merged")]) == 0
    np.testing.assert_allclose(surogate.load(place / "merged").forward(IDS), adapted, atol=2e-5)
    again = further(model, adapter, place)
    np.testing.assert_array_equal(surogate.load(model, adapter=again).forward(IDS), adapted)


def test_the_shared_case_of_tied_embeddings(shared, tmp_path, capsys):
    case = shared / "cases" / "peft-tied-embedding"
    if not case.is_dir():
        pytest.skip("no such case")
    check(case / "base", case, tmp_path)
    capsys.readouterr()
    words = ["--prompt", "x", "--max-new-tokens", "2", "--device", "cpu"]
    assert main(["generate", str(case / "base"), "--adapter", str(case), *words]) == 0


@pytest.mark.parametrize(
    "saved",
    [["embed_tokens", "model.embed_tokens"], ["norm", "model.norm"], ["model.embed_tokens", "lm_head", "embed_tokens"], ["model.layers.0.mlp", "mlp"]],
    ids=str,
)
def test_several_names_may_mean_one_module(saved, make_model, tmp_path):
    model = make_model(tiny_llama(tie_word_embeddings=True, initializer_range=0.3))
    options = {"model": str(model), "device": "cpu", "torch_dtype": "float32", "lora_rank": 2, "lora_dropout": 0.0}
    trainer = surogate.Trainer(options | {"modules_to_save": saved, "output_dir": str(tmp_path / "first")})
    trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-2)
    trainer.export(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"]
    assert set(written) >= set(saved) - {"lm_head"}
    check(model, tmp_path / "adapter", tmp_path)


def test_weights_for_a_vision_tower_are_left_out_and_handed_on(make_model, tmp_path):
    text = make_model(tiny_gemma3(initializer_range=0.3))
    model = whole_model(text, tmp_path / "whole", "Gemma3ForConditionalGeneration", published=False)
    tower = "model.vision_tower.layers.0.out_proj"
    save_file(load_file(model / "model.safetensors") | {f"{tower}.weight": np.ones((4, 4), np.float32)}, model / "model.safetensors")
    options = {"model": str(model), "device": "cpu", "torch_dtype": "float32", "lora_rank": 2, "lora_dropout": 0.0}
    trainer = surogate.Trainer(options | {"lora_target_modules": ["q_proj"], "output_dir": str(tmp_path / "first")})
    trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-2)
    adapter = tmp_path / "adapter"
    trainer.export(adapter)
    own = load_file(adapter / WEIGHTS)
    others = {
        f"base_model.model.{module}.lora_{which}.weight": np.full(shape, 0.5, np.float32)
        for module in (tower, "model.vision_tower.layers.0.q_proj")
        for which, shape in (("A", (2, 4)), ("B", (4, 2)))
    }
    save_file(own | others, adapter / WEIGHTS)
    fields = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(fields | {"target_modules": ["q_proj", "out_proj"]}))
    check(model, adapter, tmp_path)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert not np.array_equal(merged[f"{tower}.weight"], np.ones((4, 4), np.float32))
    handed_on = load_file(tmp_path / "further" / WEIGHTS)
    assert set(handed_on) == set(own | others)
    assert all(np.array_equal(handed_on[name], value) for name, value in others.items())
    shutil.rmtree(tmp_path / "merged")
    assert main(["merge", str(tmp_path / "further"), "--model", str(model), "--output", str(tmp_path / "merged")]) == 0
    again = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(np.array_equal(again[name], value) for name, value in merged.items())
    save_file(others, adapter / WEIGHTS)
    with pytest.raises(ConfigError, match="parts of the model that are not computed here"):
        surogate.load(model, adapter=adapter)


def test_a_pickled_adapter_is_named(make_model, tmp_path, capsys):
    model = make_model(tiny_llama())
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(fields))
    for made, said in ((False, "there is none"), (True, "there is adapter_model.bin")):
        if made:
            (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"pickle")
        with pytest.raises(ConfigError, match=f"read from {WEIGHTS}, and {said}(.|\n)*safe_serialization=True"):
            surogate.load(model, adapter=tmp_path / "adapter").forward(IDS)
        assert main(["merge", str(tmp_path / "adapter"), "--model", str(model), "--output", str(tmp_path / "merged")]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", [True, None])
def test_a_head_of_its_own_is_used_whatever_the_flag_says(flag, make_model, tmp_path, capsys):
    """As transformers, which ties nothing where a file has both and they differ."""
    fields = tiny_gemma3() if flag is None else tiny_llama()
    model = make_model({**fields, "tie_word_embeddings": False, "initializer_range": 0.3})
    expected = surogate.load(model).forward(IDS)
    fields = json.loads((model / "config.json").read_text())
    fields.pop("tie_word_embeddings")
    (model / "config.json").write_text(json.dumps(fields | ({} if flag is None else {"tie_word_embeddings": flag})))
    with pytest.warns(UserWarning, match="tie_word_embeddings.*lm_head.weight"):
        np.testing.assert_array_equal(surogate.load(model).forward(IDS), expected)
    options = {"model": str(model), "device": "cpu", "torch_dtype": "float32", "lora": False}
    with pytest.warns(UserWarning, match="lm_head.weight"):
        trainer = surogate.Trainer(options | {"output_dir": str(tmp_path / "run")})
    trainer.export(tmp_path / "result")
    assert json.loads((tmp_path / "result" / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(surogate.load(tmp_path / "result").forward(IDS), expected)
    # A copy of the embedding is no head of its own.
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, model / "model.safetensors")
    assert not np.array_equal(surogate.load(model).forward(IDS), expected)
