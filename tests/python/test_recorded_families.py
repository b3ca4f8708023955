"""Families without a folder of recorded values: logits, loss, gradients and answers of small forms, as transformers computes them.
tests/oracle/record_families.py recorded them, and tests/oracle/compare_transformers.py compares random forms.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import surogate
from conftest import REPOSITORY, recorded_ids
from drawn_weights import drawn
from golden import DEVICE
from safetensors.numpy import load_file, save_file
from surogate import models

RECORDED = json.loads((REPOSITORY / "tests/golden/families.json").read_text())


def shapes(fields: dict, *, images: bool = False) -> dict[str, list[int]]:
    """The tensors of a model's files."""
    ir = json.loads(models.build(fields, images=images))
    found = {row["name"]: row.get("stored", row["shape"]) for row in ir["parameters"]}
    for stack in (item for item in ir["body"] if "repeat" in item):
        for i in range(stack["repeat"]):
            for row in stack["blocks"][stack["pattern"][i] if "pattern" in stack else 0]["parameters"]:
                found[row["name"].replace("{i}", str(i))] = row.get("stored", row["shape"])
    return found


def opened(folder, fields: dict, *, images: bool = False) -> surogate.Model:
    """A model with drawn weights."""
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {name: drawn(name, shape) for name, shape in shapes(fields, images=images).items()}
    save_file(tensors, folder / "model.safetensors")
    return surogate.load(folder, device=DEVICE)


def compare(expected: dict, logits: np.ndarray, loss: float, gradients: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(logits[:, -1], expected["logits"], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(np.linalg.norm(logits, axis=-1), expected["lengths"], rtol=3e-4)
    assert loss == pytest.approx(expected["loss"], abs=2e-5)
    norms = expected["gradient_norms"]
    # The order of sums differs by processor, and the result by about what rounding to float32 costs the model.
    relative = max(1e-4, 4 * expected["float32_error"])
    assert len(norms) >= 10 and set(norms) <= set(gradients)
    for name, norm in norms.items():
        assert np.linalg.norm(gradients[name]) == pytest.approx(norm, rel=relative, abs=1e-6), name


@pytest.mark.parametrize("family", RECORDED["families"])
def test_logits_loss_and_gradients_are_those_of_transformers(family, tmp_path):
    expected = RECORDED["families"][family]
    model, ids = opened(tmp_path, expected["config"]), np.array(recorded_ids(), np.int32)
    compare(expected, model.forward(ids), *model.loss_and_gradients(ids, ids))


@pytest.mark.parametrize("family", RECORDED["families"])
def test_answers_are_those_of_transformers(family, tmp_path):
    """The likeliest tokens, of both rows at once: the shorter answer is the beginning of a longer one."""
    expected = RECORDED["families"][family]
    generation = opened(tmp_path, expected["config"]).start(recorded_ids(), max_new_tokens=16, ignore_end_tokens=True)
    while not generation.done:
        generation.step()
    assert any(expected["answers"])
    for index, answer in enumerate(expected["answers"]):
        assert generation.answer(index)[: len(answer)] == answer


@pytest.mark.parametrize("family", RECORDED["images"])
def test_rows_with_images_have_the_values_of_transformers(family, shared, tmp_path):
    expected = RECORDED["images"][family]
    rows = shared / "golden" / expected["rows"]
    inputs = load_file(rows / "inputs.safetensors")
    processor = json.loads((rows / "preprocessor_config.json").read_text())
    if family == "gemma4_unified":
        processor["image_processor_type"] = "Gemma4UnifiedImageProcessor"
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    model = opened(tmp_path, expected["config"], images=True)
    ids, labels = (inputs[name].astype(np.int32) for name in ("input_ids", "labels"))
    images = [inputs[f"image.{number}"] for number in range(3)]
    compare(expected, model.forward(ids, images=images), *model.loss_and_gradients(ids, labels, images=images))
