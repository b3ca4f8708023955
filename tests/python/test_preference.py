"""Training on preferences: options, batches by hand, runs on texts."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import surogate
from recorded_preferences import DEVICE, MODELS, batch_of, run_of, side
from surogate.cli.commands import main
from surogate.errors import ConfigError


@pytest.fixture
def preference(shared):
    return shared / "golden" / "preference"


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
    metrics = surogate.Trainer(run_of("llama", case)).step(batch_of(pairs), 0.0)
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
    ],
)
def test_options_that_would_do_nothing_are_refused(options, named):
    with pytest.raises(ConfigError, match=f"`{named}"):
        surogate.Trainer({"model": "missing", "task": "dpo", "device": "cpu", **options})


def test_batches_of_another_task_are_refused(shared):
    case = {"options": {}, "policy": "lora", "reference": "adapter_off"}
    rows = {"input_ids": [[[1, 2, 3]]], "labels": [[[1, 2, 3]]]}
    with pytest.raises(surogate.errors.SurogateError, match="`chosen` and `rejected`"):
        surogate.Trainer(run_of("llama", case)).step(rows, 0.0)
    one = {name: of[0] for name, of in rows.items()}
    trainer = surogate.Trainer(run_of("llama", case, task="sft"))
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
        "model": str(model), "datasets": [{"path": str(data), "type": "preference"}], "task": "dpo", "device": DEVICE,
        "torch_dtype": "float32", "lora_dropout": 0.1, "lora_rank": 4, "learning_rate": 3e-2, "warmup_steps": 0,
        "optimizer": "adamw", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "sequence_len": 64,
        "validation_split_ratio": 0.2, "eval_steps": 4, "output_dir": str(tmp_path / "run"), "max_steps": 6,
    }  # fmt: skip


OF_TASKS = {
    "kto": {"beta": 1.0, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
    "orpo": {"beta": 1.0},
    "cpo": {"loss_type": "simpo", "beta": 2.0},
}


@pytest.mark.parametrize("task", OF_TASKS)
def test_other_tasks_learn_to_tell_the_answers_apart(task, text_run):
    run = {**text_run, **OF_TASKS[task], "task": task, "max_steps": 30, "learning_rate": 0.1}
    trainer = surogate.Trainer(run)
    steps = list(trainer)
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"] + 0.3
    evaluation = trainer.evaluate()
    assert evaluation["rewards/margins"] > 0.3
    assert evaluation["loss"] < steps[0]["loss"]


def test_a_resumed_run_of_kto_takes_the_same_steps(text_run, tmp_path):
    run = {**text_run, **OF_TASKS["kto"], "task": "kto"}
    trainer = surogate.Trainer(run)
    for _ in range(3):
        trainer.step()
    trainer.save(tmp_path / "kept")
    expected = [trainer.step() for _ in range(3)]
    resumed = surogate.Trainer({**run, "resume_from_checkpoint": str(tmp_path / "kept")})
    for step in expected:
        found = resumed.step()
        assert (found["loss"], found["grad_norm"], found["kl"]) == (step["loss"], step["grad_norm"], step["kl"])


@pytest.mark.parametrize("task", ["dpo", "kto", "orpo", "cpo"])
def test_each_task_trains_on_several_ranks_as_on_one(task, text_run):
    """With the same rows in a step, and windows of the same rows."""
    run = {**text_run, **OF_TASKS.get(task, {}), "task": task, "lora_dropout": 0.0, "max_steps": 3, "shuffle": False}
    run |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    one = list(surogate.Trainer(run))
    two = list(surogate.Trainer({**run, "gpus": 2, "gradient_accumulation_steps": 1}))
    for single, double in zip(one, two, strict=True):
        assert double["loss"] == pytest.approx(single["loss"], rel=1e-4)
        assert double["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-3)
        for key in ("rewards/margins", "logps/chosen"):
            assert double[key] == pytest.approx(single[key], rel=1e-3, abs=1e-4), key


def test_rows_of_a_batch_by_hand_may_differ_in_length(shared, preference):
    pairs = json.loads((preference / "llama" / "pairs.json").read_text())["pairs"]
    ragged = batch_of(pairs)
    assert len({len(row) for row in ragged["chosen"]["input_ids"]}) > 1
    wide = {
        name: {key: padded(of[key], fill) for key, fill in (("input_ids", 0), ("labels", -100))}
        for name, of in ragged.items()
    }
    case = {"options": {}, "policy": "lora", "reference": None}
    for task in ("orpo", "cpo"):
        steps = [surogate.Trainer(run_of("llama", case, task)).step(batch, 0.0) for batch in (ragged, wide)]
        assert steps[0]["loss"] == steps[1]["loss"]
        assert steps[0]["grad_norm"] == steps[1]["grad_norm"]


def padded(rows, fill):
    length = max(map(len, rows))
    return [row + [fill] * (length - len(row)) for row in rows]


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


@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_prompts_are_answered_during_training_without_changing_it(task, text_run):
    run = {**text_run, **OF_TASKS.get(task, {}), "task": task}
    steps = list(surogate.Trainer(run))
    sampled = surogate.Trainer({**run, "sample_prompts": ["Question 3:"]})
    assert [step["loss"] for step in sampled] == [step["loss"] for step in steps]


@pytest.mark.parametrize("task", ["dpo", "kto", "orpo", "cpo"])
@pytest.mark.parametrize("lora", [True, False])
def test_the_head_in_parts_gives_the_same_steps(task, lora, text_run):
    run = {**text_run, **OF_TASKS.get(task, {}), "task": task, "lora_dropout": 0.0, "lora": lora, "max_steps": 2}
    runs = [{"lmhead_chunks": 1}, {"lmhead_chunks": 5}]
    whole, parts = (list(surogate.Trainer({**run, **more, "learning_rate": 1e-3})) for more in runs)
    for one, other in zip(whole, parts, strict=True):
        assert one.keys() == other.keys()
        for key in ("loss", "grad_norm", "rewards/margins", "logps/chosen", "logits/rejected"):
            assert other[key] == pytest.approx(one[key], rel=2e-5, abs=2e-6), key


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
    report = (tmp_path / "run" / "report.html").read_text()
    for chart in ("Pairs in order", "Rewards", "Log-probabilities of answers"):
        assert chart in report
    assert "Divergence from the reference" not in report


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
        surogate.Trainer(run_of("llama", case, **more)).step(batch_of(pairs), 0.0) for more in ({}, changed)
    )
    assert usual["loss"] != other["loss"]


def test_the_example_puts_held_out_pairs_in_order(tmp_path):
    import yaml

    root = Path(__file__).parents[2]
    run = yaml.safe_load((root / "examples" / "preferences.yaml").read_text())
    run |= {"model": str(root / run["model"]), "output_dir": str(tmp_path), "task": "dpo", "learning_rate": 5e-4}
    run["datasets"][0]["path"] = str(root / run["datasets"][0]["path"])
    trainer = surogate.Trainer(run)
    assert trainer.evaluate()["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert len(list(trainer)) == 40
    evaluation = trainer.evaluate()
    assert evaluation["rewards/accuracies"] >= 0.8
    assert evaluation["loss"] < 0.4


def test_the_plan_counts_the_forward_passes_of_the_reference(text_run, tmp_path, capsys):
    def estimate(**more):
        path = tmp_path / "plan.yaml"
        path.write_text(json.dumps({**text_run, **more}))
        assert main(["plan", str(path), "--machine", "h200", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        return plan["estimate"] | {"micro_steps": plan["micro_steps"]}

    dpo, free, known = estimate(), estimate(reference_free=True), estimate(precompute_ref_log_probs=True)
    assert free["passes_seconds"] == known["passes_seconds"] == 0
    assert 0 < dpo["passes_seconds"] < dpo["micro_step_seconds"]
    added = dpo["step_seconds"] - known["step_seconds"]
    assert added == pytest.approx(dpo["micro_steps"] * dpo["passes_seconds"], rel=0.05)
    kto = estimate(task="kto")
    assert kto["passes_seconds"] > 2 * estimate(task="kto", loss_type="apo_zero_unpaired")["passes_seconds"] > 0


ROWS = {"input_ids": [[1, 2, 3], [4, 5]], "labels": [[1, 2, 3], [4, 5]]}
ROW = {"input_ids": [[1, 2]], "labels": [[1, 2]]}


@pytest.mark.parametrize(
    ("task", "batch", "said"),
    [
        ("dpo", ROWS, "`task: dpo` trains on batches of `chosen` and `rejected`, and this one has input_ids, labels"),
        ("orpo", ROWS, "`task: orpo` trains on batches of `chosen` and `rejected`"),
        ("cpo", ROWS, "`task: cpo` trains on batches of `chosen` and `rejected`"),
        ("reward", ROWS, "`task: reward` trains on batches of `chosen` and `rejected`"),
        ("grpo", ROWS, "`task: grpo` trains on batches of `input_ids`, `labels` and `advantages`"),
        ("kto", ROWS, "`task: kto` trains on batches of `input_ids`, `labels` and `desirable`"),
        ("kto", {}, "and this one has nothing"),
        ("dpo", {"rejected": ROW}, "has rejected; expected chosen and rejected"),
        ("dpo", {"chosen": [[1, 2]], "rejected": [[1, 3]]}, "`chosen` is of type list, expected input_ids and labels by name"),
        ("kto", {**ROW, "desirable": [[True], [True, False]]}, "desirable: .* unequal lengths; expected"),
        ("kto", {**ROW, "desirable": [1.0]}, "desirable is of type float64, expected true and false"),
        ("sft", ROWS, "input_ids: holds rows in the place of micro-batches"),
        ("sft", {"input_ids": [], "labels": []}, "input_ids: is empty"),
    ],
)
def test_what_a_batch_lacks_for_its_task_is_named(task, batch, said, shared):
    case = {"options": {}, "policy": "lora", "reference": "adapter_off"}
    more = {"rewards": [{"function": "json"}], "num_generations": 2} if task == "grpo" else {}
    with pytest.raises((ValueError, ConfigError), match=said):
        surogate.Trainer(run_of("llama", case, task=task, **more)).step(batch)
