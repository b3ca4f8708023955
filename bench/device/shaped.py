"""Runs of random weights in published shapes on random tokens: what `formats.py` and `scaling.py` have in common.

Deliberately unknown here: which runs there are, how they are watched and shown.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import one_run
from rows import MIXTURES, SIZES, vocabulary, write_data, write_model

# Shapes beyond the table: hidden, intermediate, layers, heads, key heads, tied embeddings.
SHAPES = SIZES | {
    "shape-14b": (5120, 17408, 40, 40, 8, False),
    "shape-32b": (5120, 25600, 64, 64, 8, False),
    "shape-70b": (8192, 28672, 80, 64, 8, False),
}


# Tokens of a long row.
LONG = 65536


def parser(description: str | None, name: str, limit: float) -> argparse.ArgumentParser:
    """The options of such a script; results go to output/NAME, a run may take `limit` seconds until it is measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names, with commas between")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--warm-up", type=float, default=3.0)
    parser.add_argument("--limit", type=float, default=limit, help="seconds that a run may take until it is measured")
    out = pathlib.Path(__file__).resolve().parents[2] / "output" / name
    parser.add_argument("--out", type=pathlib.Path, default=out)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    return parser


def wanted(name: str, a: argparse.Namespace) -> bool:
    """Whether a run of this name was requested."""
    parts = [part for part in a.only.split(",") if part]
    return not parts or any(part in name for part in parts)


def write(name: str, model: str, work: str, options: dict[str, Any], a: argparse.Namespace) -> pathlib.Path:
    """A run's file, its model and its data.

    `lora`: adapters on 2 rows in 4 micro-steps; `long`: on one long row. All weights: `full`, on 8 rows; `steps`, on 2 rows in
    4 micro-steps; `fp8`, on 8 rows with products of 8 bits; `masters`, on 8 rows with f32 master weights.
    """
    folder = a.out / name
    folder.mkdir(parents=True)
    if model not in MIXTURES:
        SIZES[model] = SHAPES[model]
    write_model(folder / "model", model, a.tiny)
    length, rows = (64 if a.tiny else 2048), 256
    if work == "long":
        length, rows = (128 if a.tiny else LONG), 16
    write_data(folder / "data.jsonl", False, length, rows * length, vocabulary(model, a.tiny))
    own = {
        "lora": work in ("lora", "long"),
        "lora_rank": 16,
        "lora_dropout": 0.0,
        "sequence_len": length,
        "per_device_train_batch_size": {"lora": 2, "long": 1, "steps": 2}.get(work, 8),
        "gradient_accumulation_steps": 4 if work in ("lora", "steps") else 1,
    }
    own |= {"masters": {"master_dtype": "float32"}, "fp8": {"recipe": "fp8_hybrid"}}.get(work, {})
    if work == "long":
        own |= {"max_model_len": length} | ({} if a.tiny else {"rope_scaling": "yarn"})
    return one_run.write_run(folder, a.device, own | options)


def cells(found: dict[str, Any], times: str) -> str:
    """The end of a table's row: thousands of tokens a second, a ratio, planned, GiB used and planned."""
    expected = found["planned_seconds_per_step"]
    planned = f"{found['tokens_per_step'] / expected / 1e3:.2f}" if expected else ""
    used = found["used"] - (found["used_before"] or 0) if found["used"] else found["memory_in_log"]
    memory = f"{used / one_run.GIB:.2f} | {found['planned_memory'] / one_run.GIB:.2f}"
    return f"{found['tokens_per_second'] / 1e3:.2f} | {times} | {planned} | {memory} |"
