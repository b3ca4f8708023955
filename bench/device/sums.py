"""Proof that GRPO teaches: SmolLM2-135M-Instruct on sums of one- and two-digit numbers, with a reward for the right number.

`sums.py MODEL STEPS DELAY…` first fine-tunes the model on solved sums until it answers at least a third of unseen ones (20 steps). From there
it runs `task: grpo` for STEPS steps, and for each DELAY the same by hand with answers that were sampled DELAY steps earlier and whose
probabilities are not corrected: 0 is the control. It prints mean rewards of the steps and the share of right answers to unseen sums.
"""

import json
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import surogate

GROUP, PROMPTS, SEEN = 8, 64, 4000
BASE = Path(tempfile.mkdtemp())
COMMON = {"torch_dtype": "bfloat16", "sequence_len": 128, "output_dir": str(BASE / "run"), "warmup_steps": 0, "optimizer": "adamw",
          "lr_scheduler_type": "constant"}  # fmt: skip
SAMPLED = {**COMMON, "task": "grpo", "learning_rate": 1e-4, "num_generations": GROUP, "max_completion_length": 8,
           "per_device_train_batch_size": 128, "gradient_accumulation_steps": GROUP * PROMPTS // 128,
           "rewards": [{"function": "number"}]}  # fmt: skip


def question(a, b):
    return [{"role": "user", "content": f"What is {a} + {b}? Answer with the number alone."}]


def sums():
    """Pairs to learn from and pairs that are never trained on."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(1).shuffle(pairs)
    return pairs[:SEEN], pairs[-256:]


def file(name, rows):
    path = BASE / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{"path": str(path), "type": "auto"}]


def right(text, a, b):
    return float(text.strip().rstrip(".") == str(a + b))


def share(model, pairs):
    texts = model.generate([question(*pair) for pair in pairs], max_new_tokens=8, temperature=0.0, batch_size=256)
    return sum(right(text, *pair) for text, pair in zip(texts, pairs, strict=True)) / len(pairs)


def warm(model, seen, unseen):
    """Fine-tunes until a third of the answers are right; returns the folder."""
    rows = [{"messages": [*question(*pair), {"role": "assistant", "content": str(sum(pair))}]} for pair in seen]
    trainer = surogate.Trainer({
        **COMMON, "model": model, "lora": False, "learning_rate": 5e-5, "max_steps": 400, "per_device_train_batch_size": 32,
        "sample_packing": False, "validation_split_ratio": 0, "datasets": file("solved.jsonl", rows),
    })  # fmt: skip
    for step in range(400):
        metrics = trainer.step()
        if step % 20 == 19:
            found = share(trainer.model, unseen)
            print(f"warm start, step {step + 1}: loss {metrics['loss']:.3f}, right {found:.3f}", flush=True)
            if found > 0.3:
                break
    trainer.export(BASE / "warm")
    return str(BASE / "warm")


def engine(model, seen, unseen, steps):
    """The run as users write it, with evaluations on unseen sums."""
    rows = [{"prompt": question(a, b), "answer": str(a + b)} for a, b in seen]
    held_out = [{"prompt": question(a, b), "answer": str(a + b)} for a, b in unseen]
    trainer = surogate.Trainer({
        **SAMPLED, "model": model, "max_steps": steps, "datasets": file("asked.jsonl", rows),
        "validation_datasets": file("unseen.jsonl", held_out), "num_generations_eval": 1, "eval_steps": 25,
    })  # fmt: skip
    begin = time.monotonic()
    print(f"task: grpo: before, evaluation {trainer.evaluate()['reward']:.3f}, greedy {share(trainer.model, unseen):.3f}")
    rewards, apart, seconds = [], [], []
    for step in range(steps):
        metrics = trainer.step()
        rewards.append(metrics["reward"])
        apart.append(metrics["sampling/sampling_logp_difference/max"])
        seconds.append((metrics["sampling_seconds"], metrics["seconds"]))
        if step % 25 == 24:
            found = trainer.evaluate()
            print(f"  step {step + 1}: reward of the last ten {np.mean(rewards[-10:]):.3f}, evaluation {found['reward']:.3f}, "
                  f"log-probabilities apart at most {max(apart):.1e}", flush=True)  # fmt: skip
    sampling, update = np.median(seconds, 0)
    print(f"  greedy {share(trainer.model, unseen):.3f}; {sampling:.2f} s sampling, {update:.2f} s update a step, "
          f"{time.monotonic() - begin:.0f} s in all", flush=True)  # fmt: skip


def by_hand(model, seen, unseen, steps, delay):
    """The same with a queue of samples between sampling and training."""
    trainer = surogate.Trainer({**SAMPLED, "model": model})
    tokenizer = surogate.Tokenizer(model)
    draw, queue, rewards = random.Random(7), [], []
    begin = time.monotonic()
    for step in range(steps + delay):
        prompts = [pair for pair in draw.sample(seen, PROMPTS) for _ in range(GROUP)]
        asked = [{"messages": question(*pair), "seed": step * len(prompts) + at} for at, pair in enumerate(prompts)]
        texts = trainer.model.generate(asked, max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=0, batch_size=512)
        scores = np.array([right(text, *pair) for text, pair in zip(texts, prompts, strict=True)]).reshape(PROMPTS, GROUP)
        advantages = ((scores - scores.mean(1, keepdims=True)) / (scores.std(1, ddof=1, keepdims=True) + 1e-4)).ravel()
        rows = [tokenizer.labels([*question(*pair), {"role": "assistant", "content": text}])[:2]
                for text, pair in zip(texts, prompts, strict=True)]  # fmt: skip
        queue.append((rows, advantages))
        rewards.append(scores.mean())
        if len(queue) <= delay:
            continue
        rows, advantages = queue.pop(0)
        length = max(len(ids) for ids, _ in rows)
        filled = lambda index, value: np.array(  # noqa: E731
            [list(row[index]) + [value] * (length - len(row[index])) for row in rows], np.int32
        ).reshape(GROUP * PROMPTS // 128, 128, length)
        trainer.step({"input_ids": filled(0, 0), "labels": filled(1, -100), "advantages": advantages.reshape(-1, 128)}, 1e-4)
    tail = [float(np.mean(rewards[at : at + 10])) for at in range(0, len(rewards) - 9, max(10, len(rewards) // 8))]
    print(f"by hand, answers {delay} steps old: rewards {' '.join(f'{of:.3f}' for of in tail)}; the last ten {np.mean(rewards[-10:]):.3f}, "
          f"greedy {share(trainer.model, unseen):.3f}; {time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip


def main(model, steps, *delays):
    seen, unseen = sums()
    started = warm(model, seen, unseen)
    engine(started, seen, unseen, steps)
    for delay in delays:
        by_hand(started, seen, unseen, steps, delay)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
