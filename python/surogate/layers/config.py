"""The fields of config.json that most decoders have."""

from __future__ import annotations

from typing import ClassVar, Literal

from ..dsl import Reader
from .heads import HeadsConfig
from .rotary import Rotation


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
        super().derive(reader)
        share = None if self.share is None else reader.take("partial_rotary_factor") or self.share
        self.rope = self.rope.complete(reader, self.head_dim, self.max_position_embeddings, self.theta, share)
