"""What programs read: the JSON of commands, the state of a run, and the pages as one file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from surogate.cli import status
from surogate.cli.arguments import parser
from surogate.cli.commands import SAYING, main
from test_trackers import options

COLLECT = [sys.executable, str(REPOSITORY / "docs/collect.py")]


def said(capsys, *words: object) -> dict:
    """The JSON object that a command prints, with its exit code checked."""
    code = main([*map(str, words), "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found.get("exit_code", code) == code
    return found


@pytest.fixture
def finished(tmp_path, capsys) -> Path:
    assert main([*options(tmp_path), "--quiet"]) == 0
    capsys.readouterr()
    return tmp_path / "output"


def test_commands_print_what_they_did_as_one_object(finished, tmp_path, capsys):
    merged = said(capsys, "merge", finished)
    assert merged["command"] == "merge" and Path(merged["output"]).is_dir() and merged["adapted"] > 0
    exported = said(capsys, "export", finished, "--format", "gguf", "--output", tmp_path / "x.gguf")
    assert Path(exported["output"]).stat().st_size >= exported["bytes"] > 0 and exported["lines"]
    extended = said(capsys, "extend", REPOSITORY / "examples/stories/model", "--tokens", "<|x|>", "--output", tmp_path / "e")
    assert extended["output"] == str(tmp_path / "e") and isinstance(extended["first"], int)
    assert Path(said(capsys, "report", finished)["output"]).name == "report.html"
    listed = said(capsys, "push", finished, "owner/name", "--dry-run")
    assert "adapter_config.json" in listed["files"] and "output" not in listed
    run = REPOSITORY / "examples/stories.yaml"
    assert said(capsys, "tokenize", run, "--model", REPOSITORY / "examples/stories/model")["data"]["documents"] > 0


def test_an_error_is_in_the_object_with_its_exit_code(tmp_path, capsys):
    found = said(capsys, "merge", tmp_path)
    assert (found["exit_code"], found["error"]["kind"], found["lines"]) == (2, "ConfigError", [])
    assert str(tmp_path) in found["error"]["message"]
    assert said(capsys, "export", tmp_path, "--format", "peft", "--encoding", "f16")["exit_code"] == 2


def test_every_command_with_a_result_has_json():
    commands = parser()._subparsers._group_actions[0].choices  # noqa: SLF001
    without = {name for name, of in commands.items() if "--json" not in of.format_help()}
    assert without == {"show", "chat", "serve", "completion", "schema"}
    assert SAYING < commands.keys()


def test_the_state_of_a_run_is_that_of_its_log(finished, capsys):
    found = said(capsys, "status", finished)
    assert (found["state"], found["steps_done"], found["steps_planned"]) == ("finished", 4, 4)
    assert Path(found["checkpoint"]).name == "checkpoint-4" and found["results"] == [str(finished / "adapter")]
    assert found["step"]["loss"] > 0 and found["seconds_left"] is None
    assert said(capsys, "status", found["log"])["state"] == "finished"
    assert main(["status", str(finished)]) == 0
    assert "finished, 4 of 4 steps" in capsys.readouterr().out
    assert main(["status", str(finished.parent)]) == 1 and "there is no log of a run" in capsys.readouterr().err


@pytest.mark.parametrize("end", [None, "failed", "interrupted"])
def test_a_run_that_did_not_finish_says_why(tmp_path, end):
    time = "2026-01-01T00:00:00Z"
    step = {"event": "step", "step": 0, "loss": 2.0, "seconds": 1.5, "tokens_per_second": 9.0, "time": time}
    events = [{"event": "start", "step": 0, "time": time, "manifest": {"run": "r", "steps": 9}}, step]
    events += [{"event": end, "error": "the disk is full", "time": time}] if end else []
    log = tmp_path / "log-r.json"
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    found = status.of(tmp_path)
    assert (found["state"], found["steps_done"]) == (end or "killed", 1)
    assert found["because"] == ("the disk is full" if end else None) and found["seconds_left"] == (None if end else 12.0)
    assert ("disk is full" in status.text(found)) == (end is not None)


def test_the_index_for_programs_lists_every_page_once():
    text = subprocess.run([*COLLECT, "--index"], check=True, capture_output=True, text=True).stdout
    assert text == (REPOSITORY / "llms.txt").read_text(), "run: python docs/collect.py --index > llms.txt"
    links = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): ", text, re.MULTILINE)
    pages = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md")} - {"docs/index.md"}
    assert len(links) == len(set(links)) and pages <= set(links), pages - set(links)


def test_the_pages_are_one_file_whose_links_stay_inside():
    text = subprocess.run(COLLECT, check=True, capture_output=True, text=True).stdout
    anchors = set(re.findall(r'<a id="(page-[\w-]+)">', text))
    linked = set(re.findall(r"\]\(#(page-[\w-]+)\)", text))
    assert linked <= anchors and len(anchors) > 40 and "page-docs-config" in anchors
    assert "](config.md" not in text
