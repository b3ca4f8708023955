"""The splits of a step into micro-steps: each run for some seconds, next to its plan and to the plan's own choice.

    splits.py CONFIG.json [--rows 8] [--sequence 2048] [--seconds 6] [--options JSON] [--out ROWS.jsonl] [--classes]

Every number of rows that a power of two gives, then `micro_batch_size: auto`. Prints a line for each: tokens a second as measured
and as planned, memory as planned, and what was chosen. `--classes` adds the time by class of operations next to the plan's.
Weights and tokens are drawn at random.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import shutil
import sys
import tempfile
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import one_run  # noqa: E402
from classes import markdown  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--sizes", type=int, nargs="*", help="numbers of rows instead of all, without `auto`")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--classes", action="store_true")
    return parser.parse_args()


def prepare(folder: pathlib.Path, config: pathlib.Path, rows: int, length: int) -> None:
    """A folder with a configuration without weights, and rows of random tokens."""
    (folder / "model").mkdir()
    shutil.copy(config, folder / "model" / "config.json")
    vocabulary = json.loads(config.read_text())["vocab_size"]
    chance = random.Random(1)
    with (folder / "data.jsonl").open("w") as lines:
        for _ in range(16 * rows):
            lines.write(json.dumps({"input_ids": [chance.randrange(vocabulary) for _ in range(length)]}) + "\n")


def main() -> None:
    a = arguments()
    sizes: list[int | str] = [1 << power for power in range(a.rows.bit_length()) if a.rows % (1 << power) == 0]
    for size in a.sizes or [*sizes, "auto"]:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            prepare(folder, a.config, a.rows, a.sequence)
            pair = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": a.rows // 2, "micro_batch_size": size}
            common: dict[str, Any] = {"sequence_len": a.sequence, "lora": True, "lora_dropout": 0.0, "validation_split_ratio": 0}
            run = one_run.write_run(folder, "cuda", common | pair | a.options)
            try:
                found: dict[str, Any] = one_run.watch(run, folder / "output", 2.0, a.seconds, 120.0)
            except one_run.Failed as why:
                print(f"{size}: {str(why)[-300:]}", flush=True)
                continue
            planned = found["tokens_per_step"] / found["planned_seconds_per_step"]
            rate = found["tokens_per_second"]
            log = one_run.events(folder / "output")
            start = next(event for event in log if event["event"] == "start")
            chosen = start["manifest"].get("choices", {}).get("micro_batch_size")
            print(
                f"{size}: {rate:.0f} tokens a second, planned {planned:.0f} ({planned / rate - 1:+.1%}), "
                f"{found['planned_memory'] / one_run.GIB:.1f} GiB, {found['to_step_1']:.1f} s to step 1, {chosen}",
                flush=True,
            )
            if a.classes:
                print(markdown(found), flush=True)
            if a.out:
                with a.out.open("a") as out:
                    out.write(json.dumps({"config": a.config.parent.name, "rows": size, **found}) + "\n")


if __name__ == "__main__":
    main()
