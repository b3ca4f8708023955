"""The families beyond Llama's: what each field of their configs changes in the graph, what is refused, and what is
trained, merged and exported."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable

import numpy as np
import pytest
import surogate
from conftest import (
    tiny_apertus,
    tiny_ernie4_5,
    tiny_exaone4,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gemma4,
    tiny_gemma4_mixture,
    tiny_glm4,
    tiny_granite,
    tiny_llama,
    tiny_muse_glimmer,
    tiny_olmo2,
    tiny_olmo3,
    tiny_olmo_hybrid,
    tiny_phi3,
    tiny_phi4_multimodal,
    tiny_phi4mm,
    tiny_seed_oss,
    tiny_starcoder2,
)
from surogate import models
from surogate.cli.commands import main
from surogate.errors import ModelConfigError

NEW = [tiny_gemma2, tiny_gemma3, tiny_gemma4, tiny_gemma4_mixture, tiny_phi3, tiny_granite, tiny_olmo2, tiny_olmo3, tiny_glm4]
NEW += [tiny_seed_oss, tiny_exaone4, tiny_ernie4_5, tiny_apertus, tiny_olmo_hybrid, tiny_phi4_multimodal, tiny_phi4mm, tiny_muse_glimmer]


def build(fields: dict) -> dict:
    return json.loads(models.build(fields))


def blocks(ir: dict) -> list[list[dict]]:
    """The nodes of each kind of layer."""
    return [block["nodes"] for item in ir["body"] if "repeat" in item for block in item["blocks"]]


def nodes(ir: dict) -> list[dict]:
    """Every node, those of layers once for each kind."""
    return [n for item in ir["body"] if "repeat" not in item for n in [item]] + [n for b in blocks(ir) for n in b]


def attributes(fields: dict, op: str) -> list[dict]:
    return [n.get("attrs", {}) for n in nodes(build(fields)) if n["op"] == op]


def layers_of(fields: dict, op: str, name: str) -> list:
    """An attribute of one operation in every layer."""
    ir = build(fields)
    [item] = [item for item in ir["body"] if "repeat" in item]
    found = []
    for i in range(item["repeat"]):
        block = item["blocks"][item["pattern"][i] if "pattern" in item else 0]
        value = next(n for n in block["nodes"] if n["op"] == op).get("attrs", {}).get(name)
        found.append(value["each"][i] if isinstance(value, dict) else value)
    return found


@pytest.mark.parametrize("make", NEW)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 2.5),
        ("vocab_size", 0),
        ("attention_dropout", "0.1"),
        ("rms_norm_eps", "small"),
        ("no_rope_layers", [1, 0, 1, 1]),
        ("rope_scaling", {"rope_type": "made up"}),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(make, field, value):
    with pytest.raises(ModelConfigError, match=f"`{field}"):
        build(make(**{field: value}))


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (tiny_gemma2, "use_bidirectional_attention", True),
        (tiny_gemma2, "hidden_activation", "mish"),
        (tiny_gemma2, "final_logit_softcapping", 0),
        (tiny_gemma2, "query_pre_attn_scalar", -1),
        (tiny_gemma3, "sliding_window_pattern", 0),
        (tiny_gemma3, "attn_logit_softcapping", 50.0),
        (tiny_phi3, "partial_rotary_factor", "half"),
        (tiny_glm4, "partial_rotary_factor", 0.6),
        (tiny_gemma3, "rope_local_base_freq", -5.0),
        (tiny_granite, "logits_scaling", 0),
        (tiny_granite, "partial_rotary_factor", 0.5),
        (tiny_olmo3, "layer_types", ["chunked_attention"] * 4),
        (tiny_olmo3, "sliding_window", 0),
        (tiny_phi3, "sliding_window", True),
        (tiny_gemma4, "use_bidirectional_attention", "all"),
        (tiny_gemma4, "num_kv_shared_layers", 3),
        (tiny_gemma4, "num_kv_shared_layers", 5),
        (tiny_gemma4, "rope_theta", 1e6),
        (tiny_gemma4, "rope_local_base_freq", 1e4),
        (tiny_gemma4, "global_head_dim", 0),
        (tiny_gemma4, "global_head_dim", "32"),
        (tiny_gemma4, "vocab_size_per_layer_input", 90),
        (tiny_gemma4, "hidden_size_per_layer_input", -1),
        (tiny_gemma4, "final_logit_softcapping", 0),
        (tiny_gemma4, "per_layer_config", {"1": {"sliding_window": 3}}),
        (tiny_gemma4, "per_layer_config", {"1": {"head_dim": 32}}),
        (tiny_gemma4, "per_layer_config", {"1": {"head_dim": -32}, "3": {"head_dim": -32}}),
        (tiny_gemma4, "per_layer_config", [32]),
        (tiny_gemma4, "per_layer_config", {"4": {"head_dim": 16}}),
        (tiny_gemma4_mixture, "num_experts", 0),
        (tiny_gemma4_mixture, "top_k_experts", 5),
        (tiny_gemma4_mixture, "moe_intermediate_size", -1),
        (tiny_gemma4_mixture, "output_router_logits", True),
        (tiny_glm4, "hidden_act", "gelu"),
        (tiny_ernie4_5, "hidden_act", "gelu"),
        (tiny_seed_oss, "residual_dropout", 1.0),
        (tiny_exaone4, "sliding_window_pattern", "LLLG"),
        (tiny_exaone4, "sliding_window_pattern", -1),
        (tiny_exaone4, "sliding_window", 0),
        (tiny_exaone4, "layer_types", ["chunked_attention"] * 4),
        (tiny_seed_oss, "pretraining_tp", 2),
        (tiny_apertus, "rope_theta", 10000.0),
        (tiny_apertus, "hidden_act", "silu"),
        (tiny_apertus, "qk_norm", False),
        (tiny_olmo_hybrid, "linear_key_head_dim", 160),
        (tiny_olmo_hybrid, "linear_use_gate", False),
        (tiny_muse_glimmer, "layer_rope_theta", [0, 500.0, 10000.0, 10000.0]),
        (tiny_muse_glimmer, "final_logit_softcapping", -1.0),
        (tiny_muse_glimmer, "sliding_window", 0),
    ],
)
def test_fields_of_one_family_that_cannot_be_honoured(make, field, value):
    with pytest.raises(ModelConfigError, match=f"`{field}"):
        build(make(**{field: value}))


@pytest.mark.parametrize("make", NEW)
def test_the_model_type_stands_for_a_missing_architecture(make):
    assert build(make(architectures=None))["architecture"] == make()["architectures"][0]


def test_soft_caps_and_windows_of_gemma2():
    [cap] = {a["soft_cap"] for a in attributes(tiny_gemma2(attn_logit_softcapping=20.0), "attention")}
    assert cap == 20.0
    assert [a["soft_cap"] for a in attributes(tiny_gemma2(), "attention")] == [50.0], "a missing field is the default"
    none = {**tiny_gemma2(), "attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert "soft_cap" not in attributes(none, "attention")[0], "null is no cap"
    assert {"function": "tanh"} in attributes(tiny_gemma2(), "activation")
    assert {"function": "tanh"} not in attributes(none, "activation")
    assert attributes(tiny_gemma2(query_pre_attn_scalar=4), "attention")[0]["scale"] == 0.5
    assert layers_of(tiny_gemma2(), "attention", "window") == [5, None]
    assert layers_of(tiny_gemma2(layer_types=["full_attention"] * 2), "attention", "window") == [None, None]
    assert attributes(tiny_gemma2(), "scale")[0] == {"factor": 32**0.5, "rounded": True}
    assert {a.get("offset") for a in attributes(tiny_gemma2(), "rmsnorm")} == {True}
    exact = attributes(tiny_gemma2(hidden_activation="gelu"), "activation")
    assert {"function": "gelu"} in exact


def test_rotations_of_gemma3_by_kind_of_layer():
    linear = {"rope_type": "linear", "factor": 8.0}
    ropes = attributes(tiny_gemma3(rope_scaling=linear, rope_theta=1e6), "rope_frequencies")
    assert [(a["theta"], a["scaling_type"]) for a in ropes] == [(1e6, "linear"), (10000.0, "default")]
    local = attributes(tiny_gemma3(rope_local_base_freq=500.0), "rope_frequencies")
    assert [a["theta"] for a in local] == [10000.0, 500.0], "rope_theta of the tiny model, then the field"
    assert [a["theta"] for a in attributes(tiny_gemma3(rope_theta=None), "rope_frequencies")] == [1e6, 10000.0]
    assert layers_of(tiny_gemma3(), "attention", "window") == [5, None, 5]
    assert layers_of(tiny_gemma3(sliding_window_pattern=None), "attention", "window") == [5, 5, 5]
    by_kind = {"full_attention": {"rope_type": "default", "rope_theta": 7.0}, "sliding_attention": {"rope_theta": 3.0}}
    both = attributes(tiny_gemma3(rope_theta=None, rope_parameters=by_kind), "rope_frequencies")
    assert [a["theta"] for a in both] == [7.0, 3.0]
    with pytest.raises(ModelConfigError, match="`rope_theta`: contradicts `rope_parameters`"):
        build(tiny_gemma3(rope_parameters=by_kind))


def test_kinds_of_layers_of_gemma4():
    fields = tiny_gemma4()
    assert layers_of(fields, "attention", "window") == [5, None, 5, None]
    assert layers_of(fields, "attention", "scale") == [1.0] * 4
    # Of queries, keys and values; the last two layers have queries alone.
    assert [[n["attrs"]["head_dim"] for n in block if n["op"] == "split_heads"] for block in blocks(build(fields))] == [
        [16, 16, 16],
        [32, 32, 32],
        [16],
        [32],
    ]
    ropes = attributes(fields, "rope_frequencies")
    assert [(a["head_dim"], a["theta"], a["scaling_type"], a.get("partial_rotary_factor")) for a in ropes] == [
        (32, 1e6, "proportional", 0.25),
        (16, 1e4, "default", None),
    ]
    [stack] = [item for item in build(fields)["body"] if "repeat" in item]
    shapes = [{p["name"].split("{i}.")[1]: p["shape"] for p in block["parameters"]} for block in stack["blocks"]]
    assert [of["mlp.gate_proj.weight"][0] for of in shapes] == [48, 48, 96, 96], "shared layers are wide"
    assert ["self_attn.v_proj.weight" in of for of in shapes] == [True, True, False, False]
    assert [row.get("initial") for row in stack["carry"]][1:] == [None] * 4
    assert len(stack["each"][0]["values"]) == 4

    plain = tiny_gemma4(num_kv_shared_layers=0, hidden_size_per_layer_input=0)
    [stack] = [item for item in build(plain)["body"] if "repeat" in item]
    assert (len(stack["blocks"]), len(stack["carry"]), "each" in stack) == (2, 1, False)
    by_layer = {str(i): {"head_dim": 32} for i in (1, 3)}
    other = tiny_gemma4(global_head_dim=None, per_layer_config=by_layer)
    assert build(other)["body"][2:] == build(fields)["body"][2:]
    assert layers_of(tiny_gemma4(layer_types=None, num_kv_shared_layers=0), "attention", "window") == [5, 5, 5, None]


def test_fields_of_gemma4_that_name_no_layer_change_nothing():
    """As in transformers: numbers of key heads without `attention_k_eq_v`, and images that a text has not."""
    fields = tiny_gemma4()
    for name, value in (("num_global_key_value_heads", 1), ("use_bidirectional_attention", "vision"), ("num_experts", 4)):
        assert build(tiny_gemma4(**{name: value})) == build(fields), name


def test_experts_of_gemma4_are_next_to_the_feed_forward_layer():
    ir = build(tiny_gemma4_mixture())
    [stack] = [item for item in ir["body"] if "repeat" in item]
    shapes = [{p["name"].split("{i}.")[1]: p["shape"] for p in block["parameters"]} for block in stack["blocks"]]
    for of in shapes:
        assert (of["experts.gate_up_proj"], of["experts.down_proj"]) == ([4, 32, 32], [4, 32, 16])
        assert of["router.per_expert_scale"] == [4] and "mlp.gate_proj.weight" in of
    assert [of["self_attn.k_proj.weight"][0] for of in shapes] == [32, 32]
    assert ["self_attn.v_proj.weight" in of for of in shapes] == [True, False]
    assert attributes(tiny_gemma4_mixture(), "route") == [{"top_k": 2, "scores": "softmax", "normalise": True}] * 2


def test_multipliers_of_granite():
    assert attributes(tiny_granite(), "attention")[0]["scale"] == 0.25
    assert [a["factor"] for a in attributes(tiny_granite(), "scale")] == [12.0, 1 / 8.0, 0.5, 0.5]


def test_norms_of_olmo_are_as_wide_as_all_heads():
    ir = build(tiny_olmo2(num_key_value_heads=2))
    [block] = [item["blocks"][0] for item in ir["body"] if "repeat" in item]
    shapes = {p["name"].split("{i}.")[1]: p["shape"] for p in block["parameters"]}
    assert (shapes["self_attn.q_norm.weight"], shapes["self_attn.k_norm.weight"]) == ([32], [16])
    assert "input_layernorm.weight" not in shapes
    assert layers_of(tiny_olmo3(), "attention", "window") == [5, 5, 5, None]
    scaled = tiny_olmo3(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    kinds = [(a["theta"], a["scaling_type"]) for a in attributes(scaled, "rope_frequencies")]
    assert kinds == [(10000.0, "yarn"), (10000.0, "default")], "layers with a window are not scaled"


def test_partial_rotations():
    assert [a["head_dim"] for a in attributes(tiny_phi3(), "rope_frequencies")] == [12]
    assert [a["head_dim"] for a in attributes(tiny_phi3(partial_rotary_factor=None), "rope_frequencies")] == [16]
    assert [a["head_dim"] for a in attributes(tiny_glm4(), "rope_frequencies")] == [8], "half where nothing is said"
    assert [a["head_dim"] for a in attributes(tiny_glm4(partial_rotary_factor=1.0), "rope_frequencies")] == [16]
    assert attributes(tiny_glm4(), "rope") == [{"interleaved": True}] * 2
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    longer = attributes(tiny_phi3(rope_scaling={"type": "longrope", **factors}), "rope_frequencies_of_batch")
    assert (longer[0]["factor"], longer[0]["original_max_position_embeddings"]) == (1.0, 64)
    with pytest.raises(ModelConfigError, match="`rope_scaling.short_factor`: has 8 numbers, expected .* = 6"):
        build(tiny_phi3(rope_scaling={"type": "longrope", **factors, "short_factor": [1.0] * 8}))
    with pytest.raises(ModelConfigError, match="expected a number above 0, up to 1"):
        build(tiny_glm4(rope_scaling={"rope_type": "default", "partial_rotary_factor": 2}))


@pytest.mark.parametrize("make", NEW)
def test_a_family_trains_merges_and_is_exported(make: Callable[..., dict], make_model, tmp_path):
    """An adapter of a few steps, merged: the logits of the model with its adapter; the files are those of the base."""
    folder = make_model(make())
    ids = np.random.default_rng(1).integers(1, 90, (2, 1, 2, 12))
    options = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "lora_rank": 4, "lora_dropout": 0.0}
    trainer = surogate.Trainer(options | {"output_dir": str(tmp_path / "run")})
    losses = [trainer.step({"input_ids": batch, "labels": batch}, learning_rate=1e-2)["loss"] for batch in ids]
    assert all(np.isfinite(losses))
    trainer.export(tmp_path / "adapter")
    adapted = surogate.load(folder, adapter=tmp_path / "adapter").forward(ids[0, 0])
    merged = ["merge", str(tmp_path / "adapter"), "--model", str(folder), "--output", str(tmp_path / "merged")]
    assert main(merged) == 0
    np.testing.assert_allclose(surogate.load(tmp_path / "merged").forward(ids[0, 0]), adapted, atol=2e-5)
    assert not np.array_equal(surogate.load(folder).forward(ids[0, 0]), adapted)


def test_a_mistake_in_a_shared_layer_points_at_the_line_that_made_it():
    """The size of the heads does not fit the layer that a model's file makes."""
    from surogate.dsl import model
    from surogate.errors import ModelError
    from surogate.layers import Attention, CausalLM, Decoder, DecoderConfig, DecoderLayer, GatedMLP

    @model("WrongForTests", config=DecoderConfig)
    class Wrong(CausalLM):
        def __init__(self, c: DecoderConfig) -> None:
            mlp = GatedMLP(c.hidden_size + 1, c.intermediate_size)  # here
            super().__init__(c, Decoder(c, DecoderLayer(c, Attention(c), mlp)))

    with pytest.raises(ModelError) as error:
        build(tiny_llama(architectures=["WrongForTests"], model_type=None))
    lines, first = inspect.getsourcelines(Wrong.__init__)
    line = first + next(i for i, text in enumerate(lines) if "# here" in text)
    assert error.value.place.endswith(f"test_families.py:{line}"), error.value.place


@pytest.mark.parametrize("make", NEW)
def test_codes_and_recipes_work_with_a_family(make, make_model):
    """NF4 bases and fp8 products: finite losses near those of the plain model."""
    folder = make_model(make(hidden_size=64))
    ids = np.random.default_rng(1).integers(1, 90, (1, 2, 12))
    base = {"model": str(folder), "torch_dtype": "bfloat16", "device": "cpu", "lora_rank": 4}
    losses = {}
    for name, options in {"plain": {}, "nf4": {"qlora_bnb": True}, "fp8": {"recipe": "fp8_hybrid"}}.items():
        trainer = surogate.Trainer(base | options)
        losses[name] = trainer.step({"input_ids": ids, "labels": ids}, learning_rate=0.0)["loss"]
    assert abs(losses["nf4"] - losses["plain"]) < 0.2 and abs(losses["fp8"] - losses["plain"]) < 0.2, losses


def test_biases_and_dropout_of_seed_oss():
    def biased(fields: dict) -> list[str]:
        found = [p["name"] for item in build(fields)["body"] if "repeat" in item for p in item["blocks"][0]["parameters"]]
        return [name.split(".")[-2] for name in found if name.endswith(".bias")]

    assert biased(tiny_seed_oss()) == ["q_proj", "k_proj", "v_proj"], "a missing field is the default"
    assert biased(tiny_seed_oss(attention_bias=False, attention_out_bias=True)) == ["o_proj"]
    assert biased(tiny_seed_oss(attention_bias=False, mlp_bias=True)) == ["gate_proj", "up_proj", "down_proj"]
    assert attributes(tiny_seed_oss(), "dropout") == [] and "dropout" not in attributes(tiny_seed_oss(), "attention")[0]
    dropping = tiny_seed_oss(residual_dropout=None, attention_dropout=None)
    assert attributes(dropping, "dropout") == [{"p": 0.1}, {"p": 0.1}], "of both halves of a layer"
    assert attributes(dropping, "attention")[0]["dropout"] == 0.1


def test_dropout_of_starcoder2():
    """Embeddings and both halves of a layer drop values, as the published files have it."""
    dropping = tiny_starcoder2(attention_dropout=0.1, embedding_dropout=0.2, residual_dropout=0.3)
    body = build(dropping)["body"]
    assert [of["attrs"]["p"] for of in body if of.get("op") == "dropout"] == [0.2]
    [item] = [item for item in body if "repeat" in item]
    assert [of["attrs"]["p"] for of in item["blocks"][0]["nodes"] if of["op"] == "dropout"] == [0.3, 0.3]
    assert all(of.get("op") != "dropout" for of in build(tiny_starcoder2())["body"])


def test_windows_and_rotations_of_exaone4():
    def kinds(fields: dict) -> list[tuple]:
        """Window and number of rotations of each layer."""
        [item] = [item for item in build(fields)["body"] if "repeat" in item]
        blocks = [item["blocks"][kind]["nodes"] for kind in item.get("pattern", [0] * item["repeat"])]
        windows = [next(n for n in block if n["op"] == "attention").get("attrs", {}).get("window") for block in blocks]
        return list(zip(windows, [sum(n["op"] == "rope" for n in block) for block in blocks], strict=True))

    assert kinds(tiny_exaone4()) == [(5, 2)] * 3 + [(None, 0)]
    assert kinds(tiny_exaone4(sliding_window_pattern=2)) == [(5, 2), (None, 0)] * 2
    without = {**tiny_exaone4(), "sliding_window_pattern": None}
    assert kinds(without) == [(None, 0)] * 4, "null is no layer with a window"
    assert kinds({**tiny_exaone4(), "sliding_window": None}) == [(None, 2)] * 4
    assert kinds(tiny_exaone4(sliding_window=None)) == [(4096, 2)] * 3 + [(None, 0)], "a missing field is the default"
    types = ["full_attention", "sliding_attention"] * 2
    assert kinds(tiny_exaone4(layer_types=types, sliding_window_pattern="LLLG")) == [(None, 0), (5, 2)] * 2
    with pytest.raises(ModelConfigError, match="`layer_types`: 'sliding_attention' needs"):
        build({**tiny_exaone4(layer_types=types), "sliding_window": None})


def test_fields_of_ernie4_5():
    assert [a["interleaved"] for a in attributes(tiny_ernie4_5(), "rope")] == [True, True]
    assert {a["theta"] for a in attributes(tiny_ernie4_5(rope_theta=None), "rope_frequencies")} == {500000.0}
    biased = build(tiny_ernie4_5(use_bias=True))
    [item] = [item for item in biased["body"] if "repeat" in item]
    biases = [p["name"].split(".")[-2] for p in item["blocks"][0]["parameters"] if p["name"].endswith(".bias")]
    assert biases == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert "lm_head.bias" not in [p["name"] for p in biased["parameters"]]
