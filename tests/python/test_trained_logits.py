"""Logits of the trained tokens alone (`trained_logits_only`): the numbers are those of a run that computes all."""

from __future__ import annotations

import json

import pytest
import surogate
from conftest import REPOSITORY
from surogate.cli.commands import main

MODEL = REPOSITORY / "examples" / "stories" / "model"
#: Adapters without dropout, so that nothing is drawn by the shape of the head.
LORA = {"lora": True, "lora_rank": 4, "lora_dropout": 0.0}
SIDES = ("chosen", "rejected")
PAIRED = {"task": "dpo", "type": "preference", **LORA}


def documents(path, count, trained, ids=400):
    """Writes documents of 24 tokens; `trained` gives the number of trained ones at the end of each."""
    rows = []
    for number in range(count):
        tokens = [3 + (7 * number + 5 * at + at * at) % ids for at in range(24)]
        rows.append({"input_ids": tokens, "labels": [-100] * (24 - trained(number)) + tokens[24 - trained(number) :]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def pairs(path):
    words = "the cat sat on a mat and then it ran away from home".split()
    text = lambda start, count: " ".join(words[(start + 3 * at) % len(words)] for at in range(count))  # noqa: E731
    rows = [
        {"prompt": text(n, 20 + n % 5) + " ", "chosen": text(n + 1, 6), "rejected": text(n + 2, 5)} for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdicts = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"} for row in rows for side in SIDES
    ]
    path.with_name("unpaired.jsonl").write_text("".join(json.dumps(row) + "\n" for row in verdicts))


@pytest.fixture
def trained(tmp_path):
    """Trains with the logits of some tokens, or of all; gives the trainer, its steps and an evaluation."""
    documents(tmp_path / "tokens.jsonl", 80, lambda number: 4 + number % 5)
    pairs(tmp_path / "preference.jsonl")

    def train(only, steps=4, **options):
        kind = options.pop("type", "tokens")
        config = {
            "model": str(MODEL), "device": "cpu", "torch_dtype": "float32", "lora": False, "optimizer": "adamw",
            "datasets": [{"path": str(tmp_path / f"{kind}.jsonl"), "type": kind}], "data_cache": "off", "learning_rate": 1e-3,
            "sequence_len": 64, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": steps,
            "validation_split_ratio": 0.1, "trained_logits_only": only, "output_dir": str(tmp_path / "run"), **options,
        }  # fmt: skip
        trainer = surogate.Trainer(config)
        rows = [trainer.step() for _ in range(steps)]
        numbers = [
            {name: value for name, value in row.items() if name in ("loss", "grad_norm") or "/" in name} for row in rows
        ]
        return trainer, numbers, (trainer.evaluate() or {}).get("loss")

    return train


def shapes(trainer, tmp_path):
    """The tokens whose logits are computed, by the shapes in a checkpoint; 0: all."""
    folder = tmp_path / f"kept-{id(trainer)}"
    trainer.save(folder)
    state = json.loads((folder / "state.json").read_text())
    return {shape.get("logits", 0) for shape in state["shapes"]}


@pytest.mark.parametrize(
    "options",
    [
        LORA,
        {**LORA, "sample_packing": False},
        {**LORA, "torch_dtype": "bfloat16"},
        {**LORA, "gpus": 2},
        {"neftune_noise_alpha": 5.0},
        {**PAIRED},
        {**PAIRED, "precompute_ref_log_probs": True, "sample_packing": False},
        {**PAIRED, "task": "cpo", "share_prompts": False, "sequence_len": 128},
        {**LORA, "task": "kto", "type": "unpaired"},
    ],
    ids=["lora", "padded", "bfloat16", "ranks", "all weights", "dpo", "dpo precomputed", "cpo", "kto"],
)
def test_trained_logits_make_the_bits_of_all_logits(trained, tmp_path, options):
    some, expected = trained(True, **options), trained(False, **options)
    assert some[1:] == expected[1:]
    assert max(shapes(some[0], tmp_path)) > 0 and shapes(expected[0], tmp_path) == {0}


@pytest.mark.parametrize(
    "options", [{"lmhead_chunks": 3}, {"gpus": 2, "zero_level": 3}, {"task": "dpo", "type": "preference"}]
)
def test_gradients_of_a_trained_head_are_the_same_but_for_the_order_of_sums(trained, tmp_path, options):
    some, expected = trained(True, **options), trained(False, **options)
    for row, other in zip(some[1], expected[1], strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert some[2] == pytest.approx(expected[2], rel=1e-5)
    assert max(shapes(some[0], tmp_path)) > 0


@pytest.mark.parametrize(("only", "logits"), [(True, 64), (False, 0)])
def test_the_head_has_room_for_the_trained_tokens_and_a_note_says_so(trained, tmp_path, capfd, only, logits):
    trainer, *_ = trained(only, **LORA)
    assert shapes(trainer, tmp_path) == {logits}, "of 4 × 64 tokens"
    run = tmp_path / "run.yaml"
    values = {
        "model": str(MODEL), "device": "cpu", "datasets": [{"path": str(tmp_path / "tokens.jsonl"), "type": "tokens"}],
        "sequence_len": 64, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 2,
        "trained_logits_only": only, "output_dir": str(tmp_path / "other"),
    }  # fmt: skip
    run.write_text(json.dumps(values))
    assert main(["sft", str(run)]) == 0
    shown = capfd.readouterr()
    assert ("with room for up to 25 % of all" in shown.out + shown.err) == only


def test_a_batch_with_more_trained_tokens_takes_the_logits_of_all(trained, tmp_path, capfd):
    documents(tmp_path / "tokens.jsonl", 1030, lambda number: 4 if number < 1026 else 24)
    options = {
        **LORA,
        "shuffle": False,
        "validation_split_ratio": 0.0,
        "sequence_len": 24,
        "per_device_train_batch_size": 1,
    }
    some, expected = trained(True, steps=1030, **options), trained(False, steps=1030, **options)
    assert some[1:] == expected[1:]
    assert shapes(some[0], tmp_path) == {0, 16}
    run = tmp_path / "run.yaml"
    values = {
        "model": str(MODEL), "device": "cpu", "datasets": [{"path": str(tmp_path / "tokens.jsonl"), "type": "tokens"}],
        "gradient_accumulation_steps": 1, "output_dir": str(tmp_path / "other"), "logging_steps": 500, **options,
    }  # fmt: skip
    run.write_text(json.dumps(values))
    assert main(["sft", str(run)]) == 0
    shown = capfd.readouterr()
    assert (shown.out + shown.err).count("a program with the logits of all was compiled for it") == 1


def test_all_logits_are_computed_where_nearly_all_tokens_are_trained(trained, tmp_path):
    documents(tmp_path / "tokens.jsonl", 80, lambda _: 24)
    assert shapes(trained(True, sequence_len=48, **LORA)[0], tmp_path) == {0}


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_oss", "nemotron_h", "qwen3_vl", "granite"])
def test_heads_of_other_families_take_trained_tokens_alone(trained, shared, tmp_path, family):
    """A cap on logits, factors, experts that are balanced, layers with a state, a tower, a head of a transposed table."""
    documents(tmp_path / "tokens.jsonl", 40, lambda _: 6, ids=40)
    options = {"model": str(shared / "golden" / family), "sequence_len": 32, "steps": 2}
    some, expected = trained(True, **options), trained(False, **options)
    assert some[1:] == expected[1:]
    assert shapes(some[0], tmp_path) == {32} and shapes(expected[0], tmp_path) == {0}


@pytest.mark.parametrize("then", [{}, {"trained_logits_only": False}, {"gpus": 4, "sequence_parallel_size": 2}])
def test_a_resumed_run_goes_on_with_the_shapes_of_its_options(tmp_path, then):
    documents(tmp_path / "tokens.jsonl", 80, lambda number: 4 + number % 5)
    path = tmp_path / "run.yaml"
    run = {
        "model": str(MODEL), "device": "cpu", "torch_dtype": "float32", **LORA, "gpus": 2, "sequence_len": 64, "data_cache": "off",
        "datasets": [{"path": str(tmp_path / "tokens.jsonl"), "type": "tokens"}], "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "save_steps": 2,
    }  # fmt: skip

    def losses(output, **more):
        path.write_text(json.dumps(run | more | {"output_dir": str(tmp_path / output)}))
        assert main(["sft", str(path)]) == 0
        lines = [
            line for log in sorted((tmp_path / output).glob("log-*.json")) for line in log.read_text().splitlines()
        ]
        return [event["loss"] for event in map(json.loads, lines) if event["event"] == "step"]

    whole = losses("whole", max_steps=4)
    assert losses("parts", max_steps=2) == whole[:2]
    assert losses("parts", max_steps=4, resume_from_checkpoint=True, **then) == pytest.approx(whole, rel=1e-5)
