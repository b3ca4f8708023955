"""Towers of vision-language models in GGUF files, read by llama.cpp and by the gguf package."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import surogate
from safetensors.numpy import load_file, save_file
from test_export import run
from tower_models import AFTER, BEFORE, FAMILIES, SIZE, fields_of, images_of, make, text_of

#: Log-probabilities of files in f32. llama.cpp reads GELU from a table of f16 numbers and computes that of projectors
#: by tanh. The largest difference is 0.013; another image changes them by more than ten times what is allowed.
CLOSE = 0.02
#: The same of files in f16.
CLOSE_F16 = 0.05


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def compare(name, folder, text, tower, allowed, *, model=None):
    """Checks what llama.cpp computes after a prompt with each image, and how far that depends on the image."""
    from llama_cpp_images import PLACE, ask

    images = images_of(name)
    model = model or surogate.load(folder, device="cpu")
    prompts, expected = [], []
    for image, made in zip(images, surogate.process_images(folder, images), strict=True):
        ids = [*BEFORE, *FAMILIES[name].frame(made["tokens"], made["grid"]), *AFTER]
        prompts.append((text_of(name, BEFORE) + PLACE + text_of(name, AFTER), [image]))
        expected.append((len(ids), log_softmax(model.forward([ids], images=[image])[0, -1])))
    other = log_softmax(model.forward([ids], images=[255 - image])[0, -1])
    assert np.abs(other - expected[-1][1]).max() > 10 * allowed, "the image makes no difference"
    for (count, found), (length, values) in zip(ask(text, tower, prompts, SIZE), expected, strict=True):
        assert count == length
        np.testing.assert_allclose(found, values, rtol=0, atol=allowed)


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_sees_the_same_image(capsys, tmp_path, name):
    folder = make(name, tmp_path / name)
    code, out, err = run(capsys, "export", folder, "--format", "gguf", "--encoding", "f32")
    text, tower = folder / f"{name}-f32.gguf", folder / f"mmproj-{name}-f32.gguf"
    assert (code, err) == (0, ""), err
    written = [line for line in out.splitlines() if ".gguf" in line]
    assert len(written) == 2 and written[0].startswith(f"{text}: ") and written[1].startswith(f"{tower}: the tower")
    assert out.count("read back and compared with the weights") == 2
    compare(name, folder, text, tower, CLOSE)


def changed(name: str, tmp_path, *, text=None, tower=None, whole=None, **processor):
    fields = fields_of(name, text=text, tower=tower) | (whole or {})
    return make(name, tmp_path / name, fields, **processor)


TILES, FIXED = "of the processor: readers of this form cut all images in tiles", "readers of this form have"
REFUSED = [
    ("gemma3", {"tower": {"hidden_act": "gelu"}}, f"`vision_config.hidden_act`: {FIXED} gelu_pytorch_tanh, not gelu"),
    ("gemma3", {"tower": {"intermediate_size": 32}}, "`vision_config.intermediate_size`: readers of this form cannot"),
    ("smolvlm", {"do_image_splitting": False}, f"`do_image_splitting` {TILES}"),
    ("smolvlm", {"size": {"longest_edge": 16}}, f"`size.longest_edge` {TILES}"),
    ("smolvlm", {"max_image_size": {"longest_edge": 8}}, f"`max_image_size` of the processor: {FIXED} tiles of"),
    ("qwen2_vl", {"tower": {"hidden_act": "silu"}}, f"`vision_config.hidden_act`: {FIXED} quick_gelu, not silu"),
    ("qwen2_5_vl", {"tower": {"window_size": 16}}, f"`vision_config.window_size`: {FIXED} 112, not 16"),
    ("qwen2_5_vl", {"tower": {"fullatt_block_indexes": [0, 1]}}, "`vision_config.fullatt_block_indexes`: in this form"),
    ("qwen2_5_vl", {"tower": {"temporal_patch_size": 1}}, f"`vision_config.temporal_patch_size`: {FIXED} 2, not 1"),
    ("qwen3_vl", {"tower": {"rope_theta": 100.0}}, f"`vision_config.rope_theta`: {FIXED} 10000.0, not 100.0"),
    ("qwen3_vl", {"tower": {"deepstack_visual_indexes": [0, 1, 2]}}, "expected fewer than the text has layers, 3"),
    ("mistral3", {"text": {"rms_norm_eps": 1e-6}}, f"`text_config.rms_norm_eps`: {FIXED} 1e-05 in the projector"),
    ("mistral3", {"tower": {"head_dim": 8}}, f"`vision_config.head_dim`: {FIXED} 16, not 8"),
    ("gemma4", {"tower": {"num_key_value_heads": 1}}, f"`vision_config.num_key_value_heads`: {FIXED} 2, not 1"),
]


@pytest.mark.parametrize(("name", "change", "problem"), REFUSED)
def test_settings_that_llama_cpp_has_fixed_are_refused(capsys, tmp_path, name, change, problem):
    """Before anything is written; the text alone can be."""
    folder = changed(name, tmp_path, **change)
    code, _, err = run(capsys, "export", folder, "--format", "gguf")
    assert code == 2 and problem in err and "hint: --text-only writes the text without the tower" in err, err
    assert not list(folder.glob("*.gguf"))
    code, out, err = run(capsys, "export", folder, "--format", "gguf", "--text-only")
    assert code == 0, err
    assert [path.name for path in folder.glob("*.gguf")] == [f"{name}-bf16.gguf"]
    said = r"Note: this is the text alone: \d+ tensors of other parts are in no file \(--text-only\)"
    assert re.search(said, out), out


def test_a_tower_without_windows_is_that_of_full_attention(capsys, tmp_path):
    folder = changed("qwen2_5_vl", tmp_path, tower={"fullatt_block_indexes": [0, 1, 2], "window_size": 16})
    code, _, err = run(capsys, "export", folder, "--format", "gguf", "--encoding", "f32")
    assert code == 0, err
    compare("qwen2_5_vl", folder, folder / "qwen2_5_vl-f32.gguf", folder / "mmproj-qwen2_5_vl-f32.gguf", CLOSE)


def test_what_the_folder_lacks_is_named(capsys, tmp_path):
    folder = make("mistral3", tmp_path / "mistral3")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("[IMG_BREAK]", "[BREAK]"))
    code, _, err = run(capsys, "export", folder, "--format", "gguf")
    assert code == 2 and "tokenizer.json: there is no token [IMG_BREAK], of which llama.cpp reads the embedding" in err
    (folder / "preprocessor_config.json").unlink()
    code, _, err = run(capsys, "export", folder, "--format", "gguf")
    assert code == 2 and "there is no `preprocessor_config.json`" in err
    assert not list(folder.glob("*.gguf"))


def test_nothing_is_written_where_one_of_the_files_is_there(capsys, tmp_path):
    folder = make("gemma3", tmp_path / "gemma3")
    place = tmp_path / "mmproj-result.gguf"
    place.write_bytes(b"mine")
    code, _, err = run(capsys, "export", folder, "--format", "gguf", "--output", tmp_path / "result.gguf")
    assert code == 2 and f"{place} already exists: nothing is overwritten" in err
    assert not (tmp_path / "result.gguf").exists() and place.read_bytes() == b"mine"
    assert run(capsys, "export", folder, "--format", "hf", "--text-only")[0] == 2


def test_a_tensor_of_the_tower_without_a_place_leaves_no_file(capsys, tmp_path):
    folder = make("qwen3_vl", tmp_path / "qwen3_vl")
    tensors = load_file(folder / "model.safetensors") | {"model.visual.gate.weight": np.ones((2, 2), np.float32)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code, out, err = run(capsys, "export", folder, "--format", "gguf")
    assert code == 2 and "`model.visual.gate.weight` has no place in the file" in err, err
    assert not list(folder.glob("*.gguf")) and ".gguf" not in out


@pytest.mark.parametrize(("name", "where"), [("gemma4", "in no layer"), ("gemma4_unified", "in all layers")])
def test_attention_between_tokens_of_an_image_that_is_computed_otherwise_is_told(capsys, tmp_path, name, where):
    text = {"layer_types": ["full_attention"] * 2 + ["sliding_attention", "full_attention"]}
    if name == "gemma4":
        text = {"use_bidirectional_attention": None}
    folder = changed(name, tmp_path, text=text)
    code, out, err = run(capsys, "export", folder, "--format", "gguf")
    assert code == 0, err
    assert "Note: in llama.cpp tokens of an image see each other both ways in layers with a window alone" in out
    assert f"here they do {where}, so that its answers to images differ" in out


def test_tensors_of_a_tower_are_those_of_the_model_in_the_order_of_the_file(capsys, tmp_path):
    """Values read by the gguf package equal the weights of a tower with transposed tensors, in f16 within its rounding."""
    gguf = pytest.importorskip("gguf")
    folder = make("gemma4", tmp_path / "gemma4")
    tensors = load_file(folder / "model.safetensors")
    audio = {"model.embed_audio.embedding_projection.weight": np.ones((48, 8), np.float32)}
    save_file(tensors | audio, folder / "model.safetensors", metadata={"format": "pt"})
    code, out, err = run(capsys, "export", folder, "--format", "gguf", "--encoding", "q8_0")
    assert code == 0 and "Note: 1 tensors of other parts, as of audio or of further predictions, are" in out, err
    assert sorted(path.name for path in folder.glob("*.gguf")) == ["gemma4-q8_0.gguf", "mmproj-gemma4-f16.gguf"]
    file = gguf.GGUFReader(folder / "mmproj-gemma4-f16.gguf")
    found = {of.name: gguf.quants.dequantize(of.data, of.tensor_type) for of in file.tensors}
    kinds = {of.name: of.tensor_type.name for of in file.tensors}
    of_tower = [name for name in tensors if "vision_tower" in name or "embed_vision" in name]
    assert len(found) == len(of_tower)
    at = "model.vision_tower."
    conv = tensors[f"{at}patch_embedder.input_proj.weight"].reshape(32, 4, 4, 3).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(found["v.patch_embd.weight"], conv)
    table = tensors[f"{at}patch_embedder.position_embedding_table"]
    np.testing.assert_array_equal(found["v.position_embd.weight"], table)
    bound = tensors[f"{at}encoder.layers.1.mlp.up_proj.output_max"]
    assert found["v.blk.1.ffn_up.output_max"].tolist() == [float(bound)]
    queries = tensors[f"{at}encoder.layers.0.self_attn.q_proj.linear.weight"]
    np.testing.assert_allclose(found["v.blk.0.attn_q.weight"], queries, rtol=2**-11, atol=2**-24)
    assert kinds["v.blk.0.attn_q.weight"] == "F16" and kinds["v.position_embd.weight"] == "F32"
    fields = {name: field.contents() for name, field in file.fields.items()}
    assert fields["general.architecture"] == "clip" and fields["general.type"] == "mmproj"
    assert fields["clip.projector_type"] == "gemma4v" and fields["clip.vision.projector.scale_factor"] == 2
    assert fields["clip.vision.image_std"] == [1.0, 1.0, 1.0] and fields["clip.vision.projection_dim"] == 48


def write_adapter(folder, base, modules, rank=2):
    """An adapter on these modules, with random matrices."""
    rng = np.random.default_rng(3)
    folder.mkdir()
    tensors = load_file(base / "model.safetensors")
    matrices = {}
    for module in modules:
        outputs, inputs = tensors[f"{module}.weight"].shape
        matrices[f"base_model.model.{module}.lora_A.weight"] = rng.normal(0, 0.3, (rank, inputs)).astype(np.float32)
        matrices[f"base_model.model.{module}.lora_B.weight"] = rng.normal(0, 0.3, (outputs, rank)).astype(np.float32)
    save_file(matrices, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    config["target_modules"] = modules
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))


def test_an_adapter_of_the_tower_is_part_of_both_files(capsys, tmp_path):
    """In the default encodings, too."""
    base = make("qwen3_vl", tmp_path / "base")
    modules = ["blocks.0.attn.qkv", "blocks.2.mlp.linear_fc1", "merger.linear_fc2"]
    modules.append("deepstack_merger_list.0.linear_fc1")
    adapted = [f"model.visual.{module}" for module in modules] + ["model.language_model.layers.0.self_attn.q_proj"]
    write_adapter(tmp_path / "run", base, adapted)
    live = surogate.load(base, adapter=tmp_path / "run", device="cpu")
    (image, *_), ids = images_of("qwen3_vl"), [*BEFORE, 90, *[88] * 6, 91, *AFTER]
    change = live.forward([ids], images=[image]) - surogate.load(base, device="cpu").forward([ids], images=[image])
    assert np.abs(change[0, -1]).max() > 0.5
    for encoding, of_tower, allowed in (("f32", "f32", CLOSE), ("f16", "f16", CLOSE_F16)):
        code, _, err = run(capsys, "export", tmp_path / "run", "--format", "gguf", "--encoding", encoding)
        assert code == 0, err
        text, tower = tmp_path / f"run/run-{encoding}.gguf", tmp_path / f"run/mmproj-run-{of_tower}.gguf"
        compare("qwen3_vl", base, text, tower, allowed, model=live)
