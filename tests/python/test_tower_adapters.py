"""Adapters on vision towers as PEFT writes them: targets by plain names, which reach every part, and matrices of convolutions."""

from __future__ import annotations

import json

import numpy as np
import pytest
import surogate
from golden import DEVICE
from safetensors.numpy import load_file, save_file

PREFIX = "base_model.model."

#: Modules of all layers of text and tower.
TEXT = [f"model.language_model.layers.{layer}.self_attn.q_proj" for layer in range(3)]
TOWER = [f"model.visual.blocks.{layer}.attn.qkv" for layer in range(3)]
PATCHES = ["model.visual.patch_embed.proj"]


@pytest.fixture
def recorded(shared):
    folder = shared / "golden/qwen3_vl"
    inputs = load_file(folder / "inputs.safetensors")
    return folder, inputs["input_ids"].astype(np.int32), [inputs[f"image.{number}"] for number in range(3)]


def adapter(folder, base, modules, targets):
    """An adapter of rank 2 on modules, of which that of patches is a convolution of three axes."""
    weights, tensors = load_file(base / "model.safetensors"), {}
    rng = np.random.default_rng(3)
    for module in modules:
        outputs, *inputs = weights[f"{module}.weight"].shape
        tensors[f"{PREFIX}{module}.lora_A.weight"] = rng.normal(0, 0.3, (2, *inputs)).astype(np.float32)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = rng.normal(0, 0.3, (outputs, 2, *[1] * (len(inputs) - 1))).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize(
    ("modules", "targets"),
    [
        ([*TEXT, *TOWER], ["q_proj", "qkv"]),
        (TOWER, ["qkv"]),
        (TOWER, r".*visual.*qkv"),
        ([*TEXT, *PATCHES], ["q_proj", "patch_embed.proj"]),
    ],
)
def test_adapters_are_those_of_the_merged_weights(modules, targets, recorded, tmp_path):
    base, ids, images = recorded
    tensors = adapter(tmp_path / "adapter", base, modules, targets)
    found = surogate.load(base, tmp_path / "adapter", device=DEVICE).forward(ids, images=images)
    merged = tmp_path / "merged"
    merged.mkdir()
    weights = load_file(base / "model.safetensors")
    for module in modules:
        a, b = (tensors[f"{PREFIX}{module}.lora_{which}.weight"] for which in "AB")
        added = 2 * (b.reshape(len(b), 2) @ a.reshape(2, -1))
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + added.reshape(weights[f"{module}.weight"].shape)
    save_file(weights, merged / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json"):
        (merged / name).write_bytes((base / name).read_bytes())
    expected = surogate.load(merged, device=DEVICE).forward(ids, images=images)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert np.abs(expected - surogate.load(base, device=DEVICE).forward(ids, images=images)).max() > 1e-2


def test_an_adapter_of_a_broken_tower_is_reported_as_of_other_parts(recorded, tmp_path):
    base, _, _ = recorded
    adapter(tmp_path / "adapter", base, TOWER, ["qkv"])
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((base / "config.json").read_text())
    config["vision_config"]["num_heads"] = 0
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").symlink_to(base / "model.safetensors")
    with pytest.raises(surogate.ConfigError, match="parts of the model that are not computed here"):
        surogate.load(model, tmp_path / "adapter")
