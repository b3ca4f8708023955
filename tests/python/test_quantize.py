"""`surogate quantize`: files as compressed-tensors has them, and models that are read back from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import surogate
from conftest import REPOSITORY, tiny_gpt2, tiny_qwen3
from safetensors.numpy import load_file, save_file
from quantized import calibration, config, quantize, raw, wide
from surogate.cli.commands import main

SCHEMES = ["fp8-dynamic", "fp8-block", "int8-w8a8", "w4a16", "w8a16", "nvfp4a16", "mxfp4a16"]


RECORDED = [
    ("llama", "fp8_dynamic", ["--scheme", "fp8-dynamic"]),
    ("llama", "fp8_block32", ["--scheme", "fp8-block", "--group-size", "32"]),
    ("llama", "int8_w8a8", ["--scheme", "int8-w8a8"]),
    ("llama", "w4a16_g32", ["--scheme", "w4a16"]),
    ("llama", "w4a16_asym_g32", ["--scheme", "w4a16", "--asymmetric"]),
    ("llama", "w8a16_channel", ["--scheme", "w8a16", "--group-size", "-1"]),
    ("llama", "nvfp4a16", ["--scheme", "nvfp4a16"]),
    ("llama", "mxfp4a16", ["--scheme", "mxfp4a16"]),
    ("qwen3", "nvfp4a16", ["--scheme", "nvfp4a16"]),
    ("qwen3", "mxfp4a16", ["--scheme", "mxfp4a16"]),
    ("qwen3_moe", "nvfp4a16", ["--scheme", "nvfp4a16"]),
]


@pytest.mark.parametrize(("model", "form", "options"), RECORDED)
def test_files_are_those_of_the_package(capsys, tmp_path, shared, model, form, options):
    code, out, err = quantize(capsys, shared / "golden" / model, tmp_path / "out", *options)
    assert code == 0, err
    assert "read back and compared" in out
    recorded = shared / "golden" / "compress" / "models" / model / form
    found, expected = raw(tmp_path / "out"), raw(recorded)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
    own, theirs = config(tmp_path / "out"), config(recorded)
    assert sorted(own.pop("ignore")) == sorted(theirs.pop("ignore"))
    assert own == theirs


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_result_is_loaded_asked_and_adapted(capsys, tmp_path, make_model, scheme):
    model = make_model(wide())
    code, out, err = quantize(capsys, model, tmp_path / "out", "--scheme", scheme)
    assert code == 0, err
    ids = np.arange(24).reshape(2, 12) + 1
    exact, found = (surogate.load(str(of)).forward(ids) for of in (model, tmp_path / "out"))
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    most = {"nvfp4a16": 0.3, "mxfp4a16": 0.3, "w4a16": 0.3}.get(scheme, 0.1)
    assert 1e-4 < error < most, error
    size = sum(len(data) for _, _, data in raw(tmp_path / "out").values())
    assert size < 0.5 * (model / "model.safetensors").stat().st_size
    options = {"model": str(tmp_path / "out"), "device": "cpu", "lora_rank": 2, "output_dir": str(tmp_path / "run")}
    trainer = surogate.Trainer(options)
    batch = {"input_ids": ids[None], "labels": ids[None]}
    losses = [trainer.step(batch, learning_rate=1e-2)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"- {scheme}\n" in card and str(tmp_path) not in card


def test_an_adapter_is_merged_first(capsys, tmp_path, make_model):
    model = make_model(wide())
    trainer = surogate.Trainer({"model": str(model), "device": "cpu", "lora_rank": 2, "output_dir": str(tmp_path / "run")})
    ids = np.arange(24).reshape(1, 2, 12) + 1
    for _ in range(3):
        trainer.step({"input_ids": ids, "labels": ids}, learning_rate=1e-2)
    trainer.export(tmp_path / "run" / "adapter")
    assert main(["merge", str(tmp_path / "run"), "--model", str(model)]) == 0
    for name, place in (("once", tmp_path / "run"), ("twice", tmp_path / "run" / "merged")):
        assert quantize(capsys, place, tmp_path / name, "--scheme", "w4a16")[0] == 0
    assert raw(tmp_path / "once") == raw(tmp_path / "twice")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_transposed_matrices_are_read_as_they_were(capsys, tmp_path, make_model):
    model = make_model(tiny_gpt2(initializer_range=0.3))
    code, out, err = quantize(capsys, model, tmp_path / "out", "--scheme", "w8a16")
    assert code == 0, err
    assert "only Surogate reads" in out
    tensors = raw(tmp_path / "out")
    assert tensors["transformer.h.0.attn.c_attn.weight_packed"][1] == [96, 8]
    ids = np.arange(24).reshape(2, 12)
    exact, found = (surogate.load(str(of)).forward(ids) for of in (model, tmp_path / "out"))
    assert np.linalg.norm(found - exact) < 0.05 * np.linalg.norm(exact)


def test_what_does_not_fit_stays_and_is_named(capsys, tmp_path, make_model):
    model = make_model(wide(intermediate_size=104))
    code, out, err = quantize(capsys, model, tmp_path / "out", "--scheme", "mxfp4a16")
    assert code == 0, err
    assert "left as they are: `model.layers.0.mlp.down_proj` and 1 more (rows of 104 are no whole groups of 32)" in out
    assert {"lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"} <= set(config(tmp_path / "out")["ignore"])
    assert raw(tmp_path / "out")["model.layers.1.mlp.down_proj.weight"][1] == [128, 104]
    code, out, err = quantize(capsys, model, tmp_path / "grouped", "--scheme", "w4a16", "--asymmetric")
    assert code == 0 and "in groups of 8" in out, err
    assert np.isfinite(surogate.load(str(tmp_path / "grouped")).forward(np.arange(8).reshape(1, 8))).all()


def test_a_tied_head_and_the_embedding_stay(capsys, tmp_path, make_model):
    model = make_model(tiny_qwen3(hidden_size=64))
    assert quantize(capsys, model, tmp_path / "out", "--scheme", "fp8-dynamic")[0] == 0
    before, after = raw(model), raw(tmp_path / "out")
    assert "lm_head.weight" not in after and "lm_head" in config(tmp_path / "out")["ignore"]
    assert after["model.embed_tokens.weight"] == before["model.embed_tokens.weight"]


def test_what_cannot_be_done_is_refused_and_leaves_nothing(capsys, tmp_path, make_model):
    model = make_model(wide())
    output = tmp_path / "out"
    for options, what in [
        (["--scheme", "w4a16", "--group-size", "96"], "--group-size 96: `model.layers.0.mlp.down_proj` has rows of 256"),
        (["--scheme", "nvfp4a16", "--group-size", "32"], "`nvfp4a16` has groups of a fixed size"),
        (["--scheme", "int8-w8a8", "--asymmetric"], "`int8-w8a8` has no zero points"),
        (["--scheme", "fp8-static"], "or take fp8-dynamic"),
    ]:
        code, _, err = quantize(capsys, model, output, *options)
        assert code == 2 and what in err, err
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    code, _, err = quantize(capsys, model, output, "--scheme", "w4a16")
    assert code == 2 and "`model.layers.1.mlp.up_proj.weight` is NaN at [3, 5]" in err, err
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == []
    output.mkdir()
    (output / "thesis.tex").write_text("mine")
    code, _, err = quantize(capsys, model, output, "--scheme", "w4a16")
    assert code == 2 and "nothing is overwritten" in err and (output / "thesis.tex").read_text() == "mine"


@pytest.fixture
def recorded(shared, tmp_path):
    """The recorded Llama, and a run of the rows that the package measured; further rows follow them."""
    folder = shared / "golden" / "compress" / "models" / "llama"
    ids = load_file(folder / "inputs.safetensors")["calibration_ids"]
    rows = np.concatenate([ids, ids[:4]])
    return folder, calibration(tmp_path, shared / "golden" / "llama", rows, shuffle=False, validation_split_ratio=0, per_device_train_batch_size=4)


def test_codes_of_gptq_are_those_of_the_package(capsys, tmp_path, shared, recorded):
    folder, run = recorded
    options = ["--scheme", "w4a16", "--method", "gptq", "--calibration", run, "--samples", "16", "--device", "cpu"]
    code, out, err = quantize(capsys, shared / "golden" / "llama", tmp_path / "out", *options)
    assert code == 0, err
    assert "Activations were measured on 384 tokens" in out
    found, expected = raw(tmp_path / "out"), raw(folder / "gptq_w4a16_g32")
    assert found.keys() == expected.keys()
    packed = [name for name in found if name.endswith("weight_packed")]
    assert [name for name in found if name not in packed and found[name] != expected[name]] == []
    halves = lambda of: np.concatenate([np.frombuffer(of[name][2], np.uint8) for name in packed])  # noqa: E731
    theirs, own = halves(expected), halves(found)
    same = np.mean([(own & 15) == (theirs & 15), (own >> 4) == (theirs >> 4)])
    assert same >= 0.99, same
    assert config(tmp_path / "out") == config(folder / "gptq_w4a16_g32")
    nearest = raw(shared / "golden" / "compress" / "models" / "llama" / "w4a16_g32")
    assert np.mean(own != halves(nearest)) > 0.1


@pytest.mark.parametrize(("scheme", "form"), [("fp8-static", "fp8_static"), ("nvfp4", "nvfp4")])
def test_scales_of_activations_are_those_of_the_package(capsys, tmp_path, shared, recorded, scheme, form):
    folder, run = recorded
    options = ["--scheme", scheme, "--calibration", run, "--samples", "16", "--device", "cpu"]
    code, out, err = quantize(capsys, shared / "golden" / "llama", tmp_path / "out", *options)
    assert code == 0, err
    found, expected = raw(tmp_path / "out"), raw(folder / form)
    assert found.keys() == expected.keys()
    measured = [name for name in found if ".input_" in name]
    assert [name for name in found if name not in measured and found[name] != expected[name]] == []
    for name in measured:
        own, theirs = (np.frombuffer(of[name][2], np.float32)[0] for of in (found, expected))
        assert abs(own / theirs - 1) < (0.02 if scheme == "nvfp4" else 1e-5), (name, own, theirs)


def test_the_loss_is_measured_printed_and_in_the_card(capsys, tmp_path, make_model):
    model = make_model(wide(initializer_range=0.1))
    ids = np.random.default_rng(0).integers(1, 96, (24, 16))
    run = calibration(tmp_path, model, ids, validation_split_ratio=0.25)
    results = {}
    for name, options in {"w8": ["--scheme", "w8a16"], "w4": ["--scheme", "w4a16", "--group-size", "-1"]}.items():
        code, out, err = quantize(capsys, model, tmp_path / name, *options, "--calibration", run, "--device", "cpu")
        assert code == 0, err
        line = next(line for line in out.splitlines() if "KL divergence" in line)
        assert line.startswith("90 tokens of the validation data: perplexity "), line
        results[name] = float(line.rsplit(" ", 1)[1])
        assert f"| KL divergence from the model before, nats | | {results[name]:.5f} |" in (tmp_path / name / "README.md").read_text()
    assert 0 < results["w8"] < 0.1 * results["w4"]


def test_gptq_loses_less_than_the_nearest_codes(capsys, tmp_path, make_model):
    model = make_model(wide(initializer_range=0.1))
    ids = np.random.default_rng(0).integers(1, 96, (80, 16))
    run = calibration(tmp_path, model, ids, validation_split_ratio=0.25)
    lost = []
    for method in ("rtn", "gptq"):
        options = ["--scheme", "w4a16", "--method", method, "--calibration", run, "--device", "cpu"]
        code, out, err = quantize(capsys, model, tmp_path / method, *options)
        assert code == 0, err
        lost.append(float(next(line for line in out.splitlines() if "KL divergence" in line).rsplit(" ", 1)[1]))
    assert lost[1] < 0.8 * lost[0], lost


def test_data_that_a_method_needs_are_asked_for(capsys, tmp_path, make_model):
    model = make_model(wide())
    for options, what in [
        (["--scheme", "w4a16", "--method", "gptq"], "--method gptq: it needs data"),
        (["--scheme", "nvfp4"], "or take nvfp4a16"),
        (["--scheme", "w4a16", "--calibration", str(tmp_path / "none.yaml")], "none.yaml"),
    ]:
        code, _, err = quantize(capsys, model, tmp_path / "out", *options)
        assert code == 2 and what in err, err
    run = calibration(tmp_path, model, np.ones((1, 16), dtype=int))
    code, _, err = quantize(capsys, model, tmp_path / "out", "--scheme", "w4a16", "--calibration", run)
    assert code != 0 and not (tmp_path / "out").exists(), err


def test_what_a_killed_command_left_is_removed_by_the_next(capsys, tmp_path, make_model):
    model = make_model(wide())
    left = tmp_path / ".out.quantize.17.0.tmp"
    left.mkdir()
    (left / ".model.safetensors.17-0.tmp").write_text("half")
    assert quantize(capsys, model, tmp_path / "out", "--scheme", "fp8-dynamic")[0] == 0
    assert not left.exists() and (tmp_path / "out" / "model.safetensors").is_file()


def test_a_result_answers_and_is_quantized_again(capsys, tmp_path):
    stories = REPOSITORY / "examples" / "stories" / "model"
    code, _, err = quantize(capsys, stories, tmp_path / "out", "--scheme", "w8a16", "--group-size", "-1")
    assert code == 0, err
    assert {path.name for path in stories.glob("tokenizer*")} <= {path.name for path in (tmp_path / "out").iterdir()}
    prompt = ["--prompt", "Once upon a time", "--max-new-tokens", "8", "--temperature", "0", "--device", "cpu"]
    texts = []
    for folder in (stories, tmp_path / "out"):
        assert main(["generate", str(folder), *prompt]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    code, out, err = quantize(capsys, tmp_path / "out", tmp_path / "again", "--scheme", "fp8-dynamic")
    assert code == 0 and config(tmp_path / "again")["format"] == "float-quantized", err
