"""Models of the recorded families with a tokenizer of 96 words, so that conversations with images can be answered."""

from __future__ import annotations

import json
import shutil
import zlib

#: Texts that the families frame images by, under the ids of the recorded models.
SPECIAL = {
    "qwen2_5_vl": {88: "<|image_pad|>", 90: "<|vision_start|>", 91: "<|vision_end|>"},
    "qwen3_vl": {88: "<|image_pad|>", 90: "<|vision_start|>", 91: "<|vision_end|>"},
    "qwen3_5_vl": {88: "<|image_pad|>", 90: "<|vision_start|>", 91: "<|vision_end|>"},
    "gemma3_mm": {88: "<image_soft_token>", 90: "<start_of_image>", 91: "<end_of_image>"},
    "gemma4_mm": {88: "<|image|>", 90: "<|image>", 91: "<image|>"},
    "mistral3": {88: "[IMG]", 90: "[IMG_BREAK]", 91: "[IMG_END]"},
    "smolvlm": {88: "<image>", 90: "<fake_token_around_image>", 91: "<global-img>"}
    | {70 + number: f"<row_{number // 4 + 1}_col_{number % 4 + 1}>" for number in range(16)},
}

#: The text that a template writes for an image.
PLACE = {"gemma3_mm": "<start_of_image>"}


def png(pixels):
    """The file of an image, uint8 [H, W, 3]."""

    def chunk(kind, content):
        check = zlib.crc32(kind + content).to_bytes(4, "big")
        return len(content).to_bytes(4, "big") + kind + content + check

    height, width, _ = pixels.shape
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def with_tokenizer(golden, family, folder):
    """A copy of a recorded model in `folder`, whose words are `w0`, `w1`, …"""
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "preprocessor_config.json"):
        shutil.copy(golden / family / name, folder)
    special = SPECIAL[family] | {93: "<user>", 94: "<assistant>", 95: "<end>"}
    vocab = {special.get(number, f"w{number}"): number for number in range(96)}
    added = [
        {"id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for id, text in special.items()
    ]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    place = PLACE.get(family, SPECIAL[family][88])
    if "vl" in family and family.startswith("qwen"):
        place = f"<|vision_start|>{place}<|vision_end|>"
    template = (
        "{% for message in messages %}<{{ message.role }}>{% for part in message.content %}"
        "{% if part.type == 'image' %}" + place + "{% else %} {{ part.text }} {% endif %}{% endfor %}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<end>"}))
    return folder
