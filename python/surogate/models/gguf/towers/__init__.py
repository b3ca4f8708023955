"""The towers of vision-language models as llama.cpp names and computes them: tensor names, keys, fixed settings."""

from .form import Processor, Source, Tower
from .gemma4 import GEMMA4, UNIFIED
from .pixtral import PIXTRAL
from .qwen import QWEN2, QWEN2_5, QWEN3
from .siglip import GEMMA3, SMOLVLM

__all__ = ["TOWERS", "Processor", "Source", "Tower"]

#: By the name that stands in config.json's `architectures`.
TOWERS = {
    "Qwen2VLForConditionalGeneration": QWEN2,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5,
    "Qwen3VLForConditionalGeneration": QWEN3,
    "Qwen3VLMoeForConditionalGeneration": QWEN3,
    "Qwen3_5ForConditionalGeneration": QWEN3,
    "Qwen3_5MoeForConditionalGeneration": QWEN3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "SmolVLMForConditionalGeneration": SMOLVLM,
    "Idefics3ForConditionalGeneration": SMOLVLM,
    "Mistral3ForConditionalGeneration": PIXTRAL,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": UNIFIED,
}
