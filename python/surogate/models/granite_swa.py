"""Granite with windows in most layers, a sink for each head, and a base of the rotation for each layer, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .. import layers
from ..dsl import Batch, Parameter, Reader, Tensor, model
from ..layers import FULL, SLIDING, RotaryByKind, RotaryEmbedding, layer_types, window
from .granite import GraniteConfig, Layer, ScaledDecoder, ScaledLM


class GraniteSWAConfig(GraniteConfig):
    vocab_size: int = 100352
    hidden_size: int = 2560
    intermediate_size: int = 8192
    num_hidden_layers: int = 24
    num_attention_heads: int = 20
    num_key_value_heads: int = 4
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        count = self.num_hidden_layers
        self.window = window(reader, 128)
        types = layer_types(reader, count, [SLIDING if i % 4 else FULL for i in range(count)])
        if self.window is None and SLIDING in types:
            reader.problem("layer_types", f"{SLIDING!r} needs a `sliding_window`")
        thetas = reader.take("layer_rope_theta")
        thetas = [self.rope.theta] * count if thetas is None else thetas
        fits = isinstance(thetas, list) and len(thetas) >= count
        if not fits or not all(isinstance(of, int | float) and of >= 0 for of in thetas):
            reader.problem("layer_rope_theta", f"{thetas!r} is not supported, expected a list of {count} numbers from 0")
            thetas = [self.rope.theta] * count
        #: Window and base of the rotation of each kind of layer; a base of 0 is no rotation.
        self.by_kind: dict[str, tuple[bool, float]] = {}
        self.kinds: list[str] = []
        for kind, theta in zip(types, thetas, strict=False):
            of = (kind == SLIDING, float(theta))
            known = next((name for name, other in self.by_kind.items() if other == of), f"{kind}_{len(self.by_kind)}")
            self.by_kind[known] = of
            self.kinds.append(known)


class Attention(layers.Attention):
    def __init__(self, c: GraniteSWAConfig, slides: bool, theta: float) -> None:
        bias, near = c.attention_bias, c.window if slides else None
        super().__init__(c, bias=bias, output_bias=bias, scale=c.attention_multiplier, window=near)
        self.sinks = Parameter(c.num_attention_heads, init="zeros")
        self.rotates = theta > 0

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, self.project(x))
        return (rotate(q), rotate(k), v) if self.rotates else (q, k, v)


class SWALayer(Layer):
    def __init__(self, c: GraniteSWAConfig, slides: bool, theta: float) -> None:
        super().__init__(c)
        self.self_attn = Attention(c, slides, theta)


class SWADecoder(ScaledDecoder):
    """A decoder with a rotation for each kind of layer."""

    def __init__(self, c: GraniteSWAConfig) -> None:
        bases = {kind: replace(c.rope, theta=theta or c.rope.theta) for kind, (_, theta) in c.by_kind.items()}
        rotary = RotaryByKind(**{kind: RotaryEmbedding(c.head_dim, rope) for kind, rope in bases.items()})
        by_kind = {kind: SWALayer(c, *of) for kind, of in c.by_kind.items()}
        super().__init__(c, by_kind, pattern=c.kinds, rotary=rotary)


@model(
    "GraniteSWAForCausalLM",
    config=GraniteSWAConfig,
    model_type="granite_swa",
    base="model",
    examples=["ibm-granite/granite-swash-2b"],
)
class GraniteSWA(ScaledLM):
    def __init__(self, c: GraniteSWAConfig) -> None:
        super().__init__(c, SWADecoder(c))
