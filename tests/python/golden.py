"""Reference numbers of transformers and peft: where they lie, how close is close enough.

Tolerances are those of golden/README.md. `SUROGATE_TEST_DEVICE=cuda` runs the same tests on a GPU.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

DEVICE = os.environ.get("SUROGATE_TEST_DEVICE", "cpu")

#: Folders of the reference numbers; the trimmed set has those of some.
FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gpt2",
    "smollm3",
    "gemma2",
    "gemma3",
    "gemma4",
    "phi3",
    "granite",
    "olmo3",
    "glm4",
    "ministral3",
    "qwen3_5",
    "seed_oss",
    "exaone4",
    "ernie4_5",
    "lfm2",
    "falcon_h1",
]

#: Mixtures of experts. In bfloat16 transformers takes other experts for some tokens: not compared.
MIXTURES = [
    "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_5_moe", "gemma4_moe",
    "deepseek_v2", "glm4_moe_lite", "ernie4_5_moe", "lfm2_moe", "nemotron_h", "granitemoehybrid",
]

#: Those with recorded values of rows with images.
WITH_IMAGES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5_vl", "gemma3_mm", "gemma4_mm", "mistral3", "smolvlm"]

#: Those with gated delta nets, which transformers 4 does not have.
HYBRIDS = ["qwen3_5", "qwen3_5_moe"]

#: Those with recorded adapters on experts and attention, which differ from those in `lora`.
ADAPTED_EXPERTS = ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "gemma4_moe", "ernie4_5_moe", "lfm2_moe"]

#: Those with a recorded loss of uneven loads.
BALANCED = ["gpt_oss", "mixtral", "qwen3_moe", "qwen3_5_moe"]

#: float32: relative L2 error of logits and hidden states, absolute of losses, relative L2 of gradients.
LOGITS, LOSS, GRADIENT = 2e-5, 2e-5, 1e-4

#: float32 curves: relative error of loss and norm; absolute of 99.9 % of the final weights.
CURVE_LOSS, CURVE_NORM, CURVE_WEIGHT = 1e-4, 1e-3, 5e-5

#: Tensors with a smaller reference norm are noise.
NOISE = 1e-6


@dataclass(frozen=True)
class Golden:
    """The folder of one model."""

    folder: Path

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        return load_file(self.folder / "inputs.safetensors")

    @cached_property
    def reference(self) -> dict[str, np.ndarray]:
        return load_file(self.folder / "reference.safetensors")

    @cached_property
    def packed(self) -> dict[str, np.ndarray]:
        return load_file(self.folder / "reference_packed.safetensors")

    @cached_property
    def lora(self) -> dict[str, np.ndarray]:
        return load_file(self.folder / "lora" / "reference.safetensors")

    @cached_property
    def train_inputs(self) -> dict[str, np.ndarray]:
        return load_file(self.folder / "train_inputs.safetensors")

    @cached_property
    def curve(self) -> dict:
        return json.loads((self.folder / "train_curve.json").read_text())

    @cached_property
    def meta(self) -> dict:
        return json.loads((self.folder / "meta.json").read_text())


def relative(found: np.ndarray, reference: np.ndarray) -> float:
    """‖found − reference‖₂ / ‖reference‖₂ in float64."""
    found, reference = np.asarray(found, np.float64), np.asarray(reference, np.float64)
    assert found.shape == reference.shape, f"{found.shape} instead of {reference.shape}"
    return float(np.linalg.norm(found - reference) / np.linalg.norm(reference))


def assert_close(found: np.ndarray, reference: np.ndarray, limit: float, what: str) -> None:
    """Relative L2 error within `limit`; NaN is never close."""
    error = relative(found, reference)
    assert error <= limit, f"{what}: relative error {error:.2e}, allowed {limit:.0e}"


def assert_gradients_close(
    found: dict[str, np.ndarray], reference: dict[str, np.ndarray], limit: float = GRADIENT, prefix: str = "grad."
) -> None:
    """Every `grad.*` of the reference is there, nothing else, and all are close."""
    wanted = {name.removeprefix(prefix): value for name, value in reference.items() if name.startswith(prefix)}
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    for name, value in wanted.items():
        if np.linalg.norm(value.astype(np.float64)) >= NOISE:
            assert_close(found[name], value, limit, name)


def assert_weights_close(found: np.ndarray, reference: np.ndarray, what: str) -> None:
    """99.9 % of the entries within the absolute limit: Adam divides tiny by tiny."""
    difference = np.abs(np.asarray(found, np.float64) - np.asarray(reference, np.float64))
    share = float(np.mean(difference <= CURVE_WEIGHT))
    assert share >= 0.999, f"{what}: only {share:.2%} of the entries are within {CURVE_WEIGHT:.0e}"
