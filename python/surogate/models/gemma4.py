"""Gemma 4 (text model): Gemma 3 with heads of their own size in layers without a window, a norm of values, a factor for the
result of each layer, and as the config says an embedding for each layer, last layers that read keys and values of earlier
ones, and a mixture of experts next to the feed-forward layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, Self

from .. import layers
from ..dsl import Batch, Module, Parameter, Reader, Tensor, Unset, each, model, ops, output, region
from ..layers import (
    FULL,
    SLIDING,
    Activation,
    DecoderConfig,
    Embedding,
    GatedMLP,
    Linear,
    RMSNorm,
    RotaryByKind,
    RotaryEmbedding,
    Rotation,
    Rotations,
    Routing,
    StackedExperts,
    TextPart,
    activation,
    layer_types,
    window,
)
from ..layers.vision import placed
from .gemma2 import CappedLM
from .gemma4_vision import Gemma4Embedder, Gemma4Tower, Gemma4VisionConfig

#: Fields that `per_layer_config` may have for a layer.
OF_A_LAYER = ("head_dim", "num_key_value_heads")

#: Endings of the kinds of layers whose keys and values later ones read, and of those that read them.
KEPT, SHARED = ".kept", ".shared"

#: What layers that share keys and values do not compute. Files may have it.
UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")

#: Its matrices of experts are parameters in files, too.
ADAPTERS = {"routers": ["router"], "stacks": [{"name": "gate_up_proj"}, {"name": "down_proj"}]}

#: Parts that are not computed; with images, those of audio alone.
CARRIED = [f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")]


class Gemma4Config(DecoderConfig):
    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    hidden_activation: Activation = "gelu_pytorch_tanh"
    hidden_act: str | None = None  # transformers does not read it
    attention_bias: bool = False
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: Literal["vision"] | None = None  # between tokens of an image
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int | None = 256
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int | None = 0
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    rope: Rotations

    #: The window of layers with one where the config does not say it.
    usual_window = 512
    #: The types of layers in which tokens of an image see each other both ways, where the config says that they do.
    both_ways: tuple[str, ...] = (SLIDING,)

    def derive(self, reader: Reader) -> None:
        count = self.num_hidden_layers
        self.layer_types = layer_types(reader, count, [SLIDING if (i + 1) % 6 else FULL for i in range(count)])
        self.layer_types[-1] = FULL  # whatever the config says, as in transformers
        self.heads = self.heads_by_type(reader)
        self.read_rotations(reader)
        super().derive(reader)
        self.window = window(reader, self.usual_window)
        self.first_shared = count - (self.num_kv_shared_layers or 0)
        if not 0 <= self.first_shared <= count:
            reader.problem("num_kv_shared_layers", f"{self.num_kv_shared_layers} is not supported, expected 0 to {count}")
            self.first_shared = count
        own, shared = self.layer_types[: self.first_shared], self.layer_types[self.first_shared :]
        if shared and set(own) != set(self.layer_types):
            reader.problem("num_kv_shared_layers", "leaves no layer of each type that computes keys and values")
        self.kinds = [kind + SHARED * (i >= self.first_shared) for i, kind in enumerate(self.layer_types)]
        #: The types of layers that read keys and values of earlier ones.
        self.shared_types = sorted(set(shared) & set(own))
        for kind in self.shared_types:
            self.kinds[max(i for i, other in enumerate(own) if other == kind)] += KEPT
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            found = f"{self.final_logit_softcapping} is not supported"
            reader.problem("final_logit_softcapping", f"{found}, expected a number above 0")
        size = self.hidden_size_per_layer_input or 0
        if size < 0:
            reader.problem("hidden_size_per_layer_input", f"{size} is not supported, expected a whole number from 0")
        if size and self.vocab_size_per_layer_input < self.vocab_size:
            found = f"{self.vocab_size_per_layer_input} is not supported"
            reader.problem("vocab_size_per_layer_input", f"{found}, expected at least vocab_size, {self.vocab_size}")
        if self.enable_moe_block:
            self.read_experts(reader)

    def heads_by_type(self, reader: Reader) -> dict[str, tuple[int, int]]:
        """Size and number of key heads, by type of layer: from `per_layer_config`, or from fields of layers without a
        window."""
        usual = (self.head_dim, self.num_key_value_heads)
        layers = reader.take("per_layer_config")
        named = reader.take("global_head_dim"), reader.take("num_global_key_value_heads")
        if layers is None:
            size, keys = named
            if not self.attention_k_eq_v or keys is None:  # as in transformers, which reads the number only then
                keys = self.num_key_value_heads
            full = (512 if size is None else size, keys)
            if any(isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 4096 for value in full):
                reader.problem("global_head_dim", f"{full} for size and key heads, expected whole numbers above 0")
                full = usual
            return self.checked(reader, {SLIDING: usual, FULL: full})
        if isinstance(layers, dict):
            for name in sorted({str(key) for key in layers} - {str(i) for i in range(self.num_hidden_layers)}):
                reader.problem("per_layer_config", f"has {name!r}, which is none of the {self.num_hidden_layers} layers")
        found: dict[str, set[tuple[int, int]]] = {}
        for i, kind in enumerate(self.layer_types):
            own = layers.get(str(i), layers.get(i, {})) if isinstance(layers, dict) else None
            if not isinstance(own, dict) or set(own) - set(OF_A_LAYER):
                names = " and ".join(OF_A_LAYER)
                reader.problem("per_layer_config", f"{own!r} for layer {i} is not supported, expected {names}")
                return {SLIDING: usual, FULL: usual}
            values = tuple(own.get(name, value) for name, value in zip(OF_A_LAYER, usual, strict=True))
            if any(isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 4096 for value in values):
                reader.problem("per_layer_config", f"{own!r} for layer {i}: expected whole numbers above 0")
                return {SLIDING: usual, FULL: usual}
            found.setdefault(kind, set()).add((values[0], values[1]))
        for kind, values in found.items():
            if len(values) > 1:
                reader.problem("per_layer_config", f"layers of type {kind!r} differ, which is not supported")
        return self.checked(reader, {SLIDING: usual, FULL: usual} | {kind: min(of) for kind, of in found.items()})

    def checked(self, reader: Reader, heads: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        for kind, (size, keys) in heads.items():
            if size % 2 or self.num_attention_heads % keys:
                what = f"heads of {size} columns, {keys} of {self.num_attention_heads} with keys"
                reader.problem("head_dim", f"layers of type {kind!r} have {what}: expected an even size and a divisor")
        return heads

    def read_rotations(self, reader: Reader) -> None:
        """By type of layer, which is the only spelling that there is."""
        given = self.rope.by_kind
        for name in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
            if reader.fields.get(name) is not None:
                reader.problem(name, "is not supported, expected `rope_parameters` by type of layer")
        if not given or reader.fields.get("rope_parameters") is None:
            local = Rotation(10000.0)
            full = Rotation(1000000.0, "proportional", {"partial_rotary_factor": 0.25})
            self.rope = Rotations({SLIDING: local, FULL: full})
        for kind in sorted(set(self.layer_types) - set(self.rope.by_kind)):
            reader.problem(f"rope_parameters.{kind}", "is missing, expected the rotation of these layers")

    def read_experts(self, reader: Reader) -> None:
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            value = getattr(self, name)
            if value is None or value < 1:
                reader.problem(name, f"{value!r} is not supported with `enable_moe_block`, expected a whole number above 0")
                return
        if self.top_k_experts > self.num_experts:
            reader.problem("top_k_experts", f"{self.top_k_experts} is more than {self.num_experts} experts")
        self.routing = Routing(self.num_experts, self.top_k_experts)

    @property
    def rotary_head_dim(self) -> dict[str, int]:
        return {kind: size for kind, (size, _) in self.heads.items()}

    def with_heads_of(self, kind: str) -> Self:
        """This config with the heads of one type of layer."""
        own = copy.copy(self)
        own.head_dim, own.num_key_value_heads = self.heads[kind]
        return own


def type_of(kind: str) -> str:
    """The type of a layer by its kind."""
    return kind.removesuffix(KEPT).removesuffix(SHARED)


class Attention(layers.Attention):
    """Queries and keys are normalised and rotated, values normalised without a weight. Where `attention_k_eq_v`, values of
    layers without a window are what keys are before that. Scores are not scaled."""

    def __init__(self, c: Gemma4Config, kind: str) -> None:
        own = c.with_heads_of(type_of(kind))
        self.shares = kind.endswith(SHARED)
        self.one = c.attention_k_eq_v and type_of(kind) == FULL
        self.eps = c.rms_norm_eps
        slides = type_of(kind) == SLIDING
        bias = c.attention_bias
        super().__init__(own, bias=bias, output_bias=bias, scale=1.0, window=c.window if slides else None)
        self.q_norm = RMSNorm(self.head_dim, self.eps)
        self.k_norm = None if self.shares else RMSNorm(self.head_dim, self.eps)

    def declare(self, c: DecoderConfig, bias: bool) -> None:
        self.q_proj = Linear(c.hidden_size, c.queries, bias=bias)
        self.k_proj = None if self.shares else Linear(c.hidden_size, c.keys, bias=bias)
        self.v_proj = None if self.shares or self.one else Linear(c.hidden_size, c.keys, bias=bias)

    def keys_and_values(self, x: Tensor, rotate: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        keys = self.split(self.k_proj(x))
        values, _ = ops.unit_norm(keys if self.v_proj is None else self.split(self.v_proj(x)), eps=self.eps)
        return rotate(self.k_norm(keys)), values

    @region("attention")
    def forward(self, x: Tensor, kept: tuple[Tensor, Tensor] | None, rotate: Any, batch: Batch) -> tuple[Tensor, ...]:
        """The result, and the keys and values that it was computed with: those of `kept` in layers that share them."""
        q = rotate(self.q_norm(self.split(self.q_proj(x))))
        k, v = kept if self.shares else self.keys_and_values(x, rotate)
        return self.attend(q, k, v, batch), k, v


class Router(Module):
    """Scores are `proj`(norm(x) · `scale` / √hidden), weights of the chosen experts their softmax over these, each then
    multiplied with the expert's `per_expert_scale`."""

    def __init__(self, c: Gemma4Config) -> None:
        self.proj = Linear(c.hidden_size, c.num_experts)
        self.scale = Parameter(c.hidden_size, init="ones")
        self.per_expert_scale = Parameter(c.num_experts, init="ones")
        self.top_k, self.eps, self.factor = c.top_k_experts, c.rms_norm_eps, c.hidden_size**-0.5
        #: Scores and choices of the call that was recorded last.
        self.chosen: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = ops.rmsnorm(x, self.scale, eps=self.eps)
        logits = self.proj(x * self.factor)
        weights, index = ops.route(logits, top_k=self.top_k, scores="softmax", normalise=True)
        self.chosen = (logits, index)
        scales = ops.embedding(index, ops.split_heads(self.per_expert_scale, head_dim=1))
        return weights * ops.cast(ops.merge_heads(scales), dtype="f32"), index

    def load(self, present: Tensor) -> Tensor:
        """The load of the experts in the call that was recorded last, as that of a `Mixture`."""
        assert self.chosen is not None, "a layer is recorded before its load is requested"
        return ops.expert_load(*self.chosen, present, scores="softmax")


class Layer(Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), in mixtures with the results of the experts added to that of
    the feed-forward layer, each after a norm of its own. Then what the layer's own embedding of the token gives, gated by x;
    all of it times `layer_scalar`."""

    def __init__(self, c: Gemma4Config, kind: str) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps)

        #: Where keys and values of this type of layer are among those that are carried.
        types = c.shared_types
        self.slot = 2 * types.index(type_of(kind)) if type_of(kind) in types else None
        self.carried = 2 * len(types)
        self.gives = kind.endswith(KEPT)
        self.function = c.hidden_activation
        self.input_layernorm = norm()
        self.self_attn = Attention(c, kind)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        wide = c.use_double_wide_mlp and kind.endswith(SHARED)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size * (2 if wide else 1), function=c.hidden_activation)
        self.post_feedforward_layernorm = norm()
        self.layer_scalar = Parameter(1, init="ones", buffer=True)
        self.size = c.hidden_size_per_layer_input
        if self.size:
            self.per_layer_input_gate = Linear(c.hidden_size, self.size)
            self.per_layer_projection = Linear(self.size, c.hidden_size, residual_projection=True)
            self.post_per_layer_input_norm = norm()
        self.count = c.num_experts if c.enable_moe_block else None
        if self.count:
            self.router = Router(c)
            inner, function = c.moe_intermediate_size, c.hidden_activation
            self.experts = StackedExperts(c.num_experts, c.hidden_size, inner, function)
            self.post_feedforward_layernorm_1 = norm()
            self.post_feedforward_layernorm_2 = norm()
            self.pre_feedforward_layernorm_2 = norm()

    @region("mlp")
    def with_experts(self, x: Tensor, y: Tensor) -> Tensor:
        """`y`, the result of the feed-forward layer, with that of the experts."""
        weights, index = self.router(x)
        order, places, offsets = ops.group_rows(index, groups=self.count)
        rows = self.experts(ops.to_groups(self.pre_feedforward_layernorm_2(x), order, places), offsets)
        of_experts = ops.from_groups(rows, order, places, weights)
        return self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(of_experts)

    @region("mlp")
    def with_own_embedding(self, x: Tensor, embedded: Tensor) -> Tensor:
        gated = activation(self.function, self.per_layer_input_gate(x)) * embedded
        return x + self.post_per_layer_input_norm(self.per_layer_projection(gated))

    def forward(self, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
        carried, (rotate, *embedded, batch) = list(given[: self.carried]), given[self.carried :]
        kept = None if self.slot is None else tuple(carried[self.slot : self.slot + 2])
        y, k, v = self.self_attn(self.input_layernorm(x), kept, rotate, batch)
        if self.gives:
            carried[self.slot : self.slot + 2] = [k, v]
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.count:
            y = self.with_experts(x, y)
        x = x + self.post_feedforward_layernorm(y)
        if self.size:
            x = self.with_own_embedding(x, *embedded)
        x = ops.scale_by(x, self.layer_scalar)
        output("hidden.layer.{i}", x)
        return x, *carried


class Decoder(layers.Decoder):
    """Embeddings are multiplied by √hidden_size, which has their type. Each layer's own input is a part of
    `embed_tokens_per_layer`, multiplied likewise, with one of `per_layer_model_projection` of the embedding."""

    def __init__(self, c: Gemma4Config, *, images: bool = False) -> None:
        self.images = images
        types = sorted(set(c.layer_types))
        rotary = RotaryByKind(**{kind: RotaryEmbedding(c.heads[kind][0], c.rope[kind]) for kind in types})
        by_kind = {kind: Layer(c, kind) for kind in dict.fromkeys(c.kinds)}
        for kind, layer in by_kind.items():
            sees = images and c.use_bidirectional_attention == "vision"
            layer.self_attn.sees_images = sees and type_of(kind) in c.both_ways
        super().__init__(c, by_kind, pattern=c.kinds, rotary=rotary)
        self.kinds = list(by_kind)
        self.unset = [Unset("B", "T", c.heads[kind][1], c.heads[kind][0]) for kind in c.shared_types for _ in "kv"]
        self.factor, self.size, self.count = c.hidden_size**0.5, c.hidden_size_per_layer_input, c.num_hidden_layers
        if self.size:
            of_all = self.size * self.count
            self.embed_tokens_per_layer = Embedding(c.vocab_size_per_layer_input, of_all, c.pad_token_id)
            self.per_layer_model_projection = Linear(c.hidden_size, of_all)
            self.per_layer_projection_norm = RMSNorm(self.size, c.rms_norm_eps)

    def embed(self, batch: Batch) -> Tensor:
        return ops.scale(self.embed_tokens(batch.input_ids), factor=self.factor, rounded=True)

    def carried(self) -> tuple[Unset, ...]:
        return tuple(self.unset)

    def shared(self, x: Tensor, batch: Batch) -> tuple[Any, ...]:
        (rotations,) = super().shared(x, batch)
        by_kind = {kind: rotations[type_of(kind)] for kind in self.kinds}
        return (by_kind, each(self.inputs_of_layers(x, batch))) if self.size else (by_kind,)

    def inputs_of_layers(self, x: Tensor, batch: Batch) -> list[Tensor]:
        """Returns the input of each layer by its own embedding of the tokens [B, T, size]; tokens of images have that of the
        padding."""
        own = self.embed_tokens_per_layer(batch.text_ids if self.images else batch.input_ids)
        own = ops.scale(own, factor=self.size**0.5, rounded=True)
        projected = self.per_layer_model_projection(x) * (1.0 / self.factor)
        heads = self.per_layer_projection_norm(ops.split_heads(projected, head_dim=self.size))
        both = (ops.merge_heads(heads) + own) * 0.5**0.5
        parts = ops.split(both, sizes=[self.size] * self.count)
        return [parts] if isinstance(parts, Tensor) else list(parts)


def unused(c: Gemma4Config, path: str) -> list[str]:
    """Beginnings of names of weights that layers with shared keys and values do not have."""
    shared = range(c.first_shared, c.num_hidden_layers)
    return [f"{path}.layers.{i}.self_attn.{name}." for i in shared for name in UNUSED]


@model(
    "Gemma4ForCausalLM",
    config=Gemma4Config,
    model_type="gemma4_text",
    base="model",
    adapters=ADAPTERS,
)
class Gemma4(CappedLM):
    def __init__(self, c: Gemma4Config) -> None:
        super().__init__(c, Decoder(c))
        self.carried = unused(c, "model")


class Gemma4ImageConfig(Gemma4Config):
    section = "text_config"


class Part(TextPart):
    def __init__(self, c: Gemma4Config, v: Gemma4VisionConfig) -> None:
        text, side = Decoder(c, images=True), v.pooling_kernel_size
        super().__init__(text)
        self.vision_tower = Gemma4Tower(v)
        self.embed_vision = Gemma4Embedder(v.hidden_size, c.hidden_size, v.rms_norm_eps)
        text.place_images = lambda x, batch: placed(x, self.embed_vision(self.vision_tower(batch)), batch, side)


class Gemma4Whole(CappedLM):
    def __init__(self, c: Gemma4ImageConfig, v: Gemma4VisionConfig) -> None:
        super().__init__(c, Part(c, v))
        self.images, self.projectors = v.form(c.pad_token_id or 0), ["model.embed_vision."]
        self.carried = unused(c, "model.language_model")


@model(
    "Gemma4ForConditionalGeneration",
    config=Gemma4ImageConfig,
    model_type="gemma4",
    carried=CARRIED,
    adapters=ADAPTERS,
    examples=["google/gemma-4-e2b-it", "google/gemma-4-26B-A4B-it"],
    images=(Gemma4Whole, Gemma4VisionConfig),
)
class Gemma4Text(CappedLM):
    def __init__(self, c: Gemma4ImageConfig) -> None:
        super().__init__(c, TextPart(Decoder(c)))
        self.carried = unused(c, "model.language_model")
