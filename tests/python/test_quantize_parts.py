"""Parts that `surogate quantize --include` makes codes of: the LM head, routers, towers."""

from __future__ import annotations

import numpy as np
import pytest
import surogate
from quantized import calibration, config, quantize, raw, wide
from safetensors.numpy import load_file
from surogate.cli.commands import main
from test_mixtures import tiny_qwen3_moe


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_the_lm_head_and_routers_become_codes_when_they_are_included(capsys, make_model, tmp_path, method):
    model = make_model(tiny_qwen3_moe(hidden_size=64, tie_word_embeddings=False))
    data = ["--calibration", calibration(tmp_path, model, np.arange(192).reshape(12, 16) % 64, per_device_train_batch_size=2)]
    usual = quantize(capsys, model, tmp_path / "usual", "--scheme", "w8a16", "--method", method, *data)
    both = ["--include", "lm_head, routers", "--method", method, *data]
    code, out, err = quantize(capsys, model, tmp_path / "out", "--scheme", "w8a16", *both)
    assert usual[0] == code == 0, err
    assert config(tmp_path / "out")["ignore"] == []
    before, after = raw(tmp_path / "usual"), raw(tmp_path / "out")
    kept = {name for name in before if name == "lm_head.weight" or name.endswith("mlp.gate.weight")}
    assert len(kept) > 1 and kept <= {f"{name.removesuffix('_packed')}" for name in after}
    assert not kept & after.keys()
    assert {name: of for name, of in before.items() if name not in kept}.items() <= after.items()
    assert ("`lm_head`: the nearest codes" in out) == (method == "gptq")
    plain, quantized = (surogate.load(folder, device="cpu", dtype="fp32") for folder in [model, tmp_path / "out"])
    ids = [list(range(20))]
    a, b = plain.forward(ids), quantized.forward(ids)
    assert 0 < np.abs(a - b).max() < 0.1 * np.abs(a).max()


@pytest.mark.parametrize(
    ("part", "changes", "scheme", "expected"),
    [
        ("lm_head", {"tie_word_embeddings": True}, "w8a16", "the table of embeddings, of which readers"),
        ("routers", {}, "w8a16", "the model has none in matrices of their own"),
        ("lm_head", {}, "nvfp4", "measured in the text's layers alone"),
        ("towers", {}, "w8a16", "images are not available"),
    ],
)
def test_parts_that_cannot_be_included(capsys, make_model, tmp_path, part, changes, scheme, expected):
    options = ["--scheme", scheme, "--include", part]
    code, _, err = quantize(capsys, make_model(wide(**changes)), tmp_path / "out", *options)
    assert code == 2 and expected in err, err
    assert not (tmp_path / "out").exists()


def test_an_unknown_part_is_refused_with_the_known_ones(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["quantize", "model", "--output", str(tmp_path / "out"), "--scheme", "w8a16", "--include", "embeddings"])
    assert "expected some of lm_head, routers, towers" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_tower_becomes_codes_and_reads_images(capsys, shared, tmp_path, method):
    model = shared / "golden" / "qwen3_vl"
    rows = np.random.default_rng(0).integers(1, 80, (12, 16))
    data = ["--calibration", calibration(tmp_path, model, rows)] if method == "gptq" else []
    options = ["--scheme", "w8a16", "--include", "towers", "--method", method, "--device", "cpu"]
    code, out, err = quantize(capsys, model, tmp_path / "out", *options, *data)
    assert code == 0, err
    tensors = raw(tmp_path / "out")
    assert "model.visual.blocks.0.attn.qkv.weight_packed" in tensors
    assert {"model.visual.merger.linear_fc1.weight", "model.visual.pos_embed.weight"} <= tensors.keys()
    assert ("`model.visual.blocks.0.attn.proj` and" in out) == (method == "gptq")
    inputs = load_file(model / "inputs.safetensors")
    ids, images = [inputs["input_ids"][0].tolist()], [inputs["image.0"], inputs["image.1"]]
    plain, quantized = (surogate.load(folder, device="cpu", dtype="fp32") for folder in [model, tmp_path / "out"])
    a, b = plain.forward(ids, images=images), quantized.forward(ids, images=images)
    assert 0 < np.abs(a - b).max() < 0.1 * np.abs(a).max()
