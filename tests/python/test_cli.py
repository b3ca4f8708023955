"""The command line: what it prints and with which code it ends."""

from __future__ import annotations

import json

import pytest
from surogate.arguments import UsageError, split_overrides
from surogate.cli import main


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def test_overrides_are_told_from_flags():
    words = "run.yaml --zero-level 2 --set a.b=c=d --json --max-steps=-1 --set=e=f --machine h200".split()
    rest, overrides = split_overrides(words)
    assert rest == ["run.yaml", "--json", "--machine", "h200"]
    assert overrides == [("zero_level", "2"), ("a.b", "c=d"), ("max_steps", "-1"), ("e", "f")]


@pytest.mark.parametrize("words", [["--lora"], ["--lora", "--json"], ["--set"], ["--set", "novalue"]])
def test_overrides_need_values(words):
    with pytest.raises(UsageError):
        split_overrides(words)


def test_schema_is_json(capsys):
    code, out, _ = run(capsys, "schema")
    assert code == 0 and "learning_rate" in json.loads(out)["properties"]


def test_help_lists_the_options(capsys):
    code, out, _ = run(capsys, "sft", "--help")
    assert code == 0 and "--learning-rate float" in out and "--lora-rank" in out


def test_every_problem_of_a_configuration_is_told_at_once(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: x\nzero_leve: 1\nlearning_rate: fast\n")
    code, out, err = run(capsys, "show", "config", path, "--lora-rnk", "4")
    assert code == 2 and out == ""
    assert f"{path}:2:1" in err and "did you mean `zero_level`" in err
    assert f"{path}:3:16" in err and "lora_rnk" in err


def test_show_config_says_what_was_given(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: x\nlearning_rate: 1e-3\n")
    code, out, _ = run(capsys, "show", "config", path, "--lora-rank", "4")
    assert code == 0
    assert "learning_rate: 0.001  # given" in out and "lora_rank: 4  # given" in out


@pytest.mark.parametrize(
    "words", [["sft"], ["sft", "missing.yaml"], ["fly"], ["schema", "--lora", "true"], ["sft", "a.yaml", "b.yaml"]]
)
def test_wrong_usage_ends_with_2(capsys, words):
    code, _, err = run(capsys, *words)
    assert code == 2 and err
