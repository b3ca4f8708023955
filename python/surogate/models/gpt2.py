"""GPT-2: learned positions, LayerNorm before attention and feed-forward layer, one matrix for queries, keys
and values, and a tied LM head."""

from __future__ import annotations

from ..dsl import Batch, Layers, ModelConfig, Module, Reader, Tensor, each, model, ops, output, region, repeat
from ..layers import Activation, Conv1D, Embedding, LayerNorm, Linear, activation, dropout


class GPT2Config(ModelConfig):
    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int = 0  # 4 · n_embd
    activation_function: Activation = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False  # scores are f32 here in any case
    tie_word_embeddings: bool = True

    def derive(self, reader: Reader) -> None:
        reader.take("pad_token_id")  # every row of this embedding is trained
        self.n_inner = self.n_inner or 4 * self.n_embd
        if self.n_embd % self.n_head:
            reader.problem("n_head", f"{self.n_head} does not divide n_embd")
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            if not 0 <= getattr(self, name) < 1:
                reader.problem(name, f"{getattr(self, name)} is not supported, expected a number from 0, below 1")


class Attention(Module):
    def __init__(self, c: GPT2Config) -> None:
        self.c_attn = Conv1D(c.n_embd, 3 * c.n_embd)
        self.c_proj = Conv1D(c.n_embd, c.n_embd, residual_projection=True)
        self.sizes = [c.n_embd] * 3
        self.head_dim = c.n_embd // c.n_head
        scale = self.head_dim**-0.5 if c.scale_attn_weights else 1.0
        by_depth = each([scale / depth for depth in range(1, c.n_layer + 1)])
        self.scale = by_depth if c.scale_attn_by_inverse_layer_idx else scale
        self.attn_pdrop = c.attn_pdrop or None
        self.resid_pdrop = c.resid_pdrop

    @region("attention")
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        parts = ops.split(self.c_attn(x), sizes=self.sizes)
        q, k, v = (ops.split_heads(part, head_dim=self.head_dim) for part in parts)
        o, _ = ops.attention(q, k, v, batch.document_start, scale=self.scale, dropout=self.attn_pdrop)
        return dropout(self.c_proj(ops.merge_heads(o)), self.resid_pdrop, batch)


class MLP(Module):
    def __init__(self, c: GPT2Config) -> None:
        self.c_fc = Conv1D(c.n_embd, c.n_inner)
        self.c_proj = Conv1D(c.n_inner, c.n_embd, residual_projection=True)
        self.activation = c.activation_function
        self.resid_pdrop = c.resid_pdrop

    @region("mlp")
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return dropout(self.c_proj(activation(self.activation, self.c_fc(x))), self.resid_pdrop, batch)


class Block(Module):
    def __init__(self, c: GPT2Config) -> None:
        self.ln_1 = LayerNorm(c.n_embd, c.layer_norm_epsilon)
        self.attn = Attention(c)
        self.ln_2 = LayerNorm(c.n_embd, c.layer_norm_epsilon)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.attn(self.ln_1(x), batch)
        x = x + self.mlp(self.ln_2(x), batch)
        output("hidden.layer.{i}", x)
        return x


class Transformer(Module):
    def __init__(self, c: GPT2Config) -> None:
        self.wte = Embedding(c.vocab_size, c.n_embd)
        self.wpe = Embedding(c.n_positions, c.n_embd)
        self.h = Layers(c.n_layer, Block(c))
        self.ln_f = LayerNorm(c.n_embd, c.layer_norm_epsilon)
        self.embd_pdrop = c.embd_pdrop

    def forward(self, batch: Batch) -> Tensor:
        x = self.wte(batch.input_ids) + self.wpe(batch.position_ids)
        output("hidden.embed", x)
        x = repeat(self.h, dropout(x, self.embd_pdrop, batch), batch)
        x = self.ln_f(x)
        output("hidden.final_norm", x)
        return x


@model(
    "GPT2LMHeadModel",
    config=GPT2Config,
    model_type="gpt2",
    base="transformer",
    computed=[".attn.bias", ".attn.masked_bias"],
    examples=["openai-community/gpt2"],
)
class GPT2(Module):
    def __init__(self, c: GPT2Config) -> None:
        self.max_positions = c.n_positions
        self.transformer = Transformer(c)
        tied = self.transformer.wte.weight if c.tie_word_embeddings else None
        self.lm_head = Linear(c.n_embd, c.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> None:
        output("logits", self.lm_head(self.transformer(batch)))
