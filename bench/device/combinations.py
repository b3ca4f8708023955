"""Drawn combinations of options on tiny models: what must not change a run does not, and two devices agree.

    python bench/device/combinations.py                              # 20 combinations, on the CPU and on the GPU
    python bench/device/combinations.py --first 100 --count 50 --jobs 8
    python bench/device/combinations.py --number 117                 # one, again
    python bench/device/combinations.py --devices cpu                # without a GPU: only what must not change a run

Each combination draws a model, formats, a recipe, adapters, QLoRA, an optimizer, rows and batches, and trains a few steps. On
the first device a run that is interrupted and one that recomputes other values must have the same losses, norms and results, bit
for bit. On the second device losses may differ as far as `LIMITS` says. Options that the engine rejects count as rejected.
Ends with 1 if anything differs or fails. Deliberately unknown here: recorded numbers, data sets.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import hashlib
import json
import math
import pathlib
import random
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import surogate

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
STEPS, INTERRUPTED_AFTER = 4, 2
RECOMPUTED = ["swiglu", "rmsnorm", "ffn", "qkv", "att", "block"]

# How far a loss may be from that of the other device, relatively. Neighbouring codes of four bits are far apart, and a last digit
# of bf16 decides between them.
LIMITS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2, "fp8_hybrid": 2e-2, "nvfp4": 6e-2}

Options = dict[str, Any]
Batch = dict[str, np.ndarray]


def draw_options(draw: random.Random, model: pathlib.Path) -> tuple[Options, Options]:
    """Options of a run, and others that must not change it."""

    def chance(share: float) -> bool:
        return draw.random() < share

    recipe = draw.choice(["bf16", "bf16", "fp8_hybrid", "nvfp4"])
    options: Options = {
        "model": model,
        "recipe": recipe,
        "torch_dtype": draw.choice(["bfloat16", "float16", "float32"]) if recipe == "bf16" else "bfloat16",
        "optimizer": draw.choice(["adamw", "adamw_8bit", "normuon"]),
        "learning_rate": 5e-4,
        "per_device_train_batch_size": draw.choice([1, 2, 3]),
        "gradient_accumulation_steps": draw.choice([1, 2]),
        "sequence_len": draw.choice([16, 24, 33, 64, 130]),
        "max_steps": STEPS,
        "train_seed": draw.randint(1, 99),
        "lora": chance(0.6),
    }
    if recipe == "nvfp4":
        options |= {"fp4_backend": "emulate", "fp4_stochastic_rounding": chance(0.5)}
    if recipe == "fp8_hybrid":
        gradients = draw.choice([None, "float8_e4m3", "bfloat16"])
        options |= {"gradient_dtype": gradients, "fp8_amax_history": draw.choice([0, 1, 16])}
    if options["lora"]:
        mixture = "num_experts" in read_config(model) or "num_local_experts" in read_config(model)
        dropout = 0.0 if mixture else draw.choice([0.0, 0.1])
        options |= {"lora_rank": draw.choice([4, 8, 16]), "lora_dropout": dropout}
        quantized = draw.choice([None, None, "qlora_bnb", "qlora_fp8", "qlora_fp4"])
        options |= {quantized: True} if quantized else {}
        options |= {"lora_dora": True} if chance(0.2) else {}
    elif chance(0.4):
        options["master_dtype"] = "float32"
    return options, {f"recompute_{part}": True for part in RECOMPUTED if chance(0.3)}


def read_config(model: pathlib.Path) -> dict[str, Any]:
    fields = json.loads((model / "config.json").read_text())
    return fields.get("text_config", fields)


def draw_batches(number: int, options: Options, packed: bool) -> list[Batch]:
    """Random tokens, a third of which is not trained; `packed`: rows of two documents."""
    draw = np.random.default_rng(number)
    extents = ["gradient_accumulation_steps", "per_device_train_batch_size", "sequence_len"]
    shape = tuple(options[extent] for extent in extents)
    batches = []
    for _ in range(STEPS):
        ids = draw.integers(3, read_config(options["model"])["vocab_size"], shape).astype(np.int32)
        batch = {"input_ids": ids, "labels": np.where(draw.random(shape) < 0.3, -100, ids).astype(np.int32)}
        if packed:
            places = np.tile(np.arange(shape[-1], dtype=np.int32), (*shape[:2], 1))
            second = int(draw.integers(1, shape[-1]))
            places[..., second:] -= second
            batch["position_ids"] = places
        batches.append(batch)
    return batches


class Run:
    """One training run: losses and norms of its steps, and a digest of what it exports."""

    def __init__(self, options: Options, batches: list[Batch], folder: pathlib.Path, interrupted: bool = False):
        self.steps: list[tuple[float, float]] = []
        before = batches[:INTERRUPTED_AFTER] if interrupted else []
        if before:
            trainer = surogate.Trainer(options | {"output_dir": folder / "before"})
            self.train(trainer, before)
            trainer.save(folder / "checkpoint")
            options = options | {"resume_from_checkpoint": str(folder / "checkpoint")}
        trainer = surogate.Trainer(options | {"output_dir": folder / "output"})
        self.train(trainer, batches[len(before) :])
        trainer.export(folder / "result")
        files = sorted((folder / "result").rglob("*.safetensors"))
        self.result = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]

    def train(self, trainer: surogate.Trainer, batches: list[Batch]) -> None:
        for batch in batches:
            metrics = trainer.step(batch)
            self.steps.append((metrics["loss"], metrics["grad_norm"]))

    def equals(self, other: Run) -> bool:
        # As text: what is not a number is itself.
        return repr(self.steps) == repr(other.steps) and self.result == other.result

    def distance(self, other: Run) -> float:
        """The largest relative difference of losses."""
        pairs = zip(self.steps, other.steps, strict=True)
        apart = [abs(b / a - 1.0) if a else math.inf for (a, _), (b, _) in pairs]
        return math.nan if any(math.isnan(x) for x in apart) else max(apart)


def combination(number: int, models: pathlib.Path, devices: list[str]) -> tuple[str, str]:
    """Runs one: `ok`, `rejected` or `FAILED`, and what is to be said of it."""
    draw = random.Random(number)
    known = sorted(file.parent for file in models.glob("*/config.json") if (file.parent / "model.safetensors").exists())
    if not known:
        raise SystemExit(f"{models} has no models")
    options, harmless = draw_options(draw, draw.choice(known))
    packed = draw.random() < 0.5
    batches = draw_batches(number, options, packed)
    said = f"{options['model'].name} {json.dumps({k: v for k, v in options.items() if k != 'model'} | {'packed': packed})}"
    with tempfile.TemporaryDirectory() as folder:
        place, first = pathlib.Path(folder), options | {"device": devices[0]}
        try:
            plain = Run(first, batches, place / "plain")
        except surogate.SurogateError as problem:
            return "rejected", f"{said}: {str(problem).splitlines()[-1]}"
        if not plain.equals(Run(first, batches, place / "interrupted", interrupted=True)):
            return "FAILED", f"{said}: an interrupted run differs"
        if not plain.equals(Run(first | harmless, batches, place / "recomputed")):
            return "FAILED", f"{said}: {', '.join(harmless)} change it"
        apart = 0.0
        for device in devices[1:]:
            apart = plain.distance(Run(options | {"device": device}, batches, place / device))
            if not apart < LIMITS[options["recipe"] if options["recipe"] in LIMITS else options["torch_dtype"]]:
                return "FAILED", f"{said}: losses on {device} are {apart:.1e} apart"
        return "ok", f"{apart:.1e} {said}"


def in_process(number: int, a: argparse.Namespace) -> str:
    """A combination in a process of its own: its line."""
    words = [str(a.models), "--devices", a.devices, "--number", str(number)]
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    return lines[-1] if lines else f"FAILED {number} ended with {done.returncode}: {done.stderr.strip()[-400:]}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=pathlib.Path, nargs="?", default=GOLDEN, help="folders of models")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--number", type=int, help="only this one, in this process")
    parser.add_argument("--devices", default="cpu,cuda")
    parser.add_argument("--jobs", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    a = arguments()
    if a.number is not None:
        verdict, said = combination(a.number, a.models, a.devices.split(","))
        print(verdict, a.number, said, flush=True)
        return int(verdict == "FAILED")
    verdicts: collections.Counter[str] = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        for line in pool.map(lambda number: in_process(number, a), range(a.first, a.first + a.count)):
            print(line, flush=True)
            verdicts[line.split()[0]] += 1
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    return int(verdicts["FAILED"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
