"""The architectures: their IR as stored text, both config spellings, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import surogate
from conftest import TRIMMED, tiny_gpt2, tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3, tiny_smollm3, updating
from golden import FAMILIES, HYBRIDS, MIXTURES
from surogate import models
from surogate.cli.commands import main
from surogate.dsl.model import ARCHITECTURES
from surogate.errors import ConfigError, ModelConfigError


def nodes(ir: dict) -> list[dict]:
    """Every node of the model, those of repeats once."""
    return [n for item in ir["body"] for n in (item["blocks"][0]["nodes"] if "repeat" in item else [item])]


def parameters(ir: dict) -> dict[str, dict]:
    inner = [p for item in ir["body"] if "repeat" in item for p in item["blocks"][0]["parameters"]]
    return {p["name"]: p for p in ir["parameters"] + inner}


def build(fields: dict) -> dict:
    return json.loads(models.build(fields))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", tiny_llama()),
        ("qwen3", tiny_qwen3()),
        ("mistral", tiny_mistral()),
        ("gpt2", tiny_gpt2(resid_pdrop=0.1)),
        ("smollm3", tiny_smollm3()),
    ],
)
def test_ir_is_as_stored(name, fields):
    # Line numbers move with every edit of the model's file and are left out.
    text = re.sub(r'("at": "[^"]*):\d+"', r'\1"', models.build(fields)) + "\n"
    path = Path(__file__).parent / "ir" / f"{name}.json"
    if updating():
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "if the change is meant: SUROGATE_UPDATE=1 pytest"


@pytest.fixture(params=[*FAMILIES, *MIXTURES])
def folder(request, golden_folder) -> Path:
    if not (golden_folder / request.param).is_dir():
        # The trimmed set holds some families; with ../shared every family must be there.
        assert golden_folder == TRIMMED, f"../shared has no numbers of {request.param}"
        pytest.skip(f"no ../shared next to the checkout, and no numbers of {request.param} in the trimmed set")
    return golden_folder / request.param


def test_both_spellings_of_the_config_are_one_model(folder):
    if not (folder / "config_v4.json").exists():
        assert folder.name in ("ministral3", *HYBRIDS), "transformers 4 does not have it"
        return
    texts = [models.build(json.loads((folder / name).read_text())) for name in ("config.json", "config_v4.json")]
    assert texts[0] == texts[1]


def test_parameters_are_those_of_the_file(folder):
    from safetensors import safe_open

    fields = json.loads((folder / "config.json").read_text())
    ir = build(fields)
    ours = {row["name"]: row["shape"] for row in ir["parameters"]}
    [stack] = [item for item in ir["body"] if "repeat" in item]
    for i in range(stack["repeat"]):
        for row in stack["blocks"][stack["pattern"][i] if "pattern" in stack else 0]["parameters"]:
            ours[row["name"].replace("{i}", str(i))] = row["shape"]

    def named(name: str) -> str:
        pairs = ir.get("files", {}).get("renamed", [])
        return next((there + name.removeprefix(here) for here, there in pairs if name.startswith(here)), name)

    with safe_open(folder / "model.safetensors", "np") as file:
        assert ours == {named(name): list(file.get_slice(name).get_shape()) for name in file.keys()}


def test_published_configs_are_read(shared):
    read = []
    for file in sorted((shared / "assets" / "configs").glob("*/config.json")):
        fields = json.loads(file.read_text())
        if fields["architectures"][0] in ARCHITECTURES:
            read.append((file.parent.name, build(fields)["architecture"]))
    assert len(read) >= 15, read


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


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_qwen3, tiny_mistral])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_dropout", "0.1"),
        ("partial_rotary_factor", 0.5),
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


def windows(fields: dict) -> object:
    """The `window` attribute of the attention: a number, a list with one for each layer, or None."""
    attention = next(n for n in nodes(build(fields)) if n["op"] == "attention")
    window = attention["attrs"].get("window")
    return window["each"] if isinstance(window, dict) else window


@pytest.mark.parametrize("fields", [tiny_gpt2(attn_pdrop=0.1), tiny_llama(attention_dropout=0.1)])
def test_dropout_of_attention_is_not_applied_and_told(make_model, fields, tmp_path, capsys):
    folder = make_model({name: 0.0 if value == 0.1 else value for name, value in fields.items()})
    (folder / "config.json").write_text(json.dumps(fields))
    ids = np.arange(12).reshape(1, 1, 12)
    loss, _ = surogate.load(folder).loss_and_gradients(ids[0], ids[0])
    assert np.isfinite(loss)
    run = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "lora_dropout": 0.0}
    with pytest.warns(UserWarning, match="`attn_pdrop` or `attention_dropout` in config.json, 0.1. is not applied in training"):
        trainer = surogate.Trainer(run)
    found = trainer.step({"input_ids": ids, "labels": ids}, learning_rate=0.0)["loss"]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": list(range(1, 13))}) + "\n")
    (tmp_path / "run.yaml").write_text(json.dumps(run | {"datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "tokens"}]}))
    assert main(["plan", str(tmp_path / "run.yaml"), "--machine", "h100"]) == 0
    assert capsys.readouterr().out.count("dropout of attention weights") == 1
    (folder / "config.json").write_text(json.dumps({name: 0.0 if value == 0.1 else value for name, value in fields.items()}))
    assert surogate.Trainer(run).step({"input_ids": ids, "labels": ids}, learning_rate=0.0)["loss"] == found


@pytest.mark.parametrize(
    ("option", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": '{"type": "dynamic", "factor": 3.0}'}, {"rope_type": "dynamic", "factor": 3.0}),
        (
            {"rope_scaling": "yarn", "max_model_len": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
    ],
)
def test_rope_scaling_of_the_options_is_as_if_the_model_had_it(make_model, tmp_path, option, scaling):
    own = make_model(tiny_llama(max_position_embeddings=16))
    scaled = tmp_path / "scaled"
    scaled.mkdir()
    (scaled / "model.safetensors").symlink_to(own / "model.safetensors")
    (scaled / "config.json").write_text(json.dumps(tiny_llama(max_position_embeddings=16, rope_scaling=scaling)))
    ids = np.arange(24).reshape(1, 1, 24)

    def first_loss(folder: Path, **options: object) -> float:
        base = {"model": str(folder), "torch_dtype": "float32", "device": "cpu", "lora": False, "sequence_len": 24}
        trainer = surogate.Trainer({**base, **options})
        loss = trainer.step({"input_ids": ids, "labels": ids}, learning_rate=0.0)["loss"]
        if options:
            trainer.export(tmp_path / "result")
        return loss

    assert first_loss(own, **option) == first_loss(scaled)
    logits = [surogate.load(folder).forward(ids[0]) for folder in (own, scaled, tmp_path / "result")]
    assert not np.array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[2], logits[1])
    with pytest.raises(ConfigError, match="`sequence_len: 24` is longer than the model's 16 positions"):
        first_loss(own)


def test_rope_scaling_by_name_must_stretch(make_model):
    folder = make_model(tiny_llama())
    with pytest.raises(ConfigError, match="would stretch 64 positions to `max_model_len: 64`"):
        surogate.Trainer({"model": str(folder), "rope_scaling": "linear", "max_model_len": 64, "device": "cpu"})


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_qwen3])
def test_layers_of_qwen_slide_as_the_config_says(make):
    used = {"use_sliding_window": True, "sliding_window": 16}
    assert windows(make(sliding_window=16)) is None
    assert windows(make(sliding_window=16, layer_types=["full_attention"] * 2)) is None
    assert windows(make(**used)) is None, "max_window_layers is 28"
    assert windows(make(**used, max_window_layers=1)) == [None, 16]
    assert windows(make(**used, max_window_layers=0)) == 16
    assert windows(make(**used, layer_types=["sliding_attention", "full_attention"])) == [16, None]
    assert windows({**make(**used, max_window_layers=0), "sliding_window": None}) is None
    with pytest.raises(ModelConfigError, match="`layer_types`: 'sliding_attention' needs `use_sliding_window: true`"):
        build(make(layer_types=["sliding_attention"] * 2))
    with pytest.raises(ModelConfigError, match="`layer_types`: 'chunked_attention' is not supported"):
        build(make(layer_types=["chunked_attention"] * 2))
    with pytest.raises(ModelConfigError, match="`sliding_window`: 0 is not supported"):
        build(make(use_sliding_window=True, sliding_window=0))


def test_the_window_of_mistral():
    assert windows(tiny_mistral()) == 5
    assert windows({**tiny_mistral(), "sliding_window": None}) is None
    assert windows(tiny_mistral(sliding_window=None)) == 4096, "the default of a missing field"
    with pytest.raises(ModelConfigError, match="`sliding_window`: True"):
        build(tiny_mistral(sliding_window=True))


def test_layers_of_smollm3_without_positions():
    def skipped(fields: dict) -> object:
        return next(n for n in nodes(build(fields)) if n["op"] == "rope").get("attrs", {}).get("skip")

    assert skipped(tiny_smollm3()) == {"each": [None, True, None, True]}
    assert skipped(tiny_smollm3(no_rope_layer_interval=5)) is None
    assert skipped(tiny_smollm3(no_rope_layers=[0, 0, 0, 1])) == {"each": [True, True, True, None]}
    sliding = tiny_smollm3(use_sliding_window=True, sliding_window=8)
    assert windows(sliding) == [None, 8, None, 8], "where a layer does not rotate"
    with pytest.raises(ModelConfigError, match="`no_rope_layers`: expected a list of 4"):
        build(tiny_smollm3(no_rope_layers=[1]))
    without = {**tiny_smollm3(), "pad_token_id": None}
    assert "attrs" not in nodes(build(without))[0], "null is no padding row"


def attributes(fields: dict, op: str) -> dict:
    return next(n for n in nodes(build(fields)) if n["op"] == op)["attrs"]


def test_fields_of_gpt2_that_change_its_arithmetic():
    assert attributes(tiny_gpt2(), "activation") == {"function": "gelu_tanh"}
    assert attributes(tiny_gpt2(activation_function="relu"), "activation") == {"function": "relu"}
    assert attributes(tiny_gpt2(), "attention")["scale"] == 8**-0.5
    assert attributes(tiny_gpt2(scale_attn_weights=False), "attention")["scale"] == 1.0
    by_depth = attributes(tiny_gpt2(scale_attn_by_inverse_layer_idx=True), "attention")["scale"]
    assert by_depth == {"each": [8**-0.5, 8**-0.5 / 2]}
    shapes = {name: row["shape"] for name, row in parameters(build(tiny_gpt2(n_inner=40))).items()}
    assert shapes["transformer.h.{i}.mlp.c_fc.weight"] == [32, 40]
    assert "lm_head.weight" not in shapes
    assert "lm_head.weight" in parameters(build(tiny_gpt2(tie_word_embeddings=False)))
    assert build(tiny_gpt2())["max_positions"] == 64
    dropped = tiny_gpt2(resid_pdrop=0.1, embd_pdrop=0.2)
    assert [n["attrs"]["p"] for n in nodes(build(dropped)) if n["op"] == "dropout"] == [0.2, 0.1, 0.1]
    for field, value in [
        ("activation_function", "mish"),
        ("add_cross_attention", True),
        ("n_head", 5),
        ("embd_pdrop", 1.0),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ]:
        with pytest.raises(ModelConfigError, match=f"`{field}`"):
            build(tiny_gpt2(**{field: value}))


def test_published_forms_of_gpt2_load(make_model, tmp_path):
    """Without the first component of the names, and with the masks that old files store."""
    import shutil

    from safetensors.numpy import load_file, save_file

    whole = make_model(tiny_gpt2())
    bare = tmp_path / "bare"
    shutil.copytree(whole, bare)
    tensors = {n.removeprefix("transformer."): v for n, v in load_file(whole / "model.safetensors").items()}
    assert "wte.weight" in tensors
    mask = np.tril(np.ones((1, 1, 64, 64), np.float32))
    masks = {f"h.{i}.attn.bias": mask for i in range(2)}
    masks |= {f"h.{i}.attn.masked_bias": np.float32([-1e4]) for i in range(2)}
    save_file(tensors | masks, bare / "model.safetensors")
    ids = np.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(surogate.load(bare).forward(ids), surogate.load(whole).forward(ids))


def test_positions_of_gpt2_end(make_model):
    folder = make_model(tiny_gpt2(n_positions=16))
    model = surogate.load(folder)
    assert model.forward([[1] * 16]).shape == (1, 16, 96)
    with pytest.raises(ConfigError, match="position 16 is outside of the model's 16 positions"):
        model.forward([[1] * 17])
    with pytest.raises(ConfigError, match="longer than the model's 16 positions"):
        surogate.Trainer({"model": str(folder), "sequence_len": 17, "device": "cpu"})


def test_dropout_of_a_model_is_at_work_in_training_alone(make_model):
    """Forward, loss and evaluation drop nothing; a training step drops, the same way for the same seed."""
    dropped = make_model(tiny_gpt2(resid_pdrop=0.3, embd_pdrop=0.3))
    plain = dropped.with_name("plain")
    plain.mkdir()
    (plain / "model.safetensors").symlink_to(dropped / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(tiny_gpt2()))
    ids = np.arange(48).reshape(1, 2, 24) % 90
    results = {}
    for folder in (plain, dropped):
        model = surogate.load(folder)
        results[folder] = (model.forward(ids[0]), model.loss_and_gradients(ids[0], ids[0])[0])
    np.testing.assert_array_equal(results[plain][0], results[dropped][0])
    assert results[plain][1] == results[dropped][1]

    def losses(folder: Path, seed: int) -> list[float]:
        options = {"model": str(folder), "lora": False, "torch_dtype": "float32", "device": "cpu", "train_seed": seed}
        trainer = surogate.Trainer(options)
        steps = [trainer.step({"input_ids": ids, "labels": ids}, learning_rate=0.0) for _ in range(2)]
        return [step["loss"] for step in steps]

    without = losses(plain, 1)
    assert without[0] == without[1]
    first, again, other = losses(dropped, 1), losses(dropped, 1), losses(dropped, 2)
    assert first == again and first[0] != first[1] and first != other and without[0] not in first


def test_qwen2_has_biases_on_queries_keys_and_values():
    names = parameters(build(tiny_qwen2()))
    assert {n.rsplit(".", 2)[-2] for n in names if n.endswith(".bias")} == {"q_proj", "k_proj", "v_proj"}


@pytest.mark.parametrize(
    ("scaling", "problem"),
    [
        ({"type": "longrope", "short_factor": [1.0]}, "`rope_scaling.long_factor`: is missing"),
        (
            {"type": "longrope", "short_factor": [1.0], "long_factor": 2},
            "`rope_scaling.long_factor`: 2 is not supported",
        ),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}, "`rope_scaling.short_factor`: has 1"),
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
    with pytest.raises(ModelConfigError, match="Qwen3LastForCausalLM is not available yet.*mean Qwen3"):
        build({"architectures": ["Qwen3LastForCausalLM"]})
    with pytest.raises(ModelConfigError, match="`architectures`: is missing"):
        build({})
    with pytest.raises(ModelConfigError, match="is missing, and `model_type: mamba` is not known"):
        build({"model_type": "mamba"})


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_qwen3, tiny_mistral, tiny_smollm3, tiny_gpt2])
def test_the_model_type_stands_for_a_missing_architecture(make):
    assert build(make(architectures=None))["architecture"] == make()["architectures"][0]
