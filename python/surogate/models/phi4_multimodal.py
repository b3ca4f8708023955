"""Phi-4 multimodal (text model): Phi-3 with the parts for images and sound, which are copied, next to the embedding. Files have the
names of transformers, or those of the model's own code (`Phi4MMForCausalLM`), where each matrix lies next to two adapters for images
and sound; these are copied, too, as that code leaves them out for text."""

from __future__ import annotations

from ..dsl import Module, Reader, Tensor, model
from ..layers import CausalLM, Decoder, DecoderLayer, FusedGatedMLP, Linear
from .phi3 import Attention, Phi3, Phi3Config


class Phi4MultimodalConfig(Phi3Config):
    vocab_size: int = 200064
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    pad_token_id: int | None = 199999

    def derive(self, reader: Reader) -> None:
        for name in ("vision_config", "audio_config"):
            reader.take(name)  # of parts that are not computed
        super().derive(reader)


class Phi4MMConfig(Phi4MultimodalConfig):
    def derive(self, reader: Reader) -> None:
        for name in ("embd_layer", "img_processor", "audio_processor", "vision_lora", "speech_lora"):
            reader.take(name)  # of parts that are not computed
        for name, only in (("mlp_bias", False), ("lm_head_bias", False), ("full_attn_mod", 1), ("interpolate_factor", 1)):
            if (found := reader.take(name)) not in (None, only):
                reader.problem(name, f"{found} is not supported, expected {only}")
        super().derive(reader)


@model(
    "Phi4MultimodalForCausalLM",
    config=Phi4MultimodalConfig,
    model_type="phi4_multimodal",
    base="model",
    carried=["model.embed_tokens_extend."],
    examples=["microsoft/Phi-4-multimodal-instruct"],
)
class Phi4Multimodal(Phi3):
    pass


class Adapted(Module):
    """A matrix, `base_layer`, next to which files have adapters that are not computed."""

    def __init__(self, matrix: Linear) -> None:
        self.base_layer = matrix

    def forward(self, x: Tensor) -> Tensor:
        """The product of x and the matrix."""
        return self.base_layer(x)


@model(
    "Phi4MMForCausalLM",
    config=Phi4MMConfig,
    model_type="phi4mm",
    base="model",
    carried=["model.embed_tokens_extend."],
    examples=["microsoft/Phi-4-multimodal-instruct"],
)
class Phi4MM(CausalLM):
    def __init__(self, c: Phi4MMConfig) -> None:
        attention, mlp = Attention(c, window=c.window), FusedGatedMLP(c.hidden_size, c.intermediate_size)
        attention.qkv_proj, attention.o_proj = Adapted(attention.qkv_proj), Adapted(attention.o_proj)
        mlp.gate_up_proj, mlp.down_proj = Adapted(mlp.gate_up_proj), Adapted(mlp.down_proj)
        super().__init__(c, Decoder(c, DecoderLayer(c, attention, mlp)))
        adapted = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        layers = range(c.num_hidden_layers)
        self.carried = [f"model.layers.{i}.{name}.lora_" for i in layers for name in adapted]
