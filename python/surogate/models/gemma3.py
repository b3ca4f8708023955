"""Gemma 3 (text model): Gemma 2 with QK norm instead of a soft cap on scores, five layers with a sliding window for each
one without, and a rotary embedding for each of the two kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import layers
from ..dsl import Batch, Module, Parameter, Reader, Tensor, model, ops
from ..errors import ModelConfigError
from ..layers import (
    FULL,
    SIGLIP_RENAMED,
    SLIDING,
    VISION_CARRIED,
    RMSNorm,
    RotaryByKind,
    RotaryEmbedding,
    Rotations,
    TextPart,
    layer_types,
)
from ..layers.vision import placed, pooled
from .gemma2 import CappedLM, Gemma2Config, Layer, Norm, ScaledDecoder
from .siglip import Siglip, SiglipConfig


class Gemma3Config(Gemma2Config):
    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope: Rotations

    theta = 1000000.0

    def derive(self, reader: Reader) -> None:
        self.rope = self.rope.with_local_theta(10000.0)
        super().derive(reader)
        if self.attn_logit_softcapping is not None:
            reader.problem("attn_logit_softcapping", "is not supported: transformers reads it, and does not apply it")

    def kinds_of_layers(self, reader: Reader) -> list[str]:
        period = reader.take("sliding_window_pattern")
        period = period if period is not None else reader.take("_sliding_window_pattern")
        if period is not None and (isinstance(period, bool) or not isinstance(period, int) or period < 1):
            reader.problem("sliding_window_pattern", f"{period!r} is not supported, expected a whole number above 0")
            period = None
        kinds = [SLIDING if (i + 1) % (period or 6) else FULL for i in range(self.num_hidden_layers)]
        return layer_types(reader, self.num_hidden_layers, kinds)


class Attention(layers.Attention):
    def __init__(self, c: Gemma3Config, kind: str) -> None:
        super().__init__(
            c,
            bias=c.attention_bias,
            output_bias=c.attention_bias,
            scale=c.query_pre_attn_scalar**-0.5,
            window=c.window if kind == SLIDING else None,
        )
        self.q_norm = Norm(c, c.head_dim)
        self.k_norm = Norm(c, c.head_dim)

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project(x)
        return rotate(self.q_norm(self.split(q))), rotate(self.k_norm(self.split(k))), self.split(v)


def decoder(c: Gemma3Config, *, images: bool = False) -> ScaledDecoder:
    """The decoder; with `images`, the tokens of an image see each other both ways."""
    kinds = sorted(set(c.layer_types))
    rotary = RotaryByKind(**{kind: RotaryEmbedding(c.head_dim, c.rope[kind]) for kind in kinds})
    by_kind = {kind: Layer(c, Attention(c, kind)) for kind in kinds}
    for layer in by_kind.values():
        layer.self_attn.sees_images = images
    return ScaledDecoder(c, by_kind, pattern=c.layer_types, rotary=rotary)


@model(
    "Gemma3ForCausalLM",
    config=Gemma3Config,
    model_type="gemma3_text",
    base="model",
    examples=["google/gemma-3-270m", "google/gemma-3-1b-pt"],
)
class Gemma3(CappedLM):
    def __init__(self, c: Gemma3Config) -> None:
        super().__init__(c, decoder(c))


class Gemma3ImageConfig(Gemma3Config):
    section = "text_config"


class Gemma3VisionConfig(SiglipConfig):
    token = ("image_token_index", 262144)

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        reader.take("vision_use_head")  # published files have none

    def side(self, tokens: Any) -> int:
        """Rows and columns of patches that become one token."""
        per_image, patches = 256 if tokens is None else tokens, self.image_size // self.patch_size
        root = int(per_image**0.5) if isinstance(per_image, int) and per_image > 0 else 0
        if root == 0 or root**2 != per_image or patches % root:
            problem = f"`mm_tokens_per_image`: {per_image!r} does not divide {patches} × {patches} patches"
            raise ModelConfigError("Gemma3ForConditionalGeneration", [problem])
        return patches // root


class Projector(Module):
    """The mean over the patches of a token, a norm, and a product."""

    def __init__(self, c: Gemma3Config, v: Gemma3VisionConfig, side: int) -> None:
        self.side = side
        self.mm_input_projection_weight = Parameter(v.hidden_size, c.hidden_size, transposed=True)
        self.mm_soft_emb_norm = RMSNorm(v.hidden_size, v.layer_norm_eps, offset=True)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(self.mm_soft_emb_norm(pooled(x, self.side)), self.mm_input_projection_weight, transposed=True)


class Part(TextPart):
    def __init__(self, c: Gemma3Config, v: Gemma3VisionConfig) -> None:
        text, side = decoder(c, images=True), v.side(v.whole.get("mm_tokens_per_image"))
        super().__init__(text)
        self.side = side
        self.vision_tower = Siglip(v)
        self.multi_modal_projector = Projector(c, v, side)
        text.place_images = lambda x, batch: placed(x, self.multi_modal_projector(self.vision_tower(batch)), batch, side)


class Gemma3Whole(CappedLM):
    def __init__(self, c: Gemma3ImageConfig, v: Gemma3VisionConfig) -> None:
        part = Part(c, v)
        super().__init__(c, part)
        self.images, self.projectors = v.form(part.side), ["model.multi_modal_projector."]


@model(
    "Gemma3ForConditionalGeneration",
    config=Gemma3ImageConfig,
    model_type="gemma3",
    renamed=SIGLIP_RENAMED,
    carried=VISION_CARRIED,
    examples=["google/gemma-3-4b-it", "google/gemma-3-27b-it"],
    images=(Gemma3Whole, Gemma3VisionConfig),
)
class Gemma3Text(CappedLM):
    def __init__(self, c: Gemma3ImageConfig) -> None:
        super().__init__(c, TextPart(decoder(c)))
