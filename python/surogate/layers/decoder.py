"""The decoder stack of most models, from token ids to logits.

Does not know what attention computes: each architecture has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..dsl import Batch, Layers, Module, Tensor, Unset, ops, output, repeat
from .balance import Counted
from .config import DecoderConfig
from .embedding import Embedding
from .linear import Linear
from .norm import RMSNorm
from .rotary import RotaryEmbedding


class DecoderLayer(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Marks `hidden.layer.{i}`."""

    def __init__(self, c: DecoderConfig, attention: Module, mlp: Module) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        """Attention and MLP on x [B, T, hidden_size], each after its norm and added to its input."""
        x = x + self.self_attn(self.input_layernorm(x), *shared)
        x = x + self.mlp(self.post_attention_layernorm(x))
        output("hidden.layer.{i}", x)
        return x


class Decoder(Module):
    """Embedding, layers, norm. `layer` is the module of all layers, or one for each kind with the `pattern` of the
    kinds; their attention gets (x, rotate, batch). An architecture overrides `embed` where more happens to the
    embedding, `declare_norm` and `last` where the norm has another name, `carried` where layers hand on more than x, and
    `shared` where they are given more than the rotation.

    Marks `hidden.embed` and `hidden.final_norm`, and of mixtures `expert_load`.
    """

    def __init__(
        self,
        c: DecoderConfig,
        layer: Module | Mapping[str, Module],
        *,
        pattern: Sequence[str] | None = None,
        rotary: Module | None = None,
        norm: Module | None = None,
    ) -> None:
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, c.pad_token_id)
        self.rotary_emb = rotary or RotaryEmbedding(c.head_dim, c.rope)
        self.routing = c.routing
        if self.routing:
            layer = Counted(layer) if isinstance(layer, Module) else {kind: Counted(of) for kind, of in layer.items()}
        #: Puts images in the place of their tokens, where the model has them.
        self.place_images: Callable[[Tensor, Batch], Tensor] | None = None
        self.layers = Layers(pattern or c.num_hidden_layers, layer)
        self.declare_norm(norm or RMSNorm(c.hidden_size, c.rms_norm_eps))

    def declare_norm(self, norm: Module) -> None:
        """The layer of `last`."""
        self.norm = norm

    def last(self, x: Tensor) -> Tensor:
        """The norm of what the last layer gives."""
        return self.norm(x)

    def embed(self, batch: Batch) -> Tensor:
        """The input of the first layer."""
        return self.embed_tokens(batch.input_ids)

    def carried(self) -> tuple[Unset, ...]:
        """The values that go from layer to layer after x."""
        return ()

    def shared(self, x: Tensor, batch: Batch) -> tuple[Any, ...]:
        """The values that all layers read, before the batch; x is the input of the first."""
        has_axes = getattr(self.rotary_emb, "axes", None) is not None
        return (self.rotary_emb(batch.token_axes if has_axes else batch.position_ids),)

    def forward(self, batch: Batch) -> Tensor:
        """The normed hidden states [B, T, hidden_size] of a batch, after all layers."""
        x = self.embed(batch)
        if self.place_images is not None:
            x = self.place_images(x, batch)
        output("hidden.embed", x)
        shared = self.shared(x, batch)
        load = (ops.zeros(shape=[3, self.routing.experts]),) if self.routing else ()
        x, *carry = repeat(self.layers, (x, *load, *self.carried()), *shared, batch)
        if self.routing:
            output("expert_load", carry[0])
        x = self.last(x)
        output("hidden.final_norm", x)
        return x


class TextPart(Module):
    """A decoder as the `language_model` of a model that has other parts too."""

    def __init__(self, decoder: Decoder) -> None:
        self.language_model = decoder

    @property
    def embed_tokens(self) -> Embedding:
        """The token embedding of the language model inside, which a tied head reads."""
        return self.language_model.embed_tokens

    def forward(self, batch: Batch) -> Tensor:
        """The hidden states [B, T, hidden_size] of the language model inside."""
        return self.language_model(batch)


class CausalLM(Module):
    """A decoder, `model`, and its head, `lm_head`, which is the embedding where the config ties them. An architecture
    overrides `head` where logits are more than a product. Marks `logits`."""

    def __init__(self, c: DecoderConfig, decoder: Decoder | TextPart) -> None:
        self.model = decoder
        tied = decoder.embed_tokens.weight if c.tie_word_embeddings else None
        self.lm_head = Linear(c.hidden_size, c.vocab_size, tied=tied)

    def head(self, x: Tensor) -> Tensor:
        """Logits of the decoder's result."""
        return self.lm_head(x)

    def forward(self, batch: Batch) -> None:
        """Outputs the logits [B, T, vocab_size] of a batch."""
        output("logits", self.head(self.model(batch)))
