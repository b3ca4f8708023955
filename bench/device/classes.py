"""The time of a step by class of operations, relative to the ceilings, as a Markdown table.

    classes.py ROWS.jsonl NAME...

Reads the third step of rows that `table.py` ran, in which every instruction was timed (the timing itself takes about
2.5 µs each). The ceiling of a class is the longer of its arithmetic and its traffic at the machine's best rates. Knows
how operations are grouped, nothing else of them.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

# The first group with a part that occurs in the class's name.
GROUPS = [
    ("attention, backward", ["attention, backward", "attention_backward"]),
    ("attention, forward", ["attention, forward", "attention, recompute"]),
    ("GEMMs", ["gemm"]),
    ("adapter gradients", ["low_rank"]),
    ("norms, RoPE, residual adds", ["norm", "rope"]),
    ("SwiGLU", ["swiglu", "silu"]),
    ("cross-entropy", ["cross_entropy", "weighted_sum"]),
    ("embedding", ["embedding"]),
    ("update and gradient norm", ["update"]),
]


def grouped(classes: list[dict[str, Any]]) -> list[tuple[str, dict[str, float]]]:
    """Sums by group, the longest first."""
    sums: dict[str, dict[str, float]] = {}
    for of in classes:
        name = next((name for name, parts in GROUPS if any(part in of["class"] for part in parts)), "other")
        total = sums.setdefault(
            name, dict.fromkeys(("instructions", "seconds", "ceiling", "planned", "flops", "bytes"), 0.0)
        )
        total["ceiling"] += of["ceiling_seconds"] or 0.0
        total["planned"] += of["planned_seconds"] or 0.0
        for key in ("instructions", "seconds", "flops", "bytes"):
            total[key] += of[key]
    return sorted(sums.items(), key=lambda item: -item[1]["seconds"])


def markdown(result: dict[str, Any]) -> str:
    groups = grouped(result["classes"])
    whole = sum(total["seconds"] for _, total in groups)
    lines = ["| Class | ms | share | instructions | TFLOP/s | TB/s | of its ceiling | planned |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, total in groups:
        seconds = total["seconds"]
        arithmetic = f"{total['flops'] / seconds / 1e12:.0f}" if total["flops"] / seconds > 1e13 else "–"
        figures = f"{seconds * 1e3:.2f} | {seconds / whole:.1%} | {total['instructions']:.0f} | {arithmetic}"
        shares = f"{total['ceiling'] / seconds:.0%} | {total['planned'] / seconds:.0%}"
        lines.append(f"| {name} | {figures} | {total['bytes'] / seconds / 1e12:.2f} | {shares} |")
    planned, ceiling = (sum(total[key] for _, total in groups) for key in ("planned", "ceiling"))
    lines.append(f"| total | {whole * 1e3:.2f} | 100 % | | | | {ceiling / whole:.0%} | {planned / whole:.0%} |")
    return "\n".join(lines).replace("%|", "% |")


def main() -> int:
    path, *names = sys.argv[1:]
    results = {result["row"]: result for result in map(json.loads, pathlib.Path(path).read_text().splitlines())}
    for name in names or [name for name, result in results.items() if result.get("classes")]:
        print(f"{name}, one step with {results[name]['accumulation']} micro-steps:\n\n{markdown(results[name])}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
