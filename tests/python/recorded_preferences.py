"""What TRL computed for losses of preferences, and the runs that compute the same."""

import json
import os
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
MODELS = ["llama", "qwen3"]
DEVICE = os.environ.get("SUROGATE_TEST_DEVICE", "cpu")
#: TRL's form of what SEMANTICS.md decides otherwise, by task.
NOT_IMITATED = {"dpo": {"label_smoothing_ignored"}}


def cases(*tasks):
    """(task, model, case) of every recorded case; none where the fixtures are absent."""
    for task in tasks:
        for model in MODELS:
            if (file := GOLDEN / "preference" / model / f"{task}.json").is_file():
                known = NOT_IMITATED.get(task, ())
                yield from ((task, model, name) for name in json.loads(file.read_text()) if name not in known)


def read(model, file):
    return json.loads((GOLDEN / "preference" / model / file).read_text())


def arrays(model, file):
    from safetensors.numpy import load_file

    return load_file(GOLDEN / "preference" / model / file)


def side(pairs, name):
    """One side of pairs as rows of unequal lengths."""
    return {
        "input_ids": [of["prompt"] + of[name] for of in pairs],
        "labels": [[-100] * len(of["prompt"]) + of[name] for of in pairs],
    }


def batch_of(pairs):
    return {name: side(pairs, name) for name in ("chosen", "rejected")}


def scored_of(pairs, margin=None):
    """Pairs without labels, as a reward model takes them."""
    batch = {name: {"input_ids": side(pairs, name)["input_ids"]} for name in ("chosen", "rejected")}
    return batch if margin is None else {**batch, "margin": margin}


def answers_of(rows):
    """Answers with verdicts as rows of unequal lengths."""
    batch = side(rows, "completion")
    return {**batch, "desirable": [of["label"] for of in rows]}


def recorded_batch(task, model, name):
    """The batch that a case was computed on."""
    if task == "reward":
        return scored_of(read(model, "pairs.json")["pairs"], read(model, "reward.json")[name]["options"].get("margin"))
    if task != "kto":
        return batch_of(read(model, "pairs.json")["pairs"])
    of = arrays(model, "unpaired_clamped.safetensors" if "clamped" in name else "unpaired.safetensors")
    labels = np.where(of["completion_mask"] == 1, of["input_ids"], -100)
    return {"input_ids": of["input_ids"], "labels": labels, "desirable": of["label"].astype(bool)}


def run_of(model, case, task="dpo", **more):
    """The options of a run that computes a case."""
    folder, adapter = GOLDEN / model, GOLDEN / model / "lora"
    if task == "reward":
        folder, adapter = (GOLDEN / "preference" / model / name for name in ("reward_model", "reward_lora"))
    options = {key: value for key, value in case["options"].items() if value is not None and not key.startswith("_")}
    if task == "kto":
        # The engine computes the shift of BCO itself.
        options.pop("delta", None)
    options.pop("margin", None)
    config = {
        "model": str(folder), "task": task, "device": DEVICE, "torch_dtype": "float32", "max_steps": 20,
        "learning_rate": 1e-3, "optimizer": "adamw", "lora": case["policy"] == "lora", "max_grad_norm": 0.0,
        "gradient_accumulation_steps": 1, "sequence_len": 64, **options, **more,
    }  # fmt: skip
    if case["policy"] == "lora":
        config |= {"adapter": str(adapter), "lora_dropout": 0.0}
    if case["reference"] == "reference" and not options.get("reference_free"):
        config["reference"] = str(GOLDEN / "preference" / model / "reference")
    return config
