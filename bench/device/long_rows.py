"""Rows of 32k and 128k tokens, a window against none, batches of several lengths: rates next to a floor and the plan.

    long_rows.py [--only NAME...] [--seconds 6] [--warm-up 3] [--out FOLDER] [--commit HASH] [--tiny --device cpu]

The floor is the time of the products and of attention alone at what they reach on an H200 where nothing else runs
(products 665 TFLOP/s, attention 643 forward and 519 backward): no adapters, no element-wise work. `of the floor` is
the floor's time as a share of the measured one. Random weights, random tokens, LoRA of rank 16.
FOLDER/long_rows.jsonl has everything. Needs the surogate package.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import one_run  # noqa: E402
from rows import SIZES, TINY, write_model  # noqa: E402

PRODUCTS, FORWARD, BACKWARD = 665e12, 643e12, 519e12

YARN = {"sequence_len": 131072, "max_model_len": 131072, "rope_scaling": "yarn"}
MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}

# name, model (of the table or fields), options
RUNS: list[tuple[str, str | dict[str, Any], dict[str, Any]]] = [
    ("0.6b-32k", "qwen3-0.6b", {"sequence_len": 32768}),
    ("8b-32k", "qwen3-8b", {"sequence_len": 32768}),
    ("window-4096", MISTRAL | {"sliding_window": 4096}, {"sequence_len": 8192}),
    ("window-none", MISTRAL | {"sliding_window": None}, {"sequence_len": 8192}),
    ("lengths", "qwen3-0.6b", {"sequence_len": 2048, "sample_packing": False, "per_device_train_batch_size": 4}),
    ("0.6b-128k", "qwen3-0.6b", YARN),
    ("8b-128k", "qwen3-8b", YARN),
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[name for name, _, _ in RUNS])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--warm-up", type=float, default=3.0)
    parser.add_argument("--out", type=pathlib.Path, default=HERE.parents[1] / "output" / "long_rows")
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def write(name: str, model: str | dict[str, Any], options: dict[str, Any], a: argparse.Namespace) -> pathlib.Path:
    """A run's file, its model and its data."""
    folder = a.out / name
    folder.mkdir(parents=True)
    if a.tiny:  # nothing to stretch at that length
        options = {key: value for key, value in options.items() if key != "rope_scaling"}
        options |= {"sequence_len": 64, "max_model_len": 64}
    if isinstance(model, str) or a.tiny:
        write_model(folder / "model", model if isinstance(model, str) else "qwen3-0.6b", tiny=a.tiny)
    else:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(model, indent=2))
    chance, length = random.Random(0), options["sequence_len"]
    tokens = chance.choices(range(1, 512 if a.tiny else 30000), k=length)
    with (folder / "data.jsonl").open("w") as file:
        for _ in range(4000 if name == "lengths" else 64):
            count = max(8, round(chance.uniform(0.05, 1) * length)) if name == "lengths" else length
            file.write(json.dumps({"input_ids": tokens[:count]}) + "\n")
    own = {
        "lora": True,
        "lora_rank": 16,
        "lora_dropout": 0.0,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "debug_time_breakdown": name != "lengths",
    }
    return one_run.write_run(folder, a.device, own | options)


def floor(model: str | dict[str, Any], length: int, tiny: bool) -> float:
    """Seconds of products and attention of one row with adapters' weights left out."""
    if isinstance(model, str):
        hidden, wide, layers, heads, key_heads = TINY if tiny else SIZES[model][:5]
        size, vocabulary, window = 128, 151936, None
    else:
        hidden, wide, layers = (model[f] for f in ("hidden_size", "intermediate_size", "num_hidden_layers"))
        heads, key_heads, size = (model[f] for f in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        vocabulary, window = model["vocab_size"], model["sliding_window"]
    weights = layers * (hidden * size * (2 * heads + 2 * key_heads) + 3 * hidden * wide) + hidden * vocabulary
    seen = length * (length + 1) / 2
    if window and window < length:
        seen -= (length - window) * (length - window + 1) / 2
    pairs = layers * heads * size * seen
    return 4 * weights * length / PRODUCTS + pairs * (4 / FORWARD + 10 / BACKWARD)


def main() -> int:
    a = arguments()
    failed = 0
    print("| run | k tokens/s | step, ms | of the floor | plan off by | planned, GiB | used | host, GiB |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for name, model, options in RUNS:
        if name not in a.only:
            continue
        run = write(name, model, options, a)
        long = name.endswith("128k") and not a.tiny
        try:
            times = (0.0, 1.0) if long else (a.warm_up, a.seconds)
            found = one_run.watch(run, run.parent / "output", *times, 240)
        except one_run.Failed as problem:
            print(f"| {name} | FAILED: {str(problem)[-400:]!r} |", flush=True)
            failed += 1
            continue
        logged = one_run.events(run.parent / "output")
        kinds = {kind: sum(event["event"] == kind for event in logged) for kind in {e["event"] for e in logged}}
        with (a.out / "long_rows.jsonl").open("a") as record:
            record.write(json.dumps({"name": name, "commit": a.commit, "events": kinds, **found}) + "\n")
        seconds = found["tokens_per_step"] / found["tokens_per_second"]
        share = floor(model, options["sequence_len"], a.tiny) / seconds if name != "lengths" else float("nan")
        planned = found["planned_seconds_per_step"]
        off = f"{planned / seconds - 1:+.1%}" if planned else ""
        used = (found["used"] or found["memory_in_log"]) / one_run.GIB
        host = [resident / one_run.GIB for resident in found["resident"]] or [float("nan")]
        figures = f"{found['tokens_per_second'] / 1e3:.1f} | {seconds * 1e3:.1f} | {share:.2f} | {off}"
        memory = f"{found['planned_memory'] / one_run.GIB:.2f} | {used:.2f} | {host[0]:.2f} → {host[-1]:.2f}"
        print(f"| {name} | {figures} | {memory} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
