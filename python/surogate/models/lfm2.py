"""LFM2: gated short convolutions, and attention with QK norm in the layers that the config names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from .. import layers
from ..dsl import Batch, Module, Reader, Tensor, model, ops, output, region
from ..layers import FULL, CausalLM, ChannelConv, Decoder, DecoderConfig, Linear, RMSNorm, layer_types

CONV = "conv"


class ConvolutionFields(DecoderConfig):
    """Fields of models with gated short convolutions."""

    vocab_size: int = 65536
    num_key_value_heads: int = 8
    max_position_embeddings: int = 128000
    norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    conv_bias: Literal[False] = False
    conv_L_cache: int = 3
    use_pos_enc: Literal[True] = True

    theta = 1000000.0

    def derive(self, reader: Reader) -> None:
        if self.attention_dropout:
            reader.problem("attention_dropout", f"{self.attention_dropout} is not supported, expected 0")
        super().derive(reader)
        self.rms_norm_eps = self.norm_eps
        if self.conv_L_cache > 8:
            reader.problem("conv_L_cache", f"{self.conv_L_cache} is not available yet, expected at most 8")
        tied = reader.take("tie_embedding")
        if tied is not None and not isinstance(tied, bool):
            reader.problem("tie_embedding", f"{tied!r} is not supported, expected true or false")
        self.tie_word_embeddings = self.tie_word_embeddings if tied is None else tied
        # Fields of published files that transformers does not read.
        sizes = dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), self.hidden_size)
        sizes |= {"num_heads": self.num_attention_heads}
        for name, value in {**sizes, "block_norm_eps": self.norm_eps, "rms_norm_eps": self.norm_eps}.items():
            if (found := reader.take(name)) not in (None, value):
                reader.problem(name, f"{found!r} is not supported, expected {value}")
        self.layer_types = layer_types(reader, self.num_hidden_layers, self.default_types(reader), (CONV, FULL))

    def default_types(self, reader: Reader) -> Sequence[str]:
        """Kinds of the layers where `layer_types` is missing."""
        return [FULL] * self.num_hidden_layers


class Lfm2Config(ConvolutionFields):
    hidden_size: int = 2560
    intermediate_size: int = 12288
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: int = 256
    block_use_swiglu: Literal[True] = True

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        size = reader.take("block_ff_dim")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            reader.problem("block_ff_dim", f"{size!r} is not supported, expected a whole number above 0")
            size = None
        size = self.intermediate_size if size is None else size
        if self.block_auto_adjust_ff_dim:
            size = int(2 * size / 3)
            if self.block_ffn_dim_multiplier is not None:
                size = int(self.block_ffn_dim_multiplier * size)
                size = -(-size // self.block_multiple_of) * self.block_multiple_of
        if size < 1:
            reader.problem("block_ffn_dim_multiplier", "makes feed-forward layers without columns")
        self.intermediate_size = size

    def default_types(self, reader: Reader) -> Sequence[str]:
        full = reader.take("full_attn_idxs")
        if full is None:
            return super().default_types(reader)
        if not isinstance(full, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in full):
            reader.problem("full_attn_idxs", f"{full!r} is not supported, expected a list of layers")
            return super().default_types(reader)
        return [FULL if i in full else CONV for i in range(self.num_hidden_layers)]


class Attention(layers.Attention):
    def __init__(self, c: ConvolutionFields) -> None:
        super().__init__(c)
        self.q_layernorm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_layernorm = RMSNorm(c.head_dim, c.norm_eps)

    def declare_output(self, projection: Linear) -> None:
        self.out_proj = projection

    def project_output(self, o: Tensor) -> Tensor:
        return self.out_proj(o)

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, self.project(x))
        return rotate(self.q_layernorm(q)), rotate(self.k_layernorm(k)), v


class ShortConvolution(Module):
    """`out_proj`(c · `conv`(b · x)), where b, c and x are the parts of `in_proj`."""

    def __init__(self, c: ConvolutionFields) -> None:
        self.size = c.hidden_size
        self.in_proj = Linear(c.hidden_size, 3 * c.hidden_size)
        self.conv = ChannelConv(c.hidden_size, c.conv_L_cache)
        self.out_proj = Linear(c.hidden_size, c.hidden_size, residual_projection=True)

    @region("attention")
    def forward(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> Tensor:
        before, after, x = ops.split(self.in_proj(x), sizes=[self.size] * 3)
        return self.out_proj(after * self.conv(before * x, batch))


class FeedForward(Module):
    """`w2`(silu(`w1`(x)) · `w3`(x))."""

    def __init__(self, c: ConvolutionFields) -> None:
        self.w1 = Linear(c.hidden_size, c.intermediate_size)
        self.w3 = Linear(c.hidden_size, c.intermediate_size)
        self.w2 = Linear(c.intermediate_size, c.hidden_size, residual_projection=True)

    @region("mlp")
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(ops.swiglu(self.w1(x), self.w3(x)))


class Layer(Module):
    """x + operator(norm(x)), then x + feed_forward(norm(x)); the operator is `conv` or `self_attn`."""

    def __init__(self, c: ConvolutionFields, kind: str, feed_forward: Module) -> None:
        self.name = "conv" if kind == CONV else "self_attn"
        setattr(self, self.name, ShortConvolution(c) if kind == CONV else Attention(c))
        self.feed_forward = feed_forward
        self.operator_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.ffn_norm = RMSNorm(c.hidden_size, c.norm_eps)

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        x = x + getattr(self, self.name)(self.operator_norm(x), *shared)
        x = x + self.feed_forward(self.ffn_norm(x))
        output("hidden.layer.{i}", x)
        return x


class ConvolutionDecoder(Decoder):
    def declare_norm(self, norm: Module) -> None:
        self.embedding_norm = norm

    def last(self, x: Tensor) -> Tensor:
        return self.embedding_norm(x)


@model(
    "Lfm2ForCausalLM",
    config=Lfm2Config,
    model_type="lfm2",
    base="model",
    examples=["LiquidAI/LFM2-350M", "LiquidAI/LFM2-1.2B", "LiquidAI/LFM2-2.6B"],
)
class Lfm2(CausalLM):
    def __init__(self, c: Lfm2Config) -> None:
        by_kind = {kind: Layer(c, kind, FeedForward(c)) for kind in dict.fromkeys(c.layer_types)}
        super().__init__(c, ConvolutionDecoder(c, by_kind, pattern=c.layer_types))
