"""Times of `surogate quantize` on layers of a published shape, and the latency that `surogate prune` plans next to the measured one.

Random weights: times and memory are those of a real model, losses are not. `--tiny` tries the script on any machine.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
from one_run import nvml
from rows import dense, write_data

METHODS = [("fp8-dynamic", "rtn"), ("w4a16", "rtn"), ("w4a16", "gptq"), ("w4a16", "refine")]


def write_model(folder: pathlib.Path, model: str, layers: int, tiny: bool) -> dict[str, object]:
    """A model of random weights with its first layers only, and its configuration."""
    from safetensors.torch import save_file
    import torch

    fields = dense(model, tiny) | {"num_hidden_layers": layers, "tie_word_embeddings": False}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    hidden, inner, width = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    queries, keys = fields["num_attention_heads"] * width, fields["num_key_value_heads"] * width

    def noise(*shape: int) -> torch.Tensor:
        place = "cuda" if torch.cuda.is_available() else "cpu"
        return (torch.randn(*shape, device=place) * 0.02).to(torch.bfloat16).cpu()

    tensors = {"model.embed_tokens.weight": noise(fields["vocab_size"], hidden), "lm_head.weight": noise(fields["vocab_size"], hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for norm, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden), ("self_attn.q_norm", width), ("self_attn.k_norm", width)):
            tensors[f"{at}{norm}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name, shape in {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}.items():
            tensors[f"{at}self_attn.{name}_proj.weight"] = noise(*shape)
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            tensors[f"{at}mlp.{name}_proj.weight"] = noise(*shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return fields


def command(*words: object) -> tuple[float, str]:
    """Seconds and text of a command."""
    before = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "surogate", *map(str, words)], capture_output=True, text=True, check=False)
    return time.perf_counter() - before, done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--methods", default=",".join(dict.fromkeys(method for _, method in METHODS)))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for models and results")
    a = parser.parse_args()
    length = 64 if a.tiny else 2048
    model = a.work / "model"
    fields = write_model(model, a.model, a.layers, a.tiny)
    write_data(a.work / "rows.jsonl", False, length, (a.samples + 8) * length, fields["vocab_size"])
    run = {"model": str(model), "datasets": [{"path": str(a.work / "rows.jsonl"), "type": "tokens"}], "sequence_len": length}
    run |= {"per_device_train_batch_size": 2, "output_dir": str(a.work / "unused"), "validation_split_ratio": 0.02}
    (a.work / "run.yaml").write_text(json.dumps(run))
    data = ["--calibration", a.work / "run.yaml", "--samples", a.samples, "--device", a.device]
    print("card", nvml("name"), "driver", nvml("driver_version"), "model", a.model, "layers", a.layers, flush=True)
    for scheme, method in METHODS:
        if method not in a.methods.split(","):
            continue
        flags = ["--scheme", scheme, "--method", method, *(data if method != "rtn" else [])]
        seconds, text = command("quantize", model, *flags, "--output", a.work / f"{scheme}-{method}")
        print(f"{scheme} {method}: {seconds:.1f} s\n  " + "\n  ".join(text.splitlines()[-5:]), flush=True)
    _, text = command("prune", model, "--latency", 1e9, "--output", a.work / "pruned", *data)
    planned = re.findall(r"takes ([\d.]+) ms", text)
    import surogate

    loaded = surogate.load(model, device=a.device, dtype="auto")
    prompt = np.random.default_rng(0).integers(1, fields["vocab_size"], 512).tolist()
    settings = {"max_new_tokens": 128, "ignore_end_tokens": True}
    times = []
    for _ in range(4):
        before = time.perf_counter()
        loaded.generate([prompt], **settings)
        times.append(1e3 * (time.perf_counter() - before))
    print(f"512 + 128 tokens: planned {planned} ms, measured {[round(of, 2) for of in times]} ms", flush=True)


if __name__ == "__main__":
    main()
