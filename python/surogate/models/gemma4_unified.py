"""Gemma 4 without a tower: the text of Gemma 4, and patches of images that a norm and a product make tokens of, with entries for
column and row."""

from __future__ import annotations

from typing import Any, Literal

from ..dsl import Batch, Module, Parameter, Tensor, model, ops
from ..layers import FULL, SLIDING, LayerNorm, Linear, TextPart
from ..layers.vision import TowerConfig, pixels, placed
from .gemma2 import CappedLM
from .gemma4 import ADAPTERS, Decoder, Gemma4Config, unused
from .gemma4_vision import Gemma4Embedder

#: The norms of patches have the eps that torch gives them.
EPS = 1e-5

CARRIED = [f"model.{part}." for part in ("vision_embedder", "embed_vision", "embed_audio")]


class UnifiedConfig(Gemma4Config):
    max_position_embeddings: int = 262144
    hidden_size_per_layer_input: int | None = None
    use_bidirectional_attention: Literal["vision"] | None = "vision"

    usual_window = 1024
    both_ways = (SLIDING, FULL)


class UnifiedImageConfig(UnifiedConfig):
    section = "text_config"


class UnifiedVisionConfig(TowerConfig):
    token = ("image_token_id", 258880)

    patch_size: int = 16
    pooling_kernel_size: int = 3
    mm_embed_dim: int = 3840
    mm_posemb_size: int = 1120
    output_proj_dims: int = 3840
    rms_norm_eps: float = 1e-6

    @property
    def width(self) -> int:
        """Bytes of a patch, which is as large as `pooling_kernel_size` ones of the processor each way."""
        return self.num_channels * (self.patch_size * self.pooling_kernel_size) ** 2

    def form(self, pad: int) -> dict[str, Any]:
        """The layout of batches for these patches: each is a token."""
        return {"token": self.image_token, "width": self.width, "side": 1, "pad": pad, "table": self.mm_posemb_size}


class PatchEmbedder(Module):
    """norm(norm(dense(norm(pixels))) + entries of column and row)."""

    def __init__(self, c: UnifiedVisionConfig) -> None:
        self.width, self.inner = c.width, c.mm_embed_dim
        self.patch_ln1 = LayerNorm(c.width, EPS)
        self.patch_dense = Linear(c.width, c.mm_embed_dim, bias=True)
        self.patch_ln2 = LayerNorm(c.mm_embed_dim, EPS)
        stored = (c.mm_posemb_size, 2, c.mm_embed_dim)
        self.pos_embedding = Parameter(c.mm_posemb_size, 2 * c.mm_embed_dim, stored=stored)
        self.pos_norm = LayerNorm(c.mm_embed_dim, EPS)

    def forward(self, batch: Batch) -> Tensor:
        """The features [1, P, mm_embed_dim] of the patches of a batch."""
        x = self.patch_ln2(self.patch_dense(self.patch_ln1(pixels(batch, self.width, channel_last=True))))
        sizes = [self.inner] * 2
        of_column, _ = ops.split(ops.embedding(batch.patch_columns, self.pos_embedding), sizes=sizes)
        _, of_row = ops.split(ops.embedding(batch.patch_rows, self.pos_embedding), sizes=sizes)
        return self.pos_norm(x + (of_column + of_row))


class Part(TextPart):
    """The text with the rows of images in the place of their tokens."""

    def __init__(self, c: UnifiedImageConfig, v: UnifiedVisionConfig) -> None:
        text = Decoder(c, images=True)
        super().__init__(text)
        self.vision_embedder = PatchEmbedder(v)
        self.embed_vision = Gemma4Embedder(v.output_proj_dims, c.hidden_size, v.rms_norm_eps)
        text.place_images = lambda x, batch: placed(x, self.embed_vision(self.vision_embedder(batch)), batch, 1)


class UnifiedWhole(CappedLM):
    def __init__(self, c: UnifiedImageConfig, v: UnifiedVisionConfig) -> None:
        super().__init__(c, Part(c, v))
        self.images, self.projectors = v.form(c.pad_token_id or 0), ["model.embed_vision."]
        self.carried = unused(c, "model.language_model")


@model(
    "Gemma4UnifiedForConditionalGeneration",
    config=UnifiedImageConfig,
    model_type="gemma4_unified",
    carried=CARRIED,
    adapters=ADAPTERS,
    examples=["google/gemma-4-12B-it"],
    images=(UnifiedWhole, UnifiedVisionConfig),
)
class UnifiedText(CappedLM):
    def __init__(self, c: UnifiedImageConfig) -> None:
        super().__init__(c, TextPart(Decoder(c)))
        self.carried = unused(c, "model.language_model")


@model(
    "Gemma4UnifiedForCausalLM",
    config=UnifiedConfig,
    model_type="gemma4_unified_text",
    base="model",
    adapters=ADAPTERS,
)
class Unified(CappedLM):
    def __init__(self, c: UnifiedConfig) -> None:
        super().__init__(c, Decoder(c))
        self.carried = unused(c, "model")
