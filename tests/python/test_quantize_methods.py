"""Methods of `surogate quantize` that read activations: factors of channels, experts, and commands that were killed."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import surogate
from conftest import tiny_gemma2, tiny_gemma3, tiny_gemma4, tiny_gpt2, tiny_phi3, tiny_qwen2, tiny_seed_oss
from quantized import calibration, config, quantize, raw, wide
from safetensors.numpy import load_file, save_file
from test_mixtures import tiny_qwen3_moe


def floats(tensor: tuple[str, list[int], bytes]) -> np.ndarray:
    assert tensor[0] == "F32"
    return np.frombuffer(tensor[2], np.float32)


LAYER = [
    ("awq.asym", ["--method", "awq", "--scheme", "w4a16", "--group-size", "32", "--asymmetric"]),
    ("awq.sym", ["--method", "awq", "--scheme", "w4a16", "--group-size", "32"]),
    ("smoothquant.0.5", ["--method", "smoothquant", "--scheme", "int8-w8a8"]),
    ("smoothquant.0.8", ["--method", "smoothquant", "--scheme", "int8-w8a8", "--smoothing-strength", "0.8"]),
]


@pytest.mark.parametrize(("name", "options"), LAYER)
def test_factors_are_the_recorded_ones(capsys, tmp_path, shared, name, options):
    folder = shared / "golden" / "compress" / "algos"
    recorded = load_file(folder / "awq_smoothquant.safetensors")
    ids = recorded["calibration_ids"]
    rows = np.concatenate([ids, ids[:4]])
    unshuffled = dict(shuffle=False, validation_split_ratio=0, per_device_train_batch_size=4)
    run = calibration(tmp_path, folder / "layer", rows, **unshuffled)
    data = ["--calibration", run, "--samples", len(ids), "--device", "cpu"]
    code, out, err = quantize(capsys, folder / "layer", tmp_path / "out", *options, *data)
    assert code == 0, err
    before, after = load_file(folder / "layer" / "model.safetensors"), raw(tmp_path / "out")
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weight = f"model.layers.0.{norm}.weight"
        factors = before[weight] / floats(after[weight])
        np.testing.assert_allclose(factors, recorded[f"{name}.{norm}.scales"], rtol=1e-5)


FILES = [
    ("awq_w4a16_asym_g32", ["--method", "awq", "--scheme", "w4a16", "--asymmetric"]),
    ("smoothquant_int8_w8a8", ["--method", "smoothquant", "--scheme", "int8-w8a8"]),
]


@pytest.mark.parametrize(("form", "options"), FILES)
def test_files_with_factors_are_those_of_the_package(capsys, tmp_path, shared, form, options):
    folder = shared / "golden" / "compress" / "models" / "llama"
    model = shared / "golden" / "llama"
    ids = load_file(folder / "inputs.safetensors")["calibration_ids"]
    rows = np.concatenate([ids, ids[:4]])
    unshuffled = dict(shuffle=False, validation_split_ratio=0, per_device_train_batch_size=4)
    run = calibration(tmp_path, model, rows, **unshuffled)
    data = ["--calibration", run, "--samples", "16", "--device", "cpu"]
    code, out, err = quantize(capsys, model, tmp_path / "out", *options, *data)
    assert code == 0, err
    found, expected = raw(tmp_path / "out"), raw(folder / form)
    assert found.keys() == expected.keys()
    for name in found:
        if found[name][0] == "F32":
            np.testing.assert_allclose(floats(found[name]), floats(expected[name]), rtol=1e-5, err_msg=name)
        else:
            own, theirs = (np.frombuffer(of[name][2], np.uint8) for of in (found, expected))
            assert np.mean(own != theirs) < 1e-3, name
    changed = [name for name in found if name.endswith("layernorm.weight")]
    plain = load_file(model / "model.safetensors")
    assert len(changed) == 6 and all(np.abs(floats(found[name]) / plain[name] - 1).max() > 0.01 for name in changed)


def heads(**changes: object) -> dict[str, object]:
    """A model with a key head for each head, so that values can be scaled."""
    return {"num_attention_heads": 4, "num_key_value_heads": 4, **changes}


FAMILIES = {
    "llama": lambda: wide(**heads()),
    "gpt2": lambda: tiny_gpt2(initializer_range=0.2),
    "gemma2": lambda: tiny_gemma2(initializer_range=0.1),
    "gemma3": lambda: tiny_gemma3(initializer_range=0.1),
    "phi3": lambda: tiny_phi3(initializer_range=0.1),
    "qwen2": lambda: tiny_qwen2(initializer_range=0.1, **heads()),
    "seed_oss": lambda: tiny_seed_oss(initializer_range=0.1, **heads()),
    "qwen3_moe": lambda: tiny_qwen3_moe(initializer_range=0.1, **heads()),
}


@pytest.mark.parametrize(("method", "scheme"), [("awq", "w8a16"), ("smoothquant", "int8-w8a8")])
@pytest.mark.parametrize("family", FAMILIES)
def test_factors_move_between_weights_without_changing_what_is_computed(capsys, tmp_path, make_model, family, method, scheme):
    model = make_model(FAMILIES[family]())
    ids = np.random.default_rng(1).integers(1, 90, (24, 16))
    run = calibration(tmp_path, model, ids, validation_split_ratio=0.25)
    options = ["--scheme", scheme, "--method", method, "--calibration", run, "--device", "cpu"]
    code, out, err = quantize(capsys, model, tmp_path / "out", *options)
    assert code == 0, err
    exact, found = (surogate.load(str(of)).forward(ids) for of in (model, tmp_path / "out"))
    assert 0 < np.linalg.norm(found - exact) < 0.05 * np.linalg.norm(exact)
    before, after = raw(model), raw(tmp_path / "out")
    norms = [name for name in before if "norm" in name or ".ln_" in name]
    assert any(before[name] != after[name] for name in norms)


def test_layers_that_share_keys_and_values_are_measured(capsys, tmp_path, make_model):
    model = make_model(tiny_gemma4())
    ids = np.random.default_rng(1).integers(1, 90, (24, 16))
    run = calibration(tmp_path, model, ids, validation_split_ratio=0.25)
    options = ["--scheme", "w8a16", "--method", "gptq", "--calibration", run, "--device", "cpu"]
    code, out, err = quantize(capsys, model, tmp_path / "out", *options)
    assert code == 0 and "the nearest codes" not in out, err + out
    exact, found = (surogate.load(str(of)).forward(ids) for of in (model, tmp_path / "out"))
    assert 0 < np.linalg.norm(found - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("w4a16_g32", ["--scheme", "w4a16", "--group-size", "32"]),
        ("w4a16_asym_g32", ["--scheme", "w4a16", "--group-size", "32", "--asymmetric"]),
        ("int8_w8a8", ["--scheme", "int8-w8a8"]),
        ("fp8_dynamic", ["--scheme", "fp8-dynamic"]),
    ],
)
def test_narrower_ranges_are_those_of_the_package(capsys, tmp_path, shared, make_model, scheme, options):
    formats = shared / "golden" / "compress" / "formats"
    weight = load_file(formats / "inputs.safetensors")["a"]
    model = make_model(wide(hidden_size=weight.shape[1], intermediate_size=weight.shape[0]))
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.gate_proj.weight"] = weight
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    code, out, err = quantize(capsys, model, tmp_path / "out", *options, "--observer", "mse")
    assert code == 0, err
    found = floats(raw(tmp_path / "out")["model.layers.1.mlp.gate_proj.weight_scale"])
    expected = floats(raw(formats, f"{scheme}.mse.safetensors")["a.f32.weight_scale"])
    assert np.mean(np.abs(found / expected - 1) < 1e-6) >= 0.98


def test_narrower_ranges_lose_less(capsys, tmp_path, make_model):
    model = make_model(wide(initializer_range=0.1))
    ids = np.random.default_rng(0).integers(1, 96, (80, 16))
    run = calibration(tmp_path, model, ids, validation_split_ratio=0.25)
    losses = []
    for observer in ("minmax", "mse"):
        options = ["--scheme", "w4a16", "--observer", observer, "--calibration", run, "--device", "cpu"]
        code, out, err = quantize(capsys, model, tmp_path / observer, *options)
        assert code == 0, err
        assert config(tmp_path / observer)["config_groups"]["group_0"]["weights"]["observer"] == f"memoryless_{observer}"
        losses.append(lost(out))
    assert losses[1] < 0.98 * losses[0], losses
    for scheme in ("nvfp4a16", "fp8-dynamic", "int8-w8a8"):
        output = tmp_path / scheme
        code, out, err = quantize(capsys, model, output, "--scheme", scheme, "--observer", "mse")
        assert code == 0 and np.isfinite(surogate.load(str(output)).forward(ids[:2])).all(), err
    code, _, err = quantize(capsys, model, tmp_path / "out", "--scheme", "mxfp4a16", "--observer", "mse")
    assert code == 2 and "`mxfp4a16` has scales of whole ranges only" in err


def lost(out: str) -> float:
    return float(next(line for line in out.splitlines() if "KL divergence" in line).rsplit(" ", 1)[1])


def test_each_expert_gets_codes_by_what_it_reads(capsys, tmp_path, make_model):
    model = make_model(tiny_qwen3_moe(initializer_range=0.2))
    ids = np.random.default_rng(0).integers(1, 90, (160, 16))
    run = calibration(tmp_path, model, ids, validation_split_ratio=0.25)
    losses = []
    for method in ("rtn", "gptq", "refine"):
        options = ["--scheme", "w4a16", "--method", method, "--calibration", run, "--device", "cpu"]
        code, out, err = quantize(capsys, model, tmp_path / method, *options)
        assert code == 0 and "the nearest codes" not in out, err + out
        losses.append(lost(out))
    assert losses[1] < 0.8 * losses[0] and losses[2] < 0.8 * losses[1], losses
    name = next(name for name in raw(tmp_path / "rtn") if "experts.1." in name and name.endswith("weight_packed"))
    assert raw(tmp_path / "rtn")[name] != raw(tmp_path / "gptq")[name]


def test_experts_that_no_token_reaches_are_named(capsys, tmp_path, make_model):
    model = make_model(tiny_qwen3_moe(initializer_range=0.2, num_experts=32))
    ids = np.random.default_rng(0).integers(1, 90, (3, 4))
    run = calibration(tmp_path, model, ids, validation_split_ratio=0, per_device_train_batch_size=1)
    options = ["--scheme", "w4a16", "--method", "gptq", "--calibration", run, "--samples", "1", "--device", "cpu"]
    code, out, err = quantize(capsys, model, tmp_path / "out", *options)
    assert code == 0, err
    assert "more: the nearest codes, since no token reached the expert: more --samples may" in out


def test_activations_beyond_f32_are_refused_by_name(capsys, tmp_path, make_model):
    model = make_model(wide())
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.input_layernorm.weight"][:] = 1e25
    save_file(tensors, path, {"format": "pt"})
    ids = np.random.default_rng(0).integers(1, 90, (8, 16))
    run = calibration(tmp_path, model, ids, validation_split_ratio=0.25)
    options = ["--scheme", "w8a16", "--method", "gptq", "--calibration", run, "--device", "cpu"]
    code, _, err = quantize(capsys, model, tmp_path / "out", *options)
    assert code != 0 and "`model.layers.1.self_attn.q_proj.weight`: squares of what it is multiplied with" in err, err
    assert not (tmp_path / "out").exists()


def test_scales_of_activations_of_experts_are_measured(capsys, tmp_path, make_model):
    model = make_model(tiny_qwen3_moe(initializer_range=0.2))
    ids = np.random.default_rng(0).integers(1, 90, (24, 16))
    run = calibration(tmp_path, model, ids, validation_split_ratio=0.25)
    options = ["--scheme", "fp8-static", "--calibration", run, "--device", "cpu"]
    code, out, err = quantize(capsys, model, tmp_path / "out", *options)
    assert code == 0, err
    tensors = raw(tmp_path / "out")
    scales = {name: floats(of)[0] for name, of in tensors.items() if "experts." in name and name.endswith("input_scale")}
    assert scales and all(scale > 0 for scale in scales.values()) and len(set(scales.values())) > 4


REFINED = [
    ("w4a16", wide()),
    ("w4a16", wide(num_attention_heads=4, num_key_value_heads=4)),
    ("nvfp4a16", wide()),
    ("mxfp4a16", wide()),
    ("fp8-static", wide()),
    ("w8a16", tiny_gpt2(initializer_range=0.2)),
    ("w4a16", tiny_gemma2(initializer_range=0.1)),
    ("w4a16", tiny_gemma4()),
    ("w4a16", tiny_phi3(initializer_range=0.1)),
    ("w4a16", tiny_qwen2(initializer_range=0.1)),
]


@pytest.mark.parametrize(("scheme", "fields"), REFINED)
def test_refined_codes_lose_less_than_those_of_gptq(capsys, tmp_path, make_model, scheme, fields):
    model = make_model(fields)
    ids = np.random.default_rng(3).integers(1, 90, (160, 16))
    run = calibration(tmp_path, model, ids, validation_split_ratio=0.25)
    losses = []
    for method in ("gptq", "refine"):
        options = ["--scheme", scheme, "--method", method, "--calibration", run, "--device", "cpu"]
        code, out, err = quantize(capsys, model, tmp_path / method, *options)
        assert code == 0 and "the nearest codes" not in out, err + out
        losses.append(lost(out))
    # Of 8 bits there is little to win, and digits of what is printed are few.
    assert losses[1] < (0.8 if scheme == "w4a16" else 0.9) * losses[0], losses
    form = {name: (of[0], of[1]) for name, of in raw(tmp_path / "gptq").items()}
    assert form == {name: (of[0], of[1]) for name, of in raw(tmp_path / "refine").items()}


def test_what_a_method_does_not_go_with_is_refused(capsys, tmp_path, make_model):
    model = make_model(wide())
    run = calibration(tmp_path, model, np.ones((8, 16), dtype=int))
    for options, what in [
        (["--scheme", "w4a16", "--method", "refine", "--observer", "mse"], "--method refine searches scales by itself"),
        (["--scheme", "w4a16", "--method", "smoothquant"], "`w4a16` does not quantize activations"),
        (["--scheme", "w4a16", "--method", "awq", "--smoothing-strength", "0.5"], "it has no effect"),
        (["--scheme", "int8-w8a8", "--method", "smoothquant", "--smoothing-strength", "1.5"], "expected 0 to 1"),
    ]:
        code, _, err = quantize(capsys, model, tmp_path / "out", *options, "--calibration", run)
        assert code == 2 and what in err, err
    code, _, err = quantize(capsys, model, tmp_path / "out", "--scheme", "w4a16", "--method", "awq")
    assert code == 2 and "--method awq: it needs data" in err


@pytest.mark.parametrize(("method", "width"), [("gptq", 256), ("refine", 128)])
def test_a_killed_command_goes_on_after_the_last_layer(capsys, tmp_path, make_model, method, width):
    """Layers are wide enough that one takes longer than to see that another is done."""
    fields = {"num_hidden_layers": 6, "hidden_size": width, "intermediate_size": 2 * width}
    model = make_model(wide(initializer_range=0.1, **fields))
    ids = np.random.default_rng(0).integers(1, 96, (48, 16))
    run = calibration(tmp_path, model, ids, validation_split_ratio=0.25)
    options = ["--scheme", "w4a16", "--method", method, "--calibration", str(run), "--device", "cpu"]
    assert quantize(capsys, model, tmp_path / "whole", *options)[0] == 0
    command = [sys.executable, "-m", "surogate", "quantize", str(model), "--output", str(tmp_path / "out"), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
    layers = str(tmp_path / ".out.quantize.*.layers" / "layer.1.safetensors")
    while not glob.glob(layers):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert not (tmp_path / "out").exists()
    code, out, err = quantize(capsys, model, tmp_path / "out", *options)
    assert code == 0, err
    assert " of 6 layers were done by a command that ended early" in out
    assert raw(tmp_path / "out") == raw(tmp_path / "whole")
    assert not glob.glob(str(tmp_path / ".out.*"))


@pytest.mark.parametrize(
    "options",
    [
        ["--scheme", "w4a16"],
        ["--scheme", "nvfp4", "--calibration"],
        ["--scheme", "w4a16", "--method", "gptq", "--calibration"],
        ["--scheme", "w4a16", "--method", "refine", "--calibration"],
    ],
)
def test_the_plan_has_the_sizes_of_the_result_and_writes_nothing(capsys, tmp_path, make_model, options):
    model = make_model(wide())
    rows = np.random.default_rng(0).integers(1, 90, (48, 16))
    run = [calibration(tmp_path, model, rows)] if "--calibration" in options else []
    arguments = [*options, *run, "--samples", "16", "--device", "cpu"]
    code, planned, err = quantize(capsys, model, tmp_path / "out", *arguments, "--plan")
    assert code == 0, err
    assert not (tmp_path / "out").exists()
    code, done, err = quantize(capsys, model, tmp_path / "out", *arguments)
    assert code == 0, err
    (size,) = re.findall(r"\n([\d.]+ \w+ instead of [\d.]+ \w+)\n", planned)
    assert size in done
    (codes,) = re.findall(r"would have (\d+ matrices as .*), and \d+ other tensors", planned)
    assert codes in done
    assert re.findall(r"measured on ([\d,]+) tokens", planned) == re.findall(r"measured on ([\d,]+) tokens", done)
    sums = " of sums over them" in planned
    assert sums == ("--method" in options), planned


def test_a_plan_has_the_errors_of_the_work(capsys, tmp_path, make_model):
    model = make_model(wide())
    for options in (["--scheme", "w4a16", "--method", "gptq"], ["--scheme", "fp8-dynamic", "--group-size", "7"]):
        found = [quantize(capsys, model, tmp_path / "out", *options, *plan) for plan in ([], ["--plan"])]
        assert found[0] == found[1] and found[0][0] != 0
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("")
    code, _, err = quantize(capsys, model, tmp_path / "out", "--scheme", "w4a16", "--plan")
    assert code != 0 and "already exists: nothing is overwritten" in err


def test_the_plan_of_an_adapter_has_the_sizes_of_the_merged_result(capsys, tmp_path, make_model):
    model = make_model(wide())
    ids = np.random.default_rng(1).integers(1, 90, (1, 2, 16))
    trainer = surogate.Trainer({"model": str(model), "device": "cpu", "lora_rank": 4, "output_dir": str(tmp_path / "run")})
    trainer.step({"input_ids": ids, "labels": ids}, learning_rate=1e-3)
    trainer.export(tmp_path / "adapter")
    before = sorted(tmp_path.rglob("*"))
    arguments = ["--base", model, "--scheme", "w8a16"]
    code, planned, err = quantize(capsys, tmp_path / "adapter", tmp_path / "out", *arguments, "--plan")
    assert code == 0, err
    assert sorted(tmp_path.rglob("*")) == before
    code, done, err = quantize(capsys, tmp_path / "adapter", tmp_path / "out", *arguments)
    assert code == 0, err
    assert re.findall(r"[\d.]+ \w+ instead of [\d.]+ \w+", planned) == re.findall(r"[\d.]+ \w+ instead of [\d.]+ \w+", done)
