"""The plan's step time compared with an H200: the last measured line of each row of the record, within 10 %."""

from __future__ import annotations

import csv
import json

import pytest
from conftest import REPOSITORY
from surogate.cli import main

BENCH = REPOSITORY / "bench"


def measured() -> dict[tuple[str, str], dict[str, str]]:
    """Lines over at least a minute with everything but the row's own options left to the planner; the last counts."""
    lines = csv.DictReader((BENCH / "results" / "nvidia-h200.csv").read_text().splitlines())
    plain = {}
    for line in lines:
        notes = line["notes"]
        of_table = notes.startswith("row ") and "dropout" not in notes and "packed" not in notes
        if of_table or ("planner auto" in notes and "at least 60 s" in notes):
            plain[line["work"], line["model"]] = line
    return plain


def test_there_are_lines_to_compare_with():
    assert len(measured()) >= 4


@pytest.mark.parametrize("work,model", measured())
def test_the_plan_says_what_a_step_takes(work, model, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH / "device"))
    from rows import write_model

    line = measured()[work, model]
    run = tmp_path / "run.yaml"
    options = {
        "model": str(write_model(tmp_path / model, model, tiny=False)),
        "init": "random",
        "torch_dtype": "bfloat16",
        "lora": work == "lora",
        "lora_dropout": 0.0,
        "sample_packing": False,
        "per_device_train_batch_size": int(line["batch"]),
        "gradient_accumulation_steps": int(line["accumulation"]),
        "sequence_len": int(line["seq_len"]),
        "datasets": [{"path": "none.jsonl", "type": "tokens"}],
    }
    run.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    assert main(["plan", str(run), "--machine", "h200", "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)["estimate"]
    ratio = estimate["tokens_per_second"] / float(line["tokens_per_second"])
    assert 1 / 1.1 < ratio < 1.1, f"planned {ratio:.3f} times the measured rate"
    # The bound is one: nothing was ever faster.
    assert estimate["ceiling_seconds"] < estimate["step_seconds"]
