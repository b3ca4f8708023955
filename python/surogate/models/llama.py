"""Llama 2, 3.x and the models of its form, SmolLM among them: pre-norm decoder with grouped-query
attention, rotary positions and a gated feed-forward layer."""

from __future__ import annotations

from typing import Literal

from ..dsl import Batch, Layers, ModelConfig, Module, Reader, Tensor, model, ops, output, region, repeat
from ..layers import Embedding, Linear, RMSNorm, RotaryEmbedding, Rotation, SwiGLU, language_model_loss


class LlamaConfig(ModelConfig):
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 0  # one for each attention head
    head_dim: int = 0  # hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope: Rotation
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_dropout: Literal[0] = 0
    pretraining_tp: Literal[1] = 1

    def derive(self, reader: Reader) -> None:
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        if not self.head_dim and self.hidden_size % self.num_attention_heads:
            reader.problem("head_dim", "is missing, and num_attention_heads does not divide hidden_size")
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.rope = self.rope.with_original_length(self.max_position_embeddings)
        if self.num_attention_heads % self.num_key_value_heads:
            reader.problem("num_key_value_heads", f"{self.num_key_value_heads} does not divide num_attention_heads")


class Attention(Module):
    def __init__(self, c: LlamaConfig) -> None:
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, residual_projection=True)
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5

    @region("attention")
    def forward(self, x: Tensor, rotate, batch: Batch) -> Tensor:
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        q = rotate(ops.split_heads(q, head_dim=self.head_dim))
        k = rotate(ops.split_heads(k, head_dim=self.head_dim))
        v = ops.split_heads(v, head_dim=self.head_dim)
        o, _ = ops.attention(q, k, v, batch.document_start, scale=self.scale)
        return self.o_proj(ops.merge_heads(o))


class DecoderLayer(Module):
    def __init__(self, c: LlamaConfig) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

    def forward(self, x: Tensor, rotate, batch: Batch) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotate, batch)
        x = x + self.mlp(self.post_attention_layernorm(x))
        output("hidden.layer.{i}", x)
        return x


class Decoder(Module):
    def __init__(self, c: LlamaConfig) -> None:
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


@model("LlamaForCausalLM", config=LlamaConfig)
class Llama(Module):
    def __init__(self, c: LlamaConfig) -> None:
        self.model = Decoder(c)
        tied = self.model.embed_tokens.weight if c.tie_word_embeddings else None
        self.lm_head = Linear(c.hidden_size, c.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> None:
        x = self.model(batch)
        logits = self.lm_head(x)
        language_model_loss(logits, batch)
