"""Command R7B and Command A: attention and feed-forward layer side by side after one norm, LayerNorm without a bias, and windows
in most layers, the only ones that rotate queries and keys, in neighboring pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import layers
from ..dsl import Batch, Module, Parameter, Reader, Tensor, model, ops, output
from ..layers import FULL, SLIDING, CausalLM, Decoder, DecoderConfig, GatedMLP, RotaryEmbedding, layer_types, window


class Cohere2Config(DecoderConfig):
    vocab_size: int = 256000
    hidden_size: int = 8192
    intermediate_size: int = 22528
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int | None = None  # type: ignore[assignment]
    max_position_embeddings: int = 8192
    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0

    def derive(self, reader: Reader) -> None:
        for name in ("rotary_pct", "use_embedding_sharing", "use_gated_activation", "use_parallel_embedding",
                     "order_of_interleaved_layers", "position_embedding_type", "cache_implementation"):  # fmt: skip
            reader.take(name)  # of the files; transformers does not read them
        for name, usual in (("use_qk_norm", False), ("use_parallel_block", True)):
            if (found := reader.take(name)) not in (None, usual):
                reader.problem(name, f"{found!r} is not supported, expected {usual}")
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        super().derive(reader)
        self.window = window(reader, 4096)
        period = reader.take("sliding_window_pattern") or 4
        count = self.num_hidden_layers
        self.layer_types = layer_types(reader, count, [SLIDING if (i + 1) % period else FULL for i in range(count)])
        if self.window is None and SLIDING in self.layer_types:
            reader.problem("layer_types", f"{SLIDING!r} needs a `sliding_window`")


class Norm(Module):
    """`weight` [size]; y = (x - mean) / √(variance + eps) · weight."""

    def __init__(self, c: Cohere2Config) -> None:
        self.weight, self.eps, self.size = Parameter(c.hidden_size, init="ones"), c.layer_norm_eps, c.hidden_size

    def forward(self, x: Tensor) -> Tensor:
        y, _, _ = ops.layernorm(x, self.weight, ops.zeros(shape=[self.size]), eps=self.eps)
        return y


class Attention(layers.Attention):
    def __init__(self, c: Cohere2Config, kind: str) -> None:
        self.rotates = kind == SLIDING
        super().__init__(c, bias=c.attention_bias, output_bias=c.attention_bias, window=c.window if self.rotates else None)

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, self.project(x))
        return (rotate(q), rotate(k), v) if self.rotates else (q, k, v)


class Layer(Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, c: Cohere2Config, kind: str) -> None:
        self.input_layernorm = Norm(c)
        self.self_attn = Attention(c, kind)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        h = self.input_layernorm(x)
        x = x + self.self_attn(h, *shared) + self.mlp(h)
        output("hidden.layer.{i}", x)
        return x


@model(
    "Cohere2ForCausalLM",
    config=Cohere2Config,
    model_type="cohere2",
    base="model",
    examples=["CohereLabs/c4ai-command-r7b-12-2024", "CohereLabs/c4ai-command-a-03-2025"],
)
class Cohere2(CausalLM):
    def __init__(self, c: Cohere2Config) -> None:
        by_kind = {kind: Layer(c, kind) for kind in sorted(set(c.layer_types))}
        rotary = RotaryEmbedding(c.head_dim, c.rope, interleaved=True)
        super().__init__(c, Decoder(c, by_kind, pattern=c.layer_types, rotary=rotary, norm=Norm(c)))
        self.scale = c.logit_scale

    def head(self, x: Tensor) -> Tensor:
        return self.lm_head(x) * self.scale
