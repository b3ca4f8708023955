"""A model's folder with random weights as GPT-OSS is published: experts in MXFP4, everything else in bf16.

    python bench/device/mxfp4.py FOLDER     # whose config.json is there

Written piece by piece: a file is larger than the memory that making it takes. Deliberately unknown here: what is run on it.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

# A tensor in a file: name, type, shape.
Tensor = tuple[str, str, tuple[int, ...]]

# Bytes that are drawn once, and repeated.
DRAWN = 1 << 24


def tensors(fields: dict[str, Any]) -> Iterator[Tensor]:
    hidden, inner, experts = fields["hidden_size"], fields["intermediate_size"], fields["num_local_experts"]
    heads, key_heads = fields["num_attention_heads"] * fields["head_dim"], fields["num_key_value_heads"] * fields["head_dim"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield name, "BF16", (fields["vocab_size"], hidden)
    yield "model.norm.weight", "BF16", (hidden,)
    for layer in range(fields["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", "BF16", (hidden,)
        yield f"{at}self_attn.sinks", "BF16", (fields["num_attention_heads"],)
        for linear, rows, columns in (("q", heads, hidden), ("k", key_heads, hidden), ("v", key_heads, hidden), ("o", hidden, heads)):
            yield f"{at}self_attn.{linear}_proj.weight", "BF16", (rows, columns)
            yield f"{at}self_attn.{linear}_proj.bias", "BF16", (rows,)
        yield f"{at}mlp.router.weight", "BF16", (experts, hidden)
        yield f"{at}mlp.router.bias", "BF16", (experts,)
        for linear, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            yield f"{at}mlp.experts.{linear}_blocks", "U8", (experts, rows, columns // 32, 16)
            yield f"{at}mlp.experts.{linear}_scales", "U8", (experts, rows, columns // 32)
            yield f"{at}mlp.experts.{linear}_bias", "BF16", (experts, rows)


def contents(name: str, dtype: str, numbers: np.random.Generator) -> bytes:
    """Some elements of a tensor: any codes, scales around 2⁻⁷, numbers of a deviation of 0.02, ones for norms."""
    if dtype == "U8" and name.endswith("_blocks"):
        return numbers.integers(0, 256, DRAWN, dtype=np.uint8).tobytes()
    if dtype == "U8":
        return numbers.integers(118, 122, DRAWN, dtype=np.uint8).tobytes()
    count = DRAWN // 2
    drawn = np.ones(count, np.float32) if "norm" in name else numbers.normal(0.0, 0.02, count).astype(np.float32)
    return (drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def write(folder: pathlib.Path) -> None:
    """Writes `model.safetensors`, and into `config.json` what the weights are."""
    fields = json.loads((folder / "config.json").read_text())
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in tensors(fields):
        size = int(np.prod(shape)) * (1 if dtype == "U8" else 2)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    drawn: dict[tuple[str, str], bytes] = {}
    numbers = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, entry in header.items():
            kind = (entry["dtype"], "norm" if "norm" in name else name.rsplit("_", 1)[-1] if entry["dtype"] == "U8" else "")
            block = drawn.setdefault(kind, contents(name, entry["dtype"], numbers))
            left = entry["data_offsets"][1] - entry["data_offsets"][0]
            while left > 0:
                left -= file.write(block[: min(left, len(block))])
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(fields, indent=2))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
