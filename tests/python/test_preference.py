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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", ["full", "lora"])
def test_ten_steps_of_two_micro_batches_follow_the_recorded_ones(form, model, shared, preference):
    curve = json.loads((preference / model / "curves.json").read_text())[f"dpo@{form}"]
    pairs = json.loads((preference / model / "curve_data.json").read_text())["pairs"]
    case = {"options": curve["options"], "policy": form, "reference": "adapter_off" if form == "lora" else None}
    config = run_of(shared, model, case, weight_decay=0.01, max_grad_norm=1.0, gradient_accumulation_steps=2)
    if form == "full":
        # The weights that training starts from are the recorded reference where the fixture names none of its own.
        config["reference"] = str(reference_of(curve, shared, model))
    trainer = surogate.Trainer(config)
    rows = [pairs[i : i + 2] for i in range(0, len(pairs), 2)] * 2
    for number, step in enumerate(curve["steps"]):
        micro = [batch_of(rows[2 * number + i]) for i in range(2)]
        length = {name: max(len(of[name]["input_ids"][0]) for of in micro) for name in ("chosen", "rejected")}
        batch = {
            name: {key: [wide(of[name][key], length[name], fill) for of in micro] for key, fill in FILL.items()}
            for name in ("chosen", "rejected")
        }
        metrics = trainer.step(batch, curve["learning_rate"])
        expected = step["f64"]
        assert metrics["loss"] == pytest.approx(np.mean(expected["micro_losses"]), rel=2e-4, abs=1e-4), number
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3), number
        for key in ("rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"):
            assert metrics[key] == pytest.approx(expected["metrics"][key], rel=1e-4, abs=1e-3), (number, key)


FILL = {"input_ids": 0, "labels": -100}


def wide(rows, length, fill):
    return [row + [fill] * (length - len(row)) for row in rows]


def reference_of(curve, shared, model):
    folder = shared / "golden" / "preference" / model / "reference"
    return folder if curve.get("reference", "reference") == "reference" else shared / "golden" / model


@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_of_answers_are_the_recorded_ones(model, shared, preference):
    safetensors = pytest.importorskip("safetensors.numpy")
    recorded = safetensors.load_file(preference / model / "pairs.safetensors")
    pairs = json.loads((preference / model / "pairs.json").read_text())["pairs"]
    chosen = side(pairs, "chosen")
    logps = surogate.load(shared / "golden" / model).logps(chosen["input_ids"], chosen["labels"])
    length = len(chosen["input_ids"][0])
    expected = recorded["policy.per_token_logps"][: len(pairs), : length - 1]
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logps[:, :-1], expected, atol=5e-5)
    assert not logps[:, -1].any()


def test_smoothing_with_the_sigmoid_is_conservative_dpo(shared, preference):
    """TRL ignores it."""
    cases = json.loads((preference / "llama" / "dpo.json").read_text())
    pairs = json.loads((preference / "llama" / "pairs.json").read_text())["pairs"]
    case = cases["label_smoothing_ignored"]
    metrics = surogate.Trainer(run_of(shared, "llama", case)).step(batch_of(pairs), 0.0)
    assert metrics["loss"] == pytest.approx(cases["cdpo"]["f64"]["loss"], rel=2e-5)
    assert metrics["loss"] != pytest.approx(case["f64"]["loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss_type": ["hinge"], "label_smoothing": 0.1}, "label_smoothing"),
        ({"loss_type": "exo_pair"}, "label_smoothing"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "loss_weights"),
        ({"discopop_tau": 0.1}, "discopop_tau"),
        ({"f_alpha_divergence_coef": 0.3}, "f_alpha_divergence_coef"),
        ({"label_smoothing": 0.7}, "label_smoothing"),
        ({"task": "sft", "beta": 0.3}, "beta"),
        ({"sequence_parallel_size": 2, "gpus": 2}, "sequence_parallel_size"),
        ({"sample_prompts": ["Hello"]}, "sample_prompts"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, named):
    with pytest.raises(ConfigError, match=f"`{named}"):
        surogate.Trainer({"model": "missing", "task": "dpo", "device": "cpu", **options})


def test_batches_of_another_task_are_refused(shared):
    case = {"options": {}, "policy": "lora", "reference": "adapter_off"}
    rows = {"input_ids": [[[1, 2, 3]]], "labels": [[[1, 2, 3]]]}
    with pytest.raises(surogate.errors.SurogateError, match="`chosen` and `rejected`"):
        surogate.Trainer(run_of(shared, "llama", case)).step(rows, 0.0)
    one = {name: of[0] for name, of in rows.items()}
    trainer = surogate.Trainer(run_of(shared, "llama", case, task="sft"))
    with pytest.raises(surogate.errors.SurogateError, match="`input_ids` and `labels`"):
        trainer.step({"chosen": one, "rejected": one}, 0.0)


@pytest.fixture
def text_run(shared, make_model, tmp_path):
    """A run on texts: pairs whose chosen answer ends in one word and whose rejected one in another."""
    from conftest import tiny_llama

    vocabulary = json.loads((shared / "assets" / "configs" / "smollm2-135m" / "config.json").read_text())["vocab_size"]
    model = make_model(tiny_llama(vocab_size=vocabulary, max_position_embeddings=128))
    for file in (shared / "assets" / "tokenizers" / "smollm2").iterdir():
        if not (model / file.name).exists():
            (model / file.name).write_bytes(file.read_bytes())
    rows = [
        {"prompt": f"Question {i}:", "chosen": f" yes, {i}", "rejected": " no" * (1 + i % 3)} for i in range(24)
    ]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": str(model), "datasets": [{"path": str(data), "type": "preference"}], "task": "dpo", "device": "cpu",
        "torch_dtype": "float32", "lora_dropout": 0.1, "lora_rank": 4, "learning_rate": 3e-2, "warmup_steps": 0,
        "optimizer": "adamw", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "sequence_len": 64,
        "validation_split_ratio": 0.2, "eval_steps": 4, "output_dir": str(tmp_path / "run"), "max_steps": 6,
    }  # fmt: skip


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_on_texts_learns_to_tell_the_answers_apart(packing, text_run):
    trainer = surogate.Trainer({**text_run, "sample_packing": packing, "max_steps": 20, "beta": 1.0, "learning_rate": 0.1})
    steps = list(trainer)
    assert steps[0]["loss"] == pytest.approx(math.log(2.0), abs=1e-6)
    assert steps[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert steps[-1]["rewards/margins"] > 0.5
    assert steps[-1]["loss"] < 0.5
    evaluation = trainer.evaluate()
    assert evaluation["rewards/accuracies"] == 1.0
    assert evaluation["loss"] < 0.6


def test_packing_changes_nothing_but_the_batches(text_run):
    """With the same pairs in a step the loss and the gradient are the same to rounding."""
    whole = {**text_run, "validation_split_ratio": 0.0, "lora_dropout": 0.0, "shuffle": False, "max_steps": 1}
    runs = [{"sample_packing": False}, {"sample_packing": True, "per_device_train_batch_size": 24}]
    runs[0] |= {"per_device_train_batch_size": 24}
    steps = [surogate.Trainer({**whole, **run, "gradient_accumulation_steps": 1}).step() for run in runs]
    assert steps[0]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=1e-4)
    assert steps[0]["logps/chosen"] == pytest.approx(steps[1]["logps/chosen"], rel=1e-4)


def test_a_resumed_run_takes_the_same_steps(text_run, tmp_path):
    trainer = surogate.Trainer(text_run)
    for _ in range(3):
        trainer.step()
    trainer.save(tmp_path / "kept")
    expected = [trainer.step() for _ in range(3)]
    resumed = surogate.Trainer({**text_run, "resume_from_checkpoint": str(tmp_path / "kept")})
    for step in expected:
        found = resumed.step()
        assert (found["loss"], found["grad_norm"]) == (step["loss"], step["grad_norm"])
        assert found["rewards/margins"] == step["rewards/margins"]


def test_the_command_writes_metrics_to_the_log(text_run, tmp_path):
    import subprocess
    import sys

    import yaml

    file = tmp_path / "run.yaml"
    options = {key: value for key, value in text_run.items() if key != "task"}
    file.write_text(yaml.safe_dump(options))
    done = subprocess.run(
        [sys.executable, "-m", "surogate", "dpo", str(file), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 6
    assert all(math.isfinite(step["rewards/margins"]) for step in steps)
    assert any("rewards/accuracies" in event for event in events if event["event"] == "evaluation")
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    "changed",
    [
        {"beta": 0.3},
        {"loss_type": "hinge"},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        {"label_smoothing": 0.1},
        {"f_divergence_type": "js_divergence"},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
        {"ld_alpha": 0.5},
        {"loss_type": "discopop", "discopop_tau": 0.1},
        {"use_weighting": True},
        {"reference_free": True},
    ],
)
def test_each_setting_changes_the_loss(changed, shared, preference):
    pairs = json.loads((preference / "llama" / "pairs.json").read_text())["pairs"]
    case = {"options": {}, "policy": "lora", "reference": "adapter_off"}
    usual, other = (
        surogate.Trainer(run_of(shared, "llama", case, **more)).step(batch_of(pairs), 0.0) for more in ({}, changed)
    )
    assert usual["loss"] != other["loss"]
