"""Qwen3 mixtures: Qwen3 with experts in place of the feed-forward layer, but in the layers that the config leaves dense."""

from __future__ import annotations

from typing import Literal, Protocol

from ..dsl import Module, Reader, model
from ..layers import CausalLM, Decoder, DecoderLayer, Experts, GatedMLP, Mixture, Router
from .qwen3 import Attention, Qwen3Config


class Qwen3MoeConfig(Qwen3Config):
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int = 4
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 768
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.001  # counts with `output_router_logits` alone, as in transformers
    output_router_logits: Literal[False] = False

    def derive(self, reader: Reader) -> None:
        own = reader.fields
        window = own.get("sliding_window") if own.get("use_sliding_window") else None
        super().derive(reader)
        self.windows = [window] * self.num_hidden_layers  # of every layer, where it is used
        self.num_experts = count_of_experts(reader, 128)
        if self.num_experts_per_tok > self.num_experts:
            reader.problem("num_experts_per_tok", f"{self.num_experts_per_tok} is more than {self.num_experts} experts")
        self.kinds = kinds_of_layers(reader, self.num_hidden_layers, self.decoder_sparse_step)


def count_of_experts(reader: Reader, default: int, name: str = "num_experts") -> int:
    """The number of experts, which transformers 5 also calls `num_local_experts`."""
    names = (name, "num_local_experts")
    found = [value for value in map(reader.take, names) if value is not None] or [default]
    if any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in found):
        reader.problem(name, f"{found[0]!r} is not supported, expected a whole number above 0")
        return default
    if len(set(found)) > 1:
        reader.problem("num_local_experts", f"contradicts `{name}`; give one of the two")
    return found[0]


def kinds_of_layers(reader: Reader, layers: int, step: int) -> list[str]:
    """"sparse" for every `step`-th layer but those of `mlp_only_layers`, "dense" for the others."""
    dense = reader.take("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        reader.problem("mlp_only_layers", f"{dense!r} is not supported, expected a list of layers")
        dense = []
    return ["dense" if i in dense or (i + 1) % step else "sparse" for i in range(layers)]


class MixtureConfig(Protocol):
    """What the experts of a layer take of a config."""

    hidden_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool


def routed(c: MixtureConfig, intermediate_size: int) -> tuple[Router, Experts, int]:
    """The parts of a `Mixture`: a softmax of scores, and experts whose matrices files keep one by one."""
    router = Router(c.hidden_size, c.num_experts, top_k=c.num_experts_per_tok, normalise=c.norm_topk_prob)
    return router, Experts(c.num_experts, c.hidden_size, intermediate_size), c.num_experts


@model(
    "Qwen3MoeForCausalLM",
    config=Qwen3MoeConfig,
    model_type="qwen3_moe",
    base="model",
    examples=["Qwen/Qwen3-30B-A3B"],
)
class Qwen3Moe(CausalLM):
    def __init__(self, c: Qwen3MoeConfig) -> None:
        def mlp(kind: str) -> Module:
            if kind == "dense":
                return GatedMLP(c.hidden_size, c.intermediate_size)
            return Mixture(*routed(c, c.moe_intermediate_size))

        by_kind = {kind: DecoderLayer(c, Attention(c), mlp(kind)) for kind in dict.fromkeys(c.kinds)}
        super().__init__(c, Decoder(c, by_kind, pattern=c.kinds))
