"""`precompute_ref_log_probs`: log-probabilities of the reference that are computed before the first step."""

import json
import shutil

import pytest
import surogate
from conftest import REPOSITORY
from safetensors.numpy import load_file, save_file
from surogate.errors import ConfigError, SurogateError

STORIES = REPOSITORY / "examples/stories/model"
NAMES = ("Lily", "Tom", "Mia", "Ben", "Sue", "Max", "Ann", "Tim", "Zoe")


@pytest.fixture
def run(tmp_path):
    rows = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"Once upon a time, {name}", "chosen": " went to the park.", "rejected": " was sad" * (1 + at % 3)}
             for at, name in enumerate(NAMES)]  # fmt: skip
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return {
        "model": str(STORIES), "task": "dpo", "device": "cpu", "torch_dtype": "float32", "sequence_len": 64, "lora_rank": 4,
        "datasets": [{"path": str(rows), "type": "preference"}], "output_dir": str(tmp_path / "run"), "learning_rate": 1e-3,
        "warmup_steps": 0, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 9,
        "validation_split_ratio": 0.2, "lora_dropout": 0, "precompute_ref_log_probs": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"lora": False, "learning_rate": 1e-4},
        {"sample_packing": True},
        {"padding_side": "left"},
        {"reference": str(STORIES), "train_seed": 3},
        {"loss_type": ["sigmoid_norm"], "gpus": 2, "per_device_train_batch_size": 1},
    ],
)
def test_steps_and_evaluations_are_those_of_a_reference_that_is_computed_each_time(run, more):
    """Over several passes, in which documents share rows with others."""
    known, computed = (surogate.Trainer({**run, **more, "precompute_ref_log_probs": on}) for on in (True, False))
    for first, second in zip(known, computed, strict=True):
        for key in ("loss", "grad_norm", "rewards/margins", "rewards/chosen"):
            assert first[key] == pytest.approx(second[key], rel=2e-4, abs=2e-5), key
    assert known.evaluate()["loss"] == pytest.approx(computed.evaluate()["loss"], rel=2e-4)


def test_a_resumed_run_has_the_same_bits(run, tmp_path):
    steps = list(surogate.Trainer(run))
    again = surogate.Trainer(run)
    for _ in range(4):
        again.step()
    again.save(tmp_path / "kept")
    resumed = surogate.Trainer({**run, "resume_from_checkpoint": str(tmp_path / "kept")})
    for step in steps[4:]:
        found = resumed.step()
        assert all(found[key] == step[key] for key in ("loss", "grad_norm", "rewards/margins"))


@pytest.mark.parametrize("more", [{}, {"lora": False, "learning_rate": 1e-4}])
def test_another_run_reads_them_from_the_cache(run, tmp_path, more):
    """Whatever its rate and its loss; other rows, weights and layouts have their own."""
    cache = tmp_path / "cache"
    run = {**run, **more, "data_cache": str(cache)}

    def trained(**changes):
        trainer = surogate.Trainer({**run, **changes})
        step = trainer.step()
        return step["loss"], step["rewards/margins"], trainer.evaluate()["loss"]

    def kept():
        return sorted(cache.glob("*.values"))

    first = trained()
    (table,) = kept()
    content = table.read_bytes()
    assert trained() == first
    trained(learning_rate=3e-4, loss_type=["ipo"], beta=0.3)
    assert kept() == [table] and table.read_bytes() == content

    digest, numbers = content.split(b"\n", 1)
    table.write_bytes(digest + b"\n" + numbers.replace(b"-1", b"-2"))
    assert trained() == first, "a changed table is not read"
    assert table.read_bytes() == content

    trained(sequence_len=48, per_device_train_batch_size=1)
    trained(validation_split_ratio=0.4)
    other = shutil.copytree(STORIES, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: 1.01 * of for name, of in weights.items()}, other / "model.safetensors", {"format": "pt"})
    trained(model=str(other))
    assert len(kept()) == 4


@pytest.mark.parametrize("more", [{}, {"lora": False}])
def test_the_start_says_whether_they_were_computed_or_read(run, tmp_path, more):
    from surogate.cli.commands import main

    phases = []
    for number in range(2):
        output = tmp_path / f"output-{number}"
        options = {**run, **more, "output_dir": str(output), "data_cache": str(tmp_path / "cache"), "max_steps": 1}
        (tmp_path / "run.json").write_text(json.dumps(options))
        assert main(["dpo", str(tmp_path / "run.json"), "--quiet"]) == 0
        (log,) = output.glob("log-*.json")
        (start,) = [event for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "startup"]
        phases.append([phase["phase"] for phase in start["phases"] if phase["phase"].startswith("reference")])
    assert phases == [["reference"], ["reference, from the cache"]]


def test_without_a_cache_they_are_kept_in_memory_alone(run, tmp_path, capfd):
    steps = [step["loss"] for step in surogate.Trainer({**run, "data_cache": "off"})]
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    assert [step["loss"] for step in surogate.Trainer({**run, "data_cache": str(blocked)})] == steps
    assert "log-probabilities of the reference are kept in memory alone" in capfd.readouterr().err


def test_the_reference_leaves_the_plan(run, tmp_path, capsys):
    from surogate.cli.commands import main

    def planned(**more):
        path = tmp_path / "run.json"
        path.write_text(json.dumps({**run, "lora": False, **more}))
        assert main(["plan", str(path), "--task", "dpo", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    with_reference = planned(precompute_ref_log_probs=False)
    assert any("reference" in json.dumps(line) for line in with_reference["memory"])
    assert not any("reference" in json.dumps(line) for line in planned()["memory"])


def test_answers_with_verdicts_have_known_references(run, tmp_path):
    rows = tmp_path / "answers.jsonl"
    rows.write_text("".join(
        json.dumps({"prompt": f"Once upon a time, {name}", "completion": " went home.", "label": at % 2 == 0}) + "\n"
        for at, name in enumerate(NAMES)
    ))  # fmt: skip
    kto = {**run, "task": "kto", "datasets": [{"path": str(rows), "type": "unpaired"}], "loss_type": "apo_zero_unpaired"}
    known, computed = ([step["loss"] for step in surogate.Trainer({**kto, "precompute_ref_log_probs": on})] for on in (True, False))
    assert known == pytest.approx(computed, rel=1e-5)
    with pytest.raises(ConfigError, match="the loss compares answers with prompts of their micro-batch"):
        surogate.Trainer({**kto, "loss_type": "kto"})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"reference_free": True}, "`reference_free: true` cannot be combined with `precompute_ref_log_probs: true`"),
        ({"task": "orpo"}, "`precompute_ref_log_probs` has no effect on `task: orpo`"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run, more, said):
    with pytest.raises(ConfigError) as error:
        surogate.Trainer({**run, **more})
    assert said in str(error.value)


def test_a_batch_of_other_documents_is_refused(run):
    trainer = surogate.Trainer(run)
    ids = [[1, 403, 407, 261]]
    with pytest.raises(SurogateError, match="knows the documents of the run's data, and the batch has others"):
        trainer.step({"chosen": {"input_ids": ids, "labels": ids}, "rejected": {"input_ids": ids, "labels": ids}})
