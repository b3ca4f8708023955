"""Rates of number formats on one GPU, each row beside its bf16 baseline, and quantized weights under a memory limit.

    python bench/device/formats.py                       # every row; a markdown table, and formats.jsonl in --out
    python bench/device/formats.py --only nf4 --seconds 10
    python bench/device/formats.py --tiny --device cpu   # does it work: a small model, no figures

Deliberately unknown here: how a run is watched (`one_run.py`), the sizes of the Qwen3 models (`rows.py`).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import one_run  # noqa: E402
from rows import SIZES, TINY_VOCABULARY, VOCABULARY, write_data, write_model  # noqa: E402

FP8 = {"recipe": "fp8_hybrid"}
NF4 = {"qlora_bnb": True}
# Shapes beyond the table: hidden, intermediate, layers, heads, key heads, tied embeddings.
SHAPES = SIZES | {
    "shape-32b": (5120, 25600, 64, 64, 8, False),
    "shape-70b": (8192, 28672, 80, 64, 8, False),
}
SMALL_STEP = {"gradient_accumulation_steps": 1}

# Name, model, adapters or all weights, options, the row that it is a multiple of.
RUNS: list[tuple[str, str, str, dict[str, Any], str | None]] = [
    ("lora-0.6b", "qwen3-0.6b", "lora", {}, None),
    ("lora-0.6b-fp8", "qwen3-0.6b", "lora", FP8, "lora-0.6b"),
    ("full-0.6b", "qwen3-0.6b", "full", {}, None),
    ("full-0.6b-fp8", "qwen3-0.6b", "full", FP8, "full-0.6b"),
    ("full-4b-fp8", "qwen3-4b", "full", FP8, None),
    ("lora-8b", "qwen3-8b", "lora", {}, None),
    ("lora-8b-fp8", "qwen3-8b", "lora", FP8, "lora-8b"),
    ("lora-8b-nf4", "qwen3-8b", "lora", NF4, "lora-8b"),
    ("lora-8b-tiles", "qwen3-8b", "lora", {"qlora_fp8": True}, "lora-8b"),
    ("lora-8b-nf4-16gib", "qwen3-8b", "lora", NF4 | {"memory_limit": "16GiB"}, "lora-8b-nf4"),
    ("lora-8b-nf4-12gib", "qwen3-8b", "lora", NF4 | {"memory_limit": "12GiB"}, "lora-8b-nf4"),
    ("lora-8b-nf4-10gib", "qwen3-8b", "lora", NF4 | {"memory_limit": "10GiB"}, "lora-8b-nf4"),
    ("lora-32b-nf4-24gib", "shape-32b", "lora", NF4 | SMALL_STEP | {"memory_limit": "24GiB"}, None),
    ("lora-70b-nf4", "shape-70b", "lora", NF4 | SMALL_STEP, None),
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names, with commas between")
    parser.add_argument("--seconds", type=float, default=7.0)
    parser.add_argument("--warm-up", type=float, default=4.0)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that a run may take until it is measured")
    parser.add_argument("--out", type=pathlib.Path, default=HERE.parents[1] / "output" / "formats")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def write(name: str, model: str, work: str, options: dict[str, Any], a: argparse.Namespace) -> pathlib.Path:
    """A run's file, its model and its data."""
    folder = a.out / name
    folder.mkdir(parents=True)
    SIZES[model] = SHAPES[model]
    write_model(folder / "model", model, a.tiny)
    length = 64 if a.tiny else 2048
    write_data(folder / "data.jsonl", False, length, 64 * length, TINY_VOCABULARY if a.tiny else VOCABULARY)
    own = {
        "lora": work == "lora",
        "lora_rank": 16,
        "lora_dropout": 0.0,
        "sequence_len": length,
        "per_device_train_batch_size": 2 if work == "lora" else 8,
        "gradient_accumulation_steps": 4 if work == "lora" else 1,
    }
    if a.tiny:
        options = {key: value for key, value in options.items() if key != "memory_limit"}
    return one_run.write_run(folder, a.device, own | options)


def line(name: str, found: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    rate, planned = found["tokens_per_second"], found["tokens_per_step"] / found["planned_seconds_per_step"]
    of = f"{rate / baseline['tokens_per_second']:.2f}" if baseline else ""
    used = found["used"] - (found["used_before"] or 0) if found["used"] else found["memory_in_log"]
    memory = f"{used / one_run.GIB:.2f} | {found['planned_memory'] / one_run.GIB:.2f}"
    return f"| {name} | {rate / 1e3:.2f} | {of} | {planned / 1e3:.2f} | {memory} |"


def main() -> int:
    a = arguments()
    wanted = [part for part in a.only.split(",") if part]
    measured: dict[str, dict[str, Any]] = {}
    failed = 0
    print("| run | k tokens/s | of its baseline | planned | used, GiB | planned |\n|---|--:|--:|--:|--:|--:|", flush=True)
    for name, model, work, options, baseline in RUNS:
        if wanted and not any(part in name for part in wanted):
            continue
        run = write(name, model, work, options, a)
        try:
            found = one_run.watch(run, run.parent / "output", a.warm_up, a.seconds, a.limit)
        except one_run.Failed as problem:
            print(f"| {name} | FAILED: {str(problem)[-400:]!r} |", flush=True)
            failed += 1
            continue
        measured[name] = found
        with (a.out / "formats.jsonl").open("a") as record:
            record.write(json.dumps({"name": name, "options": options} | found) + "\n")
        print(line(name, found, measured.get(baseline or "")), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
