"""`surogate new-model`: the file that it writes is an architecture that trains; what it cannot begin is said."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import surogate
from conftest import tiny_llama, tiny_qwen3
from surogate.cli import new_model
from surogate.cli.commands import main
from surogate.dsl.model import ARCHITECTURES


@pytest.fixture
def imported(monkeypatch):
    """Imports a written file; its architecture is forgotten afterwards."""
    known = dict(ARCHITECTURES)

    def of(path):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    yield of
    for name in set(ARCHITECTURES) - set(known):
        del ARCHITECTURES[name]


def trained(folder, tmp_path) -> float:
    """The loss of one step from random weights."""
    options = {"model": str(folder), "init": "random", "lora": False, "torch_dtype": "float32", "device": "cpu"}
    trainer = surogate.Trainer({**options, "output_dir": str(tmp_path / "unused")})
    ids = [[[3, 4, 5, 6, 7, 8]]]
    return trainer.step({"input_ids": ids, "labels": ids}, learning_rate=1e-3)["loss"]


@pytest.mark.parametrize(
    ("fields", "nearest", "found"),
    [
        (tiny_llama(scale_depth=1.4, rope_pattern=[1, 2]), "LlamaForCausalLM", ["scale_depth", "rope_pattern"]),
        (tiny_qwen3(tie_word_embeddings=False, attention_bias=False), "Qwen3ForCausalLM", []),
    ],
)
def test_a_new_architecture_imports_and_trains(fields, nearest, found, tmp_path, imported, capsys):
    name = nearest.replace("ForCausalLM", "TernForCausalLM")
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": [name], "model_type": "tern"}))
    path = tmp_path / "tern.py"
    assert main(["new-model", str(tmp_path), "--output", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["architecture"], said["nearest"], said["fields"]) == (name, nearest, found)
    module = imported(path)
    assert list(module.FOUND) == found and issubclass(ARCHITECTURES[name].module, ARCHITECTURES[nearest].module)
    if found:
        with pytest.warns(UserWarning, match=f"does not follow {', '.join(found)} yet"):
            loss = trained(tmp_path, tmp_path)
    else:
        loss = trained(tmp_path, tmp_path)
    assert 3 < loss < 8


def test_a_rejected_value_of_a_known_field_is_a_field_of_the_new_config(tmp_path, imported):
    path = tmp_path / "tern.py"
    path.write_text(new_model.source("TernForCausalLM", "tern", ARCHITECTURES["LlamaForCausalLM"], {"hidden_act": "relu2"}, None))
    imported(path)
    fields = tiny_llama(hidden_act="relu2", architectures=["TernForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.warns(UserWarning, match="does not follow hidden_act yet"):
        assert 3 < trained(tmp_path, tmp_path) < 8


def test_a_field_that_is_not_followed_is_right_for_the_value_that_was_found_alone(tmp_path, imported):
    fields = {**tiny_llama(scale_depth=1.4), "architectures": ["TernForCausalLM"], "model_type": "tern"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert main(["new-model", str(tmp_path), "--output", str(tmp_path / "tern.py")]) == 0
    imported(tmp_path / "tern.py")
    (tmp_path / "config.json").write_text(json.dumps({**fields, "scale_depth": 1.0}))
    with pytest.warns(UserWarning), pytest.raises(surogate.ModelConfigError, match="`scale_depth`: 1.0 is not supported"):
        trained(tmp_path, tmp_path)


def test_a_name_alone_begins_with_a_plain_decoder(tmp_path, imported, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new-model", "arctic-tern"]) == 0
    assert "ArcticTernForCausalLM as LlamaForCausalLM" in capsys.readouterr().out
    assert main(["new-model", "arctic-tern"]) == 1
    assert "already exists" in capsys.readouterr().err
    module = imported(tmp_path / "arctic_tern.py")
    assert ARCHITECTURES["ArcticTernForCausalLM"].model_type == "arctic_tern" and module.FOUND == {}


@pytest.mark.parametrize(
    ("model", "expected"),
    [("llama", "LlamaForCausalLM is known: surogate/models/llama.py"), ("7th", "no name of an architecture")],
)
def test_what_is_no_new_architecture_is_said(model, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new-model", model]) == 2
    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
