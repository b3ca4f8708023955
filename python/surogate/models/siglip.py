"""SigLIP's vision tower: a table of positions, and layers with LayerNorm and a plain feed-forward layer."""

from __future__ import annotations

from typing import Any

from ..dsl import Batch, Layers, Module, Reader, Tensor, output, repeat
from ..layers import Activation, Embedding, LayerNorm
from ..layers.vision import PatchEmbedding, PlainMLP, TowerAttention, TowerConfig, of_image, pixels


class SiglipConfig(TowerConfig):
    image_size: int = 224
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    layer_norm_eps: float = 1e-6
    hidden_act: Activation = "gelu_pytorch_tanh"

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        if self.hidden_size % self.num_attention_heads:
            reader.problem("num_attention_heads", f"{self.num_attention_heads} does not divide {self.hidden_size}")

    def form(self, side: int) -> dict[str, Any]:
        """The layout of batches for this tower."""
        table = self.image_size // self.patch_size
        return {"token": self.image_token, "width": self.width, "side": side, "table": table}


class Embeddings(Module):
    def __init__(self, c: SiglipConfig) -> None:
        self.width = c.width
        axes = [c.num_channels, c.patch_size, c.patch_size]
        self.patch_embedding = PatchEmbedding(axes, c.hidden_size, bias=True)
        self.position_embedding = Embedding((c.image_size // c.patch_size) ** 2, c.hidden_size)

    def forward(self, batch: Batch) -> Tensor:
        return self.patch_embedding(pixels(batch, self.width)) + self.position_embedding(batch.patch_entries)


class Layer(Module):
    def __init__(self, c: SiglipConfig) -> None:
        self.layer_norm1 = LayerNorm(c.hidden_size, c.layer_norm_eps)
        self.self_attn = TowerAttention(c.hidden_size, c.num_attention_heads, bias=True, out="out_proj")
        self.layer_norm2 = LayerNorm(c.hidden_size, c.layer_norm_eps)
        self.mlp = PlainMLP(c.hidden_size, c.intermediate_size, c.hidden_act, ("fc1", "fc2"))

    def forward(self, x: Tensor, first: Tensor, last: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), None, (first, last))
        x = x + self.mlp(self.layer_norm2(x))
        output("vision.layer.{i}", x)
        return x


class Encoder(Module):
    def __init__(self, c: SiglipConfig) -> None:
        self.layers = Layers(c.num_hidden_layers, Layer(c))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return repeat(self.layers, x, *of_image(batch))


class Siglip(Module):
    def __init__(self, c: SiglipConfig) -> None:
        self.embeddings = Embeddings(c)
        self.encoder = Encoder(c)
        self.post_layernorm = LayerNorm(c.hidden_size, c.layer_norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        return self.post_layernorm(self.encoder(self.embeddings(batch), batch))
