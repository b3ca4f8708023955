"""The table of a GPU's rows: made on the CPU with tiny models; restarted; collected into the record."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY

pytestmark = pytest.mark.xdist_group("table")

SCRIPT = REPOSITORY / "bench" / "device" / "table.py"


def table(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | variables)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with two rows and the words that made them."""
    folder = tmp_path_factory.mktemp("table")
    words = ["--device", "cpu", "--tiny", "--seconds", "0.4", "--warm-up", "0.1", "--commit", "abc"]
    words += ["--out", folder, "--csv", folder / "record.csv"]
    done = table(*words, "--only", "lora-0.6b,full-1.7b")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, words, done.stdout


def test_rows_are_run_and_recorded(made):
    folder, _, printed = made
    results = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [result["row"] for result in results] == ["lora-0.6b", "full-1.7b"]
    lines = list(csv.DictReader((folder / "record.csv").read_text().splitlines()))
    assert [(line["work"], line["model"], line["accumulation"]) for line in lines] == [
        ("lora", "qwen3-0.6b", "4"),
        ("full", "qwen3-1.7b", "1"),
    ]
    for line, result in zip(lines, results, strict=True):
        assert line["commit"] == "abc" and line["precision"] == "bf16"
        assert float(line["tokens_per_second"]) > 0 and float(line["planned_memory_gb"]) >= 0
        steps = result["steps"]
        # The median and the mean of the same steps; an idle moment of the machine is no factor of three.
        ratio = result["tokens_per_second"] / result["mean_tokens_per_second"]
        assert steps >= 3 and 1 / 3 < ratio < 3, result
        assert result["tokens_per_step"] == result["batch"] * result["accumulation"] * result["seq_len"]
        assert 0 < result["to_step_1"] < 60
    assert printed.count("\nlora-0.6b ") + printed.startswith("lora-0.6b ") == 2


@pytest.mark.parametrize("row", ["lora-30b-a3b-experts", "lora-gpt-oss-20b", "full-olmoe-7b"])
def test_mixtures_have_rows(row, tmp_path):
    words = ["--device", "cpu", "--tiny", "--seconds", "0.2", "--warm-up", "0", "--commit", "abc", "--only", row]
    done = table(*words, "--out", tmp_path, "--csv", tmp_path / "record.csv")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert result["row"] == row and result["tokens_per_second"] > 0


def test_a_row_that_was_run_is_not_run_again(made):
    folder, words, _ = made
    before = (folder / "rows.jsonl").read_text()
    done = table(*words, "--only", "lora-0.6b,full-1.7b")
    assert done.returncode == 0 and "full-1.7b" in done.stdout
    assert (folder / "rows.jsonl").read_text() == before
    stopped = table(*words, "--only", "lora-4b", "--budget", "1")
    assert "left for another call" in stopped.stdout
    assert (folder / "rows.jsonl").read_text() == before


def test_collecting_appends_once(made, tmp_path):
    folder, _, _ = made
    for _ in range(2):
        done = table("--collect", folder / "rows.jsonl", "--csv", tmp_path / "all.csv", "--tiny")
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "all.csv").read_text() == (folder / "record.csv").read_text()


def test_verdicts_are_of_the_numbers(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import table as script
    from rows import ROWS

    row = ROWS["lora-8b"]
    assert "NOT" in script.verdict(row, 16_000.0, {})
    assert script.verdict(row, 16_100.0, {}) == "beats what it must"
    assert script.verdict(row, 17_300.0, {}) == "target reached"
    baseline = {"lora-8b": {"tokens_per_second": 100.0}}
    assert script.verdict(ROWS["lora-8b-dropout"], 96.0, baseline).endswith("MISSED")
    assert script.verdict(ROWS["lora-8b-packed"], 101.0, baseline).endswith("reached")


def test_a_run_that_fails_is_reported(tmp_path):
    words = ["--tiny", "--seconds", "0.2", "--warm-up", "0", "--commit", "abc", "--out", tmp_path]
    record = tmp_path / "record.csv"
    done = table(*words, "--device", "cuda", "--only", "lora-8b", "--csv", record, CUDA_VISIBLE_DEVICES="")
    assert "lora-8b" in done.stdout and "FAILED: the run ended with" in done.stdout, done.stdout + done.stderr
    assert not record.is_file() or len(record.read_text().splitlines()) == 1


def test_the_peers_best_variant_stands_beside_ours(tmp_path):
    peer = tmp_path / "peer"
    peer.mkdir()
    (peer / "lean.py").write_text("")
    (peer / "peers.py").write_text(
        """
import json, os
def Clock(limit): return limit
def C(part, peer, mode, model, settings, limit): return (peer, mode, model, settings)
def case_lean(case, clock):
    assert case == ("lean", "lora", "qwen3-0.6b", [[(2, 4)]]), case
    with open(os.environ["OUT"] + "/peers.jsonl", "a") as file:
        for rate, how in ((90.0, "compiled"), (100.0, "graph")):
            row = {"tok_s": rate, "bs": 2, "ga": 4, "variant": how}
            file.write(json.dumps(row) + chr(10))
"""
    )
    words = [
        "--device",
        "cpu",
        "--tiny",
        "--seconds",
        "0.3",
        "--warm-up",
        "0",
        "--commit",
        "abc",
        "--out",
        tmp_path / "out",
    ]
    done = table(*words, "--csv", tmp_path / "record.csv", "--only", "lora-0.6b", "--peer", peer / "lean.py")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert result["peer"] == {"tokens_per_second": 100.0, "batch": 2, "accumulation": 4, "how": "graph"}
    assert "peer 100 (graph, short run)" in (tmp_path / "record.csv").read_text()
