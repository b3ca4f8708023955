"""Reward models: a score for each answer, from training to what serves it."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import surogate
from conftest import tiny_llama
from recorded_preferences import DEVICE, GOLDEN, MODELS, arrays, read, scored_of
from surogate.cli.commands import main
from surogate.errors import DataError, SurogateError


def rows_of(model):
    pairs = read(model, "pairs.json")["pairs"]
    return [pair["prompt"] + pair[side] for side in ("chosen", "rejected") for pair in pairs]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", ["full", "lora"])
def test_scores_are_those_of_transformers(form, model, shared):
    folder = GOLDEN / "preference" / model
    found = surogate.load(folder / "reward_model", adapter=folder / "reward_lora" if form == "lora" else None)
    scores = found.rewards(rows_of(model))
    np.testing.assert_allclose(scores, arrays(model, "reward.safetensors")[f"scores.{form}"], atol=5e-5)
    assert [found.rewards([row])[0] for row in rows_of(model)] == pytest.approx(scores, abs=1e-5)


def run_of(model, **more):
    return {
        "model": str(model), "task": "reward", "device": DEVICE, "torch_dtype": "float32", "lora_dropout": 0.0,
        "max_steps": 8, "sequence_len": 64, "gradient_accumulation_steps": 1, "learning_rate": 3e-3, "optimizer": "adamw",
        **more,
    }  # fmt: skip


def without(folder, name):
    """The fields of a config.json, without one."""
    fields = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in fields.items() if key != name}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("lora", [True, False])
def test_a_language_model_becomes_a_classifier_that_scores_as_in_training(lora, model, shared, tmp_path):
    from safetensors.numpy import load_file

    trainer = surogate.Trainer(run_of(GOLDEN / model, lora=lora))
    batch = scored_of(read(model, "pairs.json")["pairs"])
    steps = [trainer.step(batch) for _ in range(5)]
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert steps[-1]["accuracy"] == 1.0
    live = trainer.model.rewards(rows_of(model))
    trainer.export_merged(tmp_path / "whole")
    fields = json.loads((tmp_path / "whole" / "config.json").read_text())
    name = without(GOLDEN / model, "")["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    assert fields["architectures"] == [name]
    assert len(fields["id2label"]) == 1
    assert isinstance(fields["pad_token_id"], int)
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    assert tensors["score.weight"].shape == (1, fields["hidden_size"])
    assert "lm_head.weight" not in tensors
    assert surogate.load(tmp_path / "whole").rewards(rows_of(model)) == pytest.approx(live, abs=1e-5)
    if lora:
        trainer.export(tmp_path / "adapter")
        of = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert (of["task_type"], of["modules_to_save"]) == ("SEQ_CLS", ["score"])
        assert "score" not in of["target_modules"]
        again = surogate.load(GOLDEN / model, adapter=tmp_path / "adapter")
        assert again.rewards(rows_of(model)) == pytest.approx(live, abs=1e-5)


def test_a_reward_model_refuses_what_needs_logits(shared):
    model = surogate.load(GOLDEN / "preference" / "llama" / "reward_model")
    for call in (
        lambda: model.generate("Hello"),
        lambda: model.logps([[1, 2]]),
        lambda: model.score([([1], [2])]),
        lambda: model.loss_and_gradients([[1, 2]], [[1, 2]]),
    ):
        with pytest.raises(SurogateError, match="this is a reward model"):
            call()
    with pytest.raises(SurogateError, match="this model gives logits"):
        surogate.load(GOLDEN / "llama").rewards([[1, 2]])


@pytest.fixture
def with_tokenizer(shared, tmp_path):
    """The folder of a reward model that has a tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "preference" / "llama" / "reward_model", folder)
    shutil.copytree(shared / "assets" / "tokenizers" / "smollm2", folder, dirs_exist_ok=True)
    return folder


EXPECTED = "expected `messages`, `prompt` and `completion`, or `text`"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({}, f"has no text, {EXPECTED}"),
        ({"text": None}, f"has no text, {EXPECTED}"),
        ({"messages": None}, f"has no text, {EXPECTED}"),
        ({"prompt": "Once", "completion": None}, "`completion` is null, expected a text or messages"),
        ({"prompt": None, "completion": "upon"}, "`prompt` is null, expected a text or messages"),
        ({"prompt": "Once", "completion": 5}, "`completion` is 5, expected a text or messages"),
        ({"completion": "Once", "text": "upon"}, f"has completion, text, {EXPECTED}"),
        ({"messages": [{"role": "user", "content": "Hi"}], "prompt": "Once"}, f"has messages, prompt, {EXPECTED}"),
        ({"messages": 5}, ""),
        ({"response": "a", 1: "b"}, "has 1, response; expected some of completion, messages"),
        (None, f"is None, {EXPECTED}"),
        ([], "is \\[\\], expected"),
        ([1.5], "is \\[1.5\\], expected"),
        (["a"], "is \\['a'\\], expected"),
        (b"ab", "is b'ab', expected"),
        ("", "the text is empty"),
        ({"prompt": "", "completion": ""}, "the text is empty"),
    ],
)
def test_rows_without_a_score_are_named(row, named, with_tokenizer):
    model = surogate.load(with_tokenizer)
    with pytest.raises(DataError, match=f"^rows\\[1\\]: {named}"):
        model.rewards([[1, 2], row])


@pytest.mark.parametrize("rows", ["abc", b"abc", {"prompt": "Once", "completion": "upon"}])
def test_one_row_alone_is_no_list_of_rows(rows, shared):
    model = surogate.load(GOLDEN / "preference" / "llama" / "reward_model")
    with pytest.raises(DataError, match=r"expected a list of rows: `rewards\(\[row\]\)`"):
        model.rewards(rows)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[1, 2]\n\n{}\n", ":3: has no text, expected `messages`"),
        ("[1, 2]\n{", ":2: this is not JSON"),
        ("\n", ": the file holds no rows, expected one per line"),
        (None, ": there is no such file"),
    ],
)
def test_the_command_names_the_line_of_a_row(text, named, with_tokenizer, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    assert main(["score", str(with_tokenizer), "--prompts", str(file)]) != 0
    assert f"{file}{named}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"chosen": {"input_ids": [[1, 2]]}}, "expected chosen and rejected"),
        ({"chosen": {"input_ids": [[1, 2]]}, "rejected": {"input_ids": [[1, 2]]}, "margin": [1.0, 2.0]}, "margin is"),
        ({"chosen": {"input_ids": [[1, 2]]}, "rejected": {"input_ids": [[1, 2]]}, "margin": [float("nan")]}, "margin is"),
        ({"chosen": {"ids": [[1, 2]]}, "rejected": {"input_ids": [[1, 2]]}}, "`chosen` has ids"),
    ],
)
def test_wrong_batches_are_named(batch, named, shared):
    with pytest.raises(ValueError, match=named):
        surogate.Trainer(run_of(GOLDEN / "llama")).step(batch)


def test_padding_at_the_end_of_arrays_is_not_scored(shared):
    pairs = read("llama", "pairs.json")["pairs"]
    ragged = scored_of(pairs)
    longest = max(len(row) for of in ragged.values() for row in of["input_ids"])
    wide = {
        side: {"input_ids": np.array([row + [0] * (longest + 3 - len(row)) for row in of["input_ids"]])}
        for side, of in ragged.items()
    }
    model = GOLDEN / "preference" / "llama" / "reward_model"
    steps = [surogate.Trainer(run_of(model)).step(batch, 0.0) for batch in (ragged, wide)]
    assert steps[0]["loss"] == pytest.approx(steps[1]["loss"], rel=1e-6)
    assert steps[0]["max_reward"] == pytest.approx(steps[1]["max_reward"], rel=1e-6)


@pytest.fixture
def text_run(shared, make_model, tmp_path):
    """A run on texts whose chosen answers end in another word than the rejected ones."""
    vocabulary = json.loads((shared / "assets" / "configs" / "smollm2-135m" / "config.json").read_text())["vocab_size"]
    model = make_model(tiny_llama(vocab_size=vocabulary, max_position_embeddings=128))
    for file in (shared / "assets" / "tokenizers" / "smollm2").iterdir():
        if not (model / file.name).exists():
            (model / file.name).write_bytes(file.read_bytes())
    rows = [{"prompt": f"Question {i}:", "chosen": f" {i} yes", "rejected": f" {i} no" * (1 + i % 3)} for i in range(24)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        **run_of(model, max_steps=40, learning_rate=3e-2), "datasets": [{"path": str(data), "type": "preference"}],
        "lora_rank": 4, "warmup_steps": 0, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "validation_split_ratio": 0.2, "eval_steps": 6, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip


def test_a_run_on_texts_scores_good_answers_higher_and_says_so(text_run, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({key: value for key, value in text_run.items() if key != "task"}))

    def command(*words):
        return subprocess.run([sys.executable, "-m", "surogate", *words], capture_output=True, text=True, check=False)

    done = command("reward", str(file))
    assert done.returncode == 0, done.stderr
    assert "`score.weight` is not in the model's files" in done.stdout
    assert "surogate generate" not in done.stdout
    asked = tmp_path / "asked.jsonl"
    rows = [{"prompt": "Question 40:", "completion": f" 40 {word}"} for word in ("yes", "no")] + ["Question 41: 41 yes"]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scored = command("score", text_run["output_dir"], "--prompts", str(asked), "--json", "--device", "cpu")
    assert scored.returncode == 0, scored.stderr
    good, bad, other = [json.loads(line)["reward"] for line in scored.stdout.splitlines()]
    assert good > bad
    assert other > bad
    merged = command("merge", text_run["output_dir"])
    assert merged.returncode == 0, merged.stderr
    again = command("score", str(tmp_path / "run" / "merged"), "--prompts", str(asked), "--json", "--device", "cpu")
    assert [json.loads(line)["reward"] for line in again.stdout.splitlines()] == pytest.approx([good, bad, other], abs=1e-4)
    assert "GGUF has no form" in command("export", text_run["output_dir"], "--format", "gguf").stderr
    for words in (["generate", "--prompt", "Hello"], ["serve"]):
        refused = command(words[0], text_run["output_dir"], *words[1:], "--device", "cpu")
        assert refused.returncode != 0
        assert "this is a reward model" in refused.stderr
    asked.write_text(json.dumps("long " * 200))
    refused = command("score", text_run["output_dir"], "--prompts", str(asked), "--device", "cpu")
    assert f"{asked}:1: has " in refused.stderr and "the model allows sequences of" in refused.stderr


def test_packed_rows_and_a_resumed_run_take_the_same_steps(text_run, tmp_path):
    trainer = surogate.Trainer(text_run)
    for _ in range(3):
        trainer.step()
    trainer.save(tmp_path / "kept")
    expected = [trainer.step() for _ in range(3)]
    resumed = surogate.Trainer({**text_run, "resume_from_checkpoint": str(tmp_path / "kept")})
    for step in expected:
        found = resumed.step()
        assert (found["loss"], found["grad_norm"], found["margin"]) == (step["loss"], step["grad_norm"], step["margin"])
    same = {**text_run, "validation_split_ratio": 0.0, "shuffle": False, "gradient_accumulation_steps": 1}
    runs = [{"sample_packing": False}, {"sample_packing": True}]
    steps = [surogate.Trainer({**same, **run, "per_device_train_batch_size": 24}).step() for run in runs]
    assert steps[0]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=1e-4)
    assert steps[0]["mean_reward"] == pytest.approx(steps[1]["mean_reward"], rel=1e-4, abs=1e-6)
