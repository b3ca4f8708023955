"""Distillation: what TRL computes, and an independent float64 form of it, on tiny models; runs with a teacher."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import surogate
from conftest import REPOSITORY, tiny_llama
from recorded_preferences import DEVICE, GOLDEN, MODELS, arrays, read, run_of
from surogate.errors import ConfigError, SurogateError
from test_preference_losses import weights

CASES = [
    (model, name)
    for model in MODELS
    if (GOLDEN / "preference" / model / "distil.json").is_file()
    for name in read(model, "distil.json")
]


def run(model, case, **more):
    """The options of a case: ours name the loss over a teacher's likeliest tokens as TRL's server distillation does."""
    options = {key: value for key, value in case["options"].items() if key != "num_items_in_batch"}
    if "top_k" in options:
        options = {"beta": 0.0, "loss_top_k": options.pop("top_k"), "loss_add_tail": options.pop("tail"), **options}
    teacher = str(GOLDEN / "preference" / model / "teacher")
    return run_of(model, {**case, "options": {**options, "teacher": teacher}}, "distil", **more)


def recorded_rows(model):
    of = arrays(model, "distil.safetensors")
    return {"input_ids": of["input_ids"], "labels": np.where(of["completion_mask"] == 1, of["input_ids"], -100)}


def recorded_tokens(model, name):
    """The tokens of the teacher, with those of a label in its place."""
    of = arrays(model, "distil.safetensors")
    keys = ("teacher_topk_ids", "teacher_topk_logps")
    # There is nothing before a first token.
    return {key: np.concatenate([values[:, :1], values], 1) for key in keys for values in [of[f"{name}.{key}"]]}


def check(found, case):
    expected = case["f64"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=2e-5, abs=2e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert set(expected["metrics"]) <= {"entropy"}
    for key, value in expected["metrics"].items():
        assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize(("model", "name"), [case for case in CASES if case[1] != "jsd_accumulated"])
def test_loss_entropy_and_gradient_norm_are_the_recorded_ones(model, name, shared):
    case = read(model, "distil.json")[name]
    check(surogate.Trainer(run(model, case)).step(recorded_rows(model), 0.0), case)


@pytest.mark.parametrize(("model", "name"), [case for case in CASES if case[1].startswith("topk")])
def test_tokens_of_a_teacher_may_be_given(model, name, shared):
    case = read(model, "distil.json")[name]
    batch = recorded_rows(model) | recorded_tokens(model, name)
    config = run(model, case)
    del config["teacher"]
    check(surogate.Trainer(config).step(batch, 0.0), case)
    with pytest.raises(SurogateError, match="without `teacher` trains on batches with `teacher_topk_ids`"):
        surogate.Trainer(config).step(recorded_rows(model), 0.0)


@pytest.mark.parametrize("model", MODELS)
def test_the_divisor_is_of_all_micro_batches_of_a_step(model, shared):
    """The recorded case has the loss of its rows divided by the tokens of the whole step."""
    cases = read(model, "distil.json")
    case, tokens = cases["jsd_accumulated"], cases["jsd_accumulated"]["options"]["num_items_in_batch"]
    rows = recorded_rows(model)
    own = int((rows["labels"] != -100).sum())
    other = np.tile(rows["input_ids"][:1, :1], (1, tokens - own + 1))
    batches = [
        {key: [row.tolist() for row in of] for key, of in rows.items()},
        {"input_ids": other.tolist(), "labels": [[-100, *other[0, 1:].tolist()]]},
    ]
    alone = surogate.Trainer(run(model, case)).step(batches[1], 0.0)["loss"]
    config = run(model, case, gradient_accumulation_steps=2)
    both = {key: [filled(of[key], 3, tokens - own + 1, key) for of in batches] for key in ("input_ids", "labels")}
    found = surogate.Trainer(config).step({key: np.array(of) for key, of in both.items()}, 0.0)["loss"]
    assert found - alone * (tokens - own) / tokens == pytest.approx(case["f64"]["loss"], rel=1e-4)


def filled(rows, count, length, key):
    """Rows of one shape, with padding that is not trained."""
    fill = -100 if key == "labels" else 0
    rows = [[*row, *[fill] * (length - len(row))] for row in rows]
    return rows + [[fill] * length for _ in range(count - len(rows))]


@pytest.mark.parametrize(("model", "name"), [case for case in CASES if case[1] != "jsd_accumulated"])
def test_gradients_of_each_tensor_are_the_recorded_ones(model, name, shared, tmp_path):
    """AdamW with an epsilon far above any gradient steps along the gradient itself."""
    case = read(model, "distil.json")[name]
    large, scale = 1e12, 3.0 / case["f64"]["grad_norm"]
    trainer = surogate.Trainer(run(model, case, weight_decay=0.0, adamw_epsilon=large))
    trainer.export(tmp_path / "before")
    trainer.step(recorded_rows(model), scale * large)
    trainer.export(tmp_path / "after")
    before, after = (weights(tmp_path / folder) for folder in ("before", "after"))
    prefix = f"{name}.grad."
    whole = {key.removeprefix(prefix): of for key, of in arrays(model, "distil.safetensors").items() if key.startswith(prefix)}
    assert bool(whole) == (case["policy"] == "lora") and set(case["grad_norms"]) == set(before)
    total = case["f64"]["grad_norm"]
    for key, (_, norm) in case["grad_norms"].items():
        found = (before[key] - after[key]) / scale
        assert abs(np.linalg.norm(found) - norm) <= 3e-4 * max(norm, 1e-2 * total), key
        assert not whole or np.linalg.norm(found - whole[key]) <= 3e-4 * max(norm, 1e-2 * total), key


@pytest.mark.parametrize(
    ("usual", "changed"),
    [
        ({}, {"beta": 0.3}),
        ({}, {"temperature": 2.0}),
        ({}, {"cross_entropy_weight": 0.5}),
        ({"beta": 0.0}, {"loss_top_k": 8}),
        ({"beta": 0.0, "loss_top_k": 8}, {"loss_add_tail": False}),
    ],
)
def test_each_setting_changes_the_loss(usual, changed, shared):
    case = {**read("llama", "distil.json")["jsd"], "options": {}}
    losses = [
        surogate.Trainer({**run("llama", case), **usual, **more}).step(recorded_rows("llama"), 0.0)["loss"]
        for more in ({}, changed)
    ]
    assert losses[0] != losses[1]


def test_the_cross_entropy_of_the_data_is_added_with_its_weight(shared):
    case = {**read("qwen3", "distil.json")["jsd"], "options": {"beta": 0.5}}
    rows = recorded_rows("qwen3")
    alone = surogate.Trainer(run("qwen3", case)).step(rows, 0.0)
    both = surogate.Trainer(run("qwen3", case, cross_entropy_weight=0.25)).step(rows, 0.0)
    config = run("qwen3", case) | {"task": "sft"}
    tuned = surogate.Trainer({key: of for key, of in config.items() if key not in ("teacher", "beta")}).step(
        {key: of[None] for key, of in rows.items()}, 0.0
    )
    assert both["divergence"] == pytest.approx(alone["loss"], rel=1e-6)
    assert both["cross_entropy"] == pytest.approx(tuned["loss"], rel=1e-6)
    assert both["loss"] == pytest.approx(alone["loss"] + 0.25 * tuned["loss"], rel=1e-6)
    assert "cross_entropy" not in alone


def test_a_student_is_as_its_teacher_when_they_are_the_same(shared):
    """Neither the logits nor the likeliest tokens of a model differ from its own."""
    case = {**read("llama", "distil.json")["jsd"], "options": {}}
    for options in ({"beta": 0.0}, {"beta": 0.5}, {"beta": 1.0}, {"beta": 0.0, "loss_top_k": 8}):
        config = run("llama", case, **options) | {"teacher": str(GOLDEN / "llama")}
        found = surogate.Trainer(config).step(recorded_rows("llama"), 0.0)
        assert abs(found["loss"]) < 1e-6 and found["grad_norm"] < 1e-4, options


def test_a_teacher_of_another_family_teaches(shared):
    """All of the teacher's tokens with their log-probabilities say what its logits do."""
    case = {**read("llama", "distil.json")["jsd"], "options": {"beta": 0.0}}
    teacher, rows = str(GOLDEN / "smollm3"), recorded_rows("llama")
    whole = surogate.Trainer(run("llama", case) | {"teacher": teacher}).step(rows, 0.0)
    vocabulary = json.loads((GOLDEN / "smollm3" / "config.json").read_text())["vocab_size"]
    config = run("llama", case, loss_top_k=vocabulary, loss_add_tail=False) | {"teacher": teacher}
    tokens = surogate.Trainer(config).step(rows, 0.0)
    assert tokens["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert tokens["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    logits = {name: surogate.load(folder, device=DEVICE).forward(rows["input_ids"]) for name, folder in (
        ("student", str(GOLDEN / "llama")), ("teacher", teacher))}  # fmt: skip
    p, q = (log_softmax(logits[name]) for name in ("teacher", "student"))
    trained = rows["labels"][:, 1:] != -100
    expected = (np.exp(p) * (p - q)).sum(-1)[:, :-1][trained].mean()
    assert whole["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_teacher_with_another_vocabulary_is_refused(shared):
    case = {**read("llama", "distil.json")["jsd"], "options": {}}
    with pytest.raises(ConfigError, match="`teacher` has logits of 320 tokens, the student of 256"):
        surogate.Trainer(run("llama", case) | {"teacher": str(GOLDEN / "qwen3")})
    with pytest.raises(ConfigError, match="there is no folder `missing`"):
        surogate.Trainer(run("llama", case) | {"teacher": "missing"})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"teacher_topk_ids": [[[1, 2]] * 17] * 3}, "teacher_topk_logps is"),
        ({"teacher_topk_ids": [[[1] * 8] * 17] * 3}, "names a token twice"),
        ({"teacher_topk_ids": [[[1, 2, 3, 4, 5, 6, 7, 999]] * 17] * 3}, "token id 999 of the teacher is outside"),
        ({"teacher_topk_logps": [[[0.5] * 8] * 17] * 3}, "no log-probabilities"),
        ({"teacher_topk_logps": [[[-1.0] * 8] * 18] * 3}, "teacher_topk_logps: its rows have .* like input_ids"),
        ({"teacher_topk_logps": [[[-1.0] * 8] * 3] * 3}, "teacher_topk_logps: its rows have .* like input_ids"),
        ({"teacher_topk_logps": [[[-1.0] * 8]] * 2}, "not in the shape of labels"),
        ({"teacher_topk_logps": [[[-1.0], [-1.0, -2.0]]] * 3}, "not the same count of numbers for each label"),
        ({"weights": [[1.0] * 17] * 3}, "has input_ids, labels, teacher_topk_ids, teacher_topk_logps, weights"),
    ],
)
def test_wrong_batches_are_refused(changed, said, shared):
    case = read("llama", "distil.json")["topk_tail"]
    batch = recorded_rows("llama") | recorded_tokens("llama", "topk_tail")
    with pytest.raises((ValueError, SurogateError), match=said):
        surogate.Trainer(run("llama", case)).step(batch | changed, 0.0)
    with pytest.raises(SurogateError, match="8 tokens of a teacher at each place, and `loss_top_k` is 4"):
        surogate.Trainer(run("llama", case, loss_top_k=4)).step(batch, 0.0)


@pytest.fixture
def text_run(make_model, tmp_path):
    """A run on texts with a teacher that has learned them."""
    stories, folders = REPOSITORY / "examples/stories/model", {}
    for name, width in (("student", 32), ("teacher", 64)):
        fields = tiny_llama(vocab_size=512, max_position_embeddings=128, hidden_size=width, initializer_range=0.1)
        folders[name] = make_model(fields)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(stories / file, folders[name])
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"Question {i}: yes, {i}"}) + "\n" for i in range(24)))
    common = {
        "device": DEVICE, "datasets": [{"path": str(data), "type": "text"}], "torch_dtype": "float32", "sequence_len": 64,
        "output_dir": str(tmp_path / "run"), "warmup_steps": 0, "optimizer": "adamw",
    }  # fmt: skip
    taught = surogate.Trainer({**common, "model": str(folders["teacher"]), "lora": False, "max_steps": 20, "learning_rate": 1e-2})
    assert [of["loss"] for of in taught][-1] < 4
    taught.export(tmp_path / "taught")
    return {
        **common, "model": str(folders["student"]), "teacher": str(tmp_path / "taught"), "task": "distil", "lora": False,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "validation_split_ratio": 0.2,
        "eval_steps": 4, "max_steps": 6, "learning_rate": 1e-2,
    }  # fmt: skip


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"beta": 0.0, "loss_top_k": 64}])
def test_a_run_learns_from_its_teacher_and_resumes_with_the_same_bits(options, text_run, tmp_path):
    trainer = surogate.Trainer({**text_run, **options, "max_steps": 12})
    steps = list(trainer)
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    evaluation = trainer.evaluate()
    assert evaluation["loss"] < 0.9 * steps[0]["loss"] and evaluation["entropy"] > 0
    again = surogate.Trainer({**text_run, **options, "max_steps": 12})
    for _ in range(3):
        again.step()
    again.save(tmp_path / "kept")
    resumed = surogate.Trainer({**text_run, **options, "max_steps": 12, "resume_from_checkpoint": str(tmp_path / "kept")})
    for step in steps[3:6]:
        found = resumed.step()
        assert all(found[key] == step[key] for key in ("loss", "grad_norm", "entropy"))


@pytest.mark.parametrize("gpus", [1, 2])
def test_kept_tokens_of_a_teacher_teach_as_the_teacher_does(gpus, text_run, tmp_path, capfd):
    """Over two epochs of shuffled rows, in evaluations, after a resume, and in a later run, which needs no teacher any more."""
    run = {**text_run, "beta": 0.0, "loss_top_k": 32, "gpus": gpus, "gradient_accumulation_steps": 2 // gpus, "max_steps": 8}
    run["data_cache"] = str(tmp_path / "cache")
    usual = surogate.Trainer(run)
    expected = [step["loss"] for step in usual]
    kept = surogate.Trainer({**run, "precompute_teacher": True})
    said = capfd.readouterr().err
    assert "32 tokens have " in said and "% of the teacher's probability, on average" in said
    for _ in range(3):
        kept.step()
    kept.save(tmp_path / "kept")
    [file] = (tmp_path / "cache").glob("*.values")
    assert file.stat().st_size > 24 * 32 * 8
    written = file.stat().st_ino
    resumed = surogate.Trainer({**run, "precompute_teacher": True, "resume_from_checkpoint": str(tmp_path / "kept")})
    assert [step["loss"] for step in resumed] == pytest.approx(expected[3:], rel=1e-6)
    assert resumed.evaluate()["loss"] == pytest.approx(usual.evaluate()["loss"], rel=1e-6)
    assert [of.stat().st_ino for of in (tmp_path / "cache").glob("*.values")] == [written], "kept once"
    other = surogate.Trainer({**run, "precompute_teacher": True, "loss_top_k": 8})
    assert other.step()["loss"] != pytest.approx(expected[0], rel=1e-4)
    assert len(list((tmp_path / "cache").glob("*.values"))) == 2


def test_kept_tokens_that_were_changed_end_the_run(text_run, tmp_path):
    run = {**text_run, "beta": 0.0, "loss_top_k": 32, "precompute_teacher": True, "data_cache": str(tmp_path / "cache")}
    surogate.Trainer(run).step()
    [file] = (tmp_path / "cache").glob("*.values")
    content = bytearray(file.read_bytes())
    content[: 24 * 32 * 8] = bytes(24 * 32 * 8)
    file.write_bytes(content)
    with pytest.raises(SurogateError, match="the kept tokens of the teacher cannot be read: the content is not what was written"):
        list(surogate.Trainer(run))


def test_tokens_of_a_teacher_are_kept_for_the_rows_of_the_run_alone(text_run, tmp_path):
    run = {**text_run, "beta": 0.0, "loss_top_k": 32, "precompute_teacher": True}
    with pytest.raises(SurogateError, match="`precompute_teacher: true` keeps the teacher's tokens in the cache .*: set `data_cache`"):
        surogate.Trainer({**run, "data_cache": "off"})
    trainer = surogate.Trainer({**run, "data_cache": str(tmp_path / "cache")})
    rows = np.arange(64).reshape(2, 1, 32) + 5
    with pytest.raises(SurogateError, match="`precompute_teacher` knows the documents of the run's data, and the batch has others"):
        trainer.step({"input_ids": rows, "labels": rows})


def test_several_ranks_learn_as_one(text_run):
    run = {**text_run, "max_steps": 3, "shuffle": False, "per_device_train_batch_size": 1}
    one = list(surogate.Trainer(run))
    two = list(surogate.Trainer({**run, "gpus": 2, "gradient_accumulation_steps": 1}))
    for single, double in zip(one, two, strict=True):
        assert double["loss"] == pytest.approx(single["loss"], rel=1e-4)
        assert double["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-3)


def test_the_head_in_parts_gives_the_same_loss(text_run):
    """Logits of the student and of the teacher are cut alike."""
    for options in ({"beta": 0.5}, {"beta": 0.0, "loss_top_k": 16}):
        run = {**text_run, **options, "max_steps": 2, "shuffle": False}
        whole, parts = (list(surogate.Trainer({**run, "lmhead_chunks": count})) for count in (1, 3))
        for one, other in zip(whole, parts, strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
            assert other["entropy"] == pytest.approx(one["entropy"], rel=1e-6)


def test_a_teacher_with_other_tokens_is_refused(text_run):
    file = Path(text_run["teacher"]) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.unlink()
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"token 300 of `teacher` is `.*`, of the student `.*`: expected"):
        surogate.Trainer(text_run)


def test_the_command_says_how_the_teacher_reaches_the_loss(text_run, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({key: value for key, value in text_run.items() if key != "task"}))
    command = [sys.executable, "-m", "surogate"]
    planned = subprocess.run([*command, "plan", config, "--task", "distil"], capture_output=True, text=True, check=True)
    assert "hands on its logits of all 512 tokens" in planned.stdout
    done = subprocess.run([*command, "distil", config], capture_output=True, text=True, check=True)
    assert "hands on its logits of all 512 tokens" in done.stdout
    log = next((tmp_path / "run").glob("log-*.json"))
    assert '"entropy":' in log.read_text()
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "by distillation of a teacher into" in card


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
