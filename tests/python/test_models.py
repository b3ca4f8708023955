"""The architectures: their IR as stored text, both config spellings, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import tiny_llama, tiny_qwen3, updating
from surogate import models
from surogate.errors import ModelConfigError


def nodes(ir: dict) -> list[dict]:
    """Every node of the model, those of repeats once."""
    return [n for item in ir["body"] for n in (item["block"]["nodes"] if "repeat" in item else [item])]


def parameters(ir: dict) -> dict[str, dict]:
    inner = [p for item in ir["body"] if "repeat" in item for p in item["block"]["parameters"]]
    return {p["name"]: p for p in ir["parameters"] + inner}


def build(fields: dict) -> dict:
    return json.loads(models.build(fields))


@pytest.mark.parametrize(("name", "fields"), [("llama", tiny_llama()), ("qwen3", tiny_qwen3())])
def test_ir_is_as_stored(name, fields):
    # Line numbers move with every edit of the model's file and are left out.
    text = re.sub(r'("at": "[^"]*):\d+"', r'\1"', models.build(fields)) + "\n"
    path = Path(__file__).parent / "ir" / f"{name}.json"
    if updating():
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "if the change is meant: SUROGATE_UPDATE=1 pytest"


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_both_spellings_of_the_config_are_one_model(golden_folder, model):
    folder = golden_folder / model
    texts = [models.build(json.loads((folder / name).read_text())) for name in ("config.json", "config_v4.json")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_parameters_are_those_of_the_file(golden_folder, model):
    from safetensors import safe_open

    folder = golden_folder / model
    fields = json.loads((folder / "config.json").read_text())
    ours = {}
    for name, row in parameters(build(fields)).items():
        for i in range(fields["num_hidden_layers"] if "{i}" in name else 1):
            ours[name.replace("{i}", str(i))] = row["shape"]
    with safe_open(folder / "model.safetensors", "np") as file:
        assert ours == {name: list(file.get_slice(name).get_shape()) for name in file.keys()}


def test_published_configs_are_read(shared):
    read = []
    for file in sorted((shared / "assets" / "configs").glob("*/config.json")):
        fields = json.loads(file.read_text())
        if fields["architectures"][0] in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
            read.append((file.parent.name, build(fields)["architecture"]))
    assert len(read) >= 9, read


def test_tied_embeddings_have_no_head_of_their_own():
    assert "lm_head.weight" in parameters(build(tiny_llama()))
    tied = build(tiny_llama(tie_word_embeddings=True))
    assert "lm_head.weight" not in parameters(tied)
    head = [n for n in nodes(tied) if n["op"] == "linear"][-1]
    assert head["inputs"][1] == "model.embed_tokens.weight"


def test_biases_are_honoured():
    ir = build(tiny_llama(attention_bias=True, mlp_bias=True))
    biases = {name.rsplit(".", 2)[-2] for name in parameters(ir) if name.endswith(".bias")}
    assert biases == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(n["attrs"]["bias"] for n in nodes(ir) if n["op"] == "linear" and "lm_head" not in n["inputs"][1])


def test_head_size_follows_from_the_hidden_size_unless_given():
    def shape(fields):
        return parameters(build(fields))["model.layers.{i}.self_attn.q_proj.weight"]["shape"]

    assert shape(tiny_llama()) == [32, 32]
    assert shape(tiny_llama(head_dim=24)) == [96, 32]
    assert shape(tiny_qwen3(head_dim=None)) == [4 * 128, 32]
    everyone = {**tiny_qwen3(), "num_key_value_heads": None}
    assert parameters(build(everyone))["model.layers.{i}.self_attn.k_proj.weight"]["shape"] == [64, 32]
    with pytest.raises(ModelConfigError, match="`head_dim`: is missing, and num_attention_heads does not divide"):
        build(tiny_llama(hidden_size=34))


@pytest.mark.parametrize(("given", "expected"), [(5, 5), (None, None), (96, None), (-1, 95), (-97, None)])
def test_padding_row_must_lie_in_the_vocabulary(given, expected):
    embedding = nodes(build(tiny_llama(pad_token_id=given)))[0]
    assert embedding.get("attrs", {}).get("padding_idx") == expected


def test_initial_weights_follow_the_config():
    rows = parameters(build(tiny_llama(initializer_range=0.5, attention_bias=True)))
    assert rows["model.layers.{i}.mlp.up_proj.weight"]["init"] == {"normal": {"std": 0.5}}
    assert rows["model.norm.weight"]["init"] == "ones"
    assert rows["model.layers.{i}.self_attn.q_proj.bias"]["init"] == "zeros"
    marked = {name.rsplit(".", 2)[-2] for name, row in rows.items() if row.get("residual_projection")}
    assert marked == {"o_proj", "down_proj"}


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "fp8"}),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 2.5),
        ("vocab_size", 0),
        ("head_dim", True),
        ("rms_norm_eps", "small"),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(make, field, value):
    with pytest.raises(ModelConfigError, match=f"`{field}`"):
        build(make(**{field: value}))


def test_fields_of_one_architecture_that_cannot_be_honoured():
    with pytest.raises(ModelConfigError, match="`pretraining_tp`: 2 is not supported, expected 1"):
        build(tiny_llama(pretraining_tp=2))
    with pytest.raises(ModelConfigError, match="`use_sliding_window`: True"):
        build(tiny_qwen3(use_sliding_window=True, sliding_window=16))
    with pytest.raises(ModelConfigError, match="`layer_types`: 'sliding_attention'"):
        build(tiny_qwen3(layer_types=["full_attention", "sliding_attention"]))
    build(tiny_qwen3(sliding_window=16, layer_types=["full_attention"] * 2))


@pytest.mark.parametrize(
    ("scaling", "problem"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not available yet"),
        ({"type": "longrope", "short_factor": [1.0]}, "'longrope' is not available yet"),
        ({"rope_type": "linear"}, "`rope_scaling.factor`: is missing"),
        ({"rope_type": "llama3", "factor": 8.0}, "`rope_scaling.low_freq_factor`: is missing"),
        ({"rope_type": "linear", "factor": "2"}, "`rope_scaling.factor`: '2' is not supported"),
        ({"rope_type": "linear", "factor": 2.0, "truncate": True}, "`rope_scaling.truncate`: is not a setting"),
        ({"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ([1, 2], "expected one object"),
    ],
)
def test_rotations_that_cannot_be_honoured(scaling, problem):
    with pytest.raises(ModelConfigError, match=re.escape(problem)):
        build(tiny_llama(rope_scaling=scaling))


def test_yarn_is_relative_to_the_length_of_the_model():
    def attributes(**scaling):
        ir = build(tiny_llama(rope_scaling={"type": "yarn", "factor": 4.0, **scaling}))
        return next(n for n in nodes(ir) if n["op"] == "rope_frequencies")["attrs"]

    assert attributes()["original_max_position_embeddings"] == 64
    assert attributes(original_max_position_embeddings=16)["original_max_position_embeddings"] == 16


def test_an_original_length_outside_of_the_scaling_wins():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for outside, expected in ((None, 64), (24, 24)):
        ir = build(tiny_llama(rope_scaling=scaling, original_max_position_embeddings=outside))
        attributes = next(n for n in nodes(ir) if n["op"] == "rope_frequencies")["attrs"]
        assert attributes["original_max_position_embeddings"] == expected


def test_unknown_architectures_are_named_with_the_nearest():
    with pytest.raises(ModelConfigError, match="Qwen3MoeForCausalLM is not available yet.*mean Qwen3ForCausalLM"):
        build({"architectures": ["Qwen3MoeForCausalLM"]})
    with pytest.raises(ModelConfigError, match="`architectures`: is missing"):
        build({})
