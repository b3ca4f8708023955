"""The same training on the CPU and on the GPU: the loss curves step by step.

    curve.py [--steps 50] [--limit 0.02] [--work lora|full] [--devices cpu,cuda] [--precision bfloat16]
             [--recipe bf16] [--out FOLDER]

A model small enough for a CPU is trained from the same random weights on the same documents by `surogate sft`, once on
each device. Prints the loss of each step and the greatest relative difference; ends with 1 if that is above the limit.
The data can be learned: losses that fall together say more than losses that stay. Knows no reference numbers.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

# A two-layer Qwen3 with heads of 128, which the GPU's libraries take.
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--limit", type=float, default=0.02)
    parser.add_argument("--work", choices=["lora", "full"], default="full")
    parser.add_argument("--devices", default="cpu,cuda")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


def write_documents(path: pathlib.Path) -> None:
    """Documents in which each token follows from the one before: of 20 to 200 tokens, many to a row."""
    with path.open("w") as file:
        for i in range(400):
            token, ids = 1 + (37 * i) % 500, []
            for _ in range(20 + (53 * i) % 181):
                ids.append(token)
                token = 1 + (token * 5 + 3) % 499
            file.write(json.dumps({"input_ids": ids}) + "\n")


def losses(a: argparse.Namespace, folder: pathlib.Path, device: str, output: pathlib.Path) -> list[float]:
    options = {
        "model": str(folder / "model"),
        "init": "random",
        "torch_dtype": a.precision,
        "recipe": a.recipe,
        "device": device,
        "datasets": [{"path": str(folder / "documents.jsonl"), "type": "tokens"}],
        "output_dir": str(output),
        "sequence_len": 256,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": a.steps,
        "save_steps": a.steps,
        "eval_steps": a.steps,
        "learning_rate": 2e-4 if a.work == "full" else 2e-3,
        "warmup_steps": min(5, a.steps - 1),
        "lora": a.work == "lora",
        "lora_dropout": 0.0,
    }
    run = output.with_suffix(".yaml")
    run.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    subprocess.run([sys.executable, "-m", "surogate", "sft", str(run), "--quiet"], check=True)
    (log,) = output.glob("log-*.json")
    events = map(json.loads, log.read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "step"]


def main() -> int:
    a = arguments()
    first, second = a.devices.split(",")
    with tempfile.TemporaryDirectory() as place:
        folder = a.out or pathlib.Path(place)
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        write_documents(folder / "documents.jsonl")
        of = [losses(a, folder, device, folder / f"{side}-{device}") for side, device in enumerate((first, second))]
    worst = 0.0
    for step, (left, right) in enumerate(zip(*of, strict=True)):
        difference = abs(left - right) / abs(left)
        worst = max(worst, difference)
        print(f"step {step:3}  {first} {left:.5f}  {second} {right:.5f}  {100 * difference:.3f} %")
    fell = of[0][-1] / of[0][0]
    print(f"{a.work}, {a.precision}, {a.recipe}, {len(of[0])} steps: loss × {fell:.3f}; at most {100 * worst:.3f} % apart")
    return 0 if worst <= a.limit and len(of[0]) == a.steps else 1


if __name__ == "__main__":
    sys.exit(main())
