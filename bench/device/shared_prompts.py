"""Pairs a second with prompts computed once and for each answer: DPO with LoRA on random weights and random words.

`shared_prompts.py FOLDER STEPS [RATIO...]` takes `config.json` of a folder and the tokenizer of the shipped example; it prints a line for each ratio of
prompt to answer and each value of `share_prompts`.
"""

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import surogate

WORDS = "the cat sat on a mat and then it ran away from home because of rain in spring time".split()
RATIOS = {"3:1": ((230, 240), (70, 80)), "1:1": ((150, 160), (140, 160))}
PAIRS = 4000


def write_pairs(path, prompt, answer):
    draw = random.Random(3)

    def words(span):
        return " ".join(draw.choices(WORDS, k=draw.randint(*span)))

    rows = [{"prompt": words(prompt) + " ", "chosen": words(answer), "rejected": words(answer)} for _ in range(PAIRS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def model_of(folder, place):
    """The shape of a folder with the tokenizer of the example."""
    place.mkdir()
    shutil.copy(folder / "config.json", place)
    for file in Path("examples/stories/model").glob("tokenizer*"):
        shutil.copy(file, place)
    return place


def measure(model, pairs, share, steps, place):
    run = {
        "model": str(model), "init": "random", "task": "dpo", "torch_dtype": "bfloat16", "lora": True, "lora_rank": 16,
        "lora_dropout": 0.0, "datasets": [{"path": str(pairs), "type": "preference"}], "share_prompts": share,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "sequence_len": 4096, "max_length": 4096,
        "validation_split_ratio": 0.0, "max_steps": steps, "output_dir": str(place),
    }  # fmt: skip
    trainer = surogate.Trainer(run)
    rows = [trainer.step() for _ in range(steps)][steps // 2 :]
    done = (rows[-1]["epoch"] - rows[0]["epoch"]) * PAIRS
    seconds = sum(row["seconds"] for row in rows[1:])
    return done / seconds, sum(row["tokens"] for row in rows[1:]) / seconds, rows[-1]["mfu"]


def main():
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = model_of(folder, place / "model")
        for ratio in sys.argv[3:] or list(RATIOS):
            spans = RATIOS[ratio]
            write_pairs(place / "pairs.jsonl", *spans)
            for share in (False, True):
                pairs, tokens, mfu = measure(model, place / "pairs.jsonl", share, steps, place / "run")
                print(f"{ratio} share_prompts={share}: {pairs:.2f} pairs/s, {tokens:.0f} tokens/s, MFU {mfu:.3f}", flush=True)


if __name__ == "__main__":
    main()
