"""Models with vision towers against transformers: logits, hidden states and every gradient with images in the rows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import surogate
from golden import WITH_IMAGES
from surogate import models
from surogate.errors import DataError, SurogateError

DEVICE = os.environ.get("SUROGATE_TEST_DEVICE", "cpu")


@pytest.fixture
def load_file(shared):
    return pytest.importorskip("safetensors.numpy").load_file


def distance(found, expected):
    return float(np.linalg.norm(found.reshape(expected.shape) - expected) / np.linalg.norm(expected))


def recorded(shared, load_file, family, part=""):
    folder = shared / "golden" / family
    inputs, reference = load_file(folder / "inputs.safetensors"), load_file(folder / part / "reference.safetensors")
    images = [inputs[f"image.{number}"] for number in range(3)]
    return folder, inputs["input_ids"].astype(np.int32), inputs["labels"].astype(np.int32), images, reference


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_logits_and_gradients_are_those_of_transformers(family, shared, load_file):
    folder, ids, labels, images, reference = recorded(shared, load_file, family)
    model = surogate.load(folder, device=DEVICE)
    logits, hidden = model.forward(ids, hidden=True, images=images)
    assert distance(logits, reference["logits"]) <= 2e-5
    names = ["hidden.embed", *(f"hidden.layer.{layer}" for layer in range(len(hidden) - 1))]
    assert max(distance(state, reference[name]) for state, name in zip(hidden, names, strict=True)) <= 2e-5
    loss, gradients = model.loss_and_gradients(ids, labels, images=images)
    assert loss == pytest.approx(float(reference["loss"].reshape(())), abs=2e-5)
    expected = {name.removeprefix("grad."): of for name, of in reference.items() if name.startswith("grad.")}
    assert set(gradients) == set(expected)
    limit = 5e-4 if family == "qwen3_5_vl" else 1e-4
    for name, of in expected.items():
        if np.linalg.norm(of) >= 1e-6:
            assert gradients[name].shape == of.shape and distance(gradients[name], of) <= limit, name


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_adapters_of_the_language_model_have_the_recorded_gradients(family, shared, load_file):
    folder, ids, labels, images, reference = recorded(shared, load_file, family, "lora")
    model = surogate.load(folder, folder / "lora", device=DEVICE)
    assert distance(model.forward(ids, images=images), reference["logits"]) <= 2e-5
    loss, gradients = model.loss_and_gradients(ids, labels, images=images)
    assert loss == pytest.approx(float(reference["loss"].reshape(())), abs=2e-5)
    expected = {name.removeprefix("grad."): of for name, of in reference.items() if name.startswith("grad.")}
    assert set(gradients) == set(expected)
    assert max(distance(gradients[name], of) for name, of in expected.items() if np.linalg.norm(of) >= 1e-6) <= 5e-4


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_bfloat16_is_as_close_as_in_transformers(family, shared, load_file):
    folder, ids, _, images, reference = recorded(shared, load_file, family)
    measured = json.loads((folder / "meta.json").read_text())["bf16_vs_f32_in_transformers"]["logits_rel_l2"]
    logits = surogate.load(folder, device=DEVICE, dtype="bfloat16").forward(ids, images=images)
    assert distance(logits, reference["logits"]) <= 1.5 * measured


def test_a_call_without_images_is_one_of_the_text_model(shared, load_file):
    folder, ids, labels, images, _ = recorded(shared, load_file, "qwen3_vl")
    model = surogate.load(folder, device=DEVICE)
    text = np.where(ids == 88, 5, ids)
    names = {name for name in model.loss_and_gradients(text, labels)[1]}
    assert not any("visual" in name for name in names)
    # Tokens of images that are absent are refused with images, and are words without.
    for given, problem in ((images[:2], "2 images have"), ([], "0 images have 0 tokens")):
        with pytest.raises(DataError, match=problem):
            model.forward(ids, images=given)
    assert np.isfinite(model.forward(ids)).all()
    with pytest.raises(SurogateError, match="reads no images"):
        surogate.load(shared / "golden" / "llama").forward(text, images=images)


def test_images_of_one_row_do_not_change_another(shared, load_file):
    folder, ids, _, images, _ = recorded(shared, load_file, "qwen2_5_vl")
    model = surogate.load(folder, device=DEVICE)
    both = model.forward(ids, images=images)
    first = int((ids[0] == 88).sum())
    counts = np.cumsum([of["tokens"] for of in surogate.process_images(folder, images)])
    own = int(np.searchsorted(counts, first)) + 1
    alone = model.forward(ids[:1], images=images[:own])
    np.testing.assert_allclose(alone[0], both[0], atol=1e-5)
    white = [np.full_like(image, 255) for image in images[own:]]
    np.testing.assert_allclose(model.forward(ids, images=images[:own] + white)[0], both[0], atol=1e-5)


CONFIGS = Path(__file__).parents[2].parent / "shared/assets/configs"


@pytest.mark.parametrize("name", ["gemma-4-26b-a4b", "qwen3.5-27b", "qwen3.5-35b-a3b"])
def test_published_configs_are_read_with_their_towers(name, shared, recwarn):
    model = json.loads(models.build(json.loads((CONFIGS / name / "config.json").read_text()), images=True))
    towers = [item for item in model["body"] if "vision" in item.get("stack", "") or "visual" in item.get("stack", "")]
    assert len(towers) == 1 and towers[0]["repeat"] == 27 and model["images"]["token"] > 240000
    assert not [str(of.message) for of in recwarn if "does not use" in str(of.message)]
