"""A tiny Qwen3-VL with the tokenizer of the stories, and questions on the colors of images."""

from __future__ import annotations

import json
import shutil

import numpy as np
from conftest import REPOSITORY
from image_models import png

COLORS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (30, 60, 220), "yellow": (230, 220, 40)}

STORIES = REPOSITORY / "examples/stories/model"

#: Tokens of Qwen3's templates after the 512 of the stories, whose few tokens keep the head of the model small.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
TOKENS = {token: 512 + number for number, token in enumerate([*SPECIAL, *COLORS])}
IMAGE, VOCABULARY = TOKENS["<|image_pad|>"], 544


def write(shared, base):
    """Writes a tiny Qwen3-VL and 96 questions on the color of an image into a folder."""
    model = base / "model"
    model.mkdir()
    tokenizer = json.loads((STORIES / "tokenizer.json").read_text()) | {"post_processor": None}
    own = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for token, number in TOKENS.items():
        tokenizer["added_tokens"].append({"id": number, "content": token, "special": token in SPECIAL, **own})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((STORIES / "tokenizer_config.json").read_text()) | {"add_bos_token": False}
    settings |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(shared / "golden/vision/text/templates/qwen3_vl.jinja", model / "chat_template.jinja")
    config = json.loads((shared / "golden/qwen3_vl/config.json").read_text())
    config["image_token_id"] = IMAGE
    config["text_config"] |= {"vocab_size": VOCABULARY, "eos_token_id": TOKENS["<|im_end|>"], "bos_token_id": None}
    config["text_config"]["pad_token_id"] = TOKENS["<|endoftext|>"]
    config["vision_config"]["patch_size"] = 8
    (model / "config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    size = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (model / "preprocessor_config.json").write_text(json.dumps(processor | size))
    rows = []
    for number in range(96):
        name = list(COLORS)[number % 4]
        height, width = [(48, 48), (32, 64), (64, 32)][number % 3]
        pixels = np.full((height, width, 3), 240, np.uint8)
        pixels[4:-4, 4:-4] = COLORS[name]
        (base / f"{number}.png").write_bytes(png(pixels))
        asked = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "Which color?"}]
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": name}]})
    (base / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
