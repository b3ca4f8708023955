"""The vision towers of Qwen2-VL, 2.5-VL, 3-VL and 3.5: patches in blocks, rotated by row and column, of which each 2 × 2
become one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dsl import Batch, Layers, Module, Parameter, Reader, Tensor, Unset, each, ops, output, region, repeat
from ..layers import Activation, Decoder, GatedMLP, LayerNorm, Linear, RMSNorm, TextPart, activation, scale_rows
from ..layers.vision import (
    AxialRotary,
    Interval,
    PatchEmbedding,
    PlainMLP,
    TowerConfig,
    attend,
    merged,
    of_image,
    of_window,
    pixels,
    placed,
)


#: Beginnings of the names of what makes tokens of patches.
PROJECTORS = ["model.visual.merger.", "model.visual.deepstack_merger_list."]


class QwenTowerConfig(TowerConfig):
    """Fields of all Qwen towers."""

    depth: int = 32
    num_heads: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2

    token = ("image_token_id", 151655)

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        for name in ("in_channels", "in_chans"):
            if (channels := reader.take(name)) is not None:
                self.num_channels = channels
        reader.take("tokens_per_second")  # of videos
        self.theta = self.read_theta(reader)
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 4:
            reader.problem("num_heads", f"{self.num_heads} heads do not have a multiple of 4 columns each")

    @property
    def patch_axes(self) -> list[int]:
        return [self.num_channels, self.temporal_patch_size, self.patch_size, self.patch_size]

    def form(self, **more: Any) -> dict[str, Any]:
        """The layout of batches for this tower."""
        own = {"token": self.image_token, "width": self.width, "side": self.spatial_merge_size}
        return {**own, "frames": self.temporal_patch_size, **more}


class QwenAttention(Module):
    """`qkv`, queries, keys and values side by side, and `proj`."""

    def __init__(self, c: QwenTowerConfig, hidden: int) -> None:
        self.hidden, self.head_dim = hidden, hidden // c.num_heads
        self.qkv = Linear(hidden, 3 * hidden, bias=True)
        self.proj = Linear(hidden, hidden, bias=True)

    @region("attention")
    def forward(self, x: Tensor, rotate: Callable[..., Tensor], interval: Interval) -> Tensor:
        parts = ops.split(self.qkv(x), sizes=[self.hidden] * 3)
        q, k, v = (ops.split_heads(part, head_dim=self.head_dim) for part in parts)
        return self.proj(attend(rotate(q), rotate(k), v, interval, self.head_dim**-0.5))


class Block(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); attention sees the patches from `first` to `last`."""

    def __init__(self, attn: Module, mlp: Module, norm: Callable[[], Module]) -> None:
        self.norm1, self.norm2, self.attn, self.mlp = norm(), norm(), attn, mlp

    def forward(self, x: Tensor, rotate: Callable[..., Tensor], first: Tensor, last: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), rotate, (first, last))
        x = x + self.mlp(self.norm2(x))
        output("vision.layer.{i}", x)
        return x


class Merger(Module):
    """Norm, the patches of a token side by side, and `linear_fc1`, GELU, `linear_fc2`. With `after`, the norm is that of the
    patches side by side."""

    def __init__(self, c: QwenTowerConfig, hidden: int, outputs: int, *, after: bool = False) -> None:
        self.side, self.after = c.spatial_merge_size, after
        inner = hidden * self.side**2
        self.norm = LayerNorm(inner if after else hidden, 1e-6)
        self.linear_fc1, self.linear_fc2 = Linear(inner, inner, bias=True), Linear(inner, outputs, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(merged(x, self.side)) if self.after else merged(self.norm(x), self.side)
        return self.linear_fc2(activation("gelu", self.linear_fc1(x)))


class PatchMerger(Module):
    """The same with other names: `ln_q`, `mlp.0`, `mlp.2`."""

    def __init__(self, c: QwenTowerConfig, norm: Module, hidden: int, outputs: int) -> None:
        self.side, self.ln_q = c.spatial_merge_size, norm
        inner = hidden * self.side**2
        self.mlp = PlainMLP(inner, inner, "gelu", ("0", "2"), outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(merged(self.ln_q(x), self.side))


class Stem(Module):
    """The convolution that makes patches to rows."""

    def __init__(self, c: QwenTowerConfig, hidden: int, *, bias: bool) -> None:
        self.width, self.frames = c.width, c.temporal_patch_size
        self.proj = PatchEmbedding(c.patch_axes, hidden, bias=bias)

    def forward(self, batch: Batch) -> Tensor:
        """The rows [1, P, hidden] of the patches of a batch."""
        return self.proj(pixels(batch, self.width, frames=self.frames))


class Qwen2VisionConfig(QwenTowerConfig):
    """The tower of Qwen2-VL, of which `hidden_size` is that of the text."""

    embed_dim: int = 1280
    hidden_size: int = 3584
    mlp_ratio: float = 4.0
    hidden_act: Activation = "quick_gelu"

    def derive(self, reader: Reader) -> None:
        outputs, self.hidden_size = self.hidden_size, self.embed_dim
        super().derive(reader)
        self.out_hidden_size = outputs


class Qwen2Tower(Module):
    def __init__(self, c: Qwen2VisionConfig) -> None:
        hidden = c.hidden_size
        self.patch_embed = Stem(c, hidden, bias=False)
        self.rotary = AxialRotary.of_halves(hidden // c.num_heads, c.theta)
        mlp = PlainMLP(hidden, int(hidden * c.mlp_ratio), c.hidden_act, ("fc1", "fc2"))
        self.blocks = Layers(c.depth, Block(QwenAttention(c, hidden), mlp, lambda: LayerNorm(hidden, 1e-6)))
        self.merger = PatchMerger(c, LayerNorm(hidden, 1e-6), hidden, c.out_hidden_size)

    def forward(self, batch: Batch) -> Tensor:
        x = self.patch_embed(batch)
        return self.merger(repeat(self.blocks, x, self.rotary(batch), *of_image(batch)))


class Qwen2_5VisionConfig(QwenTowerConfig):
    """The tower of Qwen2.5-VL: most blocks see windows alone."""

    hidden_size: int = 1280
    intermediate_size: int = 3420
    out_hidden_size: int = 3584
    hidden_act: Activation = "silu"
    window_size: int = 112

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        full = reader.take("fullatt_block_indexes")
        self.full = [7, 15, 23, 31] if full is None else full
        if not isinstance(self.full, list) or not all(isinstance(i, int) for i in self.full):
            reader.problem("fullatt_block_indexes", f"{full!r} is not supported, expected a list of numbers")
            self.full = []
        if self.window < 1:
            reader.problem("window_size", f"{self.window_size} is smaller than the patches of a token")

    @property
    def window(self) -> int:
        """Tokens a side of a window."""
        return self.window_size // self.patch_size // self.spatial_merge_size


class Qwen2_5Tower(Module):
    def __init__(self, c: Qwen2_5VisionConfig) -> None:
        hidden = c.hidden_size
        self.patch_embed = Stem(c, hidden, bias=False)
        self.rotary = AxialRotary.of_halves(hidden // c.num_heads, c.theta)
        self.full = [i in c.full for i in range(c.depth)]

        def block() -> Module:
            mlp = GatedMLP(hidden, c.intermediate_size, bias=True)
            return Block(QwenAttention(c, hidden), mlp, lambda: RMSNorm(hidden, 1e-6))

        self.blocks = Layers(c.depth, block())
        self.merger = PatchMerger(c, RMSNorm(hidden, 1e-6), hidden, c.out_hidden_size)

    def forward(self, batch: Batch) -> Tensor:
        x = self.patch_embed(batch)
        whole, window = of_image(batch), of_window(batch)
        first, last = (each([whole[end] if full else window[end] for full in self.full]) for end in (0, 1))
        return self.merger(repeat(self.blocks, x, self.rotary(batch), first, last))


class Qwen3VisionConfig(QwenTowerConfig):
    """The tower of Qwen3-VL and Qwen3.5: a learned table of positions that is stretched over each image."""

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    out_hidden_size: int = 3584
    patch_size: int = 16
    num_position_embeddings: int = 2304
    hidden_act: Activation = "gelu_pytorch_tanh"

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        indexes = reader.take("deepstack_visual_indexes")
        self.deep = [] if indexes is None else indexes
        known = isinstance(self.deep, list) and all(isinstance(i, int) and 0 <= i < self.depth for i in self.deep)
        if not known or sorted(set(self.deep)) != self.deep:
            reader.problem("deepstack_visual_indexes", f"{indexes!r} is not supported, expected blocks in order")
            self.deep = []
        self.table = int(self.num_position_embeddings**0.5)
        if self.table**2 != self.num_position_embeddings:
            reader.problem("num_position_embeddings", f"{self.num_position_embeddings} is no square")


class Whole(TextPart):
    """A decoder with its tower, `visual`."""

    def __init__(self, decoder: Decoder, visual: Module) -> None:
        super().__init__(decoder)
        self.visual = visual


def with_tower(decoder: Decoder, v: Qwen3VisionConfig) -> Whole:
    """The decoder with a tower of this config, of which nothing is added after layers."""
    visual = Qwen3Tower(v)
    decoder.place_images = lambda x, batch: placed(x, visual(batch)[0], batch, v.spatial_merge_size)
    return Whole(decoder, visual)


class Numbered(Module):
    """Modules with numbers for names; a call has the number of the one that it calls."""

    def __init__(self, modules: list[Module]) -> None:
        vars(self).update({str(number): of for number, of in enumerate(modules)})

    def forward(self, number: int, x: Tensor) -> Tensor:
        return getattr(self, str(number))(x)


class PositionTable(Module):
    def __init__(self, rows: int, columns: int) -> None:
        self.weight = Parameter(rows, columns)

    def forward(self, batch: Batch) -> Tensor:
        """The mean of the four entries around each patch, by their weights [1, P, columns]."""
        entries = ops.embedding(batch.patch_corners, self.weight)
        weights = ops.cast(ops.split_heads(batch.patch_corner_weights, head_dim=1), dtype="float")
        return ops.merge_heads(ops.sum_heads(scale_rows(entries, weights)))


class DeepBlock(Block):
    """A block of which the result is kept, as the carried value of this number."""

    def __init__(self, number: int | None, attn: Module, mlp: Module, norm: Callable[[], Module]) -> None:
        super().__init__(attn, mlp, norm)
        self.number = number

    def forward(self, x: Tensor, *carried: Any) -> Any:
        *kept, rotate, first, last = carried
        x = super().forward(x, rotate, first, last)
        return x, *(x if number == self.number else of for number, of in enumerate(kept))


class Qwen3Tower(Module):
    """Gives the rows of the tokens, and those that are added after the first layers of the text."""

    def __init__(self, c: Qwen3VisionConfig) -> None:
        hidden = c.hidden_size
        self.deep = c.deep
        self.patch_embed = Stem(c, hidden, bias=True)
        self.pos_embed = PositionTable(c.num_position_embeddings, hidden)
        self.rotary = AxialRotary.of_halves(hidden // c.num_heads, c.theta)

        def block(number: int | None) -> Module:
            mlp = PlainMLP(hidden, c.intermediate_size, c.hidden_act, ("linear_fc1", "linear_fc2"))
            return DeepBlock(number, QwenAttention(c, hidden), mlp, lambda: LayerNorm(hidden, 1e-6))

        numbers = [c.deep.index(i) if i in c.deep else None for i in range(c.depth)]
        kinds = {str(number): block(number) for number in dict.fromkeys(numbers)}
        self.blocks = Layers([str(number) for number in numbers], kinds)
        self.merger = Merger(c, hidden, c.out_hidden_size)
        if c.deep:
            mergers = [Merger(c, hidden, c.out_hidden_size, after=True) for _ in c.deep]
            self.deepstack_merger_list = Numbered(mergers)
        self.hidden = hidden

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        x = self.patch_embed(batch) + self.pos_embed(batch)
        unset = [Unset(1, "P", self.hidden) for _ in self.deep]
        x, *kept = repeat(self.blocks, (x, *unset), self.rotary(batch), *of_image(batch))
        deep = [self.deepstack_merger_list(number, of) for number, of in enumerate(kept)]
        return self.merger(x), deep
