"""Every family against transformers and peft: forward, gradients, packed rows, LoRA, curves."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import surogate
from conftest import TRIMMED
from golden import (
    ADAPTED_EXPERTS,
    BALANCED,
    CURVE_LOSS,
    CURVE_NORM,
    DEVICE,
    FAMILIES,
    LOGITS,
    LOSS,
    MIXTURES,
    Golden,
    assert_close,
    assert_gradients_close,
    assert_weights_close,
)
from safetensors import deserialize
from safetensors.numpy import load_file
from surogate.convert import merge


@pytest.fixture(params=[*FAMILIES, *MIXTURES])
def golden(request, golden_folder) -> Golden:
    return of_family(request.param, golden_folder)


@pytest.fixture(params=FAMILIES)
def dense(request, golden_folder) -> Golden:
    return of_family(request.param, golden_folder)


def of_family(name: str, golden_folder: Path) -> Golden:
    folder = golden_folder / name
    if not folder.is_dir():
        # The trimmed set holds some families; with ../shared every family must be there.
        assert golden_folder == TRIMMED, f"../shared has no numbers of {name}"
        pytest.skip(f"no ../shared next to the checkout, and no numbers of {name} in the trimmed set")
    return Golden(folder)


def test_the_trimmed_set_is_a_part_of_the_full_one(shared):
    for file in sorted(TRIMMED.glob("**/*.safetensors")):
        # As bytes: numpy has no name for some of the types.
        full = tensors(shared / "golden" / file.relative_to(TRIMMED))
        for name, tensor in tensors(file).items():
            assert tensor == full[name], f"{file}: {name}"


def tensors(file: Path) -> dict[str, dict[str, Any]]:
    """Type, shape and bytes of each tensor of a file."""
    return dict(deserialize(file.read_bytes()))


def test_forward(golden):
    model = surogate.load(golden.folder, device=DEVICE)
    ids, positions = golden.inputs["input_ids"], golden.inputs["position_ids"]
    logits, hidden = model.forward(ids, positions, hidden=True)
    assert logits.dtype == np.float32
    assert_close(logits, golden.reference["logits"], LOGITS, "logits")
    assert_close(hidden[0], golden.reference["hidden.embed"], LOGITS, "hidden.embed")
    layers = sum(name.startswith("hidden.layer.") for name in golden.reference)
    assert len(hidden) == layers + 1
    for i, state in enumerate(hidden[1:]):
        assert_close(state, golden.reference[f"hidden.layer.{i}"], LOGITS, f"hidden.layer.{i}")
    np.testing.assert_array_equal(model.forward(ids), logits)


def test_loss_and_gradients(golden):
    model = surogate.load(golden.folder, device=DEVICE)
    loss, gradients = model.loss_and_gradients(golden.inputs["input_ids"], golden.inputs["labels"])
    assert abs(loss - golden.reference["loss"][0]) <= LOSS
    assert_gradients_close(gradients, golden.reference)


def test_loss_of_each_token(golden):
    model = surogate.load(golden.folder, device=DEVICE)
    ids, labels = golden.inputs["input_ids"], golden.inputs["labels"]
    loss, _ = model.loss_and_gradients(ids, labels, per_token=True)
    np.testing.assert_allclose(loss, golden.reference["per_token_loss"], rtol=0, atol=LOSS)


def test_packed_rows(golden):
    model = surogate.load(golden.folder, device=DEVICE)
    ids, labels, positions = (golden.inputs[f"packed.{name}"] for name in ("input_ids", "labels", "position_ids"))
    assert_close(model.forward(ids, positions), golden.packed["logits"], LOGITS, "logits")
    loss, gradients = model.loss_and_gradients(ids, labels, positions)
    assert abs(loss - golden.packed["loss"][0]) <= LOSS
    if any(name.startswith("grad.") for name in golden.packed):  # not in the trimmed set
        assert_gradients_close(gradients, golden.packed)
    each, _ = model.loss_and_gradients(ids, labels, positions, per_token=True)
    np.testing.assert_allclose(each, golden.packed["per_token_loss"], rtol=0, atol=LOSS)


@pytest.mark.parametrize("name", BALANCED)
def test_loss_of_uneven_loads(name, golden_folder, tmp_path):
    """`output_router_logits` adds the loss over the loads of all layers, and its gradient."""
    golden = of_family(name, golden_folder)
    if not (golden.folder / "reference_aux.safetensors").exists():
        assert golden_folder == TRIMMED
        pytest.skip("the trimmed set has no such losses")
    reference = load_file(golden.folder / "reference_aux.safetensors")
    fields = json.loads((golden.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"output_router_logits": True}))
    (tmp_path / "model.safetensors").symlink_to(golden.folder / "model.safetensors")
    model = surogate.load(tmp_path, device=DEVICE)
    loss, gradients = model.loss_and_gradients(golden.inputs["input_ids"], golden.inputs["labels"])
    assert abs(loss - reference["total_loss"][0]) <= LOSS
    assert abs(reference["total_loss"][0] - reference["loss"][0]) > 100 * LOSS, "the loss is not added for nothing"
    wanted = [key.removeprefix("grad.") for key in reference if key.startswith("grad.")]
    assert_gradients_close({key: gradients[key] for key in wanted}, reference)


#: Mixtures whose scores are sigmoids.
SIGMOIDS = ["deepseek_v3", "glm4_moe_lite", "lfm2_moe"]


@pytest.mark.parametrize("name", [*BALANCED, *SIGMOIDS, "gemma4_moe", "deepseek_v2", "ernie4_5_moe"])
def test_a_step_reports_what_routers_do(name, golden_folder, tmp_path):
    """Loads, entropy and the loss of uneven loads over all layers, from the recorded scores and choices."""
    golden = of_family(name, golden_folder)
    recorded = golden.reference
    layers = [key.removesuffix(".logits") for key in recorded if key.startswith("router.") and key.endswith(".logits")]
    if not layers:
        assert golden_folder == TRIMMED
        pytest.skip("the trimmed set has no scores of routers")
    options = {"model": str(golden.folder), "torch_dtype": "float32", "device": DEVICE, "lora": False}
    trainer = surogate.Trainer(options | {"output_dir": str(tmp_path)})
    batch = {"input_ids": golden.inputs["input_ids"][None], "labels": golden.inputs["labels"][None]}
    found = trainer.step(batch, learning_rate=0.0)

    scores = np.concatenate([recorded[f"{layer}.logits"] for layer in layers]).astype(np.float64)
    weights = 1 / (1 + np.exp(-scores)) if name in SIGMOIDS else np.exp(scores - scores.max(-1, keepdims=True))
    chances = weights / weights.sum(-1, keepdims=True)
    choices = np.bincount(np.concatenate([recorded[f"{layer}.topk_index"].ravel() for layer in layers]), minlength=scores.shape[1])
    np.testing.assert_allclose(found["expert_load"], choices / choices.sum(), atol=1e-6)
    assert found["busiest_expert"] == pytest.approx(choices.max() / choices.mean(), rel=1e-5)
    assert found["router_entropy"] == pytest.approx(-(chances * np.log(chances)).sum(-1).mean(), rel=1e-5)
    uneven = len(choices) * (choices / len(scores) * chances.mean(0)).sum()
    assert found["router_loss"] == pytest.approx(uneven, rel=1e-5)
    if name in BALANCED:
        aux = load_file(golden.folder / "reference_aux.safetensors")["aux_loss"]
        assert found["router_loss"] == pytest.approx(float(aux[0]), rel=1e-5)


def test_weighted_tokens(golden):
    """Weights 0 and 1 are the same as leaving labels out; a common factor changes nothing."""
    model = surogate.load(golden.folder, device=DEVICE)
    ids, labels = golden.inputs["input_ids"], golden.inputs["labels"]
    kept = np.arange(labels.size).reshape(labels.shape) % 3 != 0
    expected, gradients = model.loss_and_gradients(ids, np.where(kept, labels, -100))
    loss, weighted = model.loss_and_gradients(ids, labels, weights=kept.astype(np.float32) * 0.25)
    assert abs(loss - expected) <= 1e-6
    for name, value in gradients.items():
        if np.any(value):
            assert_close(weighted[name], value, 1e-5, name)
        else:  # of an expert that no token chose
            assert not np.any(weighted[name]), name


def test_lora(golden):
    model = surogate.load(golden.folder, adapter=golden.folder / "lora", device=DEVICE)
    ids, labels = golden.inputs["input_ids"], golden.inputs["labels"]
    logits = model.forward(ids)
    assert_close(logits, golden.lora["logits"], LOGITS, "logits")
    assert_close(logits, golden.lora["merged_logits"], LOGITS, "merged logits")
    loss, gradients = model.loss_and_gradients(ids, labels)
    assert abs(loss - golden.lora["loss"][0]) <= LOSS
    assert_gradients_close(gradients, golden.lora)


@pytest.mark.parametrize("name", ADAPTED_EXPERTS)
def test_adapters_on_experts(name, golden_folder, tmp_path):
    """PEFT's `target_parameters`: forward, gradients, merged by the engine from folder to folder, and written as they are read."""
    golden = of_family(name, golden_folder)
    folder = golden.folder / "lora_experts"
    reference = load_file(folder / "reference.safetensors")
    model = surogate.load(golden.folder, adapter=folder, device=DEVICE)
    ids, labels = golden.inputs["input_ids"], golden.inputs["labels"]
    assert_close(model.forward(ids), reference["logits"], LOGITS, "logits")
    loss, gradients = model.loss_and_gradients(ids, labels)
    assert abs(loss - reference["loss"][0]) <= LOSS
    assert_gradients_close(gradients, reference)
    options = argparse.Namespace(adapter=str(folder), model=str(golden.folder), base=None, output=str(tmp_path / "merged"))
    assert merge.run(options) == 0
    merged = surogate.load(tmp_path / "merged", device=DEVICE)
    assert_close(merged.forward(ids), reference["merged_logits"], LOGITS, "merged logits")

    own = {"adapter": str(folder), "merge_adapter": True, "train_seed": 5}
    trainer = surogate.Trainer(curve_config(golden, tmp_path / "run", lora=True) | own)
    trainer.export(tmp_path / "result")
    config, theirs = (json.loads((of / "adapter_config.json").read_text()) for of in (tmp_path / "result", folder))
    for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern"):
        assert config[key] == theirs[key]
    for key in ("target_modules", "target_parameters"):
        # Whole names where a part of the model is not computed.
        assert {target.rpartition(".")[-1] for target in config[key]} == {target.rpartition(".")[-1] for target in theirs[key]}
    ours, before = load_file(tmp_path / "result" / "adapter_model.safetensors"), load_file(folder / "adapter_model.safetensors")
    assert set(ours) == set(before)
    for key, value in before.items():
        np.testing.assert_array_equal(ours[key], value)
    trainer.export_merged(tmp_path / "live")
    live = surogate.load(tmp_path / "live", device=DEVICE)
    assert_close(live.forward(ids), reference["merged_logits"], LOGITS, "merged logits")


def test_lora_on_packed_rows(golden):
    model = surogate.load(golden.folder, adapter=golden.folder / "lora", device=DEVICE)
    ids, labels, positions = (golden.inputs[f"packed.{name}"] for name in ("input_ids", "labels", "position_ids"))
    assert_close(model.forward(ids, positions), golden.lora["packed.logits"], LOGITS, "logits")
    loss, gradients = model.loss_and_gradients(ids, labels, positions)
    assert abs(loss - golden.lora["packed.loss"][0]) <= LOSS
    assert_gradients_close(gradients, golden.lora, prefix="packed.grad.")


@pytest.mark.parametrize("spelling", ["config", "config_v4"])
@pytest.mark.parametrize(
    "variant",
    [
        "default",
        "linear",
        "dynamic",
        "llama3",
        "yarn",
        "yarn_no_truncate",
        "yarn_mscale",
        "yarn_attention_factor",
        "longrope",
    ],
)
def test_rotations(shared, tmp_path, variant, spelling):
    folder = shared / "golden" / "llama_rope"
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").symlink_to(folder / f"{spelling}.{variant}.json")
    reference = load_file(folder / "reference.safetensors")
    model = surogate.load(tmp_path, device=DEVICE)
    for length, name in ((24, "short"), (80, "long")):
        logits = model.forward(reference["input_ids"][:, :length])
        assert_close(logits, reference[f"{variant}.{name}.logits"], LOGITS, name)


def test_bfloat16_loses_no_more_than_transformers(dense):
    """Weights and activations in bf16 against float32, by what transformers itself loses there."""
    yardstick = dense.meta["bf16_vs_f32_in_transformers"]
    model = surogate.load(dense.folder, device=DEVICE, dtype="bfloat16")
    ids, labels = dense.inputs["input_ids"], dense.inputs["labels"]
    assert_close(model.forward(ids), dense.reference["logits"], 1.5 * yardstick["logits_rel_l2"], "logits")
    loss, gradients = model.loss_and_gradients(ids, labels)
    assert abs(loss - dense.reference["loss"][0]) <= 2 * yardstick["loss_abs"] + 0.01
    for name, value in gradients.items():
        assert_close(value, dense.reference[f"grad.{name}"], 2 * yardstick["grad_rel_l2"][name], name)


def curve_config(golden: Golden, output, lora: bool) -> dict:
    """The recipe of the recorded curves; learning rates are given step by step."""
    own = {"lora": False}
    if lora:
        own = {"lora": True, "adapter": str(golden.folder / "lora"), "lora_dropout": 0.0}
    return {
        "model": str(golden.folder),
        "output_dir": str(output),
        "device": DEVICE,
        "torch_dtype": "float32",
        "sequence_len": 24,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 20,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "sample_packing": False,
        **own,
    }


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_curve(golden, tmp_path, kind):
    trainer = surogate.Trainer(curve_config(golden, tmp_path / "run", kind == "lora"))
    for step, row in enumerate(golden.curve[kind]["steps"]):
        batch = {name: golden.train_inputs[name][step] for name in ("input_ids", "labels")}
        metrics = trainer.step(batch, learning_rate=row["lr"])
        assert metrics["step"] == step
        assert abs(metrics["loss"] - row["loss"]) <= CURVE_LOSS * row["loss"], (step, metrics, row)
        assert abs(metrics["grad_norm"] - row["grad_norm"]) <= CURVE_NORM * row["grad_norm"], (step, metrics, row)
    trainer.export(tmp_path / "result")
    if kind == "lora":
        ours = load_file(tmp_path / "result" / "adapter_model.safetensors")
        theirs = load_file(golden.folder / "lora" / "final_adapter.safetensors")
    elif (golden.folder / "final_model.safetensors").exists():
        ours = load_file(tmp_path / "result" / "model.safetensors")
        theirs = load_file(golden.folder / "final_model.safetensors")
    else:
        return
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert_weights_close(ours[name], value, name)
