"""Mixtures of experts: fields of their configs, what is refused, adapters outside of the experts, files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import surogate
from conftest import tiny_llama, tiny_mistral, tiny_qwen3
from safetensors.numpy import load_file
from surogate import models
from surogate.cli import main
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


MIXTURES = [tiny_qwen3_moe, tiny_mixtral, tiny_olmoe]


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


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (tiny_qwen3_moe, "output_router_logits", True),
        (tiny_qwen3_moe, "num_experts_per_tok", 5),
        (tiny_qwen3_moe, "num_experts", 0),
        (tiny_qwen3_moe, "num_local_experts", 8),
        (tiny_qwen3_moe, "mlp_only_layers", "all"),
        (tiny_mixtral, "router_jitter_noise", 0.1),
        (tiny_olmoe, "clip_qkv", 8.0),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(make, field, value):
    with pytest.raises(ModelConfigError, match=f"`{field}`"):
        models.build(make(**{field: value}))


@pytest.mark.parametrize("make", MIXTURES)
def test_adapters_outside_of_the_experts(make, make_model, tmp_path):
    folder = make_model(make())
    names = ["q_proj", "o_proj"]
    base = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "lora_rank": 4, "lora_dropout": 0.0}
    trainer = surogate.Trainer(base | {"output_dir": str(tmp_path / "run"), "lora_target_modules": names})
    for _ in range(2):
        trainer.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=1e-2)
    trainer.export(tmp_path / "adapter")
    adapted = surogate.load(folder, adapter=tmp_path / "adapter").forward(IDS)
    assert main(["merge", str(tmp_path / "adapter"), "--model", str(folder), "--output", str(tmp_path / "merged")]) == 0
    np.testing.assert_allclose(surogate.load(tmp_path / "merged").forward(IDS), adapted, atol=2e-5)
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(load_file(folder / "model.safetensors"))
    with pytest.raises(ConfigError, match="`all-linear` would put adapters on the experts"):
        every = surogate.Trainer(base | {"lora_target_modules": ["all-linear"]})
        every.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=0.0)
    with pytest.raises(ConfigError, match="experts cannot be quantised yet"):
        quantised = surogate.Trainer(base | {"lora_target_modules": names, "qlora_bnb": True})
        quantised.step({"input_ids": IDS[None], "labels": IDS[None]}, learning_rate=0.0)


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
