"""Trains on drawn shapes, and counts the right answers to questions on images that are held out, before and after.

    python examples/shapes/answers.py

Run from the root of the repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import surogate

HERE = Path(__file__).parent


def right(model: surogate.Model, rows: list[dict]) -> int:
    """The number of rows whose answer the model gives."""
    asked = [{"messages": row["messages"][:1]} for row in rows]
    found = model.generate(asked, max_new_tokens=8)
    pairs = [(of.strip(), row["messages"][1]["content"]) for of, row in zip(found, rows, strict=True)]
    for answer, wanted in pairs[:3]:
        print(f"  {wanted!r} was answered with {answer!r}")
    return sum(answer == wanted for answer, wanted in pairs)


def main(path: str = "examples/shapes.yaml") -> None:
    rows = [json.loads(line) for line in (HERE / "test.jsonl").read_text().splitlines()]
    trainer = surogate.Trainer(path)
    print(f"before: {right(trainer.model, rows)} of {len(rows)} right")
    for step in trainer:
        if step["step"] % 50 == 0:
            print(f"step {step['step']}: loss {step['loss']:.3f}")
    print(f"after: {right(trainer.model, rows)} of {len(rows)} right")


if __name__ == "__main__":
    main(*sys.argv[1:])
