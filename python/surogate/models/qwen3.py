"""Qwen3, dense: Llama's form with queries and keys normalised per head before the rotation, and a
head size of its own."""

from __future__ import annotations

from typing import Literal

from ..dsl import Batch, Layers, ModelConfig, Module, Reader, Tensor, model, ops, output, region, repeat
from ..layers import Embedding, Linear, RMSNorm, RotaryEmbedding, Rotation, SwiGLU, language_model_loss


class Qwen3Config(ModelConfig):
    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope: Rotation
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_dropout: Literal[0] = 0
    use_sliding_window: Literal[False] = False

    def derive(self, reader: Reader) -> None:
        if "num_key_value_heads" in reader.fields and reader.fields["num_key_value_heads"] is None:
            self.num_key_value_heads = self.num_attention_heads
        self.rope = self.rope.with_original_length(self.max_position_embeddings)
        reader.take("sliding_window")  # has no effect without use_sliding_window
        for kind in reader.take("layer_types") or []:
            if kind != "full_attention":
                reader.problem("layer_types", f"{kind!r} is not available yet, expected 'full_attention'")
                break
        if self.num_attention_heads % self.num_key_value_heads:
            reader.problem("num_key_value_heads", f"{self.num_key_value_heads} does not divide num_attention_heads")


class Attention(Module):
    def __init__(self, c: Qwen3Config) -> None:
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, residual_projection=True)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5

    @region("attention")
    def forward(self, x: Tensor, rotate, batch: Batch) -> Tensor:
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        q = rotate(self.q_norm(ops.split_heads(q, head_dim=self.head_dim)))
        k = rotate(self.k_norm(ops.split_heads(k, head_dim=self.head_dim)))
        v = ops.split_heads(v, head_dim=self.head_dim)
        o, _ = ops.attention(q, k, v, batch.document_start, scale=self.scale)
        return self.o_proj(ops.merge_heads(o))


class DecoderLayer(Module):
    def __init__(self, c: Qwen3Config) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size)

    def forward(self, x: Tensor, rotate, batch: Batch) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotate, batch)
        x = x + self.mlp(self.post_attention_layernorm(x))
        output("hidden.layer.{i}", x)
        return x


class Decoder(Module):
    def __init__(self, c: Qwen3Config) -> None:
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, c.pad_token_id)
        self.rotary_emb = RotaryEmbedding(c.head_dim, c.rope)
        self.layers = Layers(c.num_hidden_layers, DecoderLayer(c))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed_tokens(batch.input_ids)
        output("hidden.embed", x)
        x = repeat(self.layers, x, self.rotary_emb(batch.position_ids), batch)
        x = self.norm(x)
        output("hidden.final_norm", x)
        return x


@model("Qwen3ForCausalLM", config=Qwen3Config)
class Qwen3(Module):
    def __init__(self, c: Qwen3Config) -> None:
        self.model = Decoder(c)
        tied = self.model.embed_tokens.weight if c.tie_word_embeddings else None
        self.lm_head = Linear(c.hidden_size, c.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> None:
        x = self.model(batch)
        logits = self.lm_head(x)
        language_model_loss(logits, batch)
