"""Completion of the command line: bash is asked, the scripts of the others are looked at."""

from __future__ import annotations

import json
import subprocess

import pytest
from surogate import _native
from surogate.cli.arguments import parser
from surogate.cli.commands import COMMANDS
from surogate.cli.completion import SHELLS, script


def completed(folder, *words: str) -> list[str]:
    """What bash offers for the last word."""
    file = folder / "completion.bash"
    file.write_text(script("bash", parser()))
    typed = " ".join(f"'{word}'" for word in words)
    ask = f"source {file}; COMP_WORDS=(surogate {typed}); COMP_CWORD={len(words)}; _surogate; echo ${{COMPREPLY[@]}}"
    said = subprocess.run(["bash", "-c", ask], cwd=folder, capture_output=True, text=True, check=True)
    assert not said.stderr
    return said.stdout.split()


def test_bash_completes_commands_options_values_and_files(tmp_path):
    assert completed(tmp_path, "rep") == ["report"]
    assert set(COMMANDS) <= set(completed(tmp_path, ""))
    assert completed(tmp_path, "sft", "run.yaml", "--lora-ra") == ["--lora-rank"]
    assert {"h100", "h200"} <= set(completed(tmp_path, "plan", "run.yaml", "--machine", "h"))
    assert completed(tmp_path, "sft", "--lr-scheduler-type", "") == ["linear", "cosine", "cosine_with_restarts", "wsd", "constant"]
    assert completed(tmp_path, "sft", "--shuffle", "f") == ["false"]
    assert completed(tmp_path, "show", "m") == ["memory"]
    assert completed(tmp_path, "merge", "--lora") == []
    (tmp_path / "run.yaml").write_text("")
    assert completed(tmp_path, "sft", "ru") == ["run.yaml"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_available_option_is_in_the_script(shell):
    text = script(shell, parser())
    for name in COMMANDS:
        assert name in text
    for row in json.loads(_native.config_help()):
        if row["of_item"]:
            continue
        flag = row["name"].replace("_", "-")
        assert (f"{'-l ' if shell == 'fish' else '--'}{flag}" in text) >= row["available"], flag
