"""Draws the data of the example and writes its untrained model, both the same each time.

    python examples/shapes/draw.py

Needs numpy. `train.jsonl` and `test.jsonl` have conversations about images, which the rows themselves hold as data URIs; paths
of files work as well. `model` has the configuration of a Qwen3-VL of 155 thousand parameters, its processor's and a tokenizer of
whole words.
"""

from __future__ import annotations

import base64
import json
import random
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent

COLORS = {"red": (215, 40, 40), "green": (40, 170, 70), "blue": (50, 80, 220), "yellow": (235, 205, 50)}
SHAPES = ["circle", "cross", "triangle"]

#: Heights and widths of images.
SIZES = [(48, 48), (48, 64), (64, 48)]

#: Tokens with a meaning of their own, and words.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
WORDS = ["<unk>", "user", "assistant", "What", "is", "this", "?", "a", *COLORS, *SHAPES]
TOKENS = {text: number for number, text in enumerate([*SPECIAL, *WORDS])}

TEMPLATE = """\
{%- for message in messages -%}
<|im_start|> {{ message.role }} {% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|> assistant {% endif -%}
"""


def drawn(random: random.Random, color: str, shape: str) -> np.ndarray:
    """An image, uint8 [H, W, 3]: a shape of some size at some place, on a gray ground."""
    height, width = random.choice(SIZES)
    pixels = np.full((height, width, 3), random.randint(100, 200), np.uint8)
    radius = random.randint(16, 20)
    y, x = height // 2 + random.randint(-2, 2), width // 2 + random.randint(-2, 2)
    rows, columns = np.mgrid[:height, :width]
    down, right = rows - y, columns - x
    inside = {
        "circle": down**2 + right**2 <= radius**2,
        "cross": (np.minimum(abs(down), abs(right)) <= 0.25 * radius) & (np.maximum(abs(down), abs(right)) <= radius),
        "triangle": (down <= 0.8 * radius) & (down >= 2 * abs(right) - radius),
    }[shape]
    pixels[inside] = COLORS[color]
    return pixels


def png(pixels: np.ndarray) -> bytes:
    """The file of an image."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content).to_bytes(4, "big")
        return len(content).to_bytes(4, "big") + kind + content + check

    height, width, _ = pixels.shape
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def row(random: random.Random, number: int) -> dict[str, object]:
    """A conversation about an image."""
    color = list(COLORS)[number % len(COLORS)]
    shape = SHAPES[number // len(COLORS) % len(SHAPES)]
    address = "data:image/png;base64," + base64.b64encode(png(drawn(random, color, shape))).decode()
    asked = [{"type": "image", "image": address}, {"type": "text", "text": "What is this ?"}]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": f"a {color} {shape}"}]}


def tokenizer() -> dict[str, object]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": None,
        "added_tokens": [{"id": TOKENS[text], "content": text, **plain} for text in SPECIAL],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": TOKENS, "unk_token": "<unk>"},
    }  # fmt: skip


def configuration() -> dict[str, object]:
    text = {
        "model_type": "qwen3_vl_text", "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "attention_bias": False, "initializer_range": 0.05,
        "bos_token_id": None, "eos_token_id": TOKENS["<|im_end|>"], "pad_token_id": TOKENS["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_vl_vision", "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "in_channels": 3,
        "patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 16, "out_hidden_size": 64,
        "deepstack_visual_indexes": [0], "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.05,
    }  # fmt: skip
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "dtype": "float32",
        "image_token_id": TOKENS["<|image_pad|>"], "video_token_id": TOKENS["<|video_pad|>"],
        "vision_start_token_id": TOKENS["<|vision_start|>"], "vision_end_token_id": TOKENS["<|vision_end|>"],
        "tie_word_embeddings": True, "text_config": text, "vision_config": vision,
    }  # fmt: skip


def processor() -> dict[str, object]:
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 4096}}
    return {"image_processor_type": "Qwen2VLImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **sizes}


def main() -> None:
    for name, count, seed in [("train", 600, 1), ("test", 60, 2)]:
        source = random.Random(seed)
        rows = [json.dumps(row(source, number)) + "\n" for number in range(count)]
        (HERE / f"{name}.jsonl").write_text("".join(rows))
    model = HERE / "model"
    model.mkdir(exist_ok=True)
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    files = {"config": configuration(), "tokenizer": tokenizer(), "tokenizer_config": settings, "preprocessor_config": processor()}
    for name, content in files.items():
        (model / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
