"""Qwen3-VL: Qwen3 with a rotation by time, row and column, and a vision tower, of which the results of some blocks are
added after the first layers of the text, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dsl import Batch, Module, Tensor, each, model
from ..layers import CausalLM, Decoder, DecoderLayer, GatedMLP, ImageRotation, RotaryEmbedding, TextPart
from ..layers.vision import placed, taken
from .qwen3 import Attention, Qwen3Config
from .qwen_vision import PROJECTORS, Qwen3Tower, Qwen3VisionConfig, Whole

#: Pairs that turn with time, row and column where the config does not say it.
SECTIONS = (24, 20, 20)


class Qwen3VLTextConfig(Qwen3Config):
    section = "text_config"
    num_key_value_heads: int = 32
    max_position_embeddings: int = 128000
    rope: ImageRotation

    theta = 5000000.0


class PlainLayer(DecoderLayer):
    """A layer after which nothing is added."""

    def forward(self, x: Tensor, rotate: Any, deep: Tensor, batch: Batch) -> Tensor:
        return super().forward(x, rotate, batch)


class DeepLayer(DecoderLayer):
    """A layer after which the rows of images are added."""

    def forward(self, x: Tensor, rotate: Any, deep: Tensor, batch: Batch) -> Tensor:
        return super().forward(x, rotate, batch) + deep


class ImageDecoder(Decoder):
    """The decoder with its tower's results, of which `deep` are added after layers."""

    def __init__(self, c: Any, layer: Any, visual: Module, side: int, deep: int, **more: Any) -> None:
        super().__init__(c, layer, **more)
        self.place_images = self.put
        self.side, self.deep, self.count = side, deep, c.num_hidden_layers
        # Named by the whole model.
        self.tower = [visual]
        self.added: list[Tensor] = []

    def put(self, x: Tensor, batch: Batch) -> Tensor:
        features, deep = self.tower[0](batch)
        self.added = [taken(of, batch, self.side) for of in deep]
        return placed(x, features, batch, self.side)

    def shared(self, x: Tensor, batch: Batch) -> tuple[Any, ...]:
        rotate = super().shared(x, batch)
        if not self.deep:
            return rotate
        # Layers after the deep ones read nothing of it.
        return *rotate, each(self.added + [self.added[-1]] * (self.count - self.deep))


class DeepstackWhole(CausalLM):
    """A text with the tower of Qwen3-VL. `mlps` says the kind of feed-forward layer that each layer has, which `mlp` makes."""

    def __init__(self, c: Qwen3Config, v: Qwen3VisionConfig, mlps: list[str], mlp: Callable[[str], Module]) -> None:
        visual, deep = Qwen3Tower(v), len(v.deep)
        rotary = RotaryEmbedding(c.head_dim, c.rope, axes=c.rope.axes(c.head_dim // 2, SECTIONS))
        of = {True: DeepLayer, False: PlainLayer if deep else DecoderLayer}
        kinds = [f"{'deep' if i < deep else 'plain'}_{kind}" for i, kind in enumerate(mlps)]
        layers = {name: of[i < deep](c, Attention(c), mlp(mlps[i])) for i, name in enumerate(kinds)}
        decoder = ImageDecoder(c, layers, visual, v.spatial_merge_size, deep, pattern=kinds, rotary=rotary)
        super().__init__(c, Whole(decoder, visual))
        self.images, self.projectors = v.form(table=v.table, stretched=True), PROJECTORS


class Qwen3VLWhole(DeepstackWhole):
    def __init__(self, c: Qwen3VLTextConfig, v: Qwen3VisionConfig) -> None:
        dense = ["dense"] * c.num_hidden_layers
        super().__init__(c, v, dense, lambda _: GatedMLP(c.hidden_size, c.intermediate_size))


@model(
    "Qwen3VLForConditionalGeneration",
    config=Qwen3VLTextConfig,
    model_type="qwen3_vl",
    carried=["model.visual."],
    examples=["Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-8B-Instruct"],
    images=(Qwen3VLWhole, Qwen3VisionConfig),
)
class Qwen3VLText(CausalLM):
    def __init__(self, c: Qwen3VLTextConfig) -> None:
        mlp = GatedMLP(c.hidden_size, c.intermediate_size)
        super().__init__(c, TextPart(Decoder(c, DecoderLayer(c, Attention(c), mlp))))
