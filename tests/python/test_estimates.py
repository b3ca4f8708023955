"""The plan's step time compared with what GPUs took, within 10 %: the last measured line of each row of the record, and
shapes drawn at random."""

from __future__ import annotations

import argparse
import csv
import json
import random

import pytest
from conftest import REPOSITORY
from surogate.cli.commands import main

BENCH = REPOSITORY / "bench"

# Models whose rows differ in more than the work.
MIXTURES = ("qwen3-30b-a3b", "gpt-oss-20b", "olmoe-7b")


def measured() -> dict[tuple[str, str, str], dict[str, str]]:
    """Lines over at least a minute with everything but the row's own options left to the planner; the last counts."""
    lines = csv.DictReader((BENCH / "results" / "nvidia-h200.csv").read_text().splitlines())
    plain = {}
    for line in lines:
        notes = line["notes"]
        of_table = notes.startswith("row ") and "dropout" not in notes and "packed" not in notes
        if of_table or ("planner auto" in notes and "at least 60 s" in notes):
            row = notes.split()[1] if of_table else ""
            # Of dense models earlier scripts made the same rows.
            plain[line["work"], line["model"], row if line["model"] in MIXTURES else ""] = line
    return plain


def test_there_are_lines_to_compare_with():
    assert len(measured()) >= 4


@pytest.mark.parametrize("work,model,row", measured())
def test_the_plan_says_what_a_step_takes(work, model, row, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH / "device"))
    from rows import ROWS, write_model

    line = measured()[work, model, row]
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
        "micro_batch_size": int(line["batch"]),
        "sequence_len": int(line["seq_len"]),
        "datasets": [{"path": "none.jsonl", "type": "tokens"}],
    }
    options |= dict(ROWS[row].options) if row else {}
    run.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    assert main(["plan", str(run), "--machine", "h200", "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)["estimate"]
    ratio = estimate["tokens_per_second"] / float(line["tokens_per_second"])
    assert 1 / 1.1 < ratio < 1.1, f"planned {ratio:.3f} times the measured rate"
    # The bound is one: nothing was ever faster.
    assert estimate["ceiling_seconds"] < estimate["step_seconds"]


#: Shapes that `bench/device/calibrate.py` drew and ran: what was measured, by machine.
MACHINES = {"h200": "nvidia-h200-shapes.jsonl", "h100": "nvidia-h100-shapes.jsonl"}

#: Of the memory, what two sets of rates of one kind of card plan differently: 498 of 46 434 MB at most.
OTHER_CHOICES = 0.011


def drawn() -> list[tuple[str, dict]]:
    lines = {name: (BENCH / "results" / file).read_text().splitlines() for name, file in MACHINES.items()}
    return [(name, json.loads(line)) for name in MACHINES for line in lines[name]]


def test_there_are_shapes_of_each_machine():
    assert {name for name, _ in drawn()} == set(MACHINES) and len(drawn()) >= 16


def halved() -> list[object]:
    """The shapes; every second one is planned in the long tests only."""
    marks = ([], [pytest.mark.long])
    return [pytest.param(*of, id=f"{of[0]}-{of[1]['name']}", marks=marks[index % 2]) for index, of in enumerate(drawn())]


@pytest.mark.parametrize("machine,shape", halved())
def test_the_plan_holds_for_drawn_shapes(machine, shape, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH / "device"))
    import calibrate

    options = argparse.Namespace(tiny=False, device="cuda")
    run = calibrate.write(shape, tmp_path / "shape", options, random.Random(0), most=400_000)
    assert main(["plan", str(run), "--machine", machine, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    ratio = plan["estimate"]["step_seconds"] / shape["step_seconds"]
    assert abs(ratio - 1) <= calibrate.TIME_SHARE, f"planned {ratio:.3f} times the measured step"
    # The run was planned with rates of its own card: here and there a plan with these makes another choice.
    gap = abs(shape["used"] - plan["memory_bytes"])
    assert gap <= max(OTHER_CHOICES * plan["memory_bytes"], calibrate.MEMORY_BYTES), f"{gap / 1e6:.0f} MB"
