"""One side of `compare.py`: builds a trainer, then runs one optimizer step for each line on its standard input.

    side.py surogate|torch FOLDER lora|full f32|bf16 BATCH SEQUENCE THREADS

Answers each step with `wall-seconds processor-seconds loss`; its first line says what runs. Both sides draw the same
rows, train the same parameters with AdamW in the same precision and clip to norm 1. Knows nothing of the other side.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

Step = Callable[[np.ndarray], float]

RATE = 1e-4
RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def rows(folder: pathlib.Path, batch: int, sequence: int) -> Iterator[np.ndarray]:
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    draw = np.random.default_rng(0)
    while True:
        yield draw.integers(1, vocabulary, (batch, sequence)).astype(np.int32)


def ours(folder: pathlib.Path, work: str, precision: str, batch: int, sequence: int, threads: int) -> tuple[str, Step]:
    import os

    # The engine takes the processors that it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import surogate

    options = {
        "model": folder,
        "output_dir": "output/compare",
        "device": "cpu",
        "torch_dtype": {"f32": "float32", "bf16": "bfloat16"}[precision],
        "optimizer": "adamw",
        "lora": work == "lora",
        "lora_rank": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": 1,
        "sequence_len": sequence,
        "max_steps": 10_000,
        "learning_rate": RATE,
    }
    trainer = surogate.Trainer(options)

    def step(ids: np.ndarray) -> float:
        result = trainer.step({"input_ids": ids[None], "labels": ids[None]}, RATE)
        assert result is not None
        return float(result["loss"])

    return f"surogate {surogate.__version__}", step


def peer(folder: pathlib.Path, work: str, precision: str, batch: int, sequence: int, threads: int) -> tuple[str, Step]:
    import peft
    import torch
    import transformers

    torch.set_num_threads(threads)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.config.use_cache = False
    if work == "lora":
        config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=TARGETS)
        model = peft.get_peft_model(model, config)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.1, fused=True)

    def step(ids: np.ndarray) -> float:
        batch = torch.from_numpy(ids).long()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return f"torch {torch.__version__} transformers {transformers.__version__} peft {peft.__version__}", step


def main() -> None:
    side, folder, work, precision = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    batch, sequence, threads = (int(n) for n in sys.argv[5:8])
    what, step = (ours if side == "surogate" else peer)(folder, work, precision, batch, sequence, threads)
    print(what, flush=True)
    for ids, _ in zip(rows(folder, batch, sequence), sys.stdin):
        wall, processor = time.perf_counter(), time.process_time()
        loss = step(ids)
        print(time.perf_counter() - wall, time.process_time() - processor, loss, flush=True)


if __name__ == "__main__":
    main()
