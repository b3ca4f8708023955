"""Mixtures of experts: fields of their configs, what is refused, adapters outside of the experts, files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import surogate
from conftest import tiny_gemma4_mixture, tiny_llama, tiny_mistral, tiny_qwen3
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from surogate import models
from surogate.cli.commands import main
from surogate.errors import ConfigError, ModelConfigError

IDS = np.random.default_rng(2).integers(1, 90, (2, 12))


def tiny_qwen3_moe(**changes: object) -> dict[str, object]:
    own = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4}
    own |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0], "norm_topk_prob": True}
    return tiny_qwen3(**{**own, "num_hidden_layers": 3, **changes})


def tiny_mixtral(**changes: object) -> dict[str, object]:
    own = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    return tiny_mistral(**{**own, **changes})


def tiny_olmoe(**changes: object) -> dict[str, object]:
    own = {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}
    return tiny_llama(**{**own, **changes})


def tiny_qwen2_moe(**changes: object) -> dict[str, object]:
    own = {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 4}
    own |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
    return tiny_llama(**{**own, **changes})


def tiny_gpt_oss(**changes: object) -> dict[str, object]:
    own = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 8}
    own |= {"num_experts_per_tok": 2, "sliding_window": 5, "swiglu_limit": 1.5, "intermediate_size": 20}
    return tiny_llama(**{**own, **changes})


def tiny_grouped(**changes: object) -> dict[str, object]:
    own = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
    return tiny_llama(**{**own, "first_k_dense_replace": 1, "num_key_value_heads": 4, **changes})


def tiny_deepseek_v3(**changes: object) -> dict[str, object]:
    own = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 24}
    own |= {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    return tiny_grouped(**{**own, **changes})


def tiny_glm4_moe(**changes: object) -> dict[str, object]:
    own = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "head_dim": 8, "use_qk_norm": True}
    return tiny_grouped(**{**own, **changes})


def tiny_deepseek_v2(**changes: object) -> dict[str, object]:
    own = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": 24}
    own |= {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    return tiny_grouped(**{**own, "topk_method": "group_limited_greedy", **changes})


def tiny_glm4_moe_lite(**changes: object) -> dict[str, object]:
    own = {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
    return tiny_deepseek_v3(**{**own, **changes})


def tiny_ernie4_5_moe(**changes: object) -> dict[str, object]:
    own = {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2}
    return tiny_llama(**{**own, "moe_intermediate_size": 16, **changes})


MIXTURES = [tiny_qwen3_moe, tiny_mixtral, tiny_olmoe, tiny_qwen2_moe, tiny_gpt_oss, tiny_deepseek_v3, tiny_glm4_moe]
MIXTURES += [tiny_deepseek_v2, tiny_glm4_moe_lite, tiny_ernie4_5_moe]


def blocks(fields: dict) -> list[dict]:
    """The block of every layer."""
    ir = json.loads(models.build(fields))
    [stack] = [item for item in ir["body"] if "repeat" in item]
    return [stack["blocks"][stack["pattern"][i] if "pattern" in stack else 0] for i in range(stack["repeat"])]


def sparse(fields: dict) -> list[bool]:
    return [any(node["op"] == "route" for node in block["nodes"]) for block in blocks(fields)]


def test_layers_with_experts():
    assert sparse(tiny_qwen3_moe()) == [False, True, True]
    assert sparse(tiny_qwen3_moe(mlp_only_layers=None, decoder_sparse_step=2)) == [False, True, False]
    assert sparse(tiny_mixtral()) == [True, True]
    names = [row["name"] for row in blocks(tiny_mixtral())[0]["parameters"]]
    assert "model.layers.{i}.block_sparse_moe.experts.3.w2.weight" in names
    [route] = [node for node in blocks(tiny_olmoe())[0]["nodes"] if node["op"] == "route"]
    assert route["attrs"] == {"top_k": 2, "scores": "softmax"}


#: Those with latent attention, whose queries have a projection of another name.
LATENT = [tiny_deepseek_v3, tiny_deepseek_v2, tiny_glm4_moe_lite]

#: Those with scores in f32.
EXACT = [tiny_deepseek_v3, tiny_glm4_moe, tiny_deepseek_v2, tiny_glm4_moe_lite, tiny_ernie4_5_moe]


@pytest.mark.parametrize("make", MIXTURES)
def test_scores_are_not_rounded_where_transformers_does_not(make):
    nodes = blocks(make())[-1]["nodes"]
    [route] = [node for node in nodes if node["op"] == "route"]
    [scores] = [node for node in nodes if route["inputs"][0] in node["outputs"]]
    assert scores["op"] == "linear"
    assert scores.get("attrs", {}).get("f32", False) == (make in EXACT)


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (tiny_qwen3_moe, "num_experts_per_tok", 5),
        (tiny_qwen3_moe, "num_experts", 0),
        (tiny_qwen3_moe, "num_local_experts", 8),
        (tiny_qwen3_moe, "mlp_only_layers", "all"),
        (tiny_mixtral, "router_jitter_noise", 0.1),
        (tiny_olmoe, "clip_qkv", 8.0),
        (tiny_deepseek_v3, "output_router_logits", True),
        (tiny_llama, "output_router_logits", True),
        (tiny_gpt_oss, "experts_per_token", 3),
        (tiny_gpt_oss, "swiglu_limit", -1.0),
        (tiny_gpt_oss, "hidden_act", "gelu"),
        (tiny_deepseek_v3, "scoring_func", "softmax"),
        (tiny_deepseek_v3, "topk_method", "greedy"),
        (tiny_deepseek_v3, "topk_group", 5),
        (tiny_deepseek_v3, "n_group", 3),
        (tiny_deepseek_v3, "head_dim", 16),
        (tiny_deepseek_v3, "qk_head_dim", 23),
        (tiny_deepseek_v3, "num_key_value_heads", 2),
        (tiny_glm4_moe, "num_experts_per_tok", 5),
        (tiny_ernie4_5_moe, "num_experts_per_tok", 3),
        (tiny_ernie4_5_moe, "moe_k", 9),
        (tiny_ernie4_5_moe, "moe_norm_min", 0.1),
        (tiny_ernie4_5_moe, "output_router_logits", True),
        (tiny_ernie4_5_moe, "moe_num_shared_experts", -1),
        (tiny_ernie4_5_moe, "num_local_experts", 4),
        (tiny_glm4_moe_lite, "first_k_dense_replace", 2),
        (tiny_glm4_moe_lite, "mlp_layer_types", ["dense"]),
        (tiny_glm4_moe_lite, "mlp_layer_types", ["dense", "shared"]),
        (tiny_glm4_moe_lite, "topk_method", "greedy"),
        (tiny_deepseek_v2, "num_experts_per_tok", None),
        (tiny_deepseek_v2, "num_experts_per_tok", 5),
        (tiny_deepseek_v2, "norm_topk_prob", True),
        (tiny_deepseek_v2, "scoring_func", "sigmoid"),
        (tiny_deepseek_v2, "topk_method", "noaux_tc"),
        (tiny_deepseek_v2, "n_group", 3),
        (tiny_deepseek_v2, "n_group", None),
        (tiny_deepseek_v2, "topk_group", 5),
        (tiny_deepseek_v2, "rope_interleave", False),
        (tiny_deepseek_v2, "moe_layer_freq", 2),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(make, field, value):
    with pytest.raises(ModelConfigError, match=f"`{field}`"):
        models.build(make(**{field: value}))


def operations(fields: dict, op: str) -> list[dict]:
    """Attributes of an operation in each layer that has it."""
    found = []
    for i, block in enumerate(blocks(fields)):
        given = [node.get("attrs", {}) for node in block["nodes"] if node["op"] == op]
        one = lambda value: value["each"][i] if isinstance(value, dict) else value  # noqa: E731, B023
        found += [{name: one(value) for name, value in attrs.items()} for attrs in given]
    return found


def test_fields_of_gpt_oss():
    windows = [attrs.get("window") for attrs in operations(tiny_gpt_oss(), "attention")]
    assert windows == [5, None]
    assert operations(tiny_gpt_oss(), "clamped_swiglu")[0] == {"limit": 1.5, "alpha": 1.702}
    assert operations(tiny_gpt_oss(swiglu_alpha=2.0), "clamped_swiglu")[0]["alpha"] == 2.0
    [scaling] = [node["attrs"] for node in json.loads(models.build(tiny_gpt_oss()))["body"] if node.get("op") == "rope_frequencies"]
    assert (scaling["scaling_type"], scaling["factor"], scaling["truncate"]) == ("yarn", 32.0, False)
    rows = {row["name"]: row for row in blocks(tiny_gpt_oss())[0]["parameters"]}
    assert rows["model.layers.{i}.mlp.experts.down_proj_bias"]["bias"] is True
    assert "model.layers.{i}.self_attn.q_proj.bias" not in {
        row["name"] for row in blocks(tiny_gpt_oss(attention_bias=False))[0]["parameters"]
    }


def in_mxfp4(numbers: np.random.Generator, matrices: int, inputs: int, outputs: int) -> tuple[np.ndarray, ...]:
    """Random codes and scales as published files have them, and the matrices [inputs, outputs] that they stand for."""
    blocks = numbers.integers(0, 256, (matrices, outputs, inputs // 32, 16), dtype=np.uint8)
    scales = numbers.integers(118, 124, (matrices, outputs, inputs // 32), dtype=np.uint8)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([values, -values])
    each = np.stack([table[blocks & 15], table[blocks >> 4]], axis=-1).reshape(*blocks.shape[:3], 32)
    rows = (each * np.float32(2.0) ** (scales.astype(np.float32) - 127)[..., None]).reshape(matrices, outputs, inputs)
    return blocks, scales, rows.swapaxes(1, 2).astype(np.float32).copy()


def assert_experts_stay_in_codes(base: dict, plain: dict[str, np.ndarray], tmp_path: Path, capsys) -> None:
    """An adapter on attention and experts learns on their codes as on the numbers; these are never in memory as weights."""
    numbers = tmp_path / "numbers"
    shutil.copytree(base["model"], numbers)
    fields = json.loads((numbers / "config.json").read_text())
    del fields["quantization_config"]
    (numbers / "config.json").write_text(json.dumps(fields))
    save_file(plain, numbers / "model.safetensors")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    losses, bytes_of_weights = [], []
    for folder in (base["model"], numbers):
        run = base | {"model": str(folder), "output_dir": str(tmp_path / "unused"), "lora_dropout": 0.0}
        trainer = surogate.Trainer(run | {"lora_target_parameters": experts})
        batch = {"input_ids": IDS[None], "labels": IDS[None]}
        losses.append([trainer.step(batch, learning_rate=1e-2)["loss"] for _ in range(4)])
        rows = [{"path": str(tmp_path / "rows.jsonl"), "type": "tokens"}]
        (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3, 4]}) + "\n")
        (tmp_path / "run.json").write_text(json.dumps(run | {"datasets": rows}))
        assert main(["plan", str(tmp_path / "run.json"), "--json"]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        bytes_of_weights.append(next(line["bytes"] for line in memory if line["class"] == "weights"))
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert losses[0][0] != losses[0][3]
    # Of two layers: numbers of 4 bytes, or half a byte each and a plane of scales, which is a multiple of 256 bytes.
    elements = [4 * 32 * 64, 4 * 32 * 32]
    saved = 2 * sum(4 * n - (n // 2 + 256) for n in elements)
    assert bytes_of_weights[1] - bytes_of_weights[0] == saved


def test_published_files_of_gpt_oss_have_experts_in_mxfp4(make_model, tmp_path, capsys):
    fields = tiny_gpt_oss(intermediate_size=32)
    folder = make_model(fields)
    plain = load_file(folder / "model.safetensors")
    coded, numbers = dict(plain), np.random.default_rng(5)
    for layer in range(2):
        for name, columns in (("gate_up_proj", 64), ("down_proj", 32)):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            coded[f"{stem}_blocks"], coded[f"{stem}_scales"], plain[stem] = in_mxfp4(numbers, 4, 32, columns)
            del coded[stem]
    save_file(plain, folder / "model.safetensors")
    expected = surogate.load(folder).forward(IDS)
    save_file(coded, folder / "model.safetensors")
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": quantised}))
    np.testing.assert_array_equal(surogate.load(folder).forward(IDS), expected)
    base = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "lora_target_modules": ["q_proj"]}
    assert_experts_stay_in_codes(base, plain, tmp_path, capsys)
    trainer = surogate.Trainer(base | {"output_dir": str(tmp_path / "run"), "lora_dropout": 0.0})
    trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-2)
    trainer.export(tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), "--model", str(folder), "--output", str(tmp_path / "merged")]) == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name: value.shape for name, value in merged.items()} == {name: value.shape for name, value in plain.items()}


def test_a_recipe_quantises_the_values_of_experts_in_codes(make_model, tmp_path):
    """Codes of transposes, as files of GPT-OSS have them, are no obstacle: the run has the bits of one on their values."""
    fields = tiny_gpt_oss(intermediate_size=32)
    folder = make_model(fields)
    plain = load_file(folder / "model.safetensors")
    coded, numbers = dict(plain), np.random.default_rng(5)
    for layer in range(2):
        for name, columns in (("gate_up_proj", 64), ("down_proj", 32)):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            coded[f"{stem}_blocks"], coded[f"{stem}_scales"], plain[stem] = in_mxfp4(numbers, 4, 32, columns)
            del coded[stem]
    values = tmp_path / "values"
    shutil.copytree(folder, values)
    save_file(plain, values / "model.safetensors")
    save_file(coded, folder / "model.safetensors")
    quantised = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": quantised}))
    for recipe in ({"recipe": "fp8_hybrid"}, {"recipe": "nvfp4", "fp4_backend": "emulate"}):
        losses = []
        for model in (folder, values):
            run = {"model": str(model), "torch_dtype": "float32", "device": "cpu", "lora_target_modules": ["q_proj"]}
            trainer = surogate.Trainer(run | recipe | {"output_dir": str(tmp_path / "unused"), "lora_dropout": 0.0})
            batch = {"input_ids": IDS[None], "labels": IDS[None]}
            losses.append([trainer.step(batch, learning_rate=1e-2)["loss"] for _ in range(3)])
        assert losses[0] == losses[1], recipe
        assert len(set(losses[0])) == 3, recipe


STACKED = {"gpt_oss": tiny_gpt_oss(intermediate_size=32), "gemma4": tiny_gemma4_mixture(moe_intermediate_size=32)}


@pytest.mark.parametrize("recipe", [{"recipe": "fp8_hybrid"}, {"recipe": "nvfp4", "fp4_backend": "emulate"}], ids=str)
@pytest.mark.parametrize("fields", STACKED.values(), ids=STACKED)
def test_experts_in_stacks_learn_in_codes(make_model, tmp_path, fields, recipe):
    """Matrices in one parameter, transposed or not, with and without biases: in full, and under adapters on experts."""
    run = {"model": str(make_model(fields)), "torch_dtype": "float32", "device": "cpu", "lora_dropout": 0.0}
    run |= {"output_dir": str(tmp_path / "unused")}
    batch = {"input_ids": IDS[None], "labels": IDS[None]}
    for own in ({"lora": False}, {"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}):

        def losses(more: dict) -> list[float]:
            trainer = surogate.Trainer(run | own | more)
            return [trainer.step(batch, learning_rate=1e-2)["loss"] for _ in range(4)]

        numbers, codes = losses({}), losses(recipe)
        assert codes[-1] < codes[0] and codes != numbers
        assert codes == losses(recipe | {"recompute_block": True})
        fall = numbers[0] - numbers[-1]
        assert abs(codes[-1] - numbers[-1]) < 0.3 * fall, (numbers, codes)


def test_fields_of_grouped_routing():
    assert sparse(tiny_deepseek_v3(num_hidden_layers=3)) == [False, True, True]
    [rule] = operations(tiny_deepseek_v3(norm_topk_prob=False), "route")
    assert rule == {"top_k": 3, "scores": "sigmoid", "factor": 2.5, "groups": 4, "kept_groups": 2}
    assert operations(tiny_glm4_moe(routed_scaling_factor=1.5), "route")[0]["factor"] == 1.5
    assert json.loads(models.build(tiny_deepseek_v3()))["files"]["carried"] == ["model.layers.2."]
    assert "carried" not in json.loads(models.build(tiny_deepseek_v3(num_nextn_predict_layers=0)))["files"]
    names = [row["name"] for row in blocks(tiny_deepseek_v3() | {"q_lora_rank": None})[0]["parameters"]]
    assert "model.layers.{i}.self_attn.q_proj.weight" in names
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16, "mscale_all_dim": 1.0}
    plain, scaled = tiny_deepseek_v3(), tiny_deepseek_v3(rope_scaling=yarn)
    ratio = operations(scaled, "attention")[0]["scale"] / operations(plain, "attention")[0]["scale"]
    assert ratio == pytest.approx((0.1 * np.log(40.0) + 1.0) ** 2)


@pytest.mark.parametrize("make", [tiny_deepseek_v3, tiny_glm4_moe])
def test_the_correction_of_the_choice_counts_and_is_not_trained(make, make_model, tmp_path):
    folder = make_model(make())
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    weights = load_file(folder / "model.safetensors")
    before = surogate.load(folder).forward(IDS)
    weights[name] = np.linspace(-3.0, 3.0, 8, dtype=np.float32)
    save_file(weights, folder / "model.safetensors")
    assert not np.array_equal(surogate.load(folder).forward(IDS), before)
    base = {"model": str(folder), "torch_dtype": "bfloat16", "device": "cpu", "lora": False}
    trainer = surogate.Trainer(base | {"output_dir": str(tmp_path / "run"), "optimizer": "normuon"})
    for _ in range(2):
        trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-2)
    trainer.export(tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        kept = file.get_tensor(name)
    np.testing.assert_array_equal(kept, weights[name])  # to the last bit: f32 in a model of bf16


def test_layers_that_predict_further_ahead_are_taken_over(make_model, tmp_path):
    folder = make_model(tiny_deepseek_v3())
    weights = load_file(folder / "model.safetensors")
    more = {"model.layers.2.eh_proj.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    save_file(weights | more, folder / "model.safetensors")
    base = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "lora": False}
    trainer = surogate.Trainer(base | {"output_dir": str(tmp_path / "run")})
    trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-2)
    trainer.export(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(found["model.layers.2.eh_proj.weight"], more["model.layers.2.eh_proj.weight"])


def test_biases_of_experts_do_not_decay(make_model, tmp_path):
    """With a weight decay that halves what it acts on and no other change."""
    folder = make_model(tiny_gpt_oss())
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_bias"
    weights[name] = np.full_like(weights[name], 0.5)
    save_file(weights, folder / "model.safetensors")
    base = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "lora": False, "weight_decay": 500.0}
    trainer = surogate.Trainer(base | {"output_dir": str(tmp_path / "run")})
    trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-3)
    trainer.export(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert np.abs(found[name] - 0.5).max() < 2e-3
    matrix = "model.layers.0.mlp.experts.down_proj"
    assert np.abs(found[matrix] - 0.5 * weights[matrix]).max() < 2e-3


@pytest.mark.parametrize("make", MIXTURES)
def test_adapters_outside_of_the_experts(make, make_model, tmp_path):
    folder = make_model(make())
    names = ["kv_b_proj" if make in LATENT else "q_proj", "o_proj"]
    base = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "lora_rank": 4, "lora_dropout": 0.0}
    trainer = surogate.Trainer(base | {"output_dir": str(tmp_path / "run"), "lora_target_modules": names})
    for _ in range(2):
        trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-2)
    trainer.export(tmp_path / "adapter")
    adapted = surogate.load(folder, adapter=tmp_path / "adapter").forward(IDS)
    assert main(["merge", str(tmp_path / "adapter"), "--model", str(folder), "--output", str(tmp_path / "merged")]) == 0
    np.testing.assert_allclose(surogate.load(tmp_path / "merged").forward(IDS), adapted, atol=2e-5)
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(load_file(folder / "model.safetensors"))


def trained(folder, output, **options: object) -> surogate.Trainer:
    """An adapter after two steps."""
    base = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "lora_rank": 4, "lora_dropout": 0.0}
    trainer = surogate.Trainer(base | {"output_dir": str(output)} | options)
    for _ in range(2):
        trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-2)
    return trainer


@pytest.mark.parametrize("make", MIXTURES)
def test_adapters_on_experts_and_routers(make, make_model, tmp_path):
    """What is trained is written, read, merged from folder to folder and from memory, and is the same function."""
    folder = make_model(make())
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    router = "router.weight" if make is tiny_gpt_oss else "mlp.gate.weight"
    trainer = trained(folder, tmp_path / "run", lora_target_modules=["o_proj"], lora_target_parameters=[*experts, router])
    trainer.export(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(".mlp.experts.base_layer.lora_B." in name and np.abs(value).max() > 0 for name, value in tensors.items())
    assert any(".mlp.experts.lora_B." in name and np.abs(value).max() > 0 for name, value in tensors.items())
    assert any(name.endswith(f"mlp.{router.removeprefix('mlp.').removesuffix('.weight')}.lora_A.weight") for name in tensors)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {name.rpartition(".")[-1] for name in config["target_modules"]} == {"o_proj"}
    assert config["target_parameters"] == [*experts, router]
    adapted = surogate.load(folder, adapter=tmp_path / "adapter").forward(IDS)
    assert np.abs(adapted - surogate.load(folder).forward(IDS)).max() > 1e-3
    assert main(["merge", str(tmp_path / "adapter"), "--model", str(folder), "--output", str(tmp_path / "merged")]) == 0
    trainer.export_merged(tmp_path / "live")
    for merged in ("merged", "live"):
        np.testing.assert_allclose(surogate.load(tmp_path / merged).forward(IDS), adapted, atol=2e-5)
        assert set(load_file(tmp_path / merged / "model.safetensors")) == set(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize(
    ("make", "modules", "parameters"),
    [
        (tiny_qwen3_moe, ["k_proj", "o_proj", "q_proj", "v_proj"], ["gate.weight", "gate_up_proj", "down_proj"]),
        (tiny_qwen2_moe, ["k_proj", "o_proj", "q_proj", "shared_expert_gate", "v_proj"], ["gate.weight", "gate_up_proj", "down_proj"]),
        (tiny_gpt_oss, ["k_proj", "o_proj", "q_proj", "v_proj"], None),
    ],
)
def test_all_linear_is_what_it_is_for_peft(make, modules, parameters, make_model, tmp_path):
    trained(make_model(make()), tmp_path / "run").export(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == modules and config["target_parameters"] == parameters
    patterns = (config["rank_pattern"], config["alpha_pattern"])
    assert patterns == (({r".*\.gate_up_proj": 8}, {r".*\.gate_up_proj": 64}) if parameters else ({}, {}))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lora_dropout": 0.1}, "`lora_dropout` is 0.1, and adapters on parameters have none: gate.weight"),
        ({"lora_dora": True}, "`lora_dora: true` does not go with adapters on parameters"),
        ({"lora_target_modules": ["q_proj", "up_proj"]}, "`up_proj` needs `gate_proj` with it"),
        ({"lora_target_parameters": ["experts.up_proj"]}, "`experts.up_proj` matches no linear.*its parameters: .*gate.weight, .*gate_up_proj"),
        ({"lora_target_parameters": ["q_proj.weight"]}, "is a target as a module and its weight one as a parameter"),
    ],
)
def test_adapters_that_are_refused(options, match, make_model, tmp_path):
    with pytest.raises(ConfigError, match=match):
        trained(make_model(tiny_qwen3_moe()), tmp_path / "run", **options)


@pytest.mark.parametrize("make", [tiny_qwen3_moe, tiny_gpt_oss])
def test_routers_are_frozen_or_trained_in_full(make, make_model, tmp_path):
    folder = make_model(make())
    names = [name for name in load_file(folder / "model.safetensors") if name.endswith(("mlp.gate.weight", "router.weight"))]
    for train_router in (False, True):
        run = tmp_path / str(train_router)
        trainer = trained(folder, run, lora_target_modules=["q_proj"], train_router=train_router)
        trainer.export(run / "adapter")
        trainer.export_merged(run / "merged")
        before, after = load_file(folder / "model.safetensors"), load_file(run / "merged" / "model.safetensors")
        assert names and all(np.array_equal(before[name], after[name]) != train_router for name in names)
        kept = [name for name in load_file(run / "adapter" / "adapter_model.safetensors") if "lora" not in name]
        assert {name.removeprefix("base_model.model.").replace(".bias", ".weight") for name in kept} == (set(names) if train_router else set())
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no router"):
        trained(make_model(tiny_llama()), tmp_path / "dense", train_router=True)
    with pytest.raises(ConfigError, match="not available yet for MixtralForCausalLM"):
        trained(make_model(tiny_mixtral()), tmp_path / "renamed", train_router=True)


@pytest.mark.parametrize("form", ["qlora_bnb", "qlora_fp8", "qlora_fp4"])
@pytest.mark.parametrize("make", [tiny_qwen3_moe, tiny_mixtral, tiny_gpt_oss, tiny_deepseek_v3])
def test_experts_in_codes(make, form, make_model, tmp_path):
    """Adapters on codes of all products but routers; what is merged has the values of the codes."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32} if form == "qlora_fp4" else {}
    folder = make_model(make(**sizes))
    names = ["kv_b_proj" if make in LATENT else "q_proj", "o_proj"]
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    own = {"lora_target_modules": names, "lora_target_parameters": parameters, form: True}
    trainer = trained(folder, tmp_path / "run", **own)
    trainer.export(tmp_path / "adapter")
    trainer.export_merged(tmp_path / "live")
    assert main(["merge", str(tmp_path / "adapter"), "--model", str(folder), "--output", str(tmp_path / "merged")]) == 0
    loss = trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=0.0)["loss"]
    on_numbers, _ = surogate.load(folder, adapter=tmp_path / "adapter").loss_and_gradients(IDS, IDS)
    assert abs(loss - on_numbers) > 5e-6, "codes are not the numbers that they stand for"
    before = load_file(folder / "model.safetensors")
    for merged in ("merged", "live"):
        found, _ = surogate.load(tmp_path / merged).loss_and_gradients(IDS, IDS)
        assert found == pytest.approx(loss, abs=2e-6)
        after = load_file(tmp_path / merged / "model.safetensors")
        routers = [name for name in before if name.endswith((".gate.weight", "router.weight"))]
        assert routers and all(np.array_equal(before[name], after[name]) for name in routers)


@pytest.mark.parametrize("make", [tiny_qwen3_moe, tiny_mixtral, tiny_olmoe, tiny_qwen2_moe, tiny_gpt_oss])
def test_the_option_overrides_the_coefficient_of_the_model(make, make_model, tmp_path):
    """The loss of a run is the model's, and the loss of uneven loads times the coefficient."""
    folder = make_model(make())

    def loss(**options: object) -> float:
        base = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "lora": False}
        trainer = surogate.Trainer(base | {"output_dir": str(tmp_path / "run")} | options)
        batch = {"input_ids": np.stack([IDS, IDS[:, ::-1]]), "labels": np.stack([IDS, IDS])}
        return trainer.step(batch, learning_rate=0.0)["loss"]

    plain, once, twice = loss(), loss(router_aux_loss_coef=1.0), loss(router_aux_loss_coef=2.0)
    assert once - plain > 0.5
    assert twice - plain == pytest.approx(2 * (once - plain), rel=1e-5)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"output_router_logits": True, "router_aux_loss_coef": 1.0}))
    assert loss() == once
    assert loss(router_aux_loss_coef=0.0) == plain


def test_one_expert_for_all_tokens(make_model):
    """Choices count as they are made: equal scores send all tokens to the first expert, whose probability is one of four."""
    folder = make_model(tiny_mixtral(num_experts_per_tok=1, output_router_logits=True, router_aux_loss_coef=1.0))
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("block_sparse_moe.gate.weight")]:
        weights[name] = np.zeros_like(weights[name])
    save_file(weights, folder / "model.safetensors")
    even, _ = surogate.load(folder).loss_and_gradients(IDS, IDS)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"output_router_logits": False}))
    plain, _ = surogate.load(folder).loss_and_gradients(IDS, IDS)
    assert even - plain == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("make", MIXTURES)
def test_packed_documents_and_other_rows_change_no_token(make, make_model):
    """What a token gets does not depend on who shares its experts."""
    model = surogate.load(make_model(make()))
    whole = model.forward(IDS)
    np.testing.assert_allclose(model.forward(IDS[:1]), whole[:1], atol=1e-6)
    packed = model.forward(IDS.reshape(1, -1), np.tile(np.arange(12), 2)[None])
    np.testing.assert_allclose(packed.reshape(whole.shape), whole, atol=1e-6)


@pytest.mark.parametrize("make", MIXTURES)
def test_two_runs_of_a_mixture_have_the_same_bits(make, make_model, tmp_path):
    folder = make_model(make())

    def weights(name: str) -> dict[str, np.ndarray]:
        options = {"model": str(folder), "lora": False, "torch_dtype": "float32", "device": "cpu"}
        trainer = surogate.Trainer(options | {"output_dir": str(tmp_path / name)})
        for _ in range(3):
            trainer.step({"input_ids": np.stack([IDS, IDS[:, ::-1]]), "labels": np.stack([IDS, IDS])}, learning_rate=1e-2)
        trainer.export(tmp_path / f"{name}.out")
        return load_file(tmp_path / f"{name}.out" / "model.safetensors")

    one, two = weights("one"), weights("two")
    assert all(np.array_equal(one[name], two[name]) for name in one)
    moved = [name for name, value in load_file(folder / "model.safetensors").items() if not np.array_equal(one[name], value)]
    assert any(".experts." in name for name in moved)


def test_routers_of_gemma4_are_trained_as_wholes_and_have_no_bias(make_model, tmp_path):
    folder = make_model(tiny_gemma4_mixture())
    before = load_file(folder / "model.safetensors")
    trainer = trained(folder, tmp_path / "run", lora_target_modules=["q_proj"], train_router=True)
    trainer.export(tmp_path / "adapter")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    names = {name for name in before if ".router." in name}
    assert {name.rpartition(".")[-1] for name in names} == {"weight", "scale", "per_expert_scale"}
    assert {name.removeprefix("base_model.model.") for name in found if ".router." in name} == names
    assert all(not np.array_equal(found[f"base_model.model.{name}"], before[name]) for name in names)
    with pytest.raises(ConfigError, match="`router_bias_update_rate`, but Gemma4ForCausalLM has no bias"):
        trained(folder, tmp_path / "biased", lora=False, router_bias_update_rate=1e-3)


def test_fields_of_deepseek_v2():
    [rule] = operations(tiny_deepseek_v2(routed_scaling_factor=16.0), "route")
    assert rule == {"top_k": 3, "scores": "softmax", "factor": 16.0, "groups": 4, "kept_groups": 2, "counted": 1}
    [rule] = operations(tiny_deepseek_v2(topk_method="greedy", n_group=None, num_experts_per_tok=8), "route")
    assert rule == {"top_k": 8, "scores": "softmax", "factor": 1.0}, "all experts to choose from"
    assert sparse(tiny_deepseek_v2(n_routed_experts=4, num_experts_per_tok=2)) == [False, True], "groups of one expert"
    names = [row["name"] for block in blocks(tiny_deepseek_v2(mlp_bias=True)) for row in block["parameters"]]
    assert "model.layers.{i}.mlp.down_proj.bias" in names and "model.layers.{i}.mlp.shared_experts.up_proj.bias" in names
    assert not any(".experts.0." in name and name.endswith("bias") for name in names)
    assert any(node["attrs"].get("interleaved") for node in blocks(tiny_deepseek_v2())[0]["nodes"] if node["op"] == "rope")


def test_layers_with_experts_of_glm4_moe_lite():
    more = {"num_hidden_layers": 3}
    assert sparse(tiny_glm4_moe_lite(**more)) == [False, True, True]
    given = tiny_glm4_moe_lite(**more, mlp_layer_types=["sparse", "dense", "sparse"], first_k_dense_replace=2)
    assert sparse(given) == [True, False, True], "the list counts"
    dense = json.loads(models.build(tiny_glm4_moe_lite(mlp_layer_types=["dense", "dense"])))
    assert not any("expert_load" in item.get("name", "") for item in dense["outputs"])


def test_fields_of_ernie4_5_moe():
    more = {"num_hidden_layers": 6}
    assert sparse(tiny_ernie4_5_moe(**more)) == [False] + [True] * 5
    assert sparse(tiny_ernie4_5_moe(**more, moe_layer_start_index=0, moe_layer_end_index=3)) == [True] * 4 + [False] * 2
    assert sparse(tiny_ernie4_5_moe(**more, moe_layer_interval=2)) == [False, True] * 3
    [rule] = operations(tiny_ernie4_5_moe(), "route")
    assert rule == {"top_k": 2, "scores": "softmax", "normalise": True}
    names = {row["name"]: row["shape"] for row in blocks(tiny_ernie4_5_moe(use_bias=True))[-1]["parameters"]}
    assert names["model.layers.{i}.mlp.moe_statics.e_score_correction_bias"] == [1, 8]
    assert names["model.layers.{i}.mlp.shared_experts.up_proj.bias"] == [32]
    alone = blocks(tiny_ernie4_5_moe(moe_num_shared_experts=0))[-1]["parameters"]
    assert not any("shared_experts" in row["name"] for row in alone)
    outside = [row["name"] for row in json.loads(models.build(tiny_ernie4_5_moe(use_bias=True)))["parameters"]]
    assert "lm_head.bias" in outside


def test_layers_that_are_all_dense_have_adapters_on_their_feed_forward_layers(make_model, tmp_path):
    fields = tiny_deepseek_v3(first_k_dense_replace=2, num_hidden_layers=2)
    assert {"converted", "bare", "stacks"} & set(json.loads(models.build(tiny_deepseek_v3()))["adapters"])
    assert "adapters" not in json.loads(models.build(fields))
    model = make_model(fields)
    options = {"model": str(model), "device": "cpu", "lora_target_modules": ["down_proj", "gate_proj"], "lora_rank": 2}
    trainer = surogate.Trainer({**options, "output_dir": str(tmp_path / "run")})
    ids = np.arange(3, 15, dtype=np.int32)[None]
    trainer.step({"input_ids": ids[None], "labels": ids[None]}, learning_rate=1e-2)
    trainer.export(tmp_path / "adapter")
    expected = [f"base_model.model.model.layers.{i}.mlp.{name}_proj.lora_{ab}.weight" for i in (0, 1) for name in ("down", "gate") for ab in "AB"]
    assert sorted(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == sorted(expected)
    adapted = surogate.load(model, adapter=tmp_path / "adapter").forward(ids)
    assert np.abs(adapted - surogate.load(model).forward(ids)).max() > 1e-4
