"""Every architecture of docs/models.md starts with nothing but a model and data, in each way to train it; and what dropout
adapters get where nothing is said."""

from __future__ import annotations

import json

import pytest
import surogate
from conftest import (
    tiny_apertus,
    tiny_ernie4_5,
    tiny_exaone4,
    tiny_cohere2,
    tiny_gemma,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gemma4,
    tiny_gemma4_mixture,
    tiny_gemma4_unified,
    tiny_glm4,
    tiny_gpt2,
    tiny_granite,
    tiny_granite_swa,
    tiny_hunyuan,
    tiny_llama,
    tiny_minimax_m2,
    tiny_mistral,
    tiny_muse_glimmer,
    tiny_olmo2,
    tiny_olmo3,
    tiny_olmo_hybrid,
    tiny_phi3,
    tiny_phi4_multimodal,
    tiny_phi4mm,
    tiny_qwen2,
    tiny_qwen3,
    tiny_seed_oss,
    tiny_smollm3,
    tiny_starcoder2,
)
from surogate.cli.commands import main
from surogate.dsl.model import ARCHITECTURES
from surogate.errors import ConfigError
from test_hybrids import (
    tiny_falcon_h1,
    tiny_granitemoehybrid,
    tiny_lfm2,
    tiny_lfm2_moe,
    tiny_nemotron_h,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_next,
)
from test_mixtures import MIXTURES, tiny_qwen3_moe
from test_text_parts import tiny_ministral3


def with_images(architecture: str, text: dict[str, object]) -> dict[str, object]:
    return {"architectures": [architecture], "text_config": text, "vision_config": {"hidden_size": 8}, "torch_dtype": "float32"}


TEXT_MODELS = [make() for make in (
    tiny_gemma2, tiny_gemma3, tiny_gemma4_mixture, tiny_glm4, tiny_gpt2, tiny_granite, tiny_llama, tiny_mistral, tiny_olmo2,
    tiny_cohere2, tiny_gemma, tiny_gemma4_unified, tiny_granite_swa, tiny_hunyuan, tiny_minimax_m2, tiny_starcoder2, tiny_olmo3, tiny_phi3,
    tiny_qwen2, tiny_qwen3, tiny_smollm3, tiny_qwen3_5, tiny_qwen3_5_moe, tiny_qwen3_next,
    tiny_ministral3, tiny_seed_oss, tiny_exaone4, tiny_ernie4_5, tiny_lfm2, tiny_lfm2_moe, tiny_falcon_h1,
    tiny_nemotron_h, tiny_granitemoehybrid, tiny_apertus, tiny_olmo_hybrid, tiny_phi4_multimodal, tiny_phi4mm, tiny_muse_glimmer, *MIXTURES,
)]  # fmt: skip
WITH_IMAGES = [
    with_images("Gemma3ForConditionalGeneration", tiny_gemma3()),
    with_images("Gemma4ForConditionalGeneration", tiny_gemma4()),
    with_images("Gemma4UnifiedForConditionalGeneration", tiny_gemma4_unified()),
    with_images("Mistral3ForConditionalGeneration", tiny_ministral3()),
    with_images("Qwen3_5ForConditionalGeneration", tiny_qwen3_5()),
    with_images("Qwen3_5MoeForConditionalGeneration", tiny_qwen3_5_moe()),
    with_images("Qwen2VLForConditionalGeneration", tiny_qwen2()),
    with_images("Qwen2_5_VLForConditionalGeneration", tiny_qwen2()),
    with_images("Qwen3VLForConditionalGeneration", tiny_qwen3()),
    with_images("Qwen3VLMoeForConditionalGeneration", tiny_qwen3_moe()),
    with_images("SmolVLMForConditionalGeneration", tiny_llama()),
    with_images("Idefics3ForConditionalGeneration", tiny_llama()),
]
MODELS = {of["architectures"][0]: of for of in [*TEXT_MODELS, *WITH_IMAGES]}

WAYS = {"lora": {}, "full": {"lora": False}, "qlora": {"qlora_bnb": True}, "fp8": {"recipe": "fp8_hybrid"}}


@pytest.fixture
def least(tmp_path):
    """Options of a run with a model and data and nothing else."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": [1 + i % 60] * 20}) + "\n" for i in range(300)))

    def options(fields: dict) -> dict[str, object]:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return {"model": str(tmp_path), "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "tokens"}]}

    return options


def test_every_architecture_has_a_model_here():
    own = {name for name in ARCHITECTURES if not name.endswith("ForTests")}
    assert set(MODELS) == own


def starts() -> list[object]:
    """Models and ways. One with images, whose text is that of another model here, has all ways in the long form, and in the
    short one adapters and one of the others, so that each way has four such models.
    """
    others = [way for way in WAYS if way != "lora"]
    left = {of["architectures"][0]: {"lora", others[number % len(others)]} for number, of in enumerate(WITH_IMAGES)}
    return [
        pytest.param(architecture, way, marks=[] if way in left.get(architecture, WAYS) else [pytest.mark.long])
        for architecture in MODELS
        for way in WAYS
    ]


@pytest.mark.parametrize(("architecture", "way"), starts())
def test_a_run_starts_with_its_model_and_data_alone(architecture, way, least, tmp_path, capsys):
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(least(MODELS[architecture]) | WAYS[way]))
    assert main(["plan", str(run), "--machine", "h100"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("way", ["lora", "full"])
@pytest.mark.parametrize(
    "fields",
    [
        tiny_gpt2(attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1),
        tiny_starcoder2(attention_dropout=0.1, embedding_dropout=0.1, residual_dropout=0.1),
        tiny_seed_oss(residual_dropout=None, attention_dropout=None),
    ],
    ids=lambda fields: fields["model_type"],
)
def test_a_run_starts_with_the_dropout_of_published_files(fields, way, least, tmp_path, capsys):
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(least(fields) | WAYS[way]))
    assert main(["plan", str(run), "--machine", "h100"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("way", WAYS)
def test_a_mixture_trains_with_its_defaults(way, make_model, least, tmp_path):
    options = least(tiny_qwen3_moe()) | WAYS[way] | {"device": "cpu", "output_dir": str(tmp_path / "run")}
    trainer = surogate.Trainer(options | {"model": str(make_model(tiny_qwen3_moe()))})
    assert trainer.step()["loss"] > 0


def test_adapters_on_parameters_have_no_dropout(least, tmp_path, capsys):
    run = tmp_path / "run.yaml"

    def shown(fields: dict, **more: object) -> str:
        run.write_text(json.dumps(least(fields) | more))
        assert main(["show", "config", str(run)]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("lora_dropout:"))

    assert shown(tiny_llama()) == "lora_dropout: 0.05  # auto: the usual value"
    assert shown(tiny_llama(), lora_dropout=0.2) == "lora_dropout: 0.2  # given"
    expected = "lora_dropout: 0.0  # auto: adapters on parameters have none, as in PEFT: gate.weight, gate_up_proj, down_proj"
    assert shown(tiny_qwen3_moe()).startswith(expected)
    assert shown(tiny_qwen3_moe(), lora_target_modules=["q_proj"]).startswith("lora_dropout: 0.05")
    own = {"lora_target_modules": ["q_proj"], "lora_target_parameters": ["k_proj.weight"]}
    assert shown(tiny_llama(), **own).startswith("lora_dropout: 0.0 ")
    assert shown(tiny_llama(), lora=False) == "lora_dropout: auto  # auto: only adapters have it"
    run.write_text(json.dumps(least(tiny_qwen3_moe())))
    assert main(["plan", str(run), "--device", "cpu"]) == 0
    assert "`lora_dropout` is 0 instead of 0.05" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="`lora_dropout` is 0.05, and adapters on parameters have none"):
        surogate.Trainer(least(tiny_qwen3_moe()) | {"lora_dropout": 0.05, "init": "random", "device": "cpu"})
