"""Qwen3-Next: Qwen3.5 with a mixture of experts and a gated shared expert. Files store the projections of a gated
delta net in two matrices, ordered by key head."""

from __future__ import annotations

from ..dsl import Module, Reader, Tensor, model, ops
from ..layers import EXPERTS_AS_PARAMETERS, CausalLM, Decoder, GatedDeltaNet, GatedMLP, Linear
from .qwen2_moe import GatedMixture, SharedExpertConfig
from .qwen3_5 import LINEAR, FullLayer, HybridConfig, LinearLayer, Norm, delta_sizes
from .qwen3_moe import kinds_of_layers


class Qwen3NextConfig(HybridConfig, SharedExpertConfig):
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    num_key_value_heads: int = 2
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 10
    norm_topk_prob: bool = True

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.kinds = kinds_of_layers(reader, self.num_hidden_layers, self.decoder_sparse_step)
        self.read_experts(reader, 512, self.kinds.count("sparse"))


class DeltaNet(GatedDeltaNet):
    """`in_proj_qkvz` gives of each key head its query and key, and the values and gates of the heads that share it;
    `in_proj_ba` the same of shares and decays."""

    def declare(self, hidden_size: int, heads: int) -> None:
        self.group = heads // self.key_heads
        self.in_proj_qkvz = Linear(hidden_size, sum(self.sizes) + self.sizes[2])
        self.in_proj_ba = Linear(hidden_size, 2 * heads)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = self.group * self.value_dim
        by_head = ops.split_heads(self.in_proj_qkvz(x), head_dim=2 * self.key_dim + 2 * values)
        parts = ops.split(by_head, sizes=[self.key_dim, self.key_dim, values, values])
        q, k, v, z = map(ops.merge_heads, parts)
        by_head = ops.split_heads(self.in_proj_ba(x), head_dim=2 * self.group)
        b, a = map(ops.merge_heads, ops.split(by_head, sizes=[self.group] * 2))
        return ops.concat(q, k, v), z, b, a


@model(
    "Qwen3NextForCausalLM",
    config=Qwen3NextConfig,
    model_type="qwen3_next",
    base="model",
    carried=["mtp."],
    adapters=EXPERTS_AS_PARAMETERS,
    examples=["Qwen/Qwen3-Next-80B-A3B-Instruct"],
)
class Qwen3Next(CausalLM):
    def __init__(self, c: Qwen3NextConfig) -> None:
        def layer(kind: str, mlp: str) -> Module:
            inner = GatedMixture(c) if mlp == "sparse" else GatedMLP(c.hidden_size, c.intermediate_size)
            net = DeltaNet(c.hidden_size, c.rms_norm_eps, **delta_sizes(c))
            return LinearLayer(c, net, inner) if kind == LINEAR else FullLayer(c, inner)

        pattern = list(zip(c.layer_types, c.kinds, strict=True))
        by_kind = {f"{kind} {mlp}": layer(kind, mlp) for kind, mlp in dict.fromkeys(pattern)}
        names = [f"{kind} {mlp}" for kind, mlp in pattern]
        super().__init__(c, Decoder(c, by_kind, pattern=names, norm=Norm(c, c.hidden_size)))
