"""EXAONE 4: norms after attention and feed-forward layer instead of before them, and QK norm. If the config sets a
sliding window, the layers without it do not rotate queries and keys."""

from __future__ import annotations

from collections.abc import Callable

from .. import layers
from ..dsl import Batch, Reader, Tensor, model
from ..layers import FULL, SLIDING, CausalLM, Decoder, DecoderConfig, RMSNorm, layer_types, window
from .olmo import Layer


class Exaone4Config(DecoderConfig):
    vocab_size: int = 102400
    intermediate_size: int = 16384
    num_key_value_heads: int = 32
    rms_norm_eps: float = 1e-5

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.window = window(reader, 4096)
        count, kinds = self.num_hidden_layers, self.by_pattern(reader)
        if "layer_types" not in reader.fields and kinds is None:
            reader.problem("sliding_window_pattern", "a text is read with `layer_types` alone, which is missing")
        self.layer_types = layer_types(reader, count, kinds or [FULL] * count)
        if self.window is None and SLIDING in self.layer_types:
            reader.problem("layer_types", f"{SLIDING!r} needs a `sliding_window`")

    def by_pattern(self, reader: Reader) -> list[str] | None:
        """Kinds of the layers by `sliding_window_pattern`, n: every n-th layer has no window. None for a text such as
        "LLLG", which transformers does not read either."""
        found = reader.take("sliding_window_pattern")
        period = 4 if found is None and "sliding_window_pattern" not in reader.fields else found
        if isinstance(period, str):
            return None
        if self.window is None or not period:
            return [FULL] * self.num_hidden_layers
        if isinstance(period, bool) or not isinstance(period, int) or period < 1:
            reader.problem("sliding_window_pattern", f"{period!r} is not supported, expected a whole number above 0")
            return [FULL] * self.num_hidden_layers
        return [SLIDING if (i + 1) % period else FULL for i in range(self.num_hidden_layers)]


class Attention(layers.Attention):
    def __init__(self, c: Exaone4Config, kind: str) -> None:
        super().__init__(c, window=c.window if kind == SLIDING else None)
        self.rotates = kind == SLIDING or c.window is None
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, self.project(x))
        q, k = self.q_norm(q), self.k_norm(k)
        return (rotate(q), rotate(k), v) if self.rotates else (q, k, v)


@model(
    "Exaone4ForCausalLM",
    config=Exaone4Config,
    model_type="exaone4",
    base="model",
    examples=["LGAI-EXAONE/EXAONE-4.0-1.2B", "LGAI-EXAONE/EXAONE-4.0-32B"],
)
class Exaone4(CausalLM):
    def __init__(self, c: Exaone4Config) -> None:
        by_kind = {kind: Layer(c, Attention(c, kind)) for kind in sorted(set(c.layer_types))}
        super().__init__(c, Decoder(c, by_kind, pattern=c.layer_types))
