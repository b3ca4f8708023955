"""`quantize_aware`: what a run computes with is what `surogate quantize` writes, it learns, and it says what it does not go with."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import surogate
from conftest import REPOSITORY, tiny_gpt2, tiny_qwen3
from quantized import quantize, wide
from surogate.cli.commands import main
from surogate.errors import ConfigError
from test_mixtures import tiny_qwen3_moe

DEVICE = os.environ.get("SUROGATE_TEST_DEVICE", "cpu")
IDS = np.random.default_rng(1).integers(1, 90, (1, 4, 24))
BATCH = {"input_ids": IDS, "labels": IDS}


def aware(model, output, scheme: str, **options: object) -> dict[str, object]:
    """A run of all weights."""
    run = {"model": str(model), "device": DEVICE, "lora": False, "quantize_aware": scheme, "output_dir": str(output)}
    return run | {"learning_rate": 1e-2} | options


WEIGHTS_ALONE = [
    ("w4a16", {}, []),
    ("w4a16", {"quantize_aware_group_size": 32, "quantize_aware_asymmetric": True}, ["--group-size", "32", "--asymmetric"]),
    ("w8a16", {"quantize_aware_group_size": -1}, ["--group-size", "-1"]),
    ("nvfp4a16", {}, []),
    ("mxfp4a16", {}, []),
]
MODELS = {
    "llama": wide,
    "tied": lambda: tiny_qwen3(hidden_size=64, intermediate_size=128, initializer_range=0.1),
    "mixture": lambda: tiny_qwen3_moe(hidden_size=64, moe_intermediate_size=32, intermediate_size=128, initializer_range=0.1),
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(("scheme", "options", "flags"), WEIGHTS_ALONE)
def test_the_loss_is_that_of_the_quantized_result(capsys, tmp_path, make_model, family, scheme, options, flags):
    model = make_model(MODELS[family]())
    # FP4 is read in bfloat16 alone: such a model is trained in it.
    dtype = "bfloat16" if "fp4" in scheme else "float32"
    trainer = surogate.Trainer(aware(model, tmp_path / "run", scheme, torch_dtype=dtype, **options))
    losses = [trainer.step(BATCH, learning_rate=3e-3)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    trainer.export(tmp_path / "trained")
    code, _, err = quantize(capsys, tmp_path / "trained", tmp_path / "out", "--scheme", scheme, *flags)
    assert code == 0, err
    plain = {"device": DEVICE, "lora": False, "torch_dtype": dtype, "output_dir": str(tmp_path / "other")}
    of_result = surogate.Trainer(plain | {"model": str(tmp_path / "out")}).step(BATCH, learning_rate=0.0)
    found = trainer.step(BATCH, learning_rate=0.0)
    same = (lambda x: x) if DEVICE == "cpu" else (lambda x: pytest.approx(x, rel=1e-5))
    assert (found["loss"], found["grad_norm"]) == (same(of_result["loss"]), same(of_result["grad_norm"]))
    unquantized = surogate.Trainer(plain | {"model": str(tmp_path / "trained")}).step(BATCH, learning_rate=0.0)
    assert unquantized["loss"] != found["loss"]


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "fp8-static", "fp8-block", "int8-w8a8", "nvfp4"])
def test_activations_are_rounded_too(tmp_path, make_model, scheme):
    model = make_model(wide())
    losses = {}
    for name in (scheme, {"nvfp4": "nvfp4a16", "int8-w8a8": "w8a16"}.get(scheme)):
        if name is not None:
            more = {"quantize_aware_group_size": -1} if name == "w8a16" else {}
            trainer = surogate.Trainer(aware(model, tmp_path / "run", name, torch_dtype="float32", **more))
            losses[name] = [trainer.step(BATCH, learning_rate=3e-3)["loss"] for _ in range(4)]
    assert losses[scheme][-1] < losses[scheme][0]
    assert len({tuple(of) for of in losses.values()}) == len(losses), "weights alone give another loss"


def test_transposed_matrices_are_rounded_along_their_inputs(capsys, tmp_path, make_model):
    model = make_model(tiny_gpt2(initializer_range=0.3))
    trainer = surogate.Trainer(aware(model, tmp_path / "run", "w4a16", torch_dtype="float32"))
    trainer.step(BATCH, learning_rate=1e-3)
    trainer.export(tmp_path / "trained")
    assert quantize(capsys, tmp_path / "trained", tmp_path / "out", "--scheme", "w4a16")[0] == 0
    plain = {"model": str(tmp_path / "out"), "device": DEVICE, "lora": False, "output_dir": str(tmp_path / "other")}
    of_result = surogate.Trainer(plain | {"torch_dtype": "float32"}).step(BATCH, learning_rate=0.0)
    assert trainer.step(BATCH, learning_rate=0.0)["loss"] == pytest.approx(of_result["loss"], rel=0 if DEVICE == "cpu" else 1e-5)


def data_of(task: str, folder) -> dict[str, object]:
    """Datasets of a task, and what else it needs."""
    if task == "pt":
        return {"datasets": [{"path": str(REPOSITORY / "examples/stories/data/shakespeare.txt"), "type": "text"}]}
    kind, more = {
        "dpo": ("preference", {"chosen": " went home.", "rejected": " was sad."}),
        "orpo": ("preference", {"chosen": " went home.", "rejected": " was sad."}),
        "kto": ("unpaired", {"completion": " went home."}),
        "grpo": ("auto", {}),
    }[task]
    path = folder / "rows.jsonl"
    names = ["Lily", "Tom", "Mia", "Ben", "Sue", "Max"]
    verdict = [{"label": at % 2 == 0} if task == "kto" else {} for at in range(len(names))]
    objects = [{"prompt": f"Once upon a time, {name}", **more, **of} for name, of in zip(names, verdict, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in objects))
    sampling = {"num_generations": 2, "max_completion_length": 8, "rewards": [{"function": "length", "tokens": 4}]}
    return {"datasets": [{"path": str(path), "type": kind}]} | (sampling if task == "grpo" else {})


@pytest.mark.parametrize("task", ["pt", "dpo", "orpo", "kto", "grpo"])
def test_every_task_trains_what_the_quantized_result_computes(capsys, tmp_path, task):
    stories = REPOSITORY / "examples/stories/model"
    of = dict(task=task, torch_dtype="float32", sequence_len=64, quantize_aware_group_size=-1, max_steps=3, warmup_steps=0)
    of |= dict(per_device_train_batch_size=2, gradient_accumulation_steps=1, learning_rate=1e-3, validation_split_ratio=0.0)
    trainer = surogate.Trainer(aware(stories, tmp_path / "run", "w4a16", **{**of, **data_of(task, tmp_path)}))
    assert all(np.isfinite(step["loss"]) for step in trainer)
    found = trainer.model.forward(IDS[0])
    trainer.export(tmp_path / "trained")
    code, _, err = quantize(capsys, tmp_path / "trained", tmp_path / "out", "--scheme", "w4a16", "--group-size", "-1")
    assert code == 0, err
    of_result, of_trained = (surogate.load(tmp_path / name, device=DEVICE).forward(IDS[0]) for name in ("out", "trained"))
    np.testing.assert_allclose(found, of_result, rtol=0, atol=0 if DEVICE == "cpu" else 1e-4)
    assert abs(of_trained - of_result).max() > 0.1


def rows(tmp_path, count: int = 40):
    path = tmp_path / "rows.jsonl"
    ids = np.random.default_rng(2).integers(1, 90, (count, 16)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in ids))
    return [{"path": str(path), "type": "tokens"}]


@pytest.mark.parametrize("ranks", [{}, {"gpus": 2, "zero_level": 3}])
def test_a_resumed_run_has_the_same_bits(tmp_path, make_model, ranks):
    model = make_model(wide())
    of = dict(datasets=rows(tmp_path), sequence_len=16, torch_dtype="bfloat16", per_device_train_batch_size=2, max_steps=6, **ranks)
    live = surogate.Trainer(aware(model, tmp_path / "whole", "nvfp4a16", **of))
    for _ in range(2):
        live.step()
    live.save(tmp_path / "kept")
    expected = [live.step() for _ in range(2)]
    resumed = surogate.Trainer(
        aware(model, tmp_path / "again", "nvfp4a16", resume_from_checkpoint=str(tmp_path / "kept"), **of)
    )
    found = [resumed.step() for _ in range(2)]
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in found] == [step[key] for step in expected]


def test_weights_that_are_cut_over_ranks_compute_the_same(tmp_path, make_model):
    model = make_model(wide())
    of = dict(datasets=rows(tmp_path), sequence_len=16, torch_dtype="bfloat16", per_device_train_batch_size=2, max_steps=6, gpus=2)
    losses = []
    for level in (1, 3):
        trainer = surogate.Trainer(aware(model, tmp_path / str(level), "w4a16", zero_level=level, **of))
        losses.append([trainer.step()["loss"] for _ in range(3)])
    assert losses[0] == losses[1]


def test_distillation_takes_the_model_itself_as_the_teacher(tmp_path, make_model):
    model = make_model(wide())
    run = aware(model, tmp_path / "run", "w4a16", task="distil", beta=0, torch_dtype="float32")
    trainer = surogate.Trainer(run)
    losses = [trainer.step(BATCH, learning_rate=1e-4)["loss"] for _ in range(8)]
    assert 0 < losses[-1] < 0.9 * losses[0]
    given = surogate.Trainer(run | {"teacher": str(model)}).step(BATCH, learning_rate=1e-4)["loss"]
    assert given == losses[0]
    del run["quantize_aware"]
    with pytest.raises(ConfigError, match="`task: distil` needs `teacher`"):
        surogate.Trainer(run)


REFUSED = [
    ({"lora": True}, "`quantize_aware: w4a16` cannot be combined with `lora: true`"),
    ({"recipe": "fp8_hybrid"}, "`quantize_aware: w4a16` cannot be combined with `recipe: fp8_hybrid`"),
    ({"quantize_aware": "w3a16"}, "`quantize_aware` is the text \"w3a16\", expected `fp8-dynamic`"),
    ({"quantize_aware": None, "quantize_aware_group_size": 32}, "`quantize_aware_group_size` has no effect without"),
    ({"quantize_aware": "nvfp4", "quantize_aware_group_size": 32}, "`quantize_aware_group_size` has no effect on"),
    ({"quantize_aware": "int8-w8a8", "quantize_aware_asymmetric": True}, "`quantize_aware_asymmetric` has no effect on"),
    ({"quantize_aware_group_size": 96}, "`model.layers.0.self_attn.q_proj` has rows of 128"),
    ({"quantize_aware_group_size": 0}, "`quantize_aware_group_size` is 0"),
    ({"gpus": 2, "pipeline_parallel_size": 2}, "`quantize_aware: w4a16` is not available yet with `pipeline_parallel_size: 2`"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_it_does_not_go_with_is_named(tmp_path, make_model, options, said):
    run = aware(make_model(wide()), tmp_path / "run", "w4a16") | options
    with pytest.raises(ConfigError) as error:
        surogate.Trainer({name: value for name, value in run.items() if value is not None})
    assert said in str(error.value)


def test_matrices_that_stay_are_named(capsys, tmp_path, make_model):
    model = make_model(wide(intermediate_size=104))
    run = aware(model, tmp_path / "run", "mxfp4a16", datasets=rows(tmp_path), sequence_len=16)
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "`quantize_aware: mxfp4a16` leaves `model.layers.0.mlp.down_proj.weight` and 1 more as it is" in said
