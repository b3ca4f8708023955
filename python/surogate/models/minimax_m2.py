"""MiniMax-M2: a mixture of experts in every layer, chosen by sigmoids with a correction that is not trained, norms of queries
and keys over all heads, and a rotation of a part of each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from .. import layers
from ..dsl import Batch, Parameter, Reader, Tensor, model, ops
from ..layers import CausalLM, Decoder, Experts, Mixture, MixtureConfig, RMSNorm, Router
from .mixtral import ADAPTERS, NAMES, Layer


class MiniMaxM2Config(MixtureConfig):
    vocab_size: int = 200064
    hidden_size: int = 3072
    intermediate_size: int = 1536
    num_hidden_layers: int = 62
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 196608
    num_experts_per_tok: int = 8
    router_jitter_noise: Literal[0.0] = 0.0
    scoring_func: Literal["sigmoid"] = "sigmoid"

    theta = 5000000.0
    share = 1.0

    def derive(self, reader: Reader) -> None:
        columns = reader.take("rotary_dim")
        if columns is not None:
            if isinstance(columns, bool) or not isinstance(columns, int) or not 0 < columns <= self.head_dim:
                reader.problem("rotary_dim", f"{columns!r} is not supported, expected a whole number up to {self.head_dim}")
                columns = self.head_dim
            self.share = columns / self.head_dim
        super().derive(reader)
        self.read_experts(reader, 256)


class Attention(layers.Attention):
    def __init__(self, c: MiniMaxM2Config) -> None:
        super().__init__(c)
        self.q_norm = RMSNorm(c.queries, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.keys, c.rms_norm_eps)

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project(x)
        return rotate(self.split(self.q_norm(q))), rotate(self.split(self.k_norm(k))), self.split(v)


class SigmoidRouter(Router):
    """Weights are sigmoids of the scores, divided by their sum; the choice is made with a correction added to them."""

    def __init__(self, hidden_size: int, experts: int, correction: Parameter, *, top_k: int) -> None:
        super().__init__(hidden_size, experts, top_k=top_k, normalise=True)
        self.scores = "sigmoid"
        # Named by the mixture.
        self.correction = [correction]

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rule = dict(factor=1.0, groups=1, kept_groups=1)
        return ops.route(logits, *self.correction, top_k=self.top_k, scores=self.scores, normalise=self.normalise, **rule)


class CorrectedMixture(Mixture):
    """A mixture with `e_score_correction_bias`."""

    def __init__(self, c: MiniMaxM2Config) -> None:
        self.e_score_correction_bias = Parameter(c.num_experts, init="zeros", buffer=True)
        router = SigmoidRouter(c.hidden_size, c.num_experts, self.e_score_correction_bias, top_k=c.num_experts_per_tok)
        experts = Experts(c.num_experts, c.hidden_size, c.intermediate_size, NAMES)
        super().__init__(router, experts, c.num_experts)


@model(
    "MiniMaxM2ForCausalLM",
    config=MiniMaxM2Config,
    model_type="minimax_m2",
    base="model",
    adapters=ADAPTERS,
    examples=["MiniMaxAI/MiniMax-M2"],
)
class MiniMaxM2(CausalLM):
    def __init__(self, c: MiniMaxM2Config) -> None:
        super().__init__(c, Decoder(c, Layer(c, Attention(c), CorrectedMixture(c))))
