"""Gemma 4's vision tower: positions by row and by column, linear layers whose inputs and outputs are clamped, and the mean
of the patches of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dsl import Batch, Layers, Module, Parameter, Reader, Tensor, ops, output, region, repeat
from ..layers import Activation, Linear, RMSNorm, activation
from ..layers.vision import Interval, TowerConfig, attend, of_image, pooled


class Gemma4VisionConfig(TowerConfig):
    token = ("image_token_id", 258880)
    theta_default = 100.0

    patch_size: int = 16
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_activation: Activation = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    pooling_kernel_size: int = 3
    position_embedding_size: int = 10240
    use_clipped_linears: bool = False
    standardize: bool = False

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        # Places are bounded by the table, tokens by the processor, and all layers have heads of one size.
        for name in ("max_position_embeddings", "default_output_length", "global_head_dim"):
            reader.take(name)
        self.rotation = self.read_theta(reader)
        if self.head_dim % 4:
            reader.problem("head_dim", f"{self.head_dim} is not supported, expected a multiple of 4")
        if self.num_attention_heads % self.num_key_value_heads:
            reader.problem("num_key_value_heads", f"{self.num_key_value_heads} does not divide {self.num_attention_heads}")

    def form(self, pad: int) -> dict[str, Any]:
        """The layout of batches for this tower."""
        own = {"token": self.image_token, "width": self.width, "side": self.pooling_kernel_size, "pad": pad}
        return own | {"table": self.position_embedding_size}


class ClippedLinear(Module):
    """A product whose input and output are clamped, where the config says so, by numbers that files have."""

    def __init__(self, c: Gemma4VisionConfig, inputs: int, outputs: int, *, bias: bool = False) -> None:
        self.linear = Linear(inputs, outputs, bias=bias)
        self.clips = c.use_clipped_linears
        if self.clips:
            self.input_min, self.output_min = (Parameter(1, init="-inf", buffer=True, stored=()) for _ in range(2))
            self.input_max, self.output_max = (Parameter(1, init="inf", buffer=True, stored=()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if not self.clips:
            return self.linear(x)
        y = self.linear(ops.clamp(x, self.input_min, self.input_max))
        return ops.clamp(y, self.output_min, self.output_max)


class Attention(Module):
    """Queries and keys are normalized and rotated, values normalized without a weight. Scores are not scaled."""

    def __init__(self, c: Gemma4VisionConfig) -> None:
        self.head_dim, self.eps = c.head_dim, c.rms_norm_eps
        queries, keys = (heads * c.head_dim for heads in (c.num_attention_heads, c.num_key_value_heads))
        bias = c.attention_bias
        self.q_proj = ClippedLinear(c, c.hidden_size, queries, bias=bias)
        self.k_proj = ClippedLinear(c, c.hidden_size, keys, bias=bias)
        self.v_proj = ClippedLinear(c, c.hidden_size, keys, bias=bias)
        self.o_proj = ClippedLinear(c, queries, c.hidden_size, bias=bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    @region("attention")
    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor], interval: Interval) -> Tensor:
        q, k, v = (ops.split_heads(of(x), head_dim=self.head_dim) for of in (self.q_proj, self.k_proj, self.v_proj))
        v, _ = ops.unit_norm(v, eps=self.eps)
        return self.o_proj(attend(rotate(self.q_norm(q)), rotate(self.k_norm(k)), v, interval, 1.0))


class MLP(Module):
    def __init__(self, c: Gemma4VisionConfig) -> None:
        self.function = c.hidden_activation
        self.gate_proj = ClippedLinear(c, c.hidden_size, c.intermediate_size)
        self.up_proj = ClippedLinear(c, c.hidden_size, c.intermediate_size)
        self.down_proj = ClippedLinear(c, c.intermediate_size, c.hidden_size)

    @region("mlp")
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(activation(self.function, self.gate_proj(x)) * self.up_proj(x))


class Layer(Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, c: Gemma4VisionConfig) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps)

        self.input_layernorm = norm()
        self.self_attn = Attention(c)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = MLP(c)
        self.post_feedforward_layernorm = norm()

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor], first: Tensor, last: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotate, (first, last)))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        output("vision.layer.{i}", x)
        return x


class Rotary(Module):
    """The first half of a head is rotated by the column of the patch, the second by its row, each with the frequencies of
    half a head."""

    def __init__(self, c: Gemma4VisionConfig) -> None:
        self.half, self.theta = c.head_dim // 2, c.rotation

    def forward(self, batch: Batch) -> Callable[[Tensor], Tensor]:
        frequencies, scaling = ops.rope_frequencies(head_dim=self.half, theta=self.theta)

        def rotate(x: Tensor) -> Tensor:
            left, right = ops.split(x, sizes=[self.half] * 2)
            left = ops.rope(left, batch.patch_columns, frequencies, scaling)
            return ops.concat(left, ops.rope(right, batch.patch_rows, frequencies, scaling))

        return rotate


class Encoder(Module):
    def __init__(self, c: Gemma4VisionConfig) -> None:
        self.rotary_emb = Rotary(c)
        self.layers = Layers(c.num_hidden_layers, Layer(c))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return repeat(self.layers, x, self.rotary_emb(batch), *of_image(batch))


class PatchEmbedder(Module):
    """A product of the pixels, and the sum of an entry for the column and one for the row."""

    def __init__(self, c: Gemma4VisionConfig) -> None:
        self.width = c.width
        self.input_proj = Linear(c.width, c.hidden_size)
        self.size = c.position_embedding_size
        self.position_embedding_table = Parameter(2 * self.size, c.hidden_size, stored=(2, self.size, c.hidden_size))

    def forward(self, batch: Batch) -> Tensor:
        pixels = ops.pixels(batch.of("patches", self.width), batch.pixel_values, dtype="f32", channel_last=True)
        of_column, of_row = ops.unstack(self.position_embedding_table, sizes=[self.size] * 2)
        places = ops.embedding(batch.patch_columns, of_column) + ops.embedding(batch.patch_rows, of_row)
        return self.input_proj(ops.cast((pixels - 0.5) * 2.0, dtype="float")) + places


class Gemma4Tower(Module):
    """Features of tokens [1, P/side², hidden_size]."""

    def __init__(self, c: Gemma4VisionConfig) -> None:
        self.side, self.factor = c.pooling_kernel_size, c.hidden_size**0.5
        self.patch_embedder = PatchEmbedder(c)
        self.encoder = Encoder(c)
        self.standardizes = c.standardize
        if self.standardizes:
            self.std_bias = Parameter(c.hidden_size, init="zeros", buffer=True)
            self.std_scale = Parameter(c.hidden_size, init="ones", buffer=True)

    def forward(self, batch: Batch) -> Tensor:
        x = pooled(self.encoder(self.patch_embedder(batch), batch), self.side) * self.factor
        return ops.standardize(x, self.std_bias, self.std_scale) if self.standardizes else x


class Gemma4Embedder(Module):
    """A norm without a weight, then a product with a matrix."""

    def __init__(self, width: int, hidden: int, eps: float) -> None:
        self.eps = eps
        self.embedding_projection = Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = ops.unit_norm(x, eps=self.eps)
        return self.embedding_projection(x)
