"""Tiny models whose every number counts, as folders and as GGUF files, and what the engine computes of them."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import surogate
from safetensors.numpy import load_file, save_file
from surogate.cli.commands import main

#: Prompts of one token, and longer than every window.
PROMPTS = [
    [7],
    [3, 60, 12, 5, 41],
    [(7 * t + 3) % 90 + 3 for t in range(24)],
    [(11 * t * t + 5) % 90 + 3 for t in range(40)],
]

#: Endings of numbers that keep the values which the engine gives them.
KEPT = ("act_fn.eps", "act_fn.beta")


def tokenizer(size: int) -> dict[str, object]:
    """A tokenizer.json of `size` single characters of the byte-level alphabet."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 512))]
    vocab = {letter: number for number, letter in enumerate([*letters[: size - 2], "Ġ", "Ċ"])}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    rest = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None}
    return {**rest, "pre_tokenizer": level, "decoder": level, "model": model}


def model_folder(folder: Path, fields: dict, *, spread: float = 0.3) -> Path:
    """A model with drawn weights, of which norms, biases and other vectors are not alike, and a tokenizer."""
    drawn = folder / "drawn"
    drawn.mkdir(parents=True)
    range_of = {"initializer_range": spread}
    parts = {name: part | range_of for name, part in fields.items() if name == "text_config"}
    (drawn / "config.json").write_text(json.dumps({**fields, **range_of, **parts}))
    options = {"model": str(drawn), "init": "random", "lora": False, "torch_dtype": "float32", "device": "cpu"}
    trainer = surogate.Trainer({**options, "output_dir": str(folder / "unused")})
    model = folder / "model"
    trainer.export(model)
    tensors = dict(load_file(model / "model.safetensors"))
    for name, values in tensors.items():
        if values.ndim <= 1 and not name.endswith(KEPT):
            numbers = np.random.default_rng(zlib.crc32(name.encode()))
            tensors[name] = (values + 0.2 * numbers.standard_normal(values.shape)).astype(np.float32)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    sizes = fields.get("text_config", fields)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer(sizes["vocab_size"])))
    return model


def export(model: Path, encoding: str = "f32") -> Path:
    """The GGUF file of a model."""
    file = model.parent / f"{encoding}.gguf"
    code = main(["export", str(model), "--format", "gguf", "--encoding", encoding, "--output", str(file)])
    assert code == 0, f"surogate export ended with {code}"
    return file


def log_probabilities(model: Path, prompts: list[list[int]] = PROMPTS) -> np.ndarray:
    """Log-probabilities of the token after each prompt as the engine computes them, [prompts, vocabulary] in f64."""
    loaded, rows = surogate.load(model), []
    for prompt in prompts:
        logits = np.asarray(loaded.forward([prompt]))[0, -1].astype(np.float64)
        rows.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
    return np.array(rows)
