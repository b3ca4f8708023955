"""Rates of DPO by TRL's trainer with Liger's kernels, for the work of `preferences.py`: LoRA of rank 16 on every linear layer, random
weights, pairs of a prompt and two answers of one length.

    python bench/device/preferences_trl.py FOLDER PAIRS PROMPT ANSWER STEPS [--checkpointing]

FOLDER holds a config.json. PROMPT and ANSWER are counts of tokens; the prompt stands in both rows of a pair. Needs trl, peft, datasets,
accelerate and liger-kernel. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch
from datasets import Dataset, fingerprint
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer


class Prepared(DPOTrainer):
    """The trainer for rows that are ids already."""

    def _prepare_dataset(self, dataset: Dataset, *_: object) -> Dataset:
        return dataset


class Clock(TrainerCallback):
    """The times at which steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    for name in ("pairs", "prompt", "answer", "steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("--checkpointing", action="store_true")
    a = parser.parse_args()
    config = AutoConfig.from_pretrained(a.folder)
    encoder = Tokenizer(models.WordLevel({"w0": 0, "w1": 1, "w2": 2}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=encoder, unk_token="w0", pad_token="w1", eos_token="w2")
    draw = torch.Generator().manual_seed(0)

    def words(count: int) -> list[int]:
        return torch.randint(5, config.vocab_size, (count,), generator=draw).tolist()

    sides = {"prompt_ids": a.prompt, "chosen_ids": a.answer, "rejected_ids": a.answer}
    rows = [{side: words(count) for side, count in sides.items()} for _ in range(a.pairs * a.steps)]
    # Rows in memory need no fingerprint, whose pickling fails with some versions of Python.
    fingerprint.Hasher.hash = staticmethod(lambda _: "0" * 16)
    torch.set_default_device("cuda")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.set_default_device("cpu")
    clock = Clock()
    options = DPOConfig(
        output_dir="output/trl", per_device_train_batch_size=a.pairs, gradient_accumulation_steps=1, max_steps=a.steps,
        learning_rate=1e-5, bf16=True, use_liger_kernel=True, gradient_checkpointing=a.checkpointing, max_length=a.prompt + a.answer,
        optim="adamw_torch_fused", report_to=[], logging_steps=1000, save_strategy="no", disable_tqdm=True,
        dataloader_num_workers=0,
    )  # fmt: skip
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    Prepared(
        model=model, args=options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=lora, callbacks=[clock]
    ).train()
    seconds = [after - before for before, after in zip(clock.ends[2:], clock.ends[3:], strict=False)]
    median = statistics.median(seconds)
    print(json.dumps({
        "peer": "trl + liger", "pairs": a.pairs, "prompt": a.prompt, "answer": a.answer, "checkpointing": a.checkpointing,
        "seconds": round(median, 4), "pairs_per_second": round(a.pairs / median, 2),
        "tokens_per_second": round(a.pairs * 2 * (a.prompt + a.answer) / median),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
