"""GGUF files as llama.cpp itself computes them, against the engine.

Weights, keys, values and products of both are f32 here. What is left are other orders of sums, and what llama.cpp
looks up in tables of f16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import (
    tiny_apertus,
    tiny_cohere2,
    tiny_ernie4_5,
    tiny_exaone4,
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
    tiny_phi3,
    tiny_phi4_multimodal,
    tiny_phi4mm,
    tiny_qwen2,
    tiny_qwen3,
    tiny_seed_oss,
    tiny_smollm3,
    tiny_starcoder2,
)
from gguf_models import PROMPTS, export, log_probabilities, model_folder
from llama_cpp import ask
from safetensors.numpy import load_file, save_file
from surogate import ModelConfigError
from surogate.cli.commands import main
from surogate.dsl.model import ARCHITECTURES
from surogate.models import gguf
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
from test_mixtures import (
    in_mxfp4,
    tiny_deepseek_v2,
    tiny_deepseek_v3,
    tiny_ernie4_5_moe,
    tiny_glm4_moe,
    tiny_glm4_moe_lite,
    tiny_gpt_oss,
    tiny_mixtral,
    tiny_olmoe,
    tiny_qwen2_moe,
    tiny_qwen3_moe,
)
from test_text_parts import tiny_ministral3

#: The largest difference of a log-probability, which is as large as 15. Measured are 1.2e-4 at most, and 4e-5 without
#: latent attention.
SAME = 3e-4
#: The same with GELU, which llama.cpp reads from a table of 65536 numbers in f16. Measured are 3e-3 at most.
TABLE = 1e-2


def part(architecture: str, kind: str, text: dict, **more: object) -> dict[str, object]:
    """The config.json of a model with a tower and this text."""
    fields = {name: value for name, value in text.items() if name != "architectures"} | more
    whole = {"architectures": [architecture], "model_type": kind, "text_config": fields, "torch_dtype": "float32"}
    return whole | {"tie_word_embeddings": text.get("tie_word_embeddings", False), "vision_config": {"hidden_size": 8}}


def turning(*sections: int, **more: object) -> dict[str, object]:
    """A rotation of sections of pairs, which all turn visibly within a few tokens."""
    return {"rope_type": "default", "rope_theta": 10.0, "mrope_section": list(sections), **more}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
EVERY = {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 10000.0, "beta_fast": 16.0, "beta_slow": 2.0}}
# The prompt of one token is not rotated by either table.
LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}
SIX = {"num_hidden_layers": 6, "sliding_window_pattern": 6}
DELTA = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4, "linear_value_head_dim": 8}
# Readers normalize queries and keys of delta nets, and latents, with the epsilon of the other norms.
DELTA |= {"rms_norm_eps": 1e-6}
QWEN3_VL = {"head_dim": 128, "model_type": "qwen3_vl_text", "rope_theta": None}
QWEN3_VL |= {"rope_parameters": turning(24, 20, 20, mrope_interleaved=True)}
# llama.cpp of 2026-10 does not read the epsilon of this form and normalizes without one.
QWEN2_VL = {"rms_norm_eps": 1e-12, "rope_theta": None, "rope_parameters": turning(1, 1, 2)}
SPARSE = ["linear_attention", "full_attention", "moe"]
FACTORS = {
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.1,
}
FACTORS |= {"attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6}
FACTORS |= {
    "mlp_multipliers": [0.9, 1.3],
    "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
    "mamba_norm_before_gate": False,
}
MULTIPLIERS = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
GLM_FLASH = {"rms_norm_eps": 1e-6, "n_group": 1, "topk_group": 1}

CASES = {
    "llama": tiny_llama(),
    "llama with biases": tiny_llama(attention_bias=True, mlp_bias=True),
    "llama, tied": tiny_llama(tie_word_embeddings=True),
    "llama, linear": tiny_llama(rope_scaling={"type": "linear", "factor": 4.0}),
    "llama 3.1": tiny_llama(rope_scaling=LLAMA3 | {"original_max_position_embeddings": 16}),
    "llama, yarn": tiny_llama(rope_scaling=YARN),
    "llama, every number of yarn": tiny_llama(**EVERY),
    "mistral": tiny_mistral(sliding_window=None),
    "idefics3": part("Idefics3ForConditionalGeneration", "idefics3", tiny_llama()),
    "smolvlm": part("SmolVLMForConditionalGeneration", "smolvlm", tiny_llama()),
    "qwen2": tiny_qwen2(),
    "qwen2-vl": part("Qwen2VLForConditionalGeneration", "qwen2_vl", tiny_qwen2(**QWEN2_VL), model_type="qwen2_vl_text"),
    "qwen2.5-vl": part(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", tiny_qwen2(**QWEN2_VL), model_type="qwen2_5_vl_text"
    ),
    "qwen3": tiny_qwen3(),
    "qwen3-vl": part("Qwen3VLForConditionalGeneration", "qwen3_vl", tiny_qwen3(**QWEN3_VL)),
    "smollm3": tiny_smollm3(no_rope_layer_interval=4),
    "gemma": tiny_gemma(),
    "gemma2": tiny_gemma2(),
    "gemma3": tiny_gemma3(**SIX),
    "gemma3 with a tower": part("Gemma3ForConditionalGeneration", "gemma3", tiny_gemma3(**SIX)),
    "phi3": tiny_phi3(),
    "phi3, two tables": tiny_phi3(rope_scaling=LONG, original_max_position_embeddings=4),
    "phi4_multimodal": tiny_phi4_multimodal(),
    "phi4mm": tiny_phi4mm(),
    "granite": tiny_granite(),
    "granite_swa": tiny_granite_swa(layer_rope_theta=[0, 10000.0, 10000.0, 10000.0], **MULTIPLIERS),
    "muse_glimmer": tiny_muse_glimmer(post_norm_eps=1e-8),
    "olmo2": tiny_olmo2(),
    "olmo2, tied": tiny_olmo2(tie_word_embeddings=True),
    "olmo3": tiny_olmo3(),
    "glm4": tiny_glm4(),
    "ernie4_5": tiny_ernie4_5(),
    "exaone4": {**tiny_exaone4(), "sliding_window": None},
    "seed_oss": tiny_seed_oss(),
    "starcoder2": tiny_starcoder2(sliding_window=None),
    "cohere2": tiny_cohere2(tie_word_embeddings=True),
    "apertus": tiny_apertus(),
    "ministral3": tiny_ministral3(),
    "mistral3": part("Mistral3ForConditionalGeneration", "mistral3", tiny_ministral3()),
    "mistral3 with a mistral": part("Mistral3ForConditionalGeneration", "mistral3", tiny_mistral(sliding_window=None)),
    "hunyuan": tiny_hunyuan(),
    "gpt2": tiny_gpt2(),
    "qwen3_moe": tiny_qwen3_moe(mlp_only_layers=[]),
    "qwen3-vl_moe": part(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        tiny_qwen3_moe(mlp_only_layers=[], norm_topk_prob=None, **QWEN3_VL),
        model_type="qwen3_vl_moe_text",
    ),
    "qwen2_moe": tiny_qwen2_moe(),
    "olmoe": tiny_olmoe(num_key_value_heads=4),
    "mixtral": tiny_mixtral(sliding_window=None),
    "gpt_oss": tiny_gpt_oss(swiglu_limit=7.0, num_hidden_layers=4, **EVERY),
    "gemma4": tiny_gemma4(),
    "gemma4 with a tower": part("Gemma4ForConditionalGeneration", "gemma4", tiny_gemma4()),
    "gemma4 without a tower": tiny_gemma4_unified(),
    "gemma4 without a tower, whole": part(
        "Gemma4UnifiedForConditionalGeneration", "gemma4_unified", tiny_gemma4_unified()
    ),
    "gemma4 with a mixture": tiny_gemma4_mixture(),
    "ernie4_5_moe": tiny_ernie4_5_moe(),
    "glm4_moe": tiny_glm4_moe(),
    "minimax_m2": tiny_minimax_m2(),
    "deepseek_v3": tiny_deepseek_v3(rms_norm_eps=1e-6),
    "deepseek_v2": tiny_deepseek_v2(rms_norm_eps=1e-6, topk_method="greedy", n_group=None, topk_group=None),
    "deepseek_v2 lite": tiny_deepseek_v2(
        rms_norm_eps=1e-6, topk_method="greedy", n_group=None, topk_group=None, q_lora_rank=None
    ),
    "glm4_moe_lite": tiny_glm4_moe_lite(**GLM_FLASH),
    "granitemoehybrid": tiny_granitemoehybrid(),
    "granitemoehybrid that rotates": tiny_granitemoehybrid(position_embedding_type="rope"),
    "granitemoehybrid without experts": tiny_granitemoehybrid(num_local_experts=0, num_experts_per_tok=None),
    "falcon_h1": tiny_falcon_h1(**FACTORS),
    "falcon_h1, tied": tiny_falcon_h1(**FACTORS, tie_word_embeddings=True),
    "nemotron_h": tiny_nemotron_h(layers_block_type=["linear_attention", "full_attention", "mlp"]),
    "nemotron_h with a mixture": tiny_nemotron_h(layers_block_type=SPARSE),
    "nemotron_h with a latent mixture": tiny_nemotron_h(
        layers_block_type=SPARSE, moe_latent_size=16, moe_intermediate_size=32
    ),
    "qwen3_next": tiny_qwen3_next(mlp_only_layers=[], **DELTA),
    "qwen3.5": tiny_qwen3_5(**DELTA),
    "qwen3.5 with a tower": part("Qwen3_5ForConditionalGeneration", "qwen3_5", tiny_qwen3_5(**DELTA)),
    "qwen3.5_moe": tiny_qwen3_5_moe(**DELTA),
    "qwen3.5_moe with a tower": part("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", tiny_qwen3_5_moe(**DELTA)),
    "lfm2": tiny_lfm2(),
    "lfm2_moe": tiny_lfm2_moe(),
}

#: Families with GELU.
OF_TABLE = ("gemma", "gpt2", "starcoder2")


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_what_the_engine_does(name: str, tmp_path: Path, capsys) -> None:
    model = model_folder(tmp_path, CASES[name])
    expected = log_probabilities(model)
    found = ask(export(model), prompts=PROMPTS, size=expected.shape[1])["logprobs"]
    worst = np.abs(found - expected).max(axis=1)
    allowed = TABLE if name.startswith(OF_TABLE) else SAME
    assert (worst < allowed).all(), (
        f"log-probabilities after prompts of {[len(of) for of in PROMPTS]} tokens differ by {worst}"
    )


def test_every_form_is_computed_by_llama_cpp() -> None:
    """All that are registered have one, but for OLMo Hybrid, which llama.cpp does not have."""
    named = {of.name for of in ARCHITECTURES.values() if of.module.__module__.startswith("surogate.models.")}
    assert named - set(gguf.FORMS) == {"OlmoHybridForCausalLM"}
    checked = {fields["architectures"][0] for fields in CASES.values()}
    assert checked == set(gguf.FORMS)


def tensors(model: Path) -> dict[str, np.ndarray]:
    return dict(load_file(model / "model.safetensors"))


def same_bytes(model: Path, changed: dict[str, np.ndarray], place: Path) -> None:
    """Exports the model with its weights in another form, and holds the file against that of the first."""
    place = place / model.name
    place.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(model / name, place)
    save_file(changed, place / "model.safetensors", {"format": "pt"})
    first, second = model.parent / "first.gguf", model.parent / "second.gguf"
    for folder, file in ((model, first), (place, second)):
        words = ["export", str(folder), "--format", "gguf", "--encoding", "f32"]
        assert main([*words, "--output", str(file)]) == 0
    assert first.read_bytes() == second.read_bytes()


def test_experts_in_stacks_and_one_by_one_make_the_same_file(tmp_path: Path, capsys) -> None:
    model = model_folder(tmp_path, CASES["qwen3_moe"])
    of, changed = tensors(model), {}
    for name, value in of.items():
        if ".experts." not in name:
            changed[name] = value
    for layer in range(3):
        every = [f"model.layers.{layer}.mlp.experts.{expert}." for expert in range(4)]
        both = [np.concatenate([of[f"{at}gate_proj.weight"], of[f"{at}up_proj.weight"]]) for at in every]
        changed[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.stack(both)
        changed[f"model.layers.{layer}.mlp.experts.down_proj"] = np.stack([of[f"{at}down_proj.weight"] for at in every])
    same_bytes(model, changed, tmp_path / "other")


def test_stacks_with_exchanged_axes_make_the_same_file(tmp_path: Path, capsys) -> None:
    """Qwen3-VL, as published."""
    model = model_folder(tmp_path, CASES["qwen3-vl_moe"])
    changed = {
        name: np.ascontiguousarray(value.swapaxes(1, 2)) if value.ndim == 3 else value
        for name, value in tensors(model).items()
    }
    assert sum(value.ndim == 3 for value in changed.values()) == 6
    same_bytes(model, changed, tmp_path / "other")


def test_published_names_make_the_same_file_and_parts_that_are_left_out_are_told(tmp_path: Path, capsys) -> None:
    model = model_folder(tmp_path, CASES["nemotron_h"])
    changed = {name.replace("model.", "backbone.", 1): value for name, value in tensors(model).items()}
    changed |= {
        "mtp.layers.0.norm.weight": np.ones(32, np.float32),
        "mtp.layers.0.eh_proj.weight": np.ones((2, 2), np.float32),
    }
    capsys.readouterr()
    same_bytes(model, changed, tmp_path / "other")
    out = capsys.readouterr().out
    assert out.count("Note: 2 tensors of parts that are not the text's") == 1
    assert out.count("readers do not raise time steps to `time_step_min`, 0.001") == 2


def test_files_that_do_not_fit_the_architecture_are_refused(tmp_path: Path, capsys) -> None:
    model = model_folder(tmp_path, CASES["qwen3"])
    of = tensors(model)
    wrong = of["model.layers.1.self_attn.q_norm.weight"][:-2]
    for changed, said in (
        ({"model.layers.1.self_attn.q_norm.weight": wrong}, "has shape [14], the model needs [16]"),
        ({"model.layers.1.self_attn.q_norm.weight": None}, "`model.layers.1.self_attn.q_norm.weight` is missing"),
        ({"model.other.weight": wrong}, "`model.other.weight` has no place in the file"),
    ):
        found = {name: value for name, value in (of | changed).items() if value is not None}
        save_file(found, model / "model.safetensors", {"format": "pt"})
        capsys.readouterr()
        assert main(["export", str(model), "--format", "gguf", "--output", str(tmp_path / "x.gguf")]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "x.gguf").exists()


#: The root mean square of differences of log-probabilities from those of the decoded weights: llama.cpp rounds what it
#: multiplies with codes to eight bits. Measured is 0.023 at most; under four to six bits it is 0.06 to 0.1 from those
#: of the model's own weights.
ROUNDED = 0.04
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}


@pytest.mark.parametrize("encoding", ["q8_0", "q6_k", "q5_k_m", "q4_k_m"])
def test_stacks_of_experts_in_codes(encoding: str, tmp_path: Path, capsys) -> None:
    """The values that codes stand for are those that llama.cpp computes with. Eight experts have codes of their own in
    its mixtures."""
    from gguf import GGUFReader, dequantize

    fields = tiny_qwen3_moe(mlp_only_layers=[], num_experts=8, num_experts_per_tok=8, **WIDE)
    model = model_folder(tmp_path, fields, spread=0.06)
    file = export(model, encoding)
    found = ask(file, prompts=PROMPTS, size=96)["logprobs"]
    kinds, decoded, of = {}, {}, tensors(model)
    sources = {source["name"]: source["from"] for source in json.loads(gguf.describe(fields, [], "x"))["tensors"]}
    for tensor in GGUFReader(file).tensors:
        kinds[tensor.name] = tensor.tensor_type.name
        names = sources[tensor.name]
        values = dequantize(tensor.data, tensor.tensor_type).reshape(
            -1, *of[names if isinstance(names, str) else names[0]].shape
        )
        decoded |= zip([names] if isinstance(names, str) else names, values, strict=True)
    plain = log_probabilities(model)
    save_file(decoded, model / "model.safetensors", {"format": "pt"})
    expected = log_probabilities(model)
    error = np.sqrt(((found - expected) ** 2).mean())
    assert 0 < error < ROUNDED
    assert encoding == "q8_0" or error < 0.5 * np.sqrt(((found - plain) ** 2).mean())
    usual = encoding.removesuffix("_m").upper()
    assert kinds["blk.1.ffn_up_exps.weight"] == usual and kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    if encoding.endswith("_m"):
        assert [kinds[f"blk.{i}.ffn_down_exps.weight"] for i in range(3)] == [usual, usual, "Q6_K"]
        assert kinds["blk.0.attn_k.weight"] == kinds["blk.0.attn_v.weight"] == "Q8_0"


def test_experts_in_mxfp4_stay_as_they_are(tmp_path: Path, capsys) -> None:
    """Codes of a published GPT-OSS become codes of the same numbers; the other matrices are rounded to eight bits."""
    from gguf import GGUFReader, dequantize

    fields = tiny_gpt_oss(swiglu_limit=7.0, intermediate_size=32, **EVERY)
    model = model_folder(tmp_path, fields, spread=0.1)
    of, numbers = tensors(model), np.random.default_rng(5)
    coded, plain = dict(of), dict(of)
    for layer in range(2):
        for name, columns in (("gate_up_proj", 64), ("down_proj", 32)):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            coded[f"{stem}_blocks"], coded[f"{stem}_scales"], plain[stem] = in_mxfp4(numbers, 4, 32, columns)
            del coded[stem]
    save_file(plain, model / "model.safetensors", {"format": "pt"})
    expected = log_probabilities(model)
    save_file(coded, model / "model.safetensors", {"format": "pt"})
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (model / "config.json").write_text(json.dumps(config))
    file = export(model, "mxfp4")
    found = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in found.items()}
    assert {kinds[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")} == {"MXFP4"}
    assert kinds["blk.0.attn_q.weight"] == "Q8_0" and kinds["blk.0.ffn_up_exps.bias"] == "F32"
    for part, columns in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
        tensor = found[f"blk.1.ffn_{part}_exps.weight"]
        values = plain["model.layers.1.mlp.experts.gate_up_proj"][:, :, columns].swapaxes(1, 2)
        assert np.array_equal(dequantize(tensor.data, tensor.tensor_type).reshape(values.shape), values)
    difference = ask(file, prompts=PROMPTS, size=expected.shape[1])["logprobs"] - expected
    assert 0 < np.sqrt((difference**2).mean()) < ROUNDED


@pytest.mark.parametrize(
    "name", ["gpt_oss", "gemma4 with a mixture", "deepseek_v3", "nemotron_h with a mixture", "lfm2_moe", "qwen3_next"]
)
def test_rows_of_odd_lengths_in_codes_are_read(name: str, tmp_path: Path, capsys) -> None:
    """Rows that are no whole blocks have larger codes, and sensitive tensors f32."""
    model = model_folder(tmp_path, CASES[name])
    expected = log_probabilities(model)
    found = ask(export(model, "q4_k_m"), prompts=PROMPTS, size=expected.shape[1])["logprobs"]
    assert np.isfinite(found).all() and np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.5


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (tiny_qwen3_moe(), "mlp_only_layers"),
        (tiny_qwen3_moe(mlp_only_layers=[], norm_topk_prob=False), "norm_topk_prob"),
        (tiny_qwen2_moe(norm_topk_prob=True), "norm_topk_prob"),
        (tiny_olmoe(), "num_key_value_heads"),
        (tiny_mixtral(), "sliding_window"),
        (tiny_gpt_oss(num_hidden_layers=4), "swiglu_limit"),
        (tiny_gpt_oss(swiglu_limit=7.0, layer_types=["full_attention"] * 2), "layer_types"),
        (tiny_deepseek_v2(), "topk_method"),
        (tiny_deepseek_v3(rope_interleave=False), "rope_interleave"),
        (tiny_deepseek_v3(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}), "mscale"),
        (tiny_gemma(hidden_act="relu"), "hidden_act"),
        (tiny_cohere2(), "tie_word_embeddings"),
        (tiny_cohere2(tie_word_embeddings=True, sliding_window_pattern=2), "layer_types"),
        (tiny_starcoder2(), "sliding_window"),
        (tiny_olmo3(layer_types=["full_attention"] * 4), "layer_types"),
        (tiny_gemma3(), "layer_types"),
        (tiny_falcon_h1(), "mamba_norm_before_gate"),
        (tiny_falcon_h1(mamba_norm_before_gate=False, projectors_bias=True), "projectors_bias"),
        (tiny_nemotron_h(), "layers_block_type"),
        (tiny_granitemoehybrid(time_step_limit=[0.01, 1.0]), "time_step_limit"),
        (
            tiny_qwen3_5(
                linear_value_head_dim=8, layer_types=["full_attention", "linear_attention"] * 2, num_hidden_layers=4
            ),
            "layer_types",
        ),
        (tiny_qwen3_5(**DELTA | {"linear_value_head_dim": 12}), "linear_value_head_dim"),
        (tiny_qwen3_next(**DELTA), "mlp_only_layers"),
        (tiny_granite_swa(), "layer_rope_theta"),
        (tiny_muse_glimmer(), "post_norm_eps"),
        (tiny_lfm2_moe(routed_scaling_factor=2.0), "routed_scaling_factor"),
    ],
    ids=lambda of: of if isinstance(of, str) else of["model_type"],
)
def test_what_llama_cpp_computes_otherwise_is_refused_by_name(fields: dict, named: str) -> None:
    with pytest.raises(ModelConfigError, match=f"`[a-z_.]*{named}`"):
        gguf.describe(fields, [], "x")


def test_small_differences_of_readers_are_told() -> None:
    scaled = tiny_gpt_oss(swiglu_limit=7.0, num_hidden_layers=4)
    for fields, said in (
        (scaled, "whole pairs"),
        (tiny_deepseek_v3(), "latents"),
        (tiny_qwen3_5(**DELTA | {"rms_norm_eps": 1e-5}), "delta nets"),
        (CASES["nemotron_h"], "time_step_min"),
        (CASES["qwen2-vl"], "without an epsilon"),
        (CASES["qwen3-vl"], "row and column"),
        (CASES["phi3, two tables"], "size of the context"),
    ):
        (note,) = gguf.notes(fields)
        assert said in note
    assert gguf.notes(tiny_llama()) == []
