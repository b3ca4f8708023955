"""Training steps on random tokens: median time, and where the time of a micro-step goes.

    steps.py CONFIG_FOLDER lora|full BATCH ACCUMULATION SEQUENCE STEPS [--seconds 62] [--options JSON] [--breakdown]
             [--device cuda]

Weights are drawn at random from the folder's config.json; bf16, `adamw_8bit`, rank 16 on every linear,
no dropout, clipping on; `--options` changes any of it. With `--seconds`, steps continue that long after the
first five: a GPU at its power limit slows down in the first half minute. Batches are made on the host between
the steps and are not part of the time.
Reads nothing else and writes nothing but its table.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import statistics
import time

import numpy as np
import surogate


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("work", choices=["lora", "full"])
    for name in ("batch", "accumulation", "sequence", "steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--breakdown", action="store_true")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def trainer(a: argparse.Namespace) -> surogate.Trainer:
    return surogate.Trainer(
        {
            "model": a.folder,
            "output_dir": "output/steps",
            "device": a.device,
            "torch_dtype": "bfloat16",
            "init": "random",
            "lora": a.work == "lora",
            "lora_dropout": 0.0,
            "per_device_train_batch_size": a.batch,
            "gradient_accumulation_steps": a.accumulation,
            "sequence_len": a.sequence,
            "max_steps": 1_000_000 if a.seconds else a.steps,
            "learning_rate": 1e-4,
        }
        | a.options
    )


def breakdown(t: surogate.Trainer) -> None:
    """Rows of equal kind and phase together, the most expensive first."""
    for _ in range(2):
        rows = json.loads(t._native.time_breakdown())
    groups: dict[str, list[dict]] = collections.defaultdict(list)
    for row in rows:
        name = row["text"].split(":")[0] if row["kind"] == "gemm" else row["kind"]
        groups[f"{row['phase']:8} {name}"].append(row)
    total = {key: sum(row[key] for row in rows) for key in ("seconds", "ceiling")}
    print(f"{len(rows)} instructions, {total['seconds'] * 1e3:.2f} ms, at the ceilings {total['ceiling'] * 1e3:.2f} ms")
    print(f"{'':60} {'count':>5} {'ms':>8} {'ceiling':>8} {'TFLOP/s':>8} {'GB/s':>6}")
    for name, group in sorted(groups.items(), key=lambda item: -sum(row["seconds"] for row in item[1])):
        s = {key: sum(row[key] for row in group) for key in ("seconds", "ceiling", "flops", "bytes")}
        rates = f"{s['flops'] / s['seconds'] / 1e12:8.1f} {s['bytes'] / s['seconds'] / 1e9:6.0f}"
        print(f"{name:60} {len(group):5} {s['seconds'] * 1e3:8.3f} {s['ceiling'] * 1e3:8.3f} {rates}")


def main() -> None:
    a = arguments()
    t = trainer(a)
    vocabulary = json.loads((a.folder / "config.json").read_text())["vocab_size"]
    draw = np.random.default_rng(0)
    times = []
    warm = 5 if a.seconds else 2
    while len(times) < max(a.steps, warm + 1) or sum(times[warm:]) < a.seconds:
        ids = draw.integers(1, vocabulary, (a.accumulation, a.batch, a.sequence)).astype(np.int32)
        start = time.perf_counter()
        metrics = t.step({"input_ids": ids, "labels": ids})
        times.append(time.perf_counter() - start)
    median = statistics.median(times[warm:])
    tokens = a.accumulation * a.batch * a.sequence
    shape = f"{a.batch}×{a.accumulation}×{a.sequence}"
    rate = f"{tokens / median:.0f} tok/s, {median * 1e3:.1f} ms"
    print(f"{a.folder.name} {a.work} {shape}: {rate}, {len(times)} steps, loss {metrics['loss']:.4f}")
    if a.breakdown:
        breakdown(t)


if __name__ == "__main__":
    main()
