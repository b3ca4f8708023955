"""Losses of preferences: what TRL computes, and an independent float64 form of it, on tiny models."""

import numpy as np
import pytest
import surogate
from recorded_preferences import MODELS, answers_of, arrays, batch_of, cases, read, recorded_batch, run_of, scored_of

TASKS = ("dpo", "kto", "orpo", "cpo", "reward")
#: Metrics that are shares of counted rows.
EXACT = {"rewards/accuracies", "mean_token_accuracy", "accuracy"}


@pytest.mark.parametrize(("task", "model", "name"), list(cases(*TASKS)))
def test_loss_metrics_and_gradient_norm_are_the_recorded_ones(task, model, name, shared):
    case = read(model, f"{task}.json")[name]
    metrics = surogate.Trainer(run_of(model, case, task)).step(recorded_batch(task, model, name), 0.0)
    expected = case["f64"]
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=2e-5, abs=2e-5)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    compared = {key: value for key, value in expected["metrics"].items() if key != "num_tokens"}
    assert len(compared) >= 4
    for key, value in compared.items():
        tolerance = {"abs": 1e-7} if key in EXACT else {"rel": 1e-5, "abs": 1e-4}
        assert metrics[key] == pytest.approx(value, **tolerance), key


@pytest.mark.parametrize(
    ("task", "usual", "changed"),
    [
        ("kto", {}, {"desirable_weight": 1.5}),
        ("kto", {}, {"undesirable_weight": 0.5}),
        ("orpo", {}, {"beta": 0.3}),
        ("orpo", {}, {"nll": "paper"}),
        ("cpo", {}, {"cpo_alpha": 0.5}),
        ("cpo", {"loss_type": "simpo"}, {"simpo_gamma": 1.5}),
        ("cpo", {"loss_type": "simpo"}, {"alpha": 0.25}),
        ("reward", {}, {"center_rewards_coefficient": 0.01}),
    ],
)
def test_each_setting_changes_the_loss(task, usual, changed, shared):
    name, case = next(iter(read("llama", f"{task}.json").items()))
    batch, case = recorded_batch(task, "llama", name), {**case, "options": {}}
    losses = [
        surogate.Trainer(run_of("llama", case, task, **usual, **more)).step(batch, 0.0)["loss"] for more in ({}, changed)
    ]
    assert losses[0] != losses[1]


def with_gradients():
    """The cases whose gradients are recorded whole."""
    for task, model, name in cases(*TASKS):
        if "grad_norms" in (case := read(model, f"{task}.json")[name]) and any(
            key.startswith(f"{name}.grad.") for key in arrays(model, f"{task}.safetensors")
        ):
            yield pytest.param(task, model, name, case, id=f"{task}-{model}-{name}")


@pytest.mark.parametrize(("task", "model", "name", "case"), list(with_gradients()))
def test_gradients_of_each_tensor_are_the_recorded_ones(task, model, name, case, shared, tmp_path):
    """AdamW with an epsilon far above any gradient steps along the gradient itself."""
    # A step as long as the weights keep apart from their rounding, and the exported model finite.
    large, scale = 1e12, 3.0 / case["f64"]["grad_norm"]
    config = run_of(model, case, task, weight_decay=0.0, adamw_epsilon=large)
    trainer = surogate.Trainer(config)
    trainer.export(tmp_path / "before")
    trainer.step(recorded_batch(task, model, name), scale * large)
    trainer.export(tmp_path / "after")
    before, after = (weights(tmp_path / folder) for folder in ("before", "after"))
    prefix = f"{name}.grad."
    recorded = {key.removeprefix(prefix): of for key, of in arrays(model, f"{task}.safetensors").items() if key.startswith(prefix)}
    total = np.sqrt(sum(float((of.astype(np.float64) ** 2).sum()) for of in recorded.values()))
    assert recorded
    for key, expected in recorded.items():
        found = (before[key] - after[key]) / scale
        norm = np.linalg.norm(expected)
        assert np.linalg.norm(found - expected) <= 3e-4 * max(norm, 1e-2 * total), key


def weights(folder):
    from safetensors.numpy import load_file

    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {key: of.astype(np.float64) for key, of in load_file(file).items()}
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", ["full", "lora"])
@pytest.mark.parametrize("task", ["dpo", "orpo", "kto", "reward"])
def test_ten_steps_of_two_micro_batches_follow_the_recorded_ones(task, form, model, shared):
    curve = read(model, "curves.json")[f"{task}@{form}"]
    of_run = {"full": "reference" if task in ("dpo", "kto") else None, "lora": "adapter_off"}
    case = {"options": curve["options"], "policy": form, "reference": of_run[form]}
    config = run_of(model, case, task, weight_decay=0.01, max_grad_norm=1.0, gradient_accumulation_steps=2)
    trainer = surogate.Trainer(config)
    data = read(model, "curve_data.json")["unpaired" if task == "kto" else "pairs"]
    size, batch = {"kto": (4, answers_of), "reward": (2, scored_of)}.get(task, (2, batch_of))
    rows = [data[i : i + size] for i in range(0, len(data), size)] * 2
    for number, step in enumerate(curve["steps"]):
        metrics = trainer.step(stacked([batch(of) for of in rows[2 * number : 2 * number + 2]]), curve["learning_rate"])
        expected = step["f64"]
        assert metrics["loss"] == pytest.approx(np.mean(expected["micro_losses"]), rel=2e-4, abs=1e-4), number
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3), number
        # The means of the others are over rows of one kind, and the kinds are not as many in each micro-batch.
        compared = COMPARED.get(task, ("rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"))
        for key in compared:
            assert metrics[key] == pytest.approx(expected["metrics"][key], rel=1e-4, abs=1e-3), (number, key)


COMPARED = {"kto": ("kl",), "reward": ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")}


def stacked(batches):
    """Micro-batches in one, by key."""
    first = batches[0]
    if isinstance(first, dict):
        return {key: stacked([of[key] for of in batches]) for key in first}
    return list(batches)
