"""Qwen3 MoE: Qwen3 with a mixture of experts instead of the feed-forward layer, except in layers that the config keeps dense."""

from __future__ import annotations

from ..dsl import Module, Reader, model
from ..layers import EXPERTS_AS_PARAMETERS, CausalLM, Decoder, DecoderLayer, Experts, GatedMLP, Mixture, MixtureConfig, Router
from .qwen3 import Attention, Qwen3Config


class Qwen3MoeConfig(Qwen3Config, MixtureConfig):
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int = 4
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 768
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False

    #: Experts of a layer where the config does not say it.
    experts = 128

    def derive(self, reader: Reader) -> None:
        own = reader.fields
        window = own.get("sliding_window") if own.get("use_sliding_window") else None
        super().derive(reader)
        self.windows = [window] * self.num_hidden_layers  # of every layer, where it is used
        self.kinds = kinds_of_layers(reader, self.num_hidden_layers, self.decoder_sparse_step)
        self.read_experts(reader, self.experts, self.kinds.count("sparse"))


def kinds_of_layers(reader: Reader, layers: int, step: int) -> list[str]:
    """"sparse" for every `step`-th layer but those of `mlp_only_layers`, "dense" for the others."""
    dense = reader.take("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        reader.problem("mlp_only_layers", f"{dense!r} is not supported, expected a list of layers")
        dense = []
    return ["dense" if i in dense or (i + 1) % step else "sparse" for i in range(layers)]


def routed(c: MixtureConfig, intermediate_size: int, normalise: bool) -> tuple[Router, Experts, int]:
    """The parts of a `Mixture`: a softmax of scores, and experts whose matrices files keep one by one."""
    router = Router(c.hidden_size, c.num_experts, top_k=c.num_experts_per_tok, normalise=normalise)
    return router, Experts(c.num_experts, c.hidden_size, intermediate_size), c.num_experts


@model(
    "Qwen3MoeForCausalLM",
    config=Qwen3MoeConfig,
    model_type="qwen3_moe",
    base="model",
    adapters=EXPERTS_AS_PARAMETERS,
    examples=["Qwen/Qwen3-30B-A3B"],
)
class Qwen3Moe(CausalLM):
    def __init__(self, c: Qwen3MoeConfig) -> None:
        def mlp(kind: str) -> Module:
            if kind == "dense":
                return GatedMLP(c.hidden_size, c.intermediate_size)
            return Mixture(*routed(c, c.moe_intermediate_size, c.norm_topk_prob))

        by_kind = {kind: DecoderLayer(c, Attention(c), mlp(kind)) for kind in dict.fromkeys(c.kinds)}
        super().__init__(c, Decoder(c, by_kind, pattern=c.kinds))
