"""Hunyuan, dense: Llama with norms of queries and keys after the rotation, whose base a fixed `alpha` raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .. import layers
from ..dsl import Batch, Reader, Tensor, model
from ..layers import CausalLM, Decoder, DecoderConfig, DecoderLayer, GatedMLP, RMSNorm, Rotation


@dataclass(frozen=True)
class AlphaRotation(Rotation):
    """A rotation that files call dynamic and that has a base of theta · alpha^(d / (d - 2)), for heads of d columns."""

    alpha: float | None = None

    @classmethod
    def read(cls, reader: Reader, field: str) -> Rotation:
        """Reads the settings; next to `alpha` the others of such a rotation count for nothing, as in transformers."""
        for name in ("rope_parameters", "rope_scaling"):
            values = reader.fields.get(name)
            alpha = values.get("alpha") if isinstance(values, dict) else None
            if not alpha or values.get("rope_type", values.get("type")) != "dynamic":
                continue
            for spelling in ("rope_parameters", "rope_scaling"):
                reader.take(spelling)
            theta = values.get("rope_theta", reader.take("rope_theta"))
            for part, number in (("alpha", alpha), ("rope_theta", 1 if theta is None else theta)):
                if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
                    reader.problem(f"{name}.{part}", f"{number!r} is not supported, expected a number above 0")
                    return cls()
            return cls(None if theta is None else float(theta), alpha=float(alpha))
        return super().read(reader, field)

    def complete(self, reader: Reader, head_dim: int, length: int, theta: float = 10000.0, *more: Any) -> Rotation:
        """The rotation with its raised base."""
        if self.alpha is None:
            return super().complete(reader, head_dim, length, theta, *more)
        if head_dim < 4:
            reader.problem("head_dim", f"{head_dim} is not supported with an `alpha`, expected at least 4")
            return Rotation(theta)
        base = theta if self.theta is None else self.theta
        raised = Rotation(base * self.alpha ** (head_dim / (head_dim - 2)))
        return raised.complete(reader, head_dim, length, theta, *more)


class HunYuanConfig(DecoderConfig):
    vocab_size: int = 290943
    num_key_value_heads: int | None = None  # type: ignore[assignment]
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    pad_token_id: int | None = 0
    pretraining_tp: Literal[1] = 1
    rope: AlphaRotation

    def derive(self, reader: Reader) -> None:
        if (experts := reader.take("num_experts")) not in (None, 1):
            reader.problem("num_experts", f"{experts!r} is not supported, expected 1: the dense model")
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        super().derive(reader)


class Attention(layers.Attention):
    def __init__(self, c: HunYuanConfig) -> None:
        super().__init__(c, bias=c.attention_bias, output_bias=c.attention_bias)
        self.query_layernorm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.key_layernorm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, self.project(x))
        return self.query_layernorm(rotate(q)), self.key_layernorm(rotate(k)), v


@model(
    "HunYuanDenseV1ForCausalLM",
    config=HunYuanConfig,
    model_type="hunyuan_v1_dense",
    base="model",
    examples=["tencent/Hunyuan-7B-Instruct", "tencent/Hunyuan-0.5B-Instruct"],
)
class HunYuan(CausalLM):
    def __init__(self, c: HunYuanConfig) -> None:
        mlp = GatedMLP(c.hidden_size, c.intermediate_size)
        super().__init__(c, Decoder(c, DecoderLayer(c, Attention(c), mlp)))
