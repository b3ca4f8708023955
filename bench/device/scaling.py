"""How training scales over the GPUs of one host: links, rates against one GPU, memory, and the plan made before.

    python bench/device/scaling.py --gpus 1,2,4 --budget 540    # a markdown table; scaling.jsonl in --out
    python bench/device/scaling.py --gpus 8 --record kept.jsonl # goes on where another call ended
    python bench/device/scaling.py --tiny --device cpu --gpus 1,2 # does it work: ranks of the CPU, no figures
    python bench/device/scaling.py --picture docs/scaling.svg --record kept.jsonl

What --record or --out have of a run is not measured again, whatever machine it was on: a table over several machines names
them. A run whose plan is refused is printed with the reason.

Deliberately unknown here: how a run is watched (`one_run.py`), its files (`shaped.py`), how links are timed (`links.py`),
what the picture looks like (`picture.py`).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import links  # noqa: E402
import one_run  # noqa: E402
import picture  # noqa: E402
import shaped  # noqa: E402
from table import commit_of  # noqa: E402

# Name, model, kind of work (`shaped.py`), options with several GPUs, the least number of GPUs that it fits.
RUNS: list[tuple[str, str, str, dict[str, Any], int]] = [
    ("lora-0.6b", "qwen3-0.6b", "lora", {}, 1),
    ("lora-8b", "qwen3-8b", "lora", {}, 1),
    ("full-0.6b-zero1", "qwen3-0.6b", "full", {"zero_level": 1}, 1),
    ("full-0.6b-zero1-bf16", "qwen3-0.6b", "full", {"zero_level": 1, "gradient_compression": "bf16"}, 1),
    ("full-0.6b-zero2", "qwen3-0.6b", "full", {"zero_level": 2}, 1),
    ("full-0.6b-zero3", "qwen3-0.6b", "full", {"zero_level": 3}, 1),
    ("full-8b-zero1", "qwen3-8b", "full", {"zero_level": 1}, 1),
    ("full-8b-zero1-bf16", "qwen3-8b", "full", {"zero_level": 1, "gradient_compression": "bf16"}, 1),
    ("full-8b-zero2", "qwen3-8b", "full", {"zero_level": 2}, 1),
    ("full-8b-zero3", "qwen3-8b", "full", {"zero_level": 3}, 1),
    ("steps-8b-zero1", "qwen3-8b", "steps", {"zero_level": 1}, 1),
    ("steps-8b-zero2", "qwen3-8b", "steps", {"zero_level": 2}, 1),
    ("steps-8b-zero2-bf16", "qwen3-8b", "steps", {"zero_level": 2, "gradient_compression": "bf16"}, 1),
    ("full-8b-zero1-offload", "qwen3-8b", "full", {"zero_level": 1, "offload_grads": True}, 1),
    ("fp8-8b-zero1", "qwen3-8b", "fp8", {"zero_level": 1}, 1),
    ("fp8-8b-zero3", "qwen3-8b", "fp8", {"zero_level": 3}, 1),
    ("masters-8b-zero3", "qwen3-8b", "masters", {"zero_level": 3}, 2),
    ("masters-14b-zero3", "shape-14b", "masters", {"zero_level": 3}, 2),
    ("masters-14b-5-rows-zero3", "shape-14b", "masters", {"zero_level": 3, "per_device_train_batch_size": 5}, 2),
    ("full-32b-zero3", "shape-32b", "full", {"zero_level": 3}, 4),
    ("long-8b", "qwen3-8b", "long", {}, 1),
    ("lora-8b-stages", "qwen3-8b", "lora", {}, 1),
    ("full-8b-stages", "qwen3-8b", "full", {}, 1),
]

# A pipeline has one micro-batch at a time enter it: a number of micro-steps for each stage.
MICRO_STEPS = 4


def arguments() -> argparse.Namespace:
    parser = shaped.parser(__doc__, "scaling", limit=120.0)
    parser.add_argument("--gpus", default="1,2", help="numbers of GPUs, with commas between")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no run is begun")
    parser.add_argument("--record", type=pathlib.Path, help="results of earlier calls")
    parser.add_argument("--picture", type=pathlib.Path, help="only draw what --record has")
    parser.add_argument("--checkpoints", help="folder that has room for checkpoints, which are not written")
    parser.add_argument("--commit", help="what was measured; left out: that of the checkout")
    return parser.parse_args()


def known(a: argparse.Namespace) -> list[dict[str, Any]]:
    """What was measured before."""
    files = [file for file in (a.record, a.out / "scaling.jsonl") if file and file.is_file()]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def baseline(name: str) -> str:
    """What a run on one GPU is called: levels are the same there."""
    return name.split("-zero")[0].removesuffix("-stages")


def of_several(name: str, work: str, gpus: int) -> dict[str, Any]:
    """What a run on several GPUs has besides its own options."""
    if name.endswith("-stages"):
        return {"pipeline_parallel_size": gpus, "gradient_accumulation_steps": MICRO_STEPS * gpus}
    return {"sequence_parallel_size": gpus} if work == "long" else {}


def line(found: dict[str, Any], one: dict[str, Any] | None) -> str:
    """A row of the table."""
    ratio = f"{found['tokens_per_second'] / one['tokens_per_second']:.3f}" if one else ""
    mfu = f"{found['mfu']:.3f}" if found["mfu"] is not None else ""
    return f"| {found['name']} | {found['gpus']} | {mfu} | {shaped.cells(found, ratio)}"


def runs(a: argparse.Namespace, counts: list[int]) -> list[tuple[str, str, str, dict[str, Any], int]]:
    """What is measured: name, model, work, options, GPUs. On one GPU each work once."""
    chosen: dict[tuple[str, int], tuple[str, str, str, dict[str, Any], int]] = {}
    for gpus in counts:
        for name, model, work, options, least in RUNS:
            if gpus >= least and shaped.wanted(name, a):
                own = baseline(name) if gpus == 1 else name
                chosen.setdefault((own, gpus), (own, model, work, options, gpus))
    return list(chosen.values())


def measure(a: argparse.Namespace, counts: list[int], done: list[dict[str, Any]]) -> int:
    """Runs what is not done yet; the number of failures."""
    began, failed = time.time(), 0
    print("| run | GPUs | MFU | k tokens/s | of one | planned | used of each, GiB | planned |", flush=True)
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    card = {"card": one_run.nvml("name"), "driver": one_run.nvml("driver_version"), "commit": commit_of(a)}
    for name, model, work, options, gpus in runs(a, counts):
        ones = [old for old in done if (old["name"], old["gpus"]) == (baseline(name), 1)]
        old = next((old for old in done if (old["name"], old["gpus"]) == (name, gpus)), None)
        if old is None:
            if time.time() - began > a.budget:
                print(f"| {name} | {gpus} | the budget ends here |", flush=True)
                continue
            place = {"checkpoint_dir": f"{a.checkpoints}/{name}-{gpus}"} if a.checkpoints else {}
            of_ranks = place | {"gpus": gpus} | (options | of_several(name, work, gpus) if gpus > 1 else {})
            run = shaped.write(f"{name}-{gpus}", model, work, of_ranks, a)
            try:
                found = one_run.watch(run, run.parent / "output", a.warm_up, a.seconds, a.limit)
            except one_run.Failed as problem:
                print(f"| {name} | {gpus} | FAILED: {str(problem)[-300:]!r} |", flush=True)
                failed += 1
                continue
            old = {"name": name, "gpus": gpus, "date": time.strftime("%Y-%m-%d")} | card | found
            done.append(old)
            with (a.out / "scaling.jsonl").open("a") as record:
                record.write(json.dumps(old) + "\n")
        print(line(old, ones[-1] if ones and gpus > 1 else None), flush=True)
    return failed


def main() -> int:
    a = arguments()
    done = known(a)
    if a.picture:
        a.picture.write_text(picture.drawn(done, baseline), encoding="utf-8")
        return 0
    a.out.mkdir(parents=True, exist_ok=True)
    counts = sorted({int(count) for count in a.gpus.split(",")})
    if a.device == "cuda" and counts[-1] > 1:
        for text in links.timed(counts[-1]):
            print(text, flush=True)
    return 1 if measure(a, counts, done) else 0


if __name__ == "__main__":
    raise SystemExit(main())
