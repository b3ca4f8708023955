"""Qwen2-VL and Qwen2.5-VL: Qwen2 with a rotation by time, row and column, and a vision tower."""

from __future__ import annotations

from typing import Any

from ..dsl import Module, Reader, model
from ..layers import Attention, CausalLM, Decoder, DecoderLayer, GatedMLP, ImageRotation, RotaryEmbedding, TextPart
from ..layers.vision import placed
from .qwen2 import Qwen2Config
from .qwen_vision import (
    PROJECTORS,
    Qwen2_5Tower,
    Qwen2_5VisionConfig,
    Qwen2Tower,
    Qwen2VisionConfig,
    QwenTowerConfig,
    Whole,
)

#: As published, and as the modules of transformers 5 are called.
RENAMED = {
    "model.language_model.": "model.language_model.",
    "model.visual.": "model.visual.",
    "visual.": "model.visual.",
    "model.": "model.language_model.",
}

#: Fields of the whole that say nothing of the text.
OF_IMAGES = (
    "vision_config", "image_token_id", "video_token_id", "vision_token_id", "vision_start_token_id", "vision_end_token_id"
)  # fmt: skip


class Qwen2VLTextConfig(Qwen2Config):
    """In a section of its own, or, as transformers 4 wrote it, among the fields of the whole."""

    rope: ImageRotation

    theta = 1000000.0

    @classmethod
    def from_dict(cls, architecture: str, fields: dict[str, Any]) -> Any:
        text = fields.get("text_config")
        whole = {name: value for name, value in fields.items() if name not in OF_IMAGES}
        if isinstance(text, dict):
            whole = text | {name: fields[name] for name in ("tie_word_embeddings",) if name in fields}
        return super().from_dict(architecture, whole)

    def derive(self, reader: Reader) -> None:
        for name in OF_IMAGES:
            reader.take(name)
        super().derive(reader)


def decoder(c: Qwen2VLTextConfig, axes: list[int] | None = None) -> Decoder:
    layer = DecoderLayer(c, Attention(c, bias=True), GatedMLP(c.hidden_size, c.intermediate_size))
    return Decoder(c, layer, rotary=RotaryEmbedding(c.head_dim, c.rope, axes=axes))


class QwenVL(CausalLM):
    """The model with such a tower."""

    tower: type[Module]
    #: The writing of boxes in texts.
    boxes: dict[str, bool]

    def __init__(self, c: Qwen2VLTextConfig, v: QwenTowerConfig) -> None:
        axes = c.rope.axes(c.head_dim // 2, (16, 24, 24))
        text, visual = decoder(c, axes), self.tower(v)
        text.place_images = lambda x, batch: placed(x, visual(batch), batch, v.spatial_merge_size)
        super().__init__(c, Whole(text, visual))
        self.projectors = PROJECTORS
        self.images = v.form(window=getattr(v, "window", 0), **self.boxes)


class Qwen2VLWhole(QwenVL):
    tower = Qwen2Tower
    boxes = {"boxes_marked": True}


class Qwen2_5VLWhole(QwenVL):
    tower = Qwen2_5Tower
    boxes = {"boxes_in_pixels": True}


@model(
    "Qwen2VLForConditionalGeneration",
    config=Qwen2VLTextConfig,
    model_type="qwen2_vl",
    renamed=RENAMED,
    carried=["model.visual."],
    examples=["Qwen/Qwen2-VL-2B-Instruct", "Qwen/Qwen2-VL-7B-Instruct"],
    images=(Qwen2VLWhole, Qwen2VisionConfig),
)
class Qwen2VLText(CausalLM):
    def __init__(self, c: Qwen2VLTextConfig) -> None:
        super().__init__(c, TextPart(decoder(c)))


@model(
    "Qwen2_5_VLForConditionalGeneration",
    config=Qwen2VLTextConfig,
    model_type="qwen2_5_vl",
    renamed=RENAMED,
    carried=["model.visual."],
    examples=["Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"],
    images=(Qwen2_5VLWhole, Qwen2_5VisionConfig),
)
class Qwen2_5VLText(CausalLM):
    def __init__(self, c: Qwen2VLTextConfig) -> None:
        super().__init__(c, TextPart(decoder(c)))
