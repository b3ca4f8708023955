"""Rates of GRPO with adapters on random Qwen3 shapes: sampling, rewards and update of a step.

`grpo.py TOKENIZER CONFIG PROMPTS ANSWERS TOKENS STEPS [GPUS [REPEATED]] [NAME=VALUE …]` writes a folder and prompts, and prints a line for each
step: sampled tokens a second, seconds of sampling, rewards and update, and how far the sampler's log-probabilities are from those of training.
Prompts are REPEATED times as long; with REPEATED, a second run has `share_prompts: false`. Further options, in JSON, are those of the run.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import surogate

#: Answers of random weights have no end: each has all its tokens.
WORDS = "How many apples are left when Tom gives three of his nine apples to Sue and eats one of the others? "


def main(tokenizer, config, prompts, answers, tokens, steps, gpus=1, repeated=1, **options):
    base = Path(tempfile.mkdtemp())
    model = base / "model"
    model.mkdir()
    shutil.copy(config, model / "config.json")
    for path in Path(tokenizer).glob("*.json"):
        shutil.copy(path, model)
    rows = [{"prompt": f"{number}. " + WORDS * repeated * (1 + number % 4)} for number in range(4 * prompts)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows_of_batch = min(16, prompts * answers)
    run = {"model": str(model), "init": "random", "torch_dtype": "bfloat16", "task": "grpo", "lora_rank": 16,
           "optimizer": "adamw_8bit", "learning_rate": 1e-5, "max_steps": 1000, "output_dir": str(base / "run"),
           "datasets": [{"path": str(base / "prompts.jsonl"), "type": "auto"}], "num_generations": answers,
           "rewards": [{"function": "length", "tokens": max(tokens // 2, 1)}, {"function": "regex", "pattern": "[aeiou]"}],
           "max_completion_length": tokens, "sequence_len": tokens + 256 * repeated, "per_device_train_batch_size": rows_of_batch,
           "gradient_accumulation_steps": prompts * answers // (rows_of_batch * gpus), "gpus": gpus, **options}  # fmt: skip
    trainer = surogate.Trainer(run)
    for _ in range(steps):
        of = trainer.step()
        sampled = prompts * answers * of["completions/mean_length"]
        difference = [of[f"sampling/sampling_logp_difference/{name}"] for name in ("mean", "max")]
        print(f"{sampled / of['sampling_seconds']:8.0f} tokens/s sampled  {of['sampling_seconds']:6.2f} s sampling  "
              f"{of['reward_seconds']:5.2f} s rewards  {of['seconds']:6.2f} s update ({of['tokens_per_second']:7.0f} tokens/s)  "
              f"log-probabilities apart {difference[0]:.2e} mean {difference[1]:.2e} max  "
              f"{(of['memory'] or 0) / 1e9:.1f} GB", flush=True)  # fmt: skip


if __name__ == "__main__":
    named = dict(word.split("=", 1) for word in sys.argv[3:] if "=" in word)
    options = {name: json.loads(value) for name, value in named.items()}
    numbers = [int(word) for word in sys.argv[3:] if "=" not in word]
    main(*sys.argv[1:3], *numbers, **options)
    if len(numbers) > 5:
        main(*sys.argv[1:3], *numbers, **options, share_prompts=False)
