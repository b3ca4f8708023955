"""GGUF files that the engine wrote, read by the gguf package and by transformers.

    python tests/oracle/compare_gguf.py [--cases N] [--seed S]

Needs gguf in addition to what compare_transformers.py needs. Random small models in every encoding: tensors and sizes as gguf
reads them, logits as transformers loads them; and the vocabulary of the shipped example. Exit code 1 if anything was
out of tolerance.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import surogate as engine
import torch
from compare_transformers import Report, relative
from surogate.cli.commands import main as surogate
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

#: Relative L2 of a matrix read back.
ALLOWED = {"f32": 1e-7, "f16": 5e-4, "bf16": 4e-3, "q8_0": 8e-3}

KINDS = [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config, GPT2Config]

STORIES = Path(__file__).resolve().parents[2] / "examples/stories/model"


def draw(rng: random.Random, folder: Path):
    kind = rng.choice(KINDS)
    heads = rng.choice([2, 4])
    if kind is GPT2Config:
        # transformers takes the number of positions from nowhere in the file: its own is 1024.
        sizes = {"vocab_size": 512, "n_positions": 1024, "n_embd": heads * 32, "n_layer": 2, "n_head": heads}
        return save(rng, folder, GPT2Config(**sizes, initializer_range=0.1))
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if kind is LlamaConfig and rng.random() < 0.5:
        rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = kind(
        vocab_size=512,
        hidden_size=heads * 32,
        intermediate_size=rng.choice([96, 172]),
        num_hidden_layers=4 if kind is SmolLM3Config else 2,
        num_attention_heads=heads,
        num_key_value_heads=rng.choice([1, heads]),
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters=rope,
        tie_word_embeddings=rng.random() < 0.5,
        initializer_range=0.1,
    )
    config.sliding_window = None
    config.pad_token_id = 0
    return save(rng, folder, config)


def save(rng: random.Random, folder: Path, config):
    """A model with norms and biases that are not all the same."""
    torch.manual_seed(rng.randrange(1 << 30))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                is_scale = ("norm" in name or ".ln_" in name) and name.endswith("weight")
                parameter.normal_(float(is_scale), 0.1)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((STORIES / name).read_bytes())
    return model


def models(report: Report, rng: random.Random, folder: Path) -> None:
    encoding = rng.choice(list(ALLOWED))
    model = draw(rng, folder / "model")
    rotation = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "none")
    report.case += f" {model.config.model_type} {encoding} {rotation}"
    words = ["export", str(folder / "model"), "--format", "gguf", "--encoding", encoding]
    if code := surogate([*words, "--output", str(folder / "m.gguf")]):
        return report.fail(f"surogate export ended with {code}")
    read = gguf.GGUFReader(folder / "m.gguf")
    arch = read.fields["general.architecture"].contents()
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), model.config.num_hidden_layers)
    found = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in read.tensors}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        module, part = name.rsplit(".", 1)
        other = found.pop(f"{names.get_name(module)}.{part}", None)
        if other is None:
            report.fail(f"{name} is not in the file")
            continue
        if arch in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
            other = other.reshape(heads, -1, 2, *other.shape[1:]).swapaxes(1, 2).reshape(other.shape)
        if arch == "gpt2" and other.ndim == 2 and (".attn." in name or ".mlp." in name):
            other = other.T
        report.check(name, relative(other, weight.numpy()), ALLOWED[encoding], encoding)
    if set(found) - {"rope_freqs.weight"}:
        report.fail(f"the file also has {sorted(found)}")
    # transformers takes Qwen3's heads and Llama 3's scaling from nowhere in the file, and does not know SmolLM3's form.
    if model.config.model_type not in ("qwen3", "smollm3") and rotation in ("default", "none"):
        loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file="m.gguf", dtype=torch.float32).eval()
        ids = torch.tensor([[rng.randrange(512) for _ in range(24)]])
        with torch.no_grad():
            report.check("logits", relative(loaded(ids).logits, model(ids).logits), 20 * ALLOWED[encoding] + 2e-5)


def vocabulary(report: Report, _rng: random.Random, folder: Path) -> None:
    surogate(["export", str(STORIES), "--format", "gguf", "--encoding", "f32", "--output", str(folder / "m.gguf")])
    ours, theirs = AutoTokenizer.from_pretrained(STORIES), AutoTokenizer.from_pretrained(folder, gguf_file="m.gguf")
    for text in ("Once upon a time, there was a girl.", "Zoë, 2 + 2 = 4!", "lines\nand  spaces"):
        if ours(text)["input_ids"] != theirs(text)["input_ids"]:
            report.fail(f"{text!r} is {theirs(text)['input_ids']}, expected {ours(text)['input_ids']}")
        report.compared += 1
    logits = engine.load(STORIES).forward([[1, 403, 407, 261]])
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file="m.gguf", dtype=torch.float32).eval()
    with torch.no_grad():
        other = loaded(torch.tensor([[1, 403, 407, 261]])).logits
    report.check("logits of the example", relative(np.asarray(other), logits), 2e-5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = Report()
    cases = [(models, case) for case in range(options.seed, options.seed + options.cases)]
    for part, case in [*cases, (vocabulary, 0)]:
        report.case = f"{part.__name__} {case}"
        with tempfile.TemporaryDirectory() as folder:
            part(report, random.Random(f"gguf {case}"), Path(folder))
    print(json.dumps(report.worst, indent=1))
    print(f"{report.compared} comparisons, {report.failed} failed")
    return int(report.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
