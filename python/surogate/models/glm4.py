"""GLM-4: norms before and after attention and feed-forward layer, and a rotation of neighboring columns in the first half
of each head."""

from __future__ import annotations

from typing import Any

from ..dsl import Module, Tensor, model, output
from ..layers import Attention, CausalLM, Decoder, DecoderConfig, FusedGatedMLP, RMSNorm, RotaryEmbedding


class Glm4Config(DecoderConfig):
    vocab_size: int = 151552
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-07
    pad_token_id: int | None = 151329
    attention_bias: bool = True

    share = 0.5


class Layer(Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, c: Glm4Config) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, bias=c.attention_bias)
        self.post_self_attn_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = FusedGatedMLP(c.hidden_size, c.intermediate_size)
        self.post_mlp_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        x = x + self.post_self_attn_layernorm(self.self_attn(self.input_layernorm(x), *shared))
        x = x + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x)))
        output("hidden.layer.{i}", x)
        return x


@model("Glm4ForCausalLM", config=Glm4Config, model_type="glm4", base="model", examples=["zai-org/GLM-4-9B-0414"])
class Glm4(CausalLM):
    def __init__(self, c: Glm4Config) -> None:
        rotary = RotaryEmbedding(c.head_dim, c.rope, interleaved=True)
        super().__init__(c, Decoder(c, Layer(c), rotary=rotary))
