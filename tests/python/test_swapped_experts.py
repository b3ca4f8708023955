"""Experts of Qwen3-VL MoE, whose matrices published files hold as [inputs, outputs] and transformers 5 as [outputs, inputs]."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import surogate
from surogate.cli.commands import main
from test_mixtures import tiny_qwen3_moe

STACKS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.fixture
def models(tmp_path):
    """The same model with its experts in both forms."""
    safetensors = pytest.importorskip("safetensors.numpy")
    fields = {**tiny_qwen3_moe(), "moe_intermediate_size": 24}
    config = {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": fields, "vision_config": {"hidden_size": 8},
        "torch_dtype": "float32",
    }  # fmt: skip
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    (drawn / "config.json").write_text(json.dumps(config))
    trainer = surogate.Trainer(options(drawn, tmp_path, init="random", lora=False))
    trainer.export(tmp_path / "plain")
    swapped = shutil.copytree(tmp_path / "plain", tmp_path / "swapped")
    tensors = safetensors.load_file(swapped / "model.safetensors")
    of = {name: np.ascontiguousarray(x.swapaxes(1, 2)) if name.endswith(STACKS) else x for name, x in tensors.items()}
    assert sum(x.shape != tensors[name].shape for name, x in of.items()) >= 2
    safetensors.save_file(of, swapped / "model.safetensors")
    return tmp_path / "plain", swapped


def options(model, place, **more):
    rows = place / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [1 + (i * 7 + j) % 60 for j in range(20)]}) + "\n" for i in range(40)))
    return {
        "model": str(model), "device": "cpu", "datasets": [{"path": str(rows), "type": "tokens"}], "sequence_len": 32,
        "max_steps": 2, "learning_rate": 1e-2, "output_dir": str(place / "run"), "torch_dtype": "float32", "data_cache": "off",
        "shuffle": False, **more,
    }  # fmt: skip


def weights(folder, file="model.safetensors"):
    from safetensors.numpy import load_file

    return load_file(folder / file)


def test_both_forms_are_one_model(models):
    ids = np.arange(24, dtype=np.int32).reshape(2, 12)
    found = [surogate.load(folder, device="cpu").forward(ids) for folder in models]
    np.testing.assert_array_equal(*found)


def test_a_trained_model_keeps_the_form_of_its_files(models, tmp_path):
    for folder in models:
        trainer = surogate.Trainer(options(folder, tmp_path, lora=False))
        losses = [step["loss"] for step in trainer]
        trainer.export(tmp_path / f"{folder.name}-trained")
        assert losses[-1] < losses[0]
    plain, swapped = (weights(tmp_path / f"{folder.name}-trained") for folder in models)
    for name, of in plain.items():
        np.testing.assert_array_equal(swapped[name], of.swapaxes(1, 2) if name.endswith(STACKS) else of)


def test_adapters_are_merged_into_either_form(models, tmp_path):
    targets = {"lora_rank": 2, "lora_target_parameters": list(STACKS), "lora_target_modules": []}
    merged = []
    for folder in models:
        place = tmp_path / f"adapted-{folder.name}"
        trainer = surogate.Trainer(options(folder, tmp_path, lora=True, lora_dropout=0.0, **targets))
        for _ in trainer:
            pass
        trainer.export(place)
        assert main(["merge", str(place), "--base", str(folder), "--output", str(tmp_path / f"merged-{folder.name}")]) == 0
        merged.append(weights(tmp_path / f"merged-{folder.name}"))
    plain, swapped = merged
    first = weights(models[0])
    for name, of in plain.items():
        np.testing.assert_array_equal(swapped[name], of.swapaxes(1, 2) if name.endswith(STACKS) else of)
        assert np.array_equal(of, first[name]) != name.endswith(STACKS)
