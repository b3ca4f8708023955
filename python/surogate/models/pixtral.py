"""Pixtral's vision tower: patches of images of any size, rotated by row and column."""

from __future__ import annotations

from collections.abc import Callable

from ..dsl import Batch, Layers, Module, Reader, Tensor, output, repeat
from ..errors import ModelConfigError
from ..layers import Activation, GatedMLP, RMSNorm
from ..layers.vision import AxialRotary, PatchEmbedding, TowerAttention, TowerConfig, of_image, pixels

#: Epsilon of the norms; the config does not say it.
EPS = 1e-5


class PixtralConfig(TowerConfig):
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    patch_size: int = 16
    image_size: int = 1024
    head_dim: int = 0
    hidden_act: Activation = "gelu"

    token = ("image_token_index", 10)

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.theta = self.read_theta(reader)
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if self.head_dim % 4:
            reader.problem("head_dim", f"{self.head_dim} is not supported, expected a multiple of 4")

    @property
    def side(self) -> int:
        """Rows and columns of patches that become one token."""
        side, layer = self.whole.get("spatial_merge_size", 2), self.whole.get("vision_feature_layer", -1)
        problems = []
        if isinstance(side, bool) or not isinstance(side, int) or side < 1:
            problems.append(f"`spatial_merge_size`: {side!r} is not supported, expected a whole number above 0")
        if layer != -1:
            problems.append(f"`vision_feature_layer`: {layer!r} is not supported, expected -1, the last layer")
        if problems:
            raise ModelConfigError("Mistral3ForConditionalGeneration", problems)
        return side


class Layer(Module):
    def __init__(self, c: PixtralConfig) -> None:
        self.attention_norm = RMSNorm(c.hidden_size, EPS)
        self.attention = TowerAttention(
            c.hidden_size, c.num_attention_heads, bias=False, out="o_proj", head_dim=c.head_dim
        )
        self.ffn_norm = RMSNorm(c.hidden_size, EPS)
        self.feed_forward = GatedMLP(c.hidden_size, c.intermediate_size, function=c.hidden_act)

    def forward(self, x: Tensor, rotate: Callable[..., Tensor], first: Tensor, last: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotate, (first, last))
        x = x + self.feed_forward(self.ffn_norm(x))
        output("vision.layer.{i}", x)
        return x


class Transformer(Module):
    def __init__(self, c: PixtralConfig) -> None:
        self.layers = Layers(c.num_hidden_layers, Layer(c))

    def forward(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> Tensor:
        return repeat(self.layers, x, rotate, *of_image(batch))


class Pixtral(Module):
    def __init__(self, c: PixtralConfig) -> None:
        self.width = c.width
        self.patch_conv = PatchEmbedding([c.num_channels, c.patch_size, c.patch_size], c.hidden_size)
        self.ln_pre = RMSNorm(c.hidden_size, EPS)
        self.rotary = AxialRotary.of_turns(c.head_dim, c.theta)
        self.transformer = Transformer(c)

    def forward(self, batch: Batch) -> Tensor:
        x = self.ln_pre(self.patch_conv(pixels(batch, self.width)))
        return self.transformer(x, self.rotary(batch), batch)
