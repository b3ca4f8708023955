"""Rates of the tasks of preferences next to supervised fine-tuning, on random tokens and weights.

`preferences.py FOLDER ROWS ACCUMULATION TOKENS STEPS` reads the configuration of a folder and prints a line for each task, whose answers
are half of the tokens. Supervised fine-tuning trains the same half.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import surogate

TASKS = {
    "sft": {},
    "dpo": {},
    "dpo, reference_free": {"reference_free": True},
    "kto": {"sample_packing": False},
    "orpo": {},
    "simpo": {"loss_type": "simpo"},
    "reward": {},
    "dpo, full": {"lora": False},
    "sft, full": {"lora": False},
}


def rows(rng, shape, vocabulary, prompt):
    ids = rng.integers(5, vocabulary, shape)
    labels = ids.copy()
    labels[..., :prompt] = -100
    return {"input_ids": ids, "labels": labels}


def batch_of(task, rng, vocabulary, batch, accumulation, tokens):
    """A step's micro-batches: as many tokens for each task."""
    if task == "sft":
        return rows(rng, (accumulation, batch, tokens), vocabulary, tokens // 2)
    half = tokens // 2
    if task == "kto":
        answers = rows(rng, (accumulation, 2 * batch, half), vocabulary, half // 2)
        return answers | {"desirable": np.arange(2 * batch)[None].repeat(accumulation, 0) % 2}
    shape = (accumulation, batch, half)
    if task == "reward":
        return {side: {"input_ids": rng.integers(5, vocabulary, shape)} for side in ("chosen", "rejected")}
    return {side: rows(rng, shape, vocabulary, half // 2) for side in ("chosen", "rejected")}


def measure(folder, name, options, batch, accumulation, tokens, steps):
    task = {"simpo": "cpo"}.get(name, name.split(",")[0])
    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    run = {
        "model": folder, "init": "random", "task": task, "torch_dtype": "bfloat16", "lora": True, "lora_rank": 16,
        "lora_dropout": 0.0, "optimizer": "adamw_8bit", "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation, "sequence_len": tokens, "max_steps": 1000, "learning_rate": 1e-5,
        **options,
    }  # fmt: skip
    if name == "dpo, full":
        # Weights that are drawn have no folder that holds them.
        run["init"] = "pretrained"
    trainer = surogate.Trainer(run)
    data = batch_of(task, np.random.default_rng(0), vocabulary, batch, accumulation, tokens)
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        metrics = trainer.step(data, 1e-5)
        seconds.append(time.perf_counter() - begin)
    median = sorted(seconds[2:])[len(seconds[2:]) // 2]
    rate = accumulation * batch * tokens / median
    memory = (metrics["memory"] or 0) / 1e9
    print(f"{Path(folder).name:12} {name:20} {rate:9.0f} tokens/s  {median * 1e3:8.1f} ms  {memory:6.2f} GB", flush=True)


def main():
    folder, numbers = sys.argv[1], [int(word) for word in sys.argv[2:6]]
    wanted = sys.argv[6:] or list(TASKS)
    for name in wanted:
        try:
            measure(folder, name, TASKS[name], *numbers)
        except surogate.errors.SurogateError as error:
            print(f"{Path(folder).name:12} {name:20} {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    main()
