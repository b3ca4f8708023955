"""Models that see images: their text part computes what the text model does, and the rest of their files is taken over
by merged and exported models as it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import surogate
from conftest import tiny_gemma3, tiny_mistral, tiny_phi4_multimodal, tiny_phi4mm
from safetensors.numpy import load_file, save_file
from surogate.cli.commands import main
from surogate.errors import ModelConfigError
from surogate.models import build

IDS = np.random.default_rng(1).integers(1, 90, (2, 12))


def tiny_ministral3(**changes: object) -> dict[str, object]:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4}
    own = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "sliding_window": None}
    rope |= {"llama_4_scaling_beta": 0.3, "max_position_embeddings": 64}
    return tiny_mistral(**{**own, "head_dim": 16, "rope_theta": None, "rope_parameters": rope, **changes})


PARTS = {
    "gemma3": ("Gemma3ForConditionalGeneration", tiny_gemma3()),
    "mistral3": ("Mistral3ForConditionalGeneration", tiny_ministral3()),
    "mistral": ("Mistral3ForConditionalGeneration", tiny_mistral()),
}


def whole_model(text: Path, place: Path, architecture: str, published: bool) -> Path:
    """A text model's weights as the part of a model with a vision tower, in the names of published files or of modules."""
    place.mkdir()
    fields = json.loads((text / "config.json").read_text())
    own = {"architectures": [architecture], "text_config": fields, "vision_config": {"hidden_size": 8}}
    (place / "config.json").write_text(json.dumps(own | {"image_token_index": 88, "torch_dtype": "float32"}))
    before = "language_model.model." if published else "model.language_model."
    head = "language_model.lm_head." if published else "lm_head."
    tensors = {
        head + name.removeprefix("lm_head.") if name.startswith("lm_head.") else before + name.removeprefix("model."): value
        for name, value in load_file(text / "model.safetensors").items()
    }
    rest = "" if published else "model."
    tensors[f"{rest}vision_tower.patch.weight"] = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    tensors[f"{rest}vision_tower.layers.0.q_proj.weight"] = np.ones((4, 4), np.float32)
    tensors[f"{rest}multi_modal_projector.norm"] = np.float32([1.5, -2.5])
    save_file(tensors, place / "model.safetensors")
    return place


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_the_text_part_of_a_model_with_images(part, published, make_model, tmp_path):
    architecture, fields = PARTS[part]
    text = make_model(fields)
    folder = whole_model(text, tmp_path / "whole", architecture, published)
    np.testing.assert_array_equal(surogate.load(folder).forward(IDS), surogate.load(text).forward(IDS))

    options = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "lora_rank": 4, "lora_dropout": 0.0}
    trainer = surogate.Trainer(options | {"output_dir": str(tmp_path / "run")})
    trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-2)
    trainer.export(tmp_path / "adapter")
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names), sorted(names)[:3]
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert all("language_model" in name for name in targets), "the vision tower has modules of the same short names"

    adapted = surogate.load(folder, adapter=tmp_path / "adapter").forward(IDS)
    merged = ["merge", str(tmp_path / "adapter"), "--model", str(folder), "--output", str(tmp_path / "merged")]
    assert main(merged) == 0
    check_files(folder, tmp_path / "merged")
    np.testing.assert_allclose(surogate.load(tmp_path / "merged").forward(IDS), adapted, atol=2e-5)
    trainer.export_merged(tmp_path / "other")
    check_files(folder, tmp_path / "other")

    full = surogate.Trainer(options | {"lora": False, "output_dir": str(tmp_path / "full run")})
    full.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-2)
    full.export(tmp_path / "full")
    check_files(folder, tmp_path / "full")
    assert not np.array_equal(surogate.load(tmp_path / "full").forward(IDS), surogate.load(folder).forward(IDS))


def check_files(base: Path, result: Path) -> None:
    """The same names; what is not of the text part has the same bits."""
    ours, theirs = load_file(result / "model.safetensors"), load_file(base / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        if "vision" in name or "projector" in name:
            assert ours[name].dtype == value.dtype and np.array_equal(ours[name], value), name
    assert any(not np.array_equal(ours[name], value) for name, value in theirs.items())


def trained(folder: Path, tmp_path: Path) -> tuple[surogate.Trainer, list[Path]]:
    """A trainer of an adapter, and the folders of its merged model and of the model that was trained in full, after a step."""
    options = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "output_dir": str(tmp_path / "run")}
    adapted = surogate.Trainer(options | {"lora_rank": 4, "lora_dropout": 0.0})
    full = surogate.Trainer(options | {"lora": False})
    results = [tmp_path / "merged model", tmp_path / "full model"]
    for trainer, export, result in ((adapted, adapted.export_merged, results[0]), (full, full.export, results[1])):
        trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-2)
        export(result)
    return adapted, results


def test_what_gemma4_does_not_compute_is_taken_over(shared, tmp_path):
    """Vision and audio, and keys and values of layers that read those of others, which a file may have all the same."""
    folder = tmp_path / "whole"
    folder.mkdir()
    of = shared / "golden" / "gemma4_mm"
    (folder / "config.json").write_bytes((of / "config.json").read_bytes())
    unused = {f"model.language_model.layers.{i}.self_attn.{name}_proj.weight": np.ones((3, 2), np.float16) for i in (2, 3) for name in "kv"}
    audio = {"model.audio_tower.conv.weight": np.float32([1.5]), "model.embed_audio.embedding_projection.weight": np.ones((2, 2), np.float32)}
    save_file(load_file(of / "model.safetensors") | unused | audio, folder / "model.safetensors")
    plain = surogate.load(of).forward(IDS)
    np.testing.assert_array_equal(surogate.load(folder).forward(IDS), plain)

    _, results = trained(folder, tmp_path)
    for result in results:
        ours, theirs = (load_file(place / "model.safetensors") for place in (result, folder))
        assert set(ours) == set(theirs)
        kept = [name for name in theirs if name in unused or name in audio or "vision" in name]
        assert len(kept) > 50 and all(ours[name].dtype == theirs[name].dtype for name in kept)
        assert all(np.array_equal(ours[name], theirs[name]) for name in kept)
        assert not np.array_equal(surogate.load(result).forward(IDS), plain)
        scalars = [name for name in theirs if name.endswith("layer_scalar")]
        assert len(scalars) == 4 and all(np.array_equal(ours[name], theirs[name]) for name in scalars), "no gradient"


def test_adapters_in_the_files_of_phi4_multimodal_are_taken_over(make_model, tmp_path):
    """Its own code has adapters for images and sound next to each matrix, and computes text without them."""
    text = make_model(tiny_phi4_multimodal(tie_word_embeddings=True))
    plain = surogate.load(text).forward(IDS)
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_phi4mm(tie_word_embeddings=True, torch_dtype="float32")))
    tensors, others = {}, {"model.embed_tokens_extend.image_embed.glb_GN": np.ones((1, 3), np.float16)}
    for name, value in load_file(text / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = value
            continue
        tensors[f"{module}.base_layer.weight"] = value
        for kind in ("vision", "speech"):
            others[f"{module}.lora_A.{kind}.weight"] = np.full((4, value.shape[1]), 0.5, np.float16)
            others[f"{module}.lora_B.{kind}.weight"] = np.ones((value.shape[0], 4), np.float16)
    save_file(tensors | others, folder / "model.safetensors")
    np.testing.assert_array_equal(surogate.load(folder).forward(IDS), plain)

    adapted, results = trained(folder, tmp_path)
    for result in results:
        ours = load_file(result / "model.safetensors")
        assert set(ours) == set(tensors | others)
        assert all(ours[name].dtype == value.dtype and np.array_equal(ours[name], value) for name, value in others.items())
        assert not np.array_equal(surogate.load(result).forward(IDS), plain)
    adapted.export(tmp_path / "adapter")
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.self_attn.qkv_proj.base_layer.lora_A.weight" in names
    with_adapter = surogate.load(folder, adapter=tmp_path / "adapter").forward(IDS)
    np.testing.assert_allclose(with_adapter, surogate.load(results[0]).forward(IDS), atol=2e-5)


def test_sparse_configs_of_published_models():
    """What Gemma 3's files do not say has the defaults of the text part."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 2, "intermediate_size": 10240}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    ir = json.loads(build({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}))
    assert ir["parameters"][0]["shape"] == [262208, 2560]
    with pytest.raises(ModelConfigError, match="`text_config`: is missing"):
        build({"architectures": ["Gemma3ForConditionalGeneration"]})
    with pytest.raises(ModelConfigError, match="`text_config.model_type`: 'llama' is not supported"):
        build({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "llama"}})
