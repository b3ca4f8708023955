"""Rates of number formats on one GPU, each row next to its bf16 baseline, and quantized weights under a memory limit.

    python bench/device/formats.py                       # every row; a markdown table, and formats.jsonl in --out
    python bench/device/formats.py --only nf4 --seconds 10
    python bench/device/formats.py --tiny --device cpu   # does it work: a small model, no figures

Deliberately unknown here: how a run is watched (`one_run.py`), its files (`shaped.py`).
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import mxfp4  # noqa: E402
import one_run  # noqa: E402
import shaped  # noqa: E402
from rows import ATTENTION  # noqa: E402

FP8 = {"recipe": "fp8_hybrid"}
NF4 = {"qlora_bnb": True}
SMALL_STEP = {"gradient_accumulation_steps": 1}
# Of mixtures adapters are on attention alone.
ATTENTION_ONLY = {"lora_target_modules": ATTENTION}
ON_ATTENTION = SMALL_STEP | ATTENTION_ONLY
# Files in MXFP4, written for the run.
MXFP4 = {"init": "pretrained"}

# Name, model, adapters or all weights, options, the row that it is a multiple of.
RUNS: list[tuple[str, str, str, dict[str, Any], str | None]] = [
    ("lora-0.6b", "qwen3-0.6b", "lora", {}, None),
    ("lora-0.6b-fp8", "qwen3-0.6b", "lora", FP8, "lora-0.6b"),
    ("full-0.6b", "qwen3-0.6b", "full", {}, None),
    ("full-0.6b-fp8", "qwen3-0.6b", "full", FP8, "full-0.6b"),
    ("lora-1.7b", "qwen3-1.7b", "lora", {}, None),
    ("lora-1.7b-fp8", "qwen3-1.7b", "lora", FP8, "lora-1.7b"),
    ("lora-4b", "qwen3-4b", "lora", {}, None),
    ("lora-4b-fp8", "qwen3-4b", "lora", FP8, "lora-4b"),
    ("full-4b", "qwen3-4b", "full", {}, None),
    ("full-4b-fp8", "qwen3-4b", "full", FP8, "full-4b"),
    ("full-8b-fp8", "qwen3-8b", "full", FP8, None),
    ("lora-8b", "qwen3-8b", "lora", {}, None),
    ("lora-8b-fp8", "qwen3-8b", "lora", FP8, "lora-8b"),
    ("lora-8b-nf4", "qwen3-8b", "lora", NF4, "lora-8b"),
    ("lora-8b-tiles", "qwen3-8b", "lora", {"qlora_fp8": True}, "lora-8b"),
    ("lora-8b-nf4-16gib", "qwen3-8b", "lora", NF4 | {"memory_limit": "16GiB"}, "lora-8b-nf4"),
    ("lora-8b-nf4-12gib", "qwen3-8b", "lora", NF4 | {"memory_limit": "12GiB"}, "lora-8b-nf4"),
    ("lora-8b-nf4-10gib", "qwen3-8b", "lora", NF4 | {"memory_limit": "10GiB"}, "lora-8b-nf4"),
    ("lora-32b-nf4-24gib", "shape-32b", "lora", NF4 | SMALL_STEP | {"memory_limit": "24GiB"}, None),
    ("lora-70b-nf4", "shape-70b", "lora", NF4 | SMALL_STEP, None),
    ("full-olmoe", "olmoe-7b", "full", {}, None),
    ("full-olmoe-fp8", "olmoe-7b", "full", FP8, "full-olmoe"),
    ("lora-30b-a3b", "qwen3-30b-a3b", "lora", ATTENTION_ONLY, None),
    ("lora-30b-a3b-fp8", "qwen3-30b-a3b", "lora", FP8 | ATTENTION_ONLY, "lora-30b-a3b"),
    ("lora-30b-a3b-nf4", "qwen3-30b-a3b", "lora", NF4 | ON_ATTENTION, None),
    ("lora-30b-a3b-nf4-24gb", "qwen3-30b-a3b", "lora", NF4 | ON_ATTENTION | {"memory_limit": "24GB"}, "lora-30b-a3b-nf4"),
    ("lora-gpt-oss-20b-nf4-16gb", "gpt-oss-20b", "lora", NF4 | ON_ATTENTION | {"memory_limit": "16GB"}, None),
    ("lora-gpt-oss-20b-mxfp4", "gpt-oss-20b", "lora", MXFP4 | ON_ATTENTION, None),
    ("lora-gpt-oss-20b-mxfp4-fp8", "gpt-oss-20b", "lora", MXFP4 | ON_ATTENTION | FP8, "lora-gpt-oss-20b-mxfp4"),
    ("lora-gpt-oss-20b-mxfp4-16gb", "gpt-oss-20b", "lora", MXFP4 | ON_ATTENTION | {"memory_limit": "16GB"}, "lora-gpt-oss-20b-mxfp4"),
]


def main() -> int:
    a = shaped.parser(__doc__, "formats", limit=150.0).parse_args()
    measured: dict[str, dict[str, Any]] = {}
    failed = 0
    print("| run | k tokens/s | of its baseline | planned | used, GiB | planned |\n|---|--:|--:|--:|--:|--:|", flush=True)
    for name, model, work, options, baseline in RUNS:
        if not shaped.wanted(name, a):
            continue
        limited = {key: value for key, value in options.items() if not a.tiny or key != "memory_limit"}
        run = shaped.write(name, model, work, limited, a)
        if options.get("init") == "pretrained":
            mxfp4.write(run.parent / "model")
        try:
            found = one_run.watch(run, run.parent / "output", a.warm_up, a.seconds, a.limit)
        except one_run.Failed as problem:
            print(f"| {name} | FAILED: {str(problem)[-400:]!r} |", flush=True)
            failed += 1
            continue
        measured[name] = found
        with (a.out / "formats.jsonl").open("a") as record:
            record.write(json.dumps({"name": name, "options": options} | found) + "\n")
        base = measured.get(baseline or "")
        ratio = f"{found['tokens_per_second'] / base['tokens_per_second']:.2f}" if base else ""
        print(f"| {name} | {shaped.cells(found, ratio)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
