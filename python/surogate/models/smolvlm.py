"""SmolVLM and Idefics3: Llama with SigLIP's tower, whose patches lie side by side in one token."""

from __future__ import annotations

from typing import Any

from ..dsl import Batch, Module, Tensor, model
from ..errors import ModelConfigError
from ..layers import Attention, CausalLM, Decoder, DecoderLayer, GatedMLP, Linear
from ..layers.vision import merged, placed
from .llama import LlamaConfig
from .siglip import Siglip, SiglipConfig


class SmolTextConfig(LlamaConfig):
    section = "text_config"


class SmolVisionConfig(SiglipConfig):
    image_size: int = 512
    token = ("image_token_id", 128257)

    @property
    def side(self) -> int:
        """Rows and columns of patches that become one token."""
        factor = self.whole.get("scale_factor", 2)
        if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
            problem = f"`scale_factor`: {factor!r} is not supported, expected a whole number above 0"
            raise ModelConfigError("SmolVLMForConditionalGeneration", [problem])
        return factor


class Projection(Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        self.proj = Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Connector(Module):
    def __init__(self, c: SmolTextConfig, v: SmolVisionConfig) -> None:
        self.side = v.side
        self.modality_projection = Projection(v.hidden_size * self.side**2, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.modality_projection(merged(x, self.side))


class Text(Module):
    """The decoder as the part `text_model`."""

    def __init__(self, c: SmolTextConfig) -> None:
        attention = Attention(c, bias=c.attention_bias, output_bias=c.attention_bias)
        mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.text_model = Decoder(c, DecoderLayer(c, attention, mlp))

    @property
    def embed_tokens(self) -> Module:
        return self.text_model.embed_tokens

    def forward(self, batch: Batch) -> Tensor:
        return self.text_model(batch)


class Whole(Text):
    def __init__(self, c: SmolTextConfig, v: SmolVisionConfig) -> None:
        super().__init__(c)
        self.vision_model, self.connector = Siglip(v), Connector(c, v)
        self.text_model.place_images = self.put

    def put(self, x: Tensor, batch: Batch) -> Tensor:
        return placed(x, self.connector(self.vision_model(batch)), batch, self.connector.side)


class SmolVLMWhole(CausalLM):
    def __init__(self, c: SmolTextConfig, v: SmolVisionConfig) -> None:
        super().__init__(c, Whole(c, v))
        self.images, self.projectors = v.form(v.side), ["model.connector."]


FILES: dict[str, Any] = dict(
    config=SmolTextConfig,
    carried=["model.vision_model.", "model.connector."],
    images=(SmolVLMWhole, SmolVisionConfig),
)


@model(
    "SmolVLMForConditionalGeneration",
    model_type="smolvlm",
    examples=["HuggingFaceTB/SmolVLM2-2.2B-Instruct", "HuggingFaceTB/SmolVLM-256M-Instruct"],
    **FILES,
)
class SmolVLMText(CausalLM):
    def __init__(self, c: SmolTextConfig) -> None:
        super().__init__(c, Text(c))


@model("Idefics3ForConditionalGeneration", model_type="idefics3", examples=["HuggingFaceM4/Idefics3-8B-Llama3"], **FILES)
class Idefics3Text(CausalLM):
    def __init__(self, c: SmolTextConfig) -> None:
        super().__init__(c, Text(c))
