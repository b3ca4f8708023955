"""Muse Glimmer (text model): the norms of Gemma 2 and windows in three of four layers, which alone rotate queries and keys; these
have norms without weights, results of attention a gate, embeddings a norm, and logits a factor and a soft cap."""

from __future__ import annotations

from collections.abc import Callable

from .. import layers
from ..dsl import Batch, Reader, Tensor, model, ops, region
from ..layers import (
    FULL,
    SLIDING,
    Activation,
    CausalLM,
    Decoder,
    DecoderConfig,
    GatedMLP,
    Linear,
    RMSNorm,
    TextPart,
    layer_types,
    soft_cap,
    window,
)
from . import gemma2


class MuseGlimmerConfig(DecoderConfig):
    section = "text_config"

    vocab_size: int = 202048
    hidden_size: int = 6656
    intermediate_size: int = 19968
    num_hidden_layers: int = 52
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8
    hidden_activation: Activation = "silu"
    attention_bias: bool = False
    qk_scale_factor: float = 3.87
    output_multiplier: float = 0.19611613513818404
    final_logit_softcapping: float = 20.0

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        count = self.num_hidden_layers
        if self.final_logit_softcapping <= 0:
            reader.problem("final_logit_softcapping", f"{self.final_logit_softcapping} is not supported, expected a number above 0")
        self.window = window(reader, 2048)
        whole = [(count - 1 - i) % 4 == 0 for i in range(count)]
        types = layer_types(reader, count, [FULL if is_whole else SLIDING for is_whole in whole])
        if self.window is None and SLIDING in types:
            reader.problem("layer_types", f"{SLIDING!r} needs a `sliding_window`")
        thetas = reader.take("layer_rope_theta")
        if thetas is None:
            thetas = [0 if is_whole else self.rope.theta for is_whole in whole]
        if not isinstance(thetas, list) or len(thetas) < count or any(of not in (0, self.rope.theta) for of in thetas):
            reader.problem("layer_rope_theta", f"{thetas!r} is not supported, expected {count} of 0 and {self.rope.theta}")
            thetas = [0] * count
        #: Whether a layer has a window, and whether it rotates.
        self.kinds = [(kind == SLIDING, theta != 0) for kind, theta in zip(types, thetas, strict=False)]


def unit(x: Tensor, eps: float, factor: float | None = None) -> Tensor:
    """A norm without a weight, times `factor`."""
    y, _ = ops.unit_norm(x, eps=eps, factor=factor)
    return y


class Attention(layers.Attention):
    def __init__(self, c: MuseGlimmerConfig, slides: bool, rotates: bool) -> None:
        bias = c.attention_bias
        super().__init__(c, bias=bias, output_bias=bias, window=c.window if slides else None)
        self.gate_proj = Linear(c.hidden_size, c.queries)
        self.rotates, self.eps, self.factor = rotates, c.rms_norm_eps, c.qk_scale_factor

    @region("attention")
    def forward(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> Tensor:
        q, k, v = map(self.split, self.project(x))
        q, k = unit(q, self.eps, self.factor), unit(k, self.eps)
        q, k = (rotate(q), rotate(k)) if self.rotates else (q, k)
        o, _ = ops.attention(q, k, v, batch.document_start, scale=self.scale, window=self.window, dropout=self.dropout)
        return self.o_proj(ops.merge_heads(o) * ops.activation(self.gate_proj(x), function="sigmoid"))


class Layer(gemma2.Layer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))); norms scale by 1 + weight."""

    def __init__(self, c: MuseGlimmerConfig, slides: bool, rotates: bool) -> None:
        self.self_attn = Attention(c, slides, rotates)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, function=c.hidden_activation)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, offset=True)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.post_norm_eps, offset=True)
        self.pre_feedforward_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, offset=True)
        self.post_feedforward_layernorm = RMSNorm(c.hidden_size, c.post_norm_eps, offset=True)


class NormedDecoder(Decoder):
    def __init__(self, c: MuseGlimmerConfig) -> None:
        names = {kind: f"{SLIDING if kind[0] else FULL} {kind[1]}" for kind in c.kinds}
        super().__init__(c, {name: Layer(c, *kind) for kind, name in names.items()}, pattern=[names[kind] for kind in c.kinds])
        self.eps = c.rms_norm_eps

    def embed(self, batch: Batch) -> Tensor:
        return unit(self.embed_tokens(batch.input_ids), self.eps)


@model(
    "MuseGlimmerForConditionalGeneration",
    config=MuseGlimmerConfig,
    model_type="muse_glimmer",
    carried=["model.vision_tower.", "model.vision_adapter.", "model.vision_projection."],
    examples=["meta-models/Muse-Glimmer-30B"],
)
class MuseGlimmer(CausalLM):
    def __init__(self, c: MuseGlimmerConfig) -> None:
        super().__init__(c, TextPart(NormedDecoder(c)))
        self.factor, self.limit = c.output_multiplier, c.final_logit_softcapping

    def head(self, x: Tensor) -> Tensor:
        return soft_cap(self.lm_head(x) * self.factor, self.limit)
