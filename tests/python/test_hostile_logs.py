"""Malformed logs, read by the report: a whole page, or an error in words.

The damage is drawn, the same in every run; a failure names its number. SUROGATE_ROUNDS=100 draws a hundred times as many.
Knows the events of a log by the shape of good ones alone.
"""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from surogate import report
from surogate.errors import RunError
from surogate.report.shape import COUNT
from test_report import check, opening, step

ROUNDS = 300 * int(os.environ.get("SUROGATE_ROUNDS", "1"))

#: What may stand where something else is expected.
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1 << 70,
    -(1 << 63),
    1e308,
    float("nan"),
    float("inf"),
    5e-324,
    "",
    "x",
    "<script>alert(1)</script>",
    "\u001b[31m\u0000\ud800",
    "9" * 5000,
    [],
    [[]],
    {},
    {"a": {}},
    ["event"],
]


def good() -> list[Any]:
    evaluation = {"event": "evaluation", "step": 2, "loss": 1.5, "tokens": 10, "rows": 2}
    device = {"event": "device", "step": 1, "power": 300.0, "temperature": 50, "memory": 1 << 30, "utilization": 0.5}
    checkpoint = {"event": "checkpoint", "step": 3, "path": "somewhere/checkpoint-3", "time": "2026-01-01T00:00:02Z"}
    startup = {"event": "startup", "seconds": 1.0, "phases": [{"name": "plan", "seconds": 0.5}]}
    end = {"event": "finished", "step": 4, "time": "2026-01-01T00:00:03Z", "seconds": 3.0}
    steps = [step(number) for number in range(4)]
    return [opening(), startup, *steps[:2], device, evaluation, *steps[2:], checkpoint, opening(3), step(3), end]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The ways to every value inside of a value."""
    found = [path] if path else []
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        found += places(item, (*path, key))
    return found


def damaged(dice: random.Random) -> bytes:
    """A log of which some values, lines and bytes are others."""
    events = copy.deepcopy(good())
    for _ in range(dice.randint(1, 3)):
        way = dice.choice(places(events))
        holder = events
        for key in way[:-1]:
            holder = holder[key]
        if dice.random() < 0.3:
            del holder[way[-1]]
        else:
            holder[way[-1]] = copy.deepcopy(dice.choice(VALUES))
        if not events:
            break
    if dice.random() < 0.2:
        dice.shuffle(events)
    lines = [json.dumps(event).encode("utf-8", "surrogatepass") for event in events]
    if dice.random() < 0.3:
        odd = [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"event": "step", "step": ' + b"9" * 5000 + b"}", b"null", b"7"]
        lines.insert(dice.randrange(len(lines) + 1), dice.choice(odd))
    log = b"\n".join(lines) + b"\n"
    if dice.random() < 0.2:
        at = dice.randrange(len(log))
        log = log[:at] + bytes([dice.randrange(256)]) + log[at + 1 :]
    return log


def test_the_log_that_is_damaged_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text("".join(json.dumps(event) + "\n" for event in good()))
    check(report.write([log], tmp_path / "page.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("count,fits", [(1 << 53, True), ((1 << 53) + 1, False)])
def test_counts_are_exact_as_floats_or_an_error(count: int, fits: bool) -> None:
    assert COUNT.fits(count) is fits


@pytest.mark.parametrize("several", [False, True])
def test_any_log_is_a_page_or_an_error(tmp_path: Path, several: bool) -> None:
    pages, log = 0, tmp_path / "log.json"
    whole = tmp_path / "whole.json"
    whole.write_text("".join(json.dumps(event) + "\n" for event in good()))
    for seed in range(ROUNDS):
        log.write_bytes(damaged(random.Random(seed)))
        try:
            path = report.write([log, whole] if several else [log], tmp_path / "page.html")
            check(path.read_text(encoding="utf-8"))
        except RunError:
            continue
        except Exception as error:
            error.add_note(f"log number {seed}: {log.read_bytes()[:2000]!r}")
            raise
        pages += 1
    assert pages > ROUNDS / 6, f"only {pages} of {ROUNDS} logs can be read"
