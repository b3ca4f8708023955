"""Rates of supervised fine-tuning where a part of the tokens is trained: logits of all tokens, and of those alone.

    trained_logits.py SHAPE... [--shares 0.25 0.5] [--rows 8] [--sequence 2048] [--seconds 6] [--options JSON]

SHAPE is a model of `rows.py`, such as `qwen3-0.6b`. Weights and tokens are drawn at random; the end of every document is trained, as an
answer is. Prints a line for each run: tokens a second as measured and as planned, memory as used and as planned.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import one_run
from rows import SIZES, vocabulary, write_model


def write_rows(folder, shape, share, rows, length):
    """Documents of a quarter to a whole row, of which the last `share` of the tokens is trained."""
    draw, size = random.Random(1), vocabulary(shape, False)
    with (folder / "data.jsonl").open("w") as lines:
        for _ in range(64 * rows):
            ids = draw.choices(range(size), k=draw.randint(length // 8, length // 2))
            prompt = round(len(ids) * (1 - share))
            lines.write(json.dumps({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=list(SIZES))
    parser.add_argument("--shares", type=float, nargs="*", default=[0.25, 0.5])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--options", type=json.loads, default={})
    a = parser.parse_args()
    print(
        "| shape, trained | logits | tokens/s | planned | off by | used, GiB | planned |\n|---|---|--:|--:|--:|--:|--:|",
        flush=True,
    )
    for shape in a.shapes:
        for share in a.shares:
            for only in (False, True):
                with tempfile.TemporaryDirectory() as name:
                    folder = Path(name)
                    write_model(folder / "model", shape, False)
                    write_rows(folder, shape, share, a.rows, a.sequence)
                    options = {
                        "sequence_len": a.sequence, "per_device_train_batch_size": a.rows, "gradient_accumulation_steps": 1,
                        "lora": True, "lora_dropout": 0.0, "validation_split_ratio": 0.0, "num_epochs": 1000, "data_cache": "off",
                        "debug_time_breakdown": False, "trained_logits_only": only,
                    }  # fmt: skip
                    run = one_run.write_run(folder, "cuda", options | a.options)
                    found = one_run.watch(run, folder / "output", 2.0, a.seconds, 200)
                rate, seconds = found["mean_tokens_per_second"], found["planned_seconds_per_step"]
                planned = found["tokens_per_step"] / seconds
                print(f"| {shape}, {share:.0%} | {'trained' if only else 'all'} | {rate:.0f} | {planned:.0f} | {planned / rate - 1:+.1%} | "
                      f"{found['used'] / one_run.GIB:.2f} | {found['planned_memory'] / one_run.GIB:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
