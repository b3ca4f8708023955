"""Losses of sampled answers: what TRL computes, and an independent float64 form of it, on tiny models."""

import numpy as np
import pytest
import surogate
from recorded_preferences import MODELS, arrays, cases, read, run_of
from test_preference_losses import weights

#: Metrics of the answers and their rewards, which the caller of a step knows.
OF_REWARDS = ("completions/", "reward", "frac_reward", "num_tokens", "sampling/")
EXACT = ("clip_ratio/", "cispo_clip_ratio")


def recorded_samples(model, name):
    """The answers of a case, with the prompts, and what it says of them."""
    of, case = arrays(model, "grpo.safetensors"), read(model, "grpo.json")[name]
    mask = of.get(f"{name}.completion_mask", of["completion_mask"])
    rows, labels = [], []
    logps = {key: [] for key in ("old_logps", "reference_logps", "sampling_logps")}
    recorded = {"old_logps": "old", "reference_logps": "ref", "sampling_logps": "sampling"}
    for row, prompt_mask in enumerate(of["prompt_mask"]):
        prompt = of["prompt_ids"][row][prompt_mask == 1].tolist()
        present = of["completion_mask"][row] == 1
        answer = of["completion_ids"][row][present].tolist()
        trained = mask[row][present]
        rows.append(prompt + answer)
        labels.append([-100] * len(prompt) + [id if on else -100 for id, on in zip(answer, trained, strict=True)])
        for key, short in recorded.items():
            if (values := of.get(f"{name}.{short}_per_token_logps")) is not None:
                logps[key].append([0.0] * len(prompt) + values[row][present].tolist())
    given = {key: values for key, values in logps.items() if values}
    return {"input_ids": rows, "labels": labels, "advantages": case["advantages"], **given}


def run(model, case, **more):
    longest = read("", "meta.json")["max_completion_length"]
    options = {key: value for key, value in case["options"].items() if key != "reward_weights"}
    return run_of(model, {**case, "options": options}, "grpo", max_completion_length=longest, **more)


@pytest.mark.parametrize(("task", "model", "name"), list(cases("grpo")))
def test_loss_metrics_and_gradient_norm_are_the_recorded_ones(task, model, name, shared):
    case, batch = read(model, "grpo.json")[name], recorded_samples(model, name)
    metrics = surogate.Trainer(run(model, case)).step(batch, 0.0)
    expected = case["f64"]
    # Weights of whole answers multiply the rounding of every log-probability by that of all others.
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=2e-5, abs=1e-4 if name == "vespo" else 2e-5)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-4, abs=1e-5)
    compared = {key: of for key, of in case["trl"]["metrics"].items() if not key.startswith(OF_REWARDS)}
    assert "entropy" in compared
    for key, value in compared.items():
        tolerance = {"abs": 1e-6} if key.startswith(EXACT) else {"rel": 1e-5, "abs": 1e-4}
        assert metrics[key] == pytest.approx(value, **tolerance), key


@pytest.mark.parametrize("given", [True, False])
def test_log_probabilities_of_the_reference_may_be_given(given, shared):
    """Those that a batch has are used in place of the reference's own."""
    case, batch = read("llama", "grpo.json")["grpo_off"], recorded_samples("llama", "grpo_off")
    if not given:
        del batch["reference_logps"]
    metrics = surogate.Trainer(run("llama", case)).step(batch, 0.0)
    assert metrics["kl"] == pytest.approx(case["f64"]["metrics"]["kl"], rel=1e-4)
    if given:
        batch["reference_logps"] = [[value + 0.5 for value in row] for row in batch["reference_logps"]]
        assert surogate.Trainer(run("llama", case)).step(batch, 0.0)["kl"] != pytest.approx(metrics["kl"], rel=1e-2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", ["grpo_off", "grpo@lora", "dapo@lora"])
def test_gradients_of_each_tensor_are_the_recorded_ones(form, model, shared, tmp_path):
    """AdamW with an epsilon far above any gradient steps along the gradient itself."""
    case = read(model, "grpo.json")[form]
    large, scale = 1e12, 3.0 / case["f64"]["grad_norm"]
    trainer = surogate.Trainer(run(model, case, weight_decay=0.0, adamw_epsilon=large))
    trainer.export(tmp_path / "before")
    trainer.step(recorded_samples(model, form), scale * large)
    trainer.export(tmp_path / "after")
    before, after = (weights(tmp_path / folder) for folder in ("before", "after"))
    prefix = f"{form}.grad."
    of_case = arrays(model, "grpo.safetensors")
    recorded = {key.removeprefix(prefix): of for key, of in of_case.items() if key.startswith(prefix)}
    total = np.sqrt(sum(float((of.astype(np.float64) ** 2).sum()) for of in recorded.values()))
    assert recorded
    for key, expected in recorded.items():
        found = (before[key] - after[key]) / scale
        norm = np.linalg.norm(expected)
        assert np.linalg.norm(found - expected) <= 3e-4 * max(norm, 1e-2 * total), key


@pytest.mark.parametrize(
    ("usual", "changed"),
    [
        ({"loss_type": "sapo"}, {"sapo_temperature_pos": 2.0}),
        ({"loss_type": "sapo"}, {"sapo_temperature_neg": 2.0}),
        ({"loss_type": "vespo"}, {"vespo_k_pos": 3.0}),
        ({"loss_type": "vespo"}, {"vespo_k_neg": 2.0}),
        ({"loss_type": "vespo"}, {"vespo_lambda_pos": 2.0}),
        ({"loss_type": "vespo"}, {"vespo_lambda_neg": 1.0}),
        ({}, {"temperature": 0.7}),
        ({}, {"epsilon": 0.01}),
        ({}, {"epsilon_high": 0.01}),
        ({}, {"delta": 0.9}),
        ({}, {"importance_sampling_level": "sequence"}),
        ({}, {"top_entropy_quantile": 0.5}),
        ({}, {"off_policy_mask_threshold": 0.0}),
        ({"beta": 0.1}, {"use_bias_correction_kl": False}),
        ({}, {"vllm_importance_sampling_correction": False}),
        ({}, {"vllm_importance_sampling_mode": "token_truncate"}),
        ({}, {"vllm_importance_sampling_clip_max": 0.95}),
        ({}, {"vllm_importance_sampling_clip_min": 1.02}),
        ({"loss_type": "dr_grpo"}, {"max_completion_length": 17}),
    ],
)
def test_each_setting_changes_the_loss(usual, changed, shared):
    batch = recorded_samples("qwen3", "dapo_off")
    batch["sampling_logps"] = recorded_samples("qwen3", "tis_token")["sampling_logps"]
    if "beta" in usual:
        batch["reference_logps"] = recorded_samples("qwen3", "grpo_off")["reference_logps"]
    case = {**read("qwen3", "grpo.json")["dapo_off"], "options": {}}
    losses = [surogate.Trainer({**run("qwen3", case), **usual, **more}).step(batch, 0.0)["loss"] for more in ({}, changed)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"advantages": [1.0]}, "advantages is"),
        ({"advantages": [float("nan")] * 8}, "finite numbers"),
        ({"advantages": [[1.0], [1.0, 2.0]]}, r"advantages: .* unequal lengths; expected \[1, 8\] finite numbers"),
        ({"advantages": ["a"] * 8}, "advantages is"),
        ({"advantages": [1e39] * 8}, "finite numbers"),
        ({"old_logps": [[0.0] * 99] * 8}, r"old_logps: its rows have \[99.*, expected .* like input_ids"),
        ({"old_logps": [[]] * 8}, "old_logps: its rows have"),
        ({"rewards": [1.0] * 8}, "has input_ids, labels, advantages, old_logps, rewards"),
    ],
)
def test_wrong_batches_are_refused(changed, said, shared):
    batch = {**recorded_samples("llama", "dapo_off"), **changed}
    with pytest.raises(ValueError, match=said):
        surogate.Trainer(run("llama", read("llama", "grpo.json")["dapo_off"])).step(batch, 0.0)


@pytest.mark.parametrize("name", ["old_logps", "reference_logps", "sampling_logps"])
@pytest.mark.parametrize(
    ("ids", "logps", "said"),
    [
        ([[1, 2, 3], [4, 5]], [[0.0] * 3, [0.0]], r": its rows have \[3, 1\] tokens, expected \[3, 2\] like input_ids"),
        ([[1, 2, 3], [4, 5]], [[-1.0] * 3] * 2, r": its rows have \[3, 3\] tokens, expected \[3, 2\] like input_ids"),
        ([[1, 2], [4, 5]], [[0.0] * 2, [0.0]], ": is no array: its rows have unequal lengths"),
        ([[1, 2], [4, 5]], [[0.0], [0.0]], r": has shape \[2, 1\], expected \[2, 2\] like input_ids"),
        ([[[1, 2]], [[4, 5]]], [[0.0] * 2] * 2, r": has shape \[2, 2\], expected \[2, 1, 2\] like input_ids"),
        ([[1, 2], [4, 5]], [], r": is empty: has shape \[0\], expected \[1, 2, 2\] like input_ids"),
    ],
)
def test_logps_of_other_lengths_than_the_rows_are_refused(name, ids, logps, said, shared):
    trainer = surogate.Trainer(run("llama", read("llama", "grpo.json")["dapo_off"]))
    advantages = [[1.0], [2.0]] if isinstance(ids[0][0], list) else [1.0, 2.0]
    batch = {"input_ids": ids, "labels": ids, "advantages": advantages}
    with pytest.raises(ValueError, match=name + said):
        trainer.step({**batch, name: logps}, 0.0)


def group_of(data, weights):
    """The recorded answers to a prompt as rows, with advantages within the group."""
    rewards = np.asarray(data["rewards"], np.float64) @ np.asarray(weights)
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    rows = [(data["prompt"], answer) for answer in data["completions"]]
    return {
        "input_ids": [prompt + answer for prompt, answer in rows],
        "labels": [[-100] * len(prompt) + answer for prompt, answer in rows],
        "advantages": advantages.tolist(),
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["grpo@full", "grpo@lora", "grpo_iter2@full", "grpo_iter2@lora"])
def test_ten_steps_of_two_micro_batches_follow_the_recorded_ones(name, model, shared):
    """With two steps on the same answers the second has the log-probabilities of before the first."""
    curve, form = read(model, "curves.json")[name], name.split("@")[1]
    case = {"options": curve["options"], "policy": form, "reference": {"full": "reference", "lora": "adapter_off"}[form]}
    if not curve["options"]["beta"]:
        case["reference"] = None
    trainer = surogate.Trainer(run(model, case, weight_decay=0.01, max_grad_norm=1.0, gradient_accumulation_steps=2))
    groups, weights = read(model, "curve_data.json")["groups"], read(model, "grpo.json")["dapo"]["reward_weights"]
    iterations = 2 if "iter2" in name else 1
    for number, step in enumerate(curve["steps"]):
        if number % iterations == 0:
            first = 2 * (number // iterations) % len(groups)
            batches = [group_of(data, weights) for data in groups[first : first + 2]]
            if iterations > 1:
                # A row of the model's log-probabilities has the value of a label one place before it.
                for of in batches:
                    logps = trainer.model.logps(of["input_ids"], of["labels"])
                    of["old_logps"] = np.concatenate([np.zeros_like(logps[:, :1]), logps[:, :-1]], 1)
        metrics = trainer.step(merged(batches), curve["learning_rate"])
        expected = step["f64"]
        assert metrics["loss"] == pytest.approx(sum(expected["micro_losses"]), rel=2e-4, abs=1e-4), number
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3), number


def merged(batches):
    """Micro-batches in one, by key."""
    return {key: [of[key] for of in batches] for key in batches[0]}
