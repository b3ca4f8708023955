"""Model and Trainer: what they accept, what they refuse, and that a step means the same however it is cut."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import surogate
from conftest import REPOSITORY, tiny_llama, tiny_qwen3
from safetensors.numpy import load_file


@pytest.fixture
def llama(make_model):
    return make_model(tiny_llama(initializer_range=0.3))


def random_batch(shape: tuple[int, ...], seed: int = 0, vocabulary: int = 96) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    ids = random.integers(1, vocabulary, shape)
    return {"input_ids": ids, "labels": np.where(random.random(shape) < 0.3, -100, ids)}


def trainer(model, tmp_path, **options) -> surogate.Trainer:
    return surogate.Trainer(
        {
            "model": str(model),
            "torch_dtype": "float32",
            "device": "cpu",
            "optimizer": "adamw",
            "max_steps": 20,
            "output_dir": str(tmp_path / "run"),
            **options,
        }
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (([1, 2, 3],), r"input_ids: has shape \[3\], expected \[B, T\]"),
        (([[1.5]],), "input_ids: has type float64, expected whole numbers"),
        ((np.zeros((0, 4), int),), r"input_ids: is empty: has shape \[0, 4\], expected \[B, T\]"),
        (([],), r"input_ids: is empty: has shape \[0\], expected \[B, T\]"),
        (([[], []],), r"input_ids: is empty: has shape \[2, 0\]"),
        (([[1, 2, 3]], [[0, 1]]), r"position_ids: has shape \[1, 2\], expected \[1, 3\] like input_ids"),
        (([[1, 2**40]],), "beyond 32 bits"),
        (([[-1]],), "-1 is negative"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(llama, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        surogate.load(llama).forward(*arguments)


def test_tokens_beyond_the_vocabulary_are_refused(llama):
    model = surogate.load(llama)
    with pytest.raises(surogate.ConfigError, match="token id 96 is outside of the vocabulary of 96"):
        model.forward([[96]])
    with pytest.raises(surogate.ConfigError, match="token id 300"):
        model.loss_and_gradients([[1, 2]], [[1, 300]])


def test_a_batch_without_labels_has_no_loss(llama):
    with pytest.raises(surogate.ConfigError, match="no token of the batch is trained"):
        surogate.load(llama).loss_and_gradients([[1, 2, 3]], [[5, -100, -100]])


@pytest.mark.parametrize(("name", "value"), [("dtype", "float16"), ("device", "tpu")])
def test_unknown_settings_are_refused(llama, name, value):
    with pytest.raises(ValueError, match=f'{name}: "{value}"'):
        surogate.load(llama, **{name: value})


def test_models_that_are_not_there():
    with pytest.raises(surogate.ConfigError, match="there is no folder `./nothing`"):
        surogate.load("./nothing")


def test_documents_do_not_see_each_other(llama):
    model = surogate.load(llama)
    ids = np.arange(1, 13).reshape(1, 12)
    packed = model.forward(ids, [[*range(5), *range(7)]])
    np.testing.assert_allclose(packed[:, :5], model.forward(ids[:, :5]), rtol=0, atol=1e-5)
    np.testing.assert_allclose(packed[:, 5:], model.forward(ids[:, 5:]), rtol=0, atol=1e-5)
    assert np.abs(packed[:, 5:] - model.forward(ids)[:, 5:]).max() > 1e-3


def test_the_padding_row_learns_only_from_the_head(make_model):
    ids = [[5, 0, 7, 0, 9, 11]]
    model = surogate.load(make_model(tiny_llama(pad_token_id=0)))
    _, gradients = model.loss_and_gradients(ids, ids)
    rows = np.abs(gradients["model.embed_tokens.weight"]).max(axis=1)
    assert rows[0] == 0 and rows[5] > 0
    tied = surogate.load(make_model(tiny_qwen3(pad_token_id=0)))
    _, gradients = tied.loss_and_gradients(ids, ids)
    assert np.abs(gradients["model.embed_tokens.weight"][0]).max() > 0
    assert "lm_head.weight" not in gradients


def test_gradients_are_the_slopes_of_the_loss(make_model, tmp_path):
    """Against central differences, with every bias that a config can switch on."""
    folder = make_model(tiny_llama(attention_bias=True, mlp_bias=True, head_dim=12, initializer_range=0.3))
    batch = random_batch((2, 9))
    model = surogate.load(folder)
    loss, gradients = model.loss_and_gradients(**batch)
    assert set(gradients) == set(model.parameter_names) == set(load_file(folder / "model.safetensors"))
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "config.json").write_text((folder / "config.json").read_text())
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.bias", "model.norm.weight"):
        slope = _slope(folder, moved, name, gradients[name], batch)
        expected = float(np.linalg.norm(gradients[name].astype(np.float64)))
        assert abs(slope - expected) <= 1e-2 * expected, name


def _slope(folder, moved, name, gradient, batch) -> float:
    """The loss's slope in the direction of a gradient, by a step to each side."""
    from safetensors.numpy import save_file

    direction = gradient / np.linalg.norm(gradient)
    losses = []
    for step in (5e-3, -5e-3):
        weights = load_file(folder / "model.safetensors")
        weights[name] = weights[name] + np.float32(step) * direction
        save_file(weights, moved / "model.safetensors")
        losses.append(surogate.load(moved).loss_and_gradients(**batch)[0])
    return (losses[0] - losses[1]) / 1e-2


@pytest.mark.parametrize("lora", [False, True])
def test_a_step_is_the_same_however_the_batch_is_cut(llama, tmp_path, lora):
    """8 rows as 1 × 8, 2 × 4 and 8 × 1: losses and norms of 20 steps agree to 1e-5."""
    batches = [random_batch((8, 12), seed) for seed in range(20)]
    curves = []
    for accumulation in (1, 2, 8):
        run = trainer(llama, tmp_path, lora=lora, lora_dropout=0.0, learning_rate=1e-2, weight_decay=0.1)
        curve = []
        for batch in batches:
            cut = {name: value.reshape(accumulation, 8 // accumulation, 12) for name, value in batch.items()}
            metrics = run.step(cut)
            curve.append((metrics["loss"], metrics["grad_norm"]))
        curves.append(np.array(curve))
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], rtol=1e-5)


def test_the_same_run_twice_gives_the_same_bits(llama, tmp_path):
    results = []
    for _ in range(2):
        run = trainer(llama, tmp_path, learning_rate=1e-2, lora_dropout=0.2)
        results.append([run.step(random_batch((2, 2, 12), seed))["loss"] for seed in range(5)])
    assert results[0] == results[1]


def test_a_family_is_no_part_of_a_name(make_model, tmp_path):
    qwen = make_model(tiny_qwen3())
    for name in ("qwen", "Qwen3", "qwen3"):
        trainer(qwen, tmp_path, model_type=name)
    for name in ("q", "qwe", "qwen2"):
        with pytest.raises(surogate.ConfigError, match=f"`model_type: {name}`, but the model's configuration says `qwen3`"):
            trainer(qwen, tmp_path, model_type=name)


def test_micro_batches_of_whole_and_of_packed_rows_are_one_step(llama, tmp_path):
    batch = random_batch((2, 2, 12))
    whole = np.tile(np.arange(12), (2, 1))
    packed = np.tile([*range(5), *range(7)], (2, 1))
    losses = []
    for order in ([0, 1], [1, 0]):
        run = trainer(llama, tmp_path, lora=False)
        positions = np.stack([whole, packed])[order]
        losses.append(run.step({name: of[order] for name, of in batch.items()} | {"position_ids": positions})["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_clipping_and_its_absence(llama, tmp_path):
    """The reported norm is the true one; without clipping the first step of AdamW is the same."""
    batch = random_batch((1, 2, 12))
    norms = [
        trainer(llama, tmp_path, lora=False, max_grad_norm=limit).step(batch)["grad_norm"] for limit in (0.0, 1e-3, 1e3)
    ]
    assert norms[0] == norms[1] == norms[2] > 0


def test_adapters_learn_and_the_base_stays(llama, tmp_path):
    run = trainer(
        llama, tmp_path, learning_rate=1e-2, lora_rank=4, lora_alpha=8, lora_target_modules=["q_proj", "v_proj"]
    )
    batch = random_batch((1, 4, 12))
    losses = [run.step(batch)["loss"] for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    run.export(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (4, 8, ["q_proj", "v_proj"])
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2
    model = surogate.load(llama, adapter=tmp_path / "adapter")
    loss, gradients = model.loss_and_gradients(batch["input_ids"][0], batch["labels"][0])
    assert loss < losses[0]
    assert set(gradients) == set(tensors)


def test_an_adapter_is_gone_on_with(llama, tmp_path):
    first = trainer(llama, tmp_path, learning_rate=1e-2, lora_rank=4, lora_alpha=8)
    batch = random_batch((1, 4, 12))
    losses = [first.step(batch)["loss"] for _ in range(5)]
    first.export(tmp_path / "adapter")
    second = trainer(llama, tmp_path, adapter=str(tmp_path / "adapter"), learning_rate=1e-2)
    assert second.step(batch)["loss"] < losses[-1]
    with pytest.raises(surogate.ConfigError, match="`lora_rank` is 8, but the adapter in .* has 4"):
        trainer(llama, tmp_path, adapter=str(tmp_path / "adapter"), lora_rank=8)


def test_exports_are_the_live_model(llama, tmp_path):
    run = trainer(llama, tmp_path, lora=False, learning_rate=1e-2)
    batch = random_batch((1, 2, 12))
    for _ in range(3):
        run.step(batch)
    run.export(tmp_path / "result")
    before = load_file(llama / "model.safetensors")
    after = load_file(tmp_path / "result" / "model.safetensors")
    assert {n: v.shape for n, v in before.items()} == {n: v.shape for n, v in after.items()}
    assert all(not np.array_equal(before[name], after[name]) for name in before)
    loss, _ = surogate.load(tmp_path / "result").loss_and_gradients(batch["input_ids"][0], batch["labels"][0])
    assert abs(loss - run.step(batch)["loss"]) <= 1e-6


def test_a_checkpoint_holds_what_is_trained(llama, tmp_path):
    run = trainer(llama, tmp_path)
    run.step(random_batch((1, 2, 12)))
    run.save(tmp_path / "checkpoint")
    state = json.loads((tmp_path / "checkpoint" / "state.json").read_text())
    assert state["step"] == 1
    assert load_file(tmp_path / "checkpoint" / "adapter_model.safetensors")


def test_configurations_come_as_path_text_and_dict(llama, tmp_path):
    text = f"model: {llama}\ntorch_dtype: float32\ndevice: cpu\nmax_steps: 4\noutput_dir: {tmp_path / 'run'}\n"
    path = tmp_path / "run.yaml"
    path.write_text(text)
    fields = {**dict(line.split(": ") for line in text.splitlines()), "max_steps": 4}
    assert {surogate.Trainer(config).total_steps for config in (path, str(path), text, fields)} == {4}
    with pytest.raises(surogate.ConfigError, match="lora_rnk"):
        surogate.Trainer({**fields, "lora_rnk": 3})


def test_steps_need_data_or_a_batch(llama, tmp_path):
    run = trainer(llama, tmp_path)
    assert run.evaluate() is None
    with pytest.raises(surogate.ConfigError, match="`datasets` is required"):
        run.step()
    with pytest.raises(ValueError, match="has `label`, lacks `labels`"):
        run.step({"input_ids": [[[1]]], "label": [[[1]]]})
    with pytest.raises(surogate.ConfigError, match="learning_rate is NaN"):
        run.step(random_batch((1, 1, 8)), learning_rate=float("nan"))


def test_metrics_say_what_was_done(llama, tmp_path):
    run = trainer(llama, tmp_path, learning_rate=1e-2, warmup_steps=4, lr_scheduler_type="linear")
    batch = random_batch((2, 2, 8))
    first, second = run.step(batch), run.step(batch, learning_rate=0.5)
    assert (first["step"], second["step"]) == (0, 1)
    assert first["learning_rate"] == pytest.approx(1e-2 / 4)
    assert second["learning_rate"] == 0.5
    assert first["tokens"] == 32 and first["tokens_per_second"] > 0 and first["applied"]


@pytest.mark.parametrize("epochs", [1, 1.5])
def test_epochs_end_where_the_data_end(tmp_path, epochs):
    """Also where the last step has fewer rows than the others."""
    stories = REPOSITORY / "examples" / "stories"
    trainer = surogate.Trainer(
        {
            "model": str(stories / "model"),
            "datasets": [{"path": str(stories / "data" / "shakespeare.txt"), "type": "text"}],
            "sequence_len": 64,
            "per_device_train_batch_size": 20,
            "gradient_accumulation_steps": 4,
            "num_epochs": epochs,
            "lora_rank": 2,
            "device": "cpu",
            "output_dir": str(tmp_path / "run"),
        }
    )
    seen = []
    while (metrics := trainer.step()) is not None:
        seen.append(metrics["epoch"])
    assert seen == sorted(seen) and seen[-1] == pytest.approx(epochs)


def test_a_resumed_trainer_warns_of_what_differs_from_its_checkpoint(tmp_path):
    """Among them another set of instructions of the processor, whose sums have other last bits."""
    run = {
        "model": str(REPOSITORY / "examples" / "stories" / "model"), "device": "cpu", "max_steps": 4, "sequence_len": 32,
        "datasets": [{"path": str(REPOSITORY / "examples" / "stories" / "data" / "shakespeare.txt"), "type": "text"}],
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    trainer = surogate.Trainer(run)
    trainer.step()
    trainer.save(tmp_path / "checkpoint-1")
    again = {**run, "resume_from_checkpoint": str(tmp_path / "checkpoint-1")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert surogate.Trainer(again).steps_done == 1
    with pytest.warns(UserWarning, match="learning_rate"):
        surogate.Trainer({**again, "learning_rate": 0.5})
