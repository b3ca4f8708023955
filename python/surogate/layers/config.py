"""The fields of config.json that most decoders have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..dsl import Reader
from .heads import HeadsConfig
from .rotary import Rotation


@dataclass(frozen=True)
class Balance:
    """The loss of uneven loads of experts, over all layers that have them."""

    coefficient: float


@dataclass(frozen=True)
class Routing:
    """The routing of tokens to experts, in all layers that have them."""

    experts: int
    top_k: int
    scores: str = "softmax"


class DecoderConfig(HeadsConfig):
    """Base of the configs of decoders with rotary positions. The defaults are Llama's; an architecture states its own
    where they differ."""

    vocab_size: int = 32000
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope: Rotation
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_dropout: float = 0.0

    #: Base of the rotation where the file has none.
    theta: ClassVar[float] = 10000.0
    #: The same of the part of a head's columns that is rotated (`partial_rotary_factor`); None where all always are.
    share: ClassVar[float | None] = None

    def derive(self, reader: Reader) -> None:
        """Reads the rotary settings, and sets the fields of mixtures to their values without experts."""
        super().derive(reader)
        #: The loss of uneven loads, where the config wants one.
        self.balance: Balance | None = None
        #: Of mixtures, their routing.
        self.routing: Routing | None = None
        share = None if self.share is None else reader.take("partial_rotary_factor") or self.share
        self.rope = self.rope.complete(reader, self.rotary_head_dim, self.max_position_embeddings, self.theta, share)

    @property
    def rotary_head_dim(self) -> Any:
        """The size of the heads that are rotated, by kind of layer where it differs."""
        return self.head_dim


class MixtureConfig(DecoderConfig):
    """Base of the configs of mixtures that transformers has the loss of uneven loads for: as there, it counts with
    `output_router_logits` alone."""

    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False

    def read_experts(self, reader: Reader, default: int, sparse: int | None = None) -> None:
        """`num_experts`, which transformers 5 also calls `num_local_experts`. `sparse` is the number of the layers that
        have experts, by default all."""
        self.num_experts = count_of_experts(reader, default)
        if self.num_experts_per_tok > self.num_experts:
            reader.problem("num_experts_per_tok", f"{self.num_experts_per_tok} is more than {self.num_experts} experts")
        layers = self.num_hidden_layers if sparse is None else sparse
        if layers:
            self.routing = Routing(self.num_experts, self.num_experts_per_tok)
        if self.output_router_logits and self.router_aux_loss_coef and layers:
            self.balance = Balance(self.router_aux_loss_coef)


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
