"""Measures this card for plans, then holds plans to runs: shapes drawn at random, planned and run, time and memory.

    calibrate.py [--count 16] [--seed COMMIT] [--seconds 10] [--warm-up 5] [--out FOLDER] [--budget SECONDS]
                 [--no-measuring] [--device cuda|cpu] [--tiny]

First `surogate doctor --calibrate` (under four minutes on a GPU; what it finds is kept for the plans that follow, and lies
in FOLDER/machine.json). Then `--count` shapes: family, sizes, length 512 to 32k, batch, rank, window, packed documents,
heads, from the seed, which is the commit's hash unless another is named. A shape whose plan is refused, or whose step
is expected to take longer than 4 s, is redrawn. Each is planned by `surogate plan --json` and run by `surogate sft`
for `--warm-up` + `--seconds` seconds. Prints a table, and a line for every shape that is off by more than 10 % in time
or by more than max(1 %, 300 MB) in memory; exit status 1 if there is one. FOLDER/shapes.jsonl has everything.

A shape takes about 25 seconds in addition to `--warm-up` and `--seconds`. Needs the surogate package.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import subprocess
import sys
import time
from concurrent import futures
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import one_run  # noqa: E402
from table import commit_of  # noqa: E402

TIME_SHARE, MEMORY_SHARE, MEMORY_BYTES = 0.10, 0.01, 300e6

#: Longest step that is run, as the plan expects it.
LONGEST_STEP = 4.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seed", dest="commit", help="what shapes are drawn from; left out: the commit's hash")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--budget", type=float, default=float("inf"))
    parser.add_argument("--out", type=pathlib.Path, default=HERE.parents[1] / "output" / "calibrate")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    for flag in ("--no-measuring", "--tiny"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


def draw(chance: random.Random, tiny: bool) -> dict[str, Any]:
    """A shape: fields of a model's configuration, options of a run, how documents are as long as they are."""
    family = chance.choice(["llama", "qwen2", "qwen3", "mistral", "smollm3"])
    head_dim = chance.choice([64, 128]) if not tiny else 16
    key_heads = chance.choice([2, 4, 8])
    heads = key_heads * chance.choice([1, 2, 4])
    hidden = heads * head_dim if family != "qwen3" else chance.choice([1024, 1536, 2048, 2560])
    length = 64 if tiny else 512 * 2 ** chance.randrange(7)
    tokens = 256 if tiny else chance.choice([8192, 16384, 32768])
    window = chance.choice([256, 1024, 4096]) if family == "mistral" and chance.random() < 0.7 else None
    vocabulary = 512 if tiny else chance.choice([32000, 49152, 128256, 151936])
    model: dict[str, Any] = {
        "model_type": family,
        "vocab_size": vocabulary,
        "hidden_size": 64 if tiny else hidden,
        "intermediate_size": 128 if tiny else 256 * round(hidden * chance.uniform(2.5, 4.0) / 256),
        "num_hidden_layers": 2 if tiny else chance.randrange(6, 33),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": chance.random() < 0.5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if family == "mistral":
        model["sliding_window"] = window
    if family == "qwen2":
        # Heads of this family always share the hidden size among themselves.
        del model["head_dim"]
        model["hidden_size"] = heads * head_dim
    lora = chance.random() < 0.6
    return {
        "model": model,
        "median": chance.choice([150, 300, 800]) if chance.random() < 0.5 else None,
        "options": {
            "lora": lora,
            "lora_rank": chance.choice([8, 16, 32, 64]),
            "lora_dropout": 0.0,
            "sequence_len": length,
            "per_device_train_batch_size": max(1, tokens // length),
            "gradient_accumulation_steps": chance.choice([1, 2, 4]),
        },
    }


def write(
    shape: dict[str, Any], folder: pathlib.Path, a: argparse.Namespace, chance: random.Random, most: int = 1_500_000
) -> pathlib.Path:
    """The shape as a file that `surogate sft` takes, with data of up to `most` tokens."""
    folder.mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(shape["model"], indent=2))
    length, vocabulary = shape["options"]["sequence_len"], shape["model"]["vocab_size"]
    rows = shape["options"]["per_device_train_batch_size"] * shape["options"]["gradient_accumulation_steps"]
    wanted = min(most, max(40 * rows * length, 200_000)) if not a.tiny else 20_000
    with (folder / "data.jsonl").open("w") as file:
        written = 0
        while written < wanted:
            median = shape["median"]
            count = length if median is None else min(length, max(8, round(chance.lognormvariate(0, 0.8) * median)))
            # A few thousand random tokens, from another place each time.
            file.write(json.dumps({"input_ids": chance.choices(range(1, vocabulary), k=count)}) + "\n")
            written += count
    return one_run.write_run(folder, a.device, shape["options"])


def planned(run: pathlib.Path) -> dict[str, Any] | None:
    """What `surogate plan` says; none where it refuses for lack of memory."""
    words = [sys.executable, "-m", "surogate", "plan", str(run), "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode == 3:
        return None
    if done.returncode:
        sys.exit(f"calibrate.py: {run}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def prepared(number: int, chance: random.Random, a: argparse.Namespace) -> tuple[dict[str, Any], pathlib.Path]:
    """Draws until a shape can be run, and plans it: CPU work, concurrent with the run of the shape before."""
    for attempt in range(50):
        shape = draw(chance, a.tiny)
        folder = a.out / f"shape-{number:02}-{attempt}-{time.strftime('%H%M%S')}"
        run = write(shape, folder, a, chance)
        plan = planned(run)
        if plan and plan["estimate"]["step_seconds"] <= LONGEST_STEP:
            expected = {"expected": plan["estimate"], "planned_before": plan["memory_bytes"]}
            return {"number": number, **shape, **expected}, run
    raise RuntimeError("no shape of fifty fits")


def one_shape(result: dict[str, Any], run: pathlib.Path, a: argparse.Namespace) -> dict[str, Any]:
    try:
        limit = a.warm_up + a.seconds + 120
        result |= one_run.watch(run, run.parent / "output", a.warm_up, a.seconds, limit)
    except one_run.Failed as problem:
        result["error"] = str(problem)
    (run.parent / "data.jsonl").unlink()
    return result


def words(result: dict[str, Any]) -> str:
    model, options = result["model"], result["options"]
    heads = f"{model['num_attention_heads']}/{model['num_key_value_heads']}"
    size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    parts = [f"{model['model_type']} {model['num_hidden_layers']} × {model['hidden_size']}, heads {heads} of {size}"]
    parts += [f"window {model['sliding_window']}"] if model.get("sliding_window") else []
    parts += [f"LoRA {options['lora_rank']}" if options["lora"] else "full"]
    parts += [f"{options['per_device_train_batch_size']} × {options['sequence_len']}"]
    parts += [f"documents of {result['median']}"] if result["median"] else []
    return ", ".join(parts)


def judge(result: dict[str, Any]) -> tuple[str, bool]:
    """A row of the table, and whether the plan held."""
    if "error" in result:
        return f"| {words(result)} | | | | FAILED: {result['error'][-300:]!r} | |", False
    seconds = result["tokens_per_step"] / result["tokens_per_second"]
    off = result["expected"]["step_seconds"] / seconds - 1
    used = result["used"] or result["memory_in_log"]
    gap = used - result["planned_before"]
    fits = gap <= max(MEMORY_SHARE * result["planned_before"], MEMORY_BYTES)
    same = result["planned_before"] == result["planned_memory"]
    held = abs(off) <= TIME_SHARE and (fits or not result["used"]) and same
    memory = f"{result['planned_before'] / one_run.GIB:.2f} | {used / one_run.GIB:.2f}"
    figures = f"{result['expected']['step_seconds'] * 1e3:.1f} | {seconds * 1e3:.1f} | {off:+.1%} | {memory}"
    return f"| {words(result)} | {figures} |{'' if held else ' ←'}{'' if same else ' not the run’s own plan'}", held


def main() -> int:
    a = arguments()
    began = time.time()
    a.out.mkdir(parents=True, exist_ok=True)
    if not a.no_measuring:
        level = "--calibrate=least" if a.tiny else "--calibrate"
        words_ = [sys.executable, "-m", "surogate", "doctor", level, "--output", str(a.out / "machine.json")]
        done = subprocess.run(words_, stdout=subprocess.PIPE, text=True)
        (a.out / "calibration.txt").write_text(done.stdout)
        print(done.stdout, f"calibration: {time.time() - began:.0f} s", sep="\n", flush=True)
        if done.returncode:
            return done.returncode
    seed = commit_of(a)
    chance = random.Random(seed)
    print(f"\nshapes of seed {seed}\n")
    print("| shape | expected, ms | measured | | planned, GiB | used |\n|---|--:|--:|--:|--:|--:|", flush=True)
    held = []
    with (a.out / "shapes.jsonl").open("a") as record, futures.ThreadPoolExecutor(1) as planner:
        following = planner.submit(prepared, 0, chance, a)
        for number in range(a.count):
            if time.time() - began + a.warm_up + a.seconds + 30 > a.budget:
                print(f"the budget ends before shape {number}")
                break
            shape, run = following.result()
            if number + 1 < a.count:
                following = planner.submit(prepared, number + 1, chance, a)
            result = one_shape(shape, run, a) | {"seed": seed}
            record.write(json.dumps(result) + "\n")
            record.flush()
            line, fine = judge(result)
            held.append(fine)
            print(line, flush=True)
    print(f"\n{sum(held)} of {len(held)} plans held; {time.time() - began:.0f} s")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
