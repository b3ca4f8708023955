"""`surogate prune`: scores as recorded, smaller models that compute what they should, and that are trained further."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import surogate
from conftest import tiny_gemma2, tiny_gemma4, tiny_gpt2, tiny_olmo2, tiny_phi3, tiny_qwen2, tiny_qwen3, tiny_smollm3
from quantized import calibration, raw, wide
from safetensors.numpy import load_file, save_file
from surogate.cli.commands import main
from test_mixtures import tiny_deepseek_v3, tiny_qwen3_moe


def prune(capsys, model: object, output: object, *options: object) -> tuple[int, str, str]:
    code = main(["prune", str(model), "--output", str(output), "--device", "cpu", *map(str, options)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def recorded(shared, tmp_path):
    """The recorded Llama, what was recorded of it, and the flags for the same rows; further rows follow them."""
    model, folder = shared / "golden" / "llama", shared / "golden" / "compress" / "prune"
    tensors = load_file(folder / "scores_and_logits.safetensors")
    ids = tensors["calibration_ids"]
    unshuffled = dict(shuffle=False, validation_split_ratio=0, per_device_train_batch_size=4)
    run = calibration(tmp_path, model, np.concatenate([ids, ids[:4]]), **unshuffled)
    meta = json.loads((folder / "meta.json").read_text())
    return model, tensors, meta, ["--calibration", run, "--samples", len(ids)]


@pytest.mark.parametrize("tokens", ["mean", "l2"])
@pytest.mark.parametrize("rows", ["mean", "l2"])
def test_scores_are_the_recorded_ones(capsys, tmp_path, recorded, tokens, rows):
    model, tensors, _, data = recorded
    how = ["--over-tokens", tokens, "--over-rows", rows, "--scores", tmp_path / "scores.safetensors"]
    code, out, err = prune(capsys, model, tmp_path / "out", "--hidden-size", "48", *how, *data)
    assert code == 0, err
    found = load_file(tmp_path / "scores.safetensors")
    name = f"batch_{rows}.seq_{tokens}"
    np.testing.assert_allclose(found["hidden"], tensors[f"score.embed.{name}"], rtol=1e-5)
    np.testing.assert_allclose(found["block_influence"], tensors["score.block_influence"], rtol=1e-5)
    for layer in range(3):
        np.testing.assert_allclose(found[f"heads.{layer}"], tensors[f"score.heads.{layer}.{name}"], rtol=1e-5)
        np.testing.assert_allclose(found[f"intermediate.{layer}"], tensors[f"score.mlp.{layer}.{name}"], rtol=1e-5)


VARIANTS = {
    "mlp": ["--intermediate-size", "96"],
    "kv_group": ["--key-value-heads", "1"],
    "one_head_per_group": ["--heads", "2"],
    "embed": ["--hidden-size", "48"],
    "depth": ["--layers", "2"],
    "all": ["--intermediate-size", "96", "--key-value-heads", "1", "--hidden-size", "48", "--layers", "2"],
}
NAMES = {"mlp": "intermediate", "kv": "key_value_heads", "heads": "heads"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_stays_and_what_it_computes_is_as_recorded(capsys, tmp_path, recorded, variant):
    model, tensors, meta, data = recorded
    code, out, err = prune(capsys, model, tmp_path / "out", *VARIANTS[variant], *data)
    assert code == 0, err
    kept, expected = json.loads((tmp_path / "out" / "pruned.json").read_text()), meta[variant]["kept"]
    layers = expected.get("layers", [0, 1, 2])
    assert kept["layers"] == layers and kept["hidden"] == expected.get("emb", list(range(64)))
    for theirs, own in NAMES.items():
        if theirs in expected:
            assert kept[own] == [expected[theirs][layer] for layer in layers]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert meta[variant]["config"].items() <= config.items()
    found = surogate.load(str(tmp_path / "out")).forward(tensors["input_ids"][:1])
    error = np.linalg.norm(found - tensors[f"{variant}.logits"]) / np.linalg.norm(tensors[f"{variant}.logits"])
    assert error < 2e-5, error


@pytest.fixture
def data(tmp_path):
    """Flags for rows of random tokens."""

    def flags(model):
        ids = np.random.default_rng(0).integers(1, 90, (24, 16))
        return ["--calibration", calibration(tmp_path, model, ids, validation_split_ratio=0.25)]

    return flags


def test_channels_that_are_always_zero_go_first_and_change_nothing(capsys, tmp_path, make_model, data):
    model = make_model(wide(initializer_range=0.1))
    weights = load_file(model / "model.safetensors")
    unused = np.random.default_rng(0).permutation(256)[:100]
    for layer in range(2):
        weights[f"model.layers.{layer}.mlp.up_proj.weight"][unused] = 0
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    code, out, err = prune(capsys, model, tmp_path / "out", "--intermediate-size", "156", *data(model))
    assert code == 0 and "intermediate_size 156 instead of 256" in out, err
    ids = np.arange(24).reshape(2, 12) + 1
    before, after = (surogate.load(str(of)).forward(ids) for of in (model, tmp_path / "out"))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| `intermediate_size` | 256 | 156 |" in card and str(tmp_path) not in card


FAMILIES = {
    "qwen2": (lambda: tiny_qwen2(), ["--hidden-size", "24", "--heads", "2", "--intermediate-size", "32"]),
    "qwen3": (lambda: tiny_qwen3(), ["--hidden-size", "24", "--key-value-heads", "1", "--layers", "1"]),
    "gemma2": (lambda: tiny_gemma2(), ["--intermediate-size", "32", "--hidden-size", "24"]),
    "gpt2": (lambda: tiny_gpt2(), ["--intermediate-size", "96", "--layers", "1"]),
    "olmo2": (lambda: tiny_olmo2(), ["--heads", "2", "--hidden-size", "24"]),
    "qwen3_moe": (lambda: tiny_qwen3_moe(), ["--heads", "2", "--intermediate-size", "32"]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_models_that_load_and_are_trained(capsys, tmp_path, make_model, data, family):
    fields, options = FAMILIES[family]
    model = make_model(fields())
    code, out, err = prune(capsys, model, tmp_path / "out", *options, *data(model))
    assert code == 0, err
    ids = np.arange(24).reshape(2, 12) + 1
    assert np.isfinite(surogate.load(str(tmp_path / "out")).forward(ids)).all()
    size = sum(len(content) for _, _, content in raw(tmp_path / "out").values())
    assert size < sum(len(content) for _, _, content in raw(model).values())
    counted = int(out.split(" parameters instead of")[0].rsplit(": ", 1)[1].replace(",", ""))
    assert counted * 4 == size
    options = {"model": str(tmp_path / "out"), "device": "cpu", "lora": False, "output_dir": str(tmp_path / "run")}
    trainer = surogate.Trainer({**options, "torch_dtype": "float32"})
    batch = {"input_ids": ids[None], "labels": ids[None]}
    losses = [trainer.step(batch, learning_rate=1e-2)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("by", ["influence", "loss"])
def test_a_layer_that_adds_nothing_is_left_out_first(capsys, tmp_path, make_model, data, by):
    model = make_model(wide(num_hidden_layers=4, initializer_range=0.2))
    weights = load_file(model / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.2.{name}.weight"][:] = 0
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    scores = ["--scores", tmp_path / "scores.safetensors", "--layers-by", by]
    code, out, err = prune(capsys, model, tmp_path / "out", "--layers", "3", *scores, *data(model))
    assert code == 0, err
    kept = json.loads((tmp_path / "out" / "pruned.json").read_text())["layers"]
    found = load_file(tmp_path / "scores.safetensors")["block_influence" if by == "influence" else "loss_without"]
    assert abs(found[2]) < 1e-6 < np.abs(np.delete(found, 2)).min()
    # Without a layer of random numbers the loss may fall: such a layer goes before one that adds nothing.
    assert kept == sorted(np.argsort(-found)[:3])
    if 2 in kept:
        return
    ids = np.arange(24).reshape(2, 12) + 1
    before, after = (surogate.load(str(of)).forward(ids) for of in (model, tmp_path / "out"))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_experts_that_make_nothing_are_left_out_first(capsys, tmp_path, make_model, data):
    model = make_model(tiny_qwen3_moe(initializer_range=0.2))
    weights = load_file(model / "model.safetensors")
    unused = [name for name in weights if name.endswith("down_proj.weight") and ("experts.0." in name or "experts.2." in name)]
    for name in unused:
        weights[name][:] = 0
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    code, out, err = prune(capsys, model, tmp_path / "out", "--experts", "2", *data(model))
    assert code == 0 and "num_experts 2 instead of 4" in out, err
    kept = json.loads((tmp_path / "out" / "pruned.json").read_text())["experts"]
    assert [1, 3] in kept and all(of in ([], [1, 3]) for of in kept)
    after = load_file(tmp_path / "out" / "model.safetensors")
    router = next(name for name in after if name.endswith("mlp.gate.weight"))
    np.testing.assert_array_equal(after[router], weights[router][[1, 3]])
    moved = router.replace("gate.weight", "experts.1.up_proj.weight")
    np.testing.assert_array_equal(after[moved], weights[moved.replace("experts.1.", "experts.3.")])
    counted = int(out.split(" parameters instead of")[0].rsplit(": ", 1)[1].replace(",", ""))
    assert counted == sum(of.size for of in after.values())
    assert np.isfinite(surogate.load(str(tmp_path / "out")).forward(np.arange(24).reshape(2, 12) + 1)).all()


def test_a_smaller_model_learns_from_its_parent(capsys, tmp_path, make_model, data):
    model = make_model(wide(initializer_range=0.1))
    code, out, err = prune(capsys, model, tmp_path / "out", "--intermediate-size", "128", *data(model))
    assert code == 0 and "surogate distil with teacher" in out, err
    options = {"model": str(tmp_path / "out"), "teacher": str(model), "task": "distil", "lora": False, "device": "cpu"}
    trainer = surogate.Trainer({**options, "torch_dtype": "float32", "output_dir": str(tmp_path / "run")})
    ids = np.random.default_rng(0).integers(1, 90, (1, 8, 16))
    losses = [trainer.step({"input_ids": ids, "labels": ids}, learning_rate=1e-3)["loss"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0], losses


def test_a_number_of_parameters_is_kept_to(capsys, tmp_path, make_model, data):
    model = make_model(wide())
    before = sum(np.prod(shape) for _, shape, _ in raw(model).values())
    for limit, most in (("0.5", before / 2), (str(before // 3), before // 3)):
        code, out, err = prune(capsys, model, tmp_path / limit, "--parameters", limit, *data(model))
        assert code == 0, err
        after = sum(np.prod(shape) for _, shape, _ in raw(tmp_path / limit).values())
        assert 0.8 * most < after <= most, (limit, after, most)
        assert f"{after:,} parameters instead of {before:,}" in out


def test_what_cannot_be_removed_is_refused_and_leaves_nothing(capsys, tmp_path, make_model, data):
    model, latent = make_model(wide()), make_model(tiny_deepseek_v3())
    fused, unrotated, doubled = make_model(tiny_phi3()), make_model(tiny_smollm3()), make_model(tiny_gemma4())
    for of, options, what in [
        (model, [], "it is not said how large the result is: give at least one of --layers, --hidden-size"),
        (model, ["--layers", "3"], "--layers: 3 is not supported, expected 1 to 2"),
        (model, ["--layers", "2"], "nothing is removed: the model is as small as that already"),
        (model, ["--parameters", "1.5"], "--parameters 1.5: no hidden size leaves as few"),
        (model, ["--heads", "3"], "--heads: 3 heads, expected a multiple of the 2 heads of keys and values, 4 at most"),
        (model, ["--parameters", "0.5", "--hidden-size", "64"], "--parameters: it chooses --hidden-size"),
        (latent, ["--heads", "2"], "--heads: they are not matrices of their own in this model"),
        (fused, ["--intermediate-size", "24"], "--intermediate-size: they are not matrices of their own"),
        (doubled, ["--intermediate-size", "32"], "`model.layers.2.mlp.down_proj.weight` would be [32, 64], the weights are [32, 32]"),
        (unrotated, ["--layers", "1"], "computes something else than layer"),
    ]:
        code, _, err = prune(capsys, of, tmp_path / "out", *options, *data(of))
        assert code == 2 and what in err, err
    assert not (tmp_path / "out").exists()


def milliseconds(out: str) -> tuple[float, float]:
    """The planned time of a request, now and before."""
    now, before = re.findall(r"expected to take ([\d.]+) ms instead of ([\d.]+)", out)[0]
    return float(now), float(before)


@pytest.mark.parametrize("depth", [[], ["--layers", "2"]])
def test_the_widest_model_within_a_latency_is_written(capsys, tmp_path, make_model, depth):
    model = make_model(wide(num_hidden_layers=3))
    data = ["--calibration", calibration(tmp_path, model, np.arange(192).reshape(12, 16) % 90)]
    request = ["--machine", "rtx3090", "--request", "64,16", *depth, *data]
    code, out, _ = prune(capsys, model, tmp_path / "half", "--intermediate-size", "128", "--hidden-size", "64", *data)
    assert code == 0 and "expected to take" not in out
    code, _, err = prune(capsys, model, tmp_path / "none", "--latency", "0.001", *request)
    assert code == 2 and "--latency 0.001: on rtx3090 the narrowest model that was tried takes" in err, err
    least = float(re.findall(r"takes ([\d.]+) ms", err)[0])
    limit = least * 1.02
    code, out, err = prune(capsys, model, tmp_path / "out", "--latency", str(limit), *request)
    assert code == 0, err
    now, before = milliseconds(out)
    assert least <= now <= limit + 1e-3 and now < before
    sizes = json.loads((tmp_path / "out" / "config.json").read_text())
    assert sizes["num_hidden_layers"] == (2 if depth else 3)
    assert "planned ms for 64 + 16 tokens on rtx3090" in (tmp_path / "out" / "README.md").read_text()
    assert surogate.load(tmp_path / "out", device="cpu").forward([[1, 2, 3]]).shape[-1] == sizes["vocab_size"]


def test_widths_that_an_architecture_does_not_take_are_too_narrow(capsys, tmp_path, make_model):
    """Experts of few elements do not lie one after another; the search ends at the narrowest that do."""
    model = make_model(tiny_qwen3_moe(hidden_size=64))
    data = ["--calibration", calibration(tmp_path, model, np.arange(192).reshape(12, 16) % 64)]
    code, _, err = prune(capsys, model, tmp_path / "out", "--latency", "0.001", "--machine", "h100", *data)
    assert code == 2 and "the narrowest model that was tried takes" in err, err
    limit = float(re.findall(r"takes ([\d.]+) ms", err)[0]) * 1.05
    code, out, err = prune(capsys, model, tmp_path / "out", "--latency", str(limit), "--machine", "h100", *data)
    assert code == 0 and milliseconds(out)[0] <= limit + 1e-3, err


def test_a_latency_that_the_model_has_is_refused(capsys, tmp_path, make_model):
    model = make_model(wide())
    data = ["--calibration", calibration(tmp_path, model, np.arange(192).reshape(12, 16) % 90)]
    code, _, err = prune(capsys, model, tmp_path / "out", "--latency", "1e6", *data)
    assert code == 2 and "as it is" in err and "give a shorter time" in err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--layers", "1", "--machine", "h100"], "--machine: without --latency it has no effect"),
        (["--layers", "1", "--request", "1,1"], "--request: without --latency it has no effect"),
        (["--latency", "5", "--parameters", "0.5"], "both choose the widths"),
        (["--latency", "5", "--hidden-size", "32"], "--latency: it chooses --hidden-size"),
        (["--latency", "5", "--machine", "2xh100"], "expected one device, such as h100"),
    ],
)
def test_options_of_a_latency_that_do_not_go_together(capsys, tmp_path, make_model, options, expected):
    model = make_model(wide())
    data = ["--calibration", calibration(tmp_path, model, np.arange(192).reshape(12, 16) % 90)]
    code, _, err = prune(capsys, model, tmp_path / "out", *options, *data)
    assert code == 2 and expected in err, err
