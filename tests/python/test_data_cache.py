"""Encoded rows that are kept: shared by commands and processes, reported in a line, the same training with and without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from conftest import REPOSITORY

STORIES = REPOSITORY / "examples" / "stories"
TAKEN = "are from the cache in"
KEPT = "were encoded and are kept in"


def config(place: Path, rows: int = 200, **options: object) -> Path:
    """A run.yaml over `rows` texts."""
    data = place / "texts.jsonl"
    if not data.exists():
        texts = ("".join(f"word {i * k % 97} " for k in range(20)) for i in range(rows))
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = place / f"run{len(list(place.glob('run*.yaml')))}.yaml"
    options = {
        "model": str(STORIES / "model"),
        "init": "random",
        "device": "cpu",
        "sequence_len": 64,
        "datasets": [{"path": str(data), "type": "text"}],
        "data_cache": str(place / "rows"),
        "max_steps": 2,
        **options,
    }
    path.write_text(json.dumps({name: value for name, value in options.items() if value is not None}))
    return path


def start(command: str, path: Path, **variables: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "surogate", command, str(path)]
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, text=True, stdout=pipe, stderr=pipe, env={**os.environ, **variables})


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return out + err


def losses(folder: Path) -> list[object]:
    lines = (json.loads(line) for log in folder.glob("log-*.json") for line in log.read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines if line["event"] == "step"]


def test_a_run_takes_what_tokenize_prepared_and_trains_the_same(tmp_path):
    assert KEPT in finish(start("tokenize", config(tmp_path)))
    taken = finish(start("sft", config(tmp_path, output_dir=str(tmp_path / "taken"))))
    assert TAKEN in taken
    reported = [line for line in taken.splitlines() if "cache" in line]
    assert len(reported) == 1, reported
    plain = finish(start("sft", config(tmp_path, output_dir=str(tmp_path / "plain"), data_cache="off")))
    assert "cache" not in plain
    assert losses(tmp_path / "taken") == losses(tmp_path / "plain") != []


def test_the_folder_is_that_of_the_option_else_of_the_variables(tmp_path):
    folders = {name: str(tmp_path / name) for name in ("SUROGATE_DATA_CACHE", "XDG_CACHE_HOME", "HOME")}
    path = config(tmp_path, data_cache=None)
    assert f"{KEPT} {folders['SUROGATE_DATA_CACHE']}\n" in finish(start("tokenize", path, **folders))
    folders["SUROGATE_DATA_CACHE"] = ""
    assert f"{KEPT} {folders['XDG_CACHE_HOME']}/surogate/rows\n" in finish(start("tokenize", path, **folders))
    folders["XDG_CACHE_HOME"] = ""
    assert f"{KEPT} {folders['HOME']}/.cache/surogate/rows\n" in finish(start("tokenize", path, **folders))


def test_processes_share_the_work_and_a_killed_one_leaves_nothing_behind(tmp_path):
    path = config(tmp_path, rows=20_000)
    rows = tmp_path / "rows"
    killed = start("tokenize", path)
    while killed.poll() is None and not list(rows.glob("*.partial")):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    left = list(rows.glob("*.partial"))
    texts = [finish(process) for process in [start("tokenize", path) for _ in range(3)]]
    assert sorted(KEPT in text for text in texts) == [False, False, True], texts
    assert sorted(TAKEN in text for text in texts) == [False, True, True], texts
    checks = [line for text in texts for line in text.splitlines() if "to train on" in line]
    assert len(checks) == 3 and len(set(checks)) == 1, checks
    assert not list(rows.glob("*.partial")), left
