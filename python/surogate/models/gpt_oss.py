"""GPT-OSS: attention sinks, a sliding window in every other layer, and a mixture of experts with biases and clamped
SwiGLU in every layer; files store the expert matrices stacked."""

from __future__ import annotations

from .. import layers
from ..dsl import Module, Parameter, Reader, Tensor, model, ops
from ..layers import (
    FULL,
    SLIDING,
    CausalLM,
    Decoder,
    DecoderLayer,
    Mixture,
    MixtureConfig,
    Rotation,
    Router,
    layer_types,
    window,
)

#: The scaling of the rotation where a config names none.
SCALING = {
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


#: Its matrices of experts are parameters in files, too.
ADAPTERS = {
    "bare": ["router"],
    "routers": ["mlp.router"],
    "stacks": [{"name": "gate_up_proj", "transposed": True}, {"name": "down_proj", "transposed": True}],
}


class GptOssConfig(MixtureConfig):
    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    initial_context_length: int | None = None  # in the files; transformers does not read it

    theta = 150000.0

    def derive(self, reader: Reader) -> None:
        if reader.fields.get("rope_parameters") is None and reader.fields.get("rope_scaling") is None:
            self.rope = Rotation(self.rope.theta, "yarn", dict(SCALING))
        super().derive(reader)
        alternating = [FULL if i % 2 else SLIDING for i in range(self.num_hidden_layers)]
        self.layer_types = layer_types(reader, self.num_hidden_layers, alternating)
        self.window = window(reader, 128)
        if SLIDING in self.layer_types and self.window is None:
            reader.problem("layer_types", f"{SLIDING!r} needs a `sliding_window`")
        self.read_experts(reader, 128)
        if reader.take("experts_per_token") not in (None, self.num_experts_per_tok):
            reader.problem("experts_per_token", "contradicts `num_experts_per_tok`; give one of the two")
        if self.swiglu_limit <= 0:
            reader.problem("swiglu_limit", f"{self.swiglu_limit} is not supported, expected a number above 0")


class Attention(layers.Attention):
    def __init__(self, c: GptOssConfig, kind: str) -> None:
        window = c.window if kind == SLIDING else None
        super().__init__(c, bias=c.attention_bias, output_bias=c.attention_bias, window=window)
        self.sinks = Parameter(c.num_attention_heads)


class Experts(Module):
    """Gate and up are neighbouring columns of `gate_up_proj`: down((up + 1) · gate · σ(alpha·gate)), both clamped."""

    def __init__(self, c: GptOssConfig) -> None:
        count, hidden, inner = c.num_experts, c.hidden_size, c.intermediate_size
        self.gate_up_proj = Parameter(count, hidden, 2 * inner)
        self.gate_up_proj_bias = Parameter(count, 2 * inner, init="zeros", bias=True)
        self.down_proj = Parameter(count, inner, hidden, residual_projection=True)
        self.down_proj_bias = Parameter(count, hidden, init="zeros", bias=True)
        self.count = count
        self.clamps = dict(limit=c.swiglu_limit, alpha=c.swiglu_alpha)

    def product(self, x: Tensor, matrices: Parameter, biases: Parameter, offsets: Tensor) -> Tensor:
        y = ops.grouped_linear(x, matrices, offsets, groups=self.count, transposed=True)
        return ops.grouped_bias(y, biases, offsets, groups=self.count)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        both = self.product(rows, self.gate_up_proj, self.gate_up_proj_bias, offsets)
        gate, up = ops.split(ops.split_heads(both, head_dim=2), sizes=[1, 1])
        inner = ops.merge_heads(ops.clamped_swiglu(gate, up, **self.clamps))
        return self.product(inner, self.down_proj, self.down_proj_bias, offsets)


@model(
    "GptOssForCausalLM",
    config=GptOssConfig,
    model_type="gpt_oss",
    base="model",
    adapters=ADAPTERS,
    examples=["openai/gpt-oss-20b"],
)
class GptOss(CausalLM):
    def __init__(self, c: GptOssConfig) -> None:
        def layer(kind: str) -> DecoderLayer:
            # The softmax over the chosen experts alone is that over all, divided by the chosen ones' sum.
            router = Router(c.hidden_size, c.num_experts, top_k=c.num_experts_per_tok, normalise=True, bias=True)
            return DecoderLayer(c, Attention(c, kind), Mixture(router, Experts(c), c.num_experts, name="router"))

        by_kind = {kind: layer(kind) for kind in sorted(set(c.layer_types))}
        super().__init__(c, Decoder(c, by_kind, pattern=c.layer_types))
