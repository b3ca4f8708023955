"""Configurations and tokenizers of others: every size is bounded, and the error names the field."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import tiny_llama
from surogate import ConfigError, ModelConfigError, models
from surogate.convert import vocabulary
from surogate.dsl.config import LARGEST
from surogate.storage import hub, json_file


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 1 << 31),
        ("num_hidden_layers", (1 << 12) + 1),
        ("num_hidden_layers", 10**400),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 2.5),
        ("head_dim", 1 << 40),
        ("hidden_size", 1 << 40),
        ("vocab_size", 10**12),
        ("intermediate_size", 1 << 62),
        ("num_attention_heads", 1 << 20),
        ("num_key_value_heads", 1 << 63),
        ("max_position_embeddings", 1 << 31),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 10**400),
        ("rms_norm_eps", 1e300),
        ("rope_theta", float("nan")),
        ("rope_theta", -1.0),
        ("rope_theta", 10**400),
        ("pad_token_id", -(10**30)),
        ("architectures", {"a": 1}),
        ("architectures", [["LlamaForCausalLM"]]),
        ("architectures", "LlamaForCausalLM"),
    ],
)
def test_a_size_that_no_model_has_is_refused_by_its_name(field, value):
    with pytest.raises(ModelConfigError, match=f"`{field}`") as reported:
        models.build(tiny_llama(**{field: value}))
    assert len(str(reported.value)) < 500


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 10**400}, "original_max_position"),
        ({"rope_type": ["linear"], "factor": 2}, "rope_type"),
        ({"rope_type": "longrope", "short_factor": [float("inf")] * 4, "long_factor": [1.0] * 4}, "short_factor"),
    ],
)
def test_a_rotation_that_cannot_be_is_refused_by_its_name(scaling, field):
    with pytest.raises(ModelConfigError, match=field):
        models.build(tiny_llama(rope_scaling=scaling))
    with pytest.raises(ModelConfigError, match="original_max_position_embeddings"):
        models.build(
            tiny_llama(rope_scaling={"rope_type": "yarn", "factor": 2}, original_max_position_embeddings="many")
        )


def test_sizes_within_their_bounds_have_a_bounded_product():
    largest = {"hidden_size": 1 << 18, "intermediate_size": 1 << 21, "num_hidden_layers": 1 << 12}
    with pytest.raises(ModelConfigError, match="parameters, expected at most .* in 4096 layers"):
        models.build(tiny_llama(**largest))
    # The largest models that there are have their place, and are traced in no time.
    models.build(
        tiny_llama(
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers=126,
            num_attention_heads=128,
            vocab_size=128256,
        )
    )
    models.build(tiny_llama(num_hidden_layers=LARGEST["num_hidden_layers"]))


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ('{"a": {"b": [1, NaN]}}', r"`a.b\[1\]` is nan"),
        ('{"rope_theta": 1e999}', "`rope_theta` is inf"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "deep"),
        ('{"a": ' * 70 + "1" + "}" * 70, "`a.a.a.*is nested more than 64 deep"),
        ("[1]", "expected an object"),
        ("{", "cannot be read"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read"),
    ],
    ids=["nan", "inf", "very deep", "deep", "list", "torn", "digits"],
)
def test_a_file_that_is_no_configuration_says_why(tmp_path, text, reported):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((ConfigError, ModelConfigError), match=reported):
        hub.model_config(tmp_path)


@pytest.mark.parametrize("kind", ["endless", "waits"])
def test_a_file_that_never_ends_is_refused(tmp_path, kind):
    place = tmp_path / "config.json"
    if kind == "endless":
        place.symlink_to("/dev/zero")
    else:
        os.mkfifo(place)
    with pytest.raises(ConfigError, match="is not a regular file"):
        hub.model_config(tmp_path)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def tokenizer(folder: Path, **changes: object) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [], **changes.pop("model", {})}
    fields = {"model": model, "added_tokens": [], "pre_tokenizer": BYTES, **changes}
    (folder / "tokenizer.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"model": {"vocab": {"a": (1 << 32) - 1}}}, "the token 'a' has the id 4294967295"),
        ({"model": {"vocab": {"a": -1}}}, "the token 'a' has the id -1"),
        ({"model": {"vocab": {"a": "0"}}}, "the token 'a' has the id '0'"),
        ({"added_tokens": [{"id": -1, "content": "x"}]}, "the added token 'x' has the id -1"),
        ({"added_tokens": [{"content": "x"}]}, "this is not a tokenizer"),
        ({"added_tokens": {"id": 1}}, "this is not a tokenizer"),
        ({"model": {"merges": [1]}}, "this is not a tokenizer"),
        ({"model": {"vocab": []}}, "this is not a tokenizer"),
        ({"pre_tokenizer": []}, "this is not a tokenizer|no name in GGUF"),
    ],
)
def test_a_vocabulary_that_no_model_has_is_refused(tmp_path, changes, reported):
    tokenizer(tmp_path)
    assert dict((row[0], row[2]) for row in vocabulary.read(tmp_path, 4))["tokenizer.ggml.tokens"][2] == "[PAD2]"
    tokenizer(tmp_path, **changes)
    with pytest.raises(ConfigError, match=reported):
        vocabulary.read(tmp_path, 4)


def test_a_file_is_read_up_to_a_size(tmp_path, monkeypatch):
    monkeypatch.setattr(json_file, "BYTES", 100)
    (tmp_path / "config.json").write_text(json.dumps({"a": "b" * 200}))
    with pytest.raises(ConfigError, match="expected at most 100"):
        hub.model_config(tmp_path)
