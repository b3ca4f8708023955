"""Preferences with images in their prompts: losses against single documents, shared prompts, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import surogate
from surogate.cli.commands import main
from surogate.errors import ConfigError
from test_image_training import COLORS, folder, options  # noqa: F401 (a fixture)

NAMES = list(COLORS)


@pytest.fixture
def pairs(folder, tmp_path):  # noqa: F811
    """12 pairs of answers to a question about an image: of a column, of parts, and one without an image."""
    rows = []
    for number in range(12):
        right, wrong = NAMES[number % 4], NAMES[(number + 1) % 4]
        sides = {"chosen": [{"role": "assistant", "content": right}],
                 "rejected": [{"role": "assistant", "content": f"{wrong} {right}"}]}  # fmt: skip
        part = {"type": "image"} if number % 2 else {"type": "image", "image": str(folder / f"{number}.png")}
        asked = {"role": "user", "content": [part, {"type": "text", "text": "Which color?"}]}
        rows.append({"prompt": [asked], "images": [str(folder / f"{number}.png")] if number % 2 else [], **sides})
    rows[5] = {**rows[5], "prompt": [{"role": "user", "content": "Which color?"}], "images": []}
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def given(folder, tmp_path, path, **more):  # noqa: F811
    data = [{"path": str(path), "type": "auto"}]
    return options(folder, tmp_path, datasets=data, dataloader_num_workers=0, lora=True, lora_rank=4, lora_dropout=0.0, shuffle=False,
                   lr_scheduler_type="constant", warmup_ratio=0.0, max_grad_norm=0.0, **more)  # fmt: skip


def steps(config, count=3):
    trainer = surogate.Trainer(config)
    found = [trainer.step() for _ in range(count)]
    return np.array([(of["loss"], of["grad_norm"]) for of in found])


#: The losses of which a pair has its own, whatever else is in its micro-batch.
TASKS = {"dpo": {}, "orpo": {"nll": "paper"}, "cpo": {"loss_type": "simpo"}}


@pytest.mark.parametrize("task", TASKS)
def test_shared_packed_and_single_pairs_have_one_loss_and_gradient(folder, pairs, tmp_path, task):  # noqa: F811
    def run(share, **more):
        config = given(folder, tmp_path, pairs, task=task, share_prompts=share, learning_rate=1e-3, **TASKS[task], **more)
        return steps(config | {"sequence_len": 256})

    one = {"sample_packing": False, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 12}
    packed = {"sample_packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 12}
    single = run(False, **one)
    assert np.all(np.isfinite(single)) and len(np.unique(single[:, 0])) == 3
    # No step goes on into the next epoch, so an epoch is a step in every layout.
    for found in (run(False, **packed), run(True, **packed), run(True, **one)):
        np.testing.assert_allclose(found, single, rtol=2e-4)


def test_answers_with_verdicts_packed_and_alone_have_one_loss(folder, pairs, tmp_path):  # noqa: F811
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    of = tmp_path / "verdicts.jsonl"
    both = [{"prompt": row["prompt"], "images": row["images"], "completion": row[side], "label": side == "chosen"}
            for row in rows for side in ("chosen", "rejected")]  # fmt: skip
    of.write_text("".join(json.dumps(row) + "\n" for row in both))

    def run(path, **more):
        return steps(given(folder, tmp_path, path, task="kto", learning_rate=1e-3, **more))

    # The estimate of the divergence is that of a micro-batch.
    row = {"sequence_len": 256, "gradient_accumulation_steps": 6, "per_device_train_batch_size": 4, "sample_packing": False}
    alone = run(of, padding_free=False, **row)
    assert np.all(np.isfinite(alone)) and len(np.unique(alone[:, 0])) == 3
    for path in (of, pairs):
        np.testing.assert_allclose(run(path, padding_free=True, **row), alone, rtol=2e-4)


def test_the_loss_is_that_of_whole_documents(folder, pairs, tmp_path):  # noqa: F811
    """SimPO from log-probabilities of `Model.forward`, document by document."""
    beta, gamma = 2.0, 0.5
    config = given(folder, tmp_path, pairs, task="cpo", loss_type="simpo", beta=beta, simpo_gamma=gamma, cpo_alpha=0.0,
                   sequence_len=256, share_prompts=True, per_device_train_batch_size=1, gradient_accumulation_steps=12)  # fmt: skip
    trainer = surogate.Trainer(config)
    rewards = []
    for row in map(json.loads, pairs.read_text().splitlines()):
        parts = row["prompt"][0]["content"]
        own = [part.pop("image") for part in parts if "image" in part] if isinstance(parts, list) else []
        images = row["images"] or own
        for side in ("chosen", "rejected"):
            ids, labels, *_ = surogate.Tokenizer(folder / "model").labels(row["prompt"] + row[side], images=images)
            logits = trainer.model.forward([ids], images=images)[0].astype(np.float64)
            logps = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
            trained = [t for t, label in enumerate(labels) if label != -100]
            rewards.append(np.mean([logps[t - 1, ids[t]] for t in trained]))
    margins = np.array(rewards[::2]) - np.array(rewards[1::2])
    expected = np.mean(np.log1p(np.exp(-(beta * margins - gamma))))
    assert abs(trainer.step()["loss"] - expected) < 1e-4 * expected


def test_a_run_on_pairs_with_images_ends_with_an_adapter(folder, pairs, tmp_path, capsys):  # noqa: F811
    config = given(folder, tmp_path, pairs, task="dpo", learning_rate=1e-3)
    (tmp_path / "run.yaml").write_text(json.dumps(config | {"sequence_len": 256}))
    assert main(["tokenize", str(tmp_path / "run.yaml"), "--debug"]) == 0
    shown, page = capsys.readouterr().out, (tmp_path / "run/data.html").read_text()
    assert "image 1: " in shown and "(shared)" in shown and page.count("data:image/jpeg;base64,") == 11
    assert main(["dpo", str(tmp_path / "run.yaml")]) == 0
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()


def test_what_pairs_with_images_cannot_be_is_said(folder, pairs, tmp_path, capsys):  # noqa: F811
    for of in ({"precompute_ref_log_probs": True, "task": "dpo"}, {"task": "reward"}):
        with pytest.raises(ConfigError, match="does not go with images in the data yet"):
            surogate.Trainer(given(folder, tmp_path, pairs, **of))
    rows = pairs.read_text().splitlines()
    first = json.loads(rows[0])
    long = [{"role": "user", "content": [first["prompt"][0]["content"][0], {"type": "text", "text": "Which color? " * 60}]}]
    path = first["prompt"][0]["content"][0]["image"]
    for change, said in (
        ({"chosen": [{**first["chosen"][0], "content": first["prompt"][0]["content"]}]}, "an answer has an image: images are read in"),
        ({"images": ["more.png"]}, "the row has 1 more images than places for them"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "image 1: the row has no image for it"),
        ({"prompt": "Which?", "images": [path], "chosen": "a", "rejected": "b"}, "its prompt is a plain text"),
        ({"prompt": long}, "and no image is cut"),
    ):
        # A text among messages is a turn of the user; alone it is continued.
        others = [] if "plain text" in said else rows[1:]
        pairs.write_text("\n".join([*others, json.dumps(first | change)]))
        config = given(folder, tmp_path, pairs, task="dpo")
        (tmp_path / "run.yaml").write_text(json.dumps(config | {"truncation_mode": "keep_end"}))
        assert main(["tokenize", str(tmp_path / "run.yaml")]) == (0 if others else 4)
        captured = capsys.readouterr()
        assert said in captured.out + captured.err, captured


def test_a_plain_answer_with_the_token_of_images_is_an_error_of_its_row(folder, pairs, tmp_path, capsys):  # noqa: F811
    texts = tmp_path / "texts.jsonl"
    rows = [{"prompt": "Which?", "chosen": answer, "rejected": "b"} for answer in ("a", "<|image_pad|>", "c")]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = given(folder, tmp_path, pairs, task="dpo")
    config["datasets"].append({"path": str(texts), "type": "preference"})
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    assert main(["tokenize", str(tmp_path / "run.yaml")]) == 0
    assert "a text has a token that stands for images, and no image" in capsys.readouterr().out
