"""Ministral 3 and Mistral Small 3.x (text model): Mistral with an explicit head size. In Ministral 3 the rotation
is scaled by YaRN, and queries are scaled by their position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import layers
from ..dsl import Batch, Module, Reader, Tensor, model, ops
from ..errors import ModelConfigError
from ..layers import (
    VISION_CARRIED,
    VISION_RENAMED,
    CausalLM,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    GatedMLP,
    Linear,
    RMSNorm,
    Rotation,
    TextPart,
    activation,
    window,
)
from ..layers.vision import merged, placed
from .mistral import MistralConfig
from .pixtral import Pixtral, PixtralConfig

BETA = "llama_4_scaling_beta"


class QueryRotation(Rotation):
    """A rotation whose settings also say how queries grow."""

    @classmethod
    def read(cls, reader: Reader, field: str) -> Rotation:
        for name in ("rope_parameters", "rope_scaling"):
            values = reader.fields.get(name)
            if isinstance(values, dict):
                # Repeated from the level above; transformers does not read it here.
                known = {key: value for key, value in values.items() if key not in (BETA, "max_position_embeddings")}
                reader.fields = reader.fields | {name: known, BETA: values.get(BETA)}
        return Rotation.read(reader, field)


class Ministral3Config(DecoderConfig):
    vocab_size: int = 131072
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 11
    rope: QueryRotation

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.window = window(reader, None)
        self.beta = reader.take(BETA)
        if self.beta is not None and (isinstance(self.beta, bool) or not isinstance(self.beta, int | float)):
            reader.problem(f"rope_parameters.{BETA}", f"{self.beta!r} is not supported, expected a number")
        if self.beta and "original_max_position_embeddings" not in self.rope.settings:
            reader.problem(f"rope_parameters.{BETA}", "needs `original_max_position_embeddings`")
        self.original = self.rope.settings.get("original_max_position_embeddings")


class Attention(layers.Attention):
    def __init__(self, c: Ministral3Config) -> None:
        super().__init__(c, window=c.window)
        self.beta, self.original = c.beta, c.original

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x, rotate, batch)
        if self.beta:
            q = ops.position_scale(q, batch.position_ids, beta=self.beta, original=self.original)
        return q, k, v


def decoder(c: DecoderConfig, attention: Module) -> Decoder:
    return Decoder(c, DecoderLayer(c, attention, GatedMLP(c.hidden_size, c.intermediate_size)))


@model(
    "Ministral3ForCausalLM",
    config=Ministral3Config,
    model_type="ministral3",
    base="model",
    examples=["mistralai/Ministral-3-8B-Base-2512"],
)
class Ministral3(CausalLM):
    def __init__(self, c: Ministral3Config) -> None:
        super().__init__(c, decoder(c, Attention(c)))


class Ministral3Part(Ministral3Config):
    section = "text_config"


class MistralPart(MistralConfig):
    section = "text_config"


class Mistral3Config:
    """The config of the text part, which is a Ministral 3 or a Mistral."""

    PARTS = {"ministral3": Ministral3Part, "mistral": MistralPart}

    @classmethod
    def from_dict(cls, architecture: str, fields: dict[str, Any]) -> DecoderConfig:
        part = fields.get("text_config")
        kind = part.get("model_type", "mistral") if isinstance(part, dict) else None
        if kind not in cls.PARTS:
            known = " or ".join(map(repr, cls.PARTS))
            raise ModelConfigError(architecture, [f"`text_config.model_type`: {kind!r} is not supported, expected {known}"])
        return cls.PARTS[kind].from_dict(architecture, fields)


class Merger(Module):
    """The patches of a token as one row, whose numbers `merging_layer` has by column, then by patch."""

    def __init__(self, hidden: int, side: int) -> None:
        self.hidden, self.side = hidden, side
        self.merging_layer = Linear(hidden * side**2, hidden)

    def forward(self, x: Tensor) -> Tensor:
        count = self.side**2
        by_patch = ops.transpose(self.merging_layer.weight, columns=count, shape=[count * self.hidden, self.hidden])
        weights = ops.unstack(by_patch, sizes=[self.hidden] * count)
        patches = ops.split(merged(x, self.side), sizes=[self.hidden] * count)
        first, *rest = (ops.linear(patch, weight) for patch, weight in zip(patches, weights, strict=True))
        return sum(rest, first)


class Projector(Module):
    def __init__(self, c: DecoderConfig, v: PixtralConfig, side: int) -> None:
        whole = v.whole
        self.act = whole.get("projector_hidden_act") or "gelu"
        bias = bool(whole.get("multimodal_projector_bias", False))
        self.norm = RMSNorm(v.hidden_size, c.rms_norm_eps)
        self.patch_merger = Merger(v.hidden_size, side)
        self.linear_1 = Linear(v.hidden_size, c.hidden_size, bias=bias)
        self.linear_2 = Linear(c.hidden_size, c.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(activation(self.act, self.linear_1(self.patch_merger(self.norm(x)))))


class Part(TextPart):
    def __init__(self, c: DecoderConfig, v: PixtralConfig, text: Decoder) -> None:
        super().__init__(text)
        side = v.side
        self.vision_tower, self.multi_modal_projector = Pixtral(v), Projector(c, v, side)
        text.place_images = lambda x, batch: placed(x, self.multi_modal_projector(self.vision_tower(batch)), batch, side)


def text_of(c: DecoderConfig) -> Decoder:
    """The decoder of a Ministral 3 or a Mistral."""
    return decoder(c, Attention(c) if isinstance(c, Ministral3Config) else layers.Attention(c, window=c.window))


class Mistral3Whole(CausalLM):
    def __init__(self, c: DecoderConfig, v: PixtralConfig) -> None:
        super().__init__(c, Part(c, v, text_of(c)))
        self.images = {"token": v.image_token, "width": v.width, "side": v.side, "breaks": True}
        self.projectors = ["model.multi_modal_projector."]


@model(
    "Mistral3ForConditionalGeneration",
    config=Mistral3Config,
    model_type="mistral3",
    renamed=VISION_RENAMED,
    carried=VISION_CARRIED,
    examples=["mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistralai/Ministral-3-8B-Instruct-2512"],
    images=(Mistral3Whole, PixtralConfig),
)
class Mistral3Text(CausalLM):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__(c, TextPart(text_of(c)))
