"""The architectures, one file each. Importing a file registers it."""

from collections.abc import Mapping, Sequence
from typing import Any

from .. import dsl, tasks
from . import (
    deepseek_v2,
    deepseek_v3,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gemma4_unified,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_oss,
    granite,
    granitemoehybrid,
    lfm2,
    lfm2_moe,
    llama,
    mistral,
    mistral3,
    mixtral,
    nemotron_h,
    olmo,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen2_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
    seed_oss,
    smollm3,
    smolvlm,
    starcoder2,
)

__all__ = [
    "build",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt2",
    "gpt_oss",
    "granite",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "llama",
    "mistral",
    "mistral3",
    "mixtral",
    "nemotron_h",
    "olmo",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen2_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "qwen3_vl_moe",
    "seed_oss",
    "smollm3",
    "smolvlm",
    "starcoder2",
    "tasks",
]

#: What a program is compiled for unless something else is requested.
TASKS = ("causal_lm",)


def build(
    fields: dict[str, Any], tasks: Sequence[str] | Mapping[str, Mapping[str, Any]] = TASKS, *, images: bool = False
) -> str:
    """:func:`surogate.dsl.build` with the loss of a language model."""
    return dsl.build(fields, tasks, images=images)
