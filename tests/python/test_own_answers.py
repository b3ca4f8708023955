"""Distillation on the student's own answers: `lmbda`, its samples, rows, resume and refusals."""

import json
import shutil

import pytest
import surogate
from conftest import REPOSITORY
from surogate.cli import arguments
from surogate.errors import ConfigError, SurogateError

STORIES = REPOSITORY / "examples/stories/model"
NAMES = ("Lily", "Tom", "Mia", "Ben", "Sue", "Max", "Ann", "Tim")


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """Stories' model after some steps on other texts: another distribution of the same tokens."""
    folder = tmp_path_factory.mktemp("taught")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{name} was happy. {name} was very happy."}) + "\n" for name in NAMES))
    trainer = surogate.Trainer({
        "model": str(STORIES), "device": "cpu", "torch_dtype": "float32", "lora": False, "sequence_len": 64, "max_steps": 8,
        "datasets": [{"path": str(rows), "type": "text"}], "learning_rate": 1e-3, "output_dir": str(folder / "run"),
        "validation_split_ratio": 0, "warmup_steps": 0,
    })  # fmt: skip
    list(trainer)
    trainer.export(folder / "model")
    return folder / "model"


@pytest.fixture
def run(tmp_path, taught):
    rows = tmp_path / "rows.jsonl"
    asked = [{"prompt": f"Once upon a time, {name}", "completion": " went to the park."} for name in NAMES]
    rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return {
        "model": str(STORIES), "teacher": str(taught), "task": "distil", "device": "cpu", "torch_dtype": "float32",
        "datasets": [{"path": str(rows), "type": "instruction", "instruction_field": "prompt", "output_field": "completion", "prompt_format": "{instruction}"}],
        "sequence_len": 96, "lora_rank": 4, "lora_dropout": 0, "learning_rate": 5e-3, "lr_scheduler_type": "constant",
        "warmup_steps": 0, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 6,
        "validation_split_ratio": 0, "output_dir": str(tmp_path / "run"), "lmbda": 1, "max_completion_length": 16,
    }  # fmt: skip


def test_a_student_that_is_its_teacher_has_nothing_to_learn(run):
    """Both distributions are the same for any sample."""
    for step in surogate.Trainer({**run, "teacher": run["model"]}):
        assert abs(step["loss"]) < 1e-6 and 1 <= step["completions/mean_length"] <= 16
        break


def test_the_divergence_on_own_answers_falls(run):
    more = {"max_steps": 20, "per_device_train_batch_size": 8, "sample_packing": False, "lora": False}
    more |= {"learning_rate": 5e-4, "gradient_accumulation_steps": 2}
    losses = [step["loss"] for step in surogate.Trainer({**run, **more})]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3]), losses


def test_answers_follow_from_the_seed_and_the_weights(run):
    def first(**more):
        return next(iter(surogate.Trainer({**run, **more})))

    one = first()
    assert first()["loss"] == one["loss"]
    assert first(train_seed=7)["loss"] != one["loss"]
    assert first(sampling_temperature=0.5)["loss"] != one["loss"]
    greedy = first(top_k=1)
    assert greedy["loss"] == pytest.approx(first(top_k=1, sampling_temperature=3.0)["loss"], rel=1e-6)


@pytest.mark.parametrize("more", [{"sample_packing": True}, {"sample_packing": False}, {"padding_free": True, "sample_packing": False}])
def test_rows_of_any_layout_are_trained(run, more):
    step = next(iter(surogate.Trainer({**run, **more})))
    # Prompts and answers of the step's documents, and no padding.
    assert step["tokens"] > 2 * step["completions/mean_length"] and step["loss"] > 0


def test_rows_side_by_side_and_alone_give_the_same_loss(run):
    """The likeliest tokens do not depend on the order of the documents, which packing changes."""
    whole = {**run, "per_device_train_batch_size": 8, "max_steps": 1, "top_k": 1}
    alone = next(iter(surogate.Trainer({**whole, "sample_packing": False})))
    packed = next(iter(surogate.Trainer({**whole, "sample_packing": True, "per_device_train_batch_size": 8})))
    assert packed["completions/mean_length"] == alone["completions/mean_length"]
    assert packed["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_a_share_of_the_steps_samples(run):
    steps = list(surogate.Trainer({**run, "lmbda": 0.5, "max_steps": 16}))
    sampled = [step for step in steps if "sampling_seconds" in step]
    assert 3 <= len(sampled) <= 13
    plain = list(surogate.Trainer({**run, "lmbda": 0.0, "max_completion_length": 512, "max_steps": 2}))
    assert all("sampling_seconds" not in step for step in plain)


def test_a_resumed_run_samples_the_same_answers(run, tmp_path):
    steps = list(surogate.Trainer({**run, "lmbda": 0.6}))
    again = surogate.Trainer({**run, "lmbda": 0.6})
    for _ in range(3):
        again.step()
    again.save(tmp_path / "kept")
    resumed = surogate.Trainer({**run, "lmbda": 0.6, "resume_from_checkpoint": str(tmp_path / "kept")})
    for step in steps[3:]:
        found = resumed.step()
        assert all(found[key] == step[key] for key in ("loss", "grad_norm", "entropy"))


def test_two_ranks_learn_as_one(run):
    whole = {**run, "max_steps": 3, "shuffle": False, "sample_packing": False}
    one = list(surogate.Trainer(whole))
    two = list(surogate.Trainer({**whole, "gpus": 2, "per_device_train_batch_size": 1}))
    for single, double in zip(one, two, strict=True):
        assert double["loss"] == pytest.approx(single["loss"], rel=1e-4)


def test_conversations_are_answered_where_their_last_answer_was(tmp_path, run, taught):
    """With a chat template a prompt is everything before the last answer, and an answer ends with the end of its turn."""
    model = tmp_path / "chat"
    shutil.copytree(STORIES, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    messages = [
        {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"},
        {"role": "user", "content": "Tell me a story"}, {"role": "assistant", "content": "There was a dog."},
    ]  # fmt: skip
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 4)
    more = {"model": str(model), "datasets": [{"path": str(tmp_path / "chat.jsonl"), "type": "conversation"}]}
    command = [{**run, **more, "max_steps": 1, "report_to": []}]
    trainer = surogate.Trainer(command[0])
    step = trainer.step()
    assert step["loss"] > 0 and step["completions/mean_length"] <= 16


def test_the_log_has_answers(run, tmp_path):
    from surogate.cli.commands import main

    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    assert main(["distill", str(path), "--quiet"]) == 0
    log = next((tmp_path / "run").glob("log-*.json"))
    events = [json.loads(line) for line in log.read_text().splitlines()]
    shown = next(event for event in events if event["event"] == "samples")["samples"]
    assert 2 <= len(shown) <= 4 and all(of["prompt"].startswith("Once upon a time") and of["text"] for of in shown)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"lmbda": 2}, "`lmbda` is `2`, expected a number from 0 to 1"),
        ({"cross_entropy_weight": 0.5}, "`cross_entropy_weight` is for the data's tokens"),
        ({"lmbda": 0}, "`max_completion_length` has no effect on `task: distil` without `lmbda`"),
        ({"task": "sft", "teacher": None, "max_completion_length": 512}, "`lmbda` has no effect on `task: sft`"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run, more, said):
    with pytest.raises(ConfigError) as error:
        surogate.Trainer({**run, **more})
    assert said in str(error.value)


def test_rows_without_a_prompt_are_refused(run, tmp_path):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "Once upon a time."}) + "\n")
    trainer = surogate.Trainer({**run, "datasets": [{"path": str(tmp_path / "texts.jsonl"), "type": "text"}]})
    with pytest.raises(SurogateError, match="lets the model answer the prompts of the data, and a row has none"):
        trainer.step()


def test_the_task_has_two_spellings(run):
    assert arguments.split_overrides(["distill", "run.yaml"])[0][0] == "distil"
    assert surogate.Trainer({**run, "task": "distill"}).step()["loss"] > 0
