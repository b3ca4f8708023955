"""Losses of pairs: what TRL computes, and an independent float64 form of it, on tiny models."""

import json
import math

import numpy as np
import pytest
import surogate
from surogate.errors import ConfigError

MODELS = ["llama", "qwen3"]
#: TRL's form of what SEMANTICS.md decides otherwise.
NOT_IMITATED = {"label_smoothing_ignored"}
#: Names of the fixtures' sums over both losses of a list that are metrics here, with the tolerance of each.
EXACT = {"rewards/accuracies", "mean_token_accuracy"}


@pytest.fixture
def preference(shared):
    return shared / "golden" / "preference"


def padded(rows, fill):
    length = max(map(len, rows))
    return [row + [fill] * (length - len(row)) for row in rows]


def side(pairs, name):
    return {
        "input_ids": padded([of["prompt"] + of[name] for of in pairs], 0),
        "labels": padded([[-100] * len(of["prompt"]) + of[name] for of in pairs], -100),
    }


def batch_of(pairs):
    return {name: side(pairs, name) for name in ("chosen", "rejected")}


def run_of(shared, model, case, **more):
    """The options of a run that computes a case."""
    folder = shared / "golden" / model
    options = {key: value for key, value in case["options"].items() if value is not None and not key.startswith("_")}
    config = {
        "model": str(folder), "task": "dpo", "device": "cpu", "torch_dtype": "float32", "max_steps": 20,
        "learning_rate": 1e-3, "optimizer": "adamw", "lora": case["policy"] == "lora", "max_grad_norm": 0.0,
        "gradient_accumulation_steps": 1, "sequence_len": 64, **options, **more,
    }  # fmt: skip
    if case["policy"] == "lora":
        config |= {"adapter": str(folder / "lora"), "lora_dropout": 0.0}
    if case["reference"] == "reference" and not options.get("reference_free"):
        config["reference"] = str(shared / "golden" / "preference" / model / "reference")
    return config


def cases():
    from pathlib import Path

    golden = Path(__file__).parents[3] / "shared" / "golden" / "preference"
    for model in MODELS:
        if (file := golden / model / "dpo.json").is_file():
            yield from ((model, name) for name in json.loads(file.read_text()) if name not in NOT_IMITATED)


@pytest.mark.parametrize(("model", "name"), list(cases()))
def test_loss_metrics_and_gradient_norm_are_the_recorded_ones(model, name, shared, preference):
    case = json.loads((preference / model / "dpo.json").read_text())[name]
    pairs = json.loads((preference / model / "pairs.json").read_text())["pairs"]
    metrics = surogate.Trainer(run_of(shared, model, case)).step(batch_of(pairs), 0.0)
    expected = case["f64"]
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=2e-5, abs=2e-5)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    compared = {key: value for key, value in expected["metrics"].items() if key != "num_tokens"}
    assert len(compared) >= 4
    for key, value in compared.items():
        tolerance = {"abs": 1e-7} if key in EXACT else {"rel": 1e-5, "abs": 1e-4}
        assert metrics[key] == pytest.approx(value, **tolerance), key
