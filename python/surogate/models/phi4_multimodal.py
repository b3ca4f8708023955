"""Phi-4 multimodal (text model): Phi-3 with the parts for images and sound, which are copied, next to the embedding. Files have the
names of transformers; those of the model's own code (`Phi4MMForCausalLM`), whose layers hold adapters, are not read."""

from __future__ import annotations

from ..dsl import Reader, model
from .phi3 import Phi3, Phi3Config


class Phi4MultimodalConfig(Phi3Config):
    vocab_size: int = 200064
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    pad_token_id: int | None = 199999

    def derive(self, reader: Reader) -> None:
        for name in ("vision_config", "audio_config"):
            reader.take(name)  # of parts that are not computed
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
