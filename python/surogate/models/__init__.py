"""The architectures, one file each. Importing a file registers it."""

from collections.abc import Sequence
from typing import Any

from .. import dsl, tasks
from . import gpt2, llama, mistral, qwen2, qwen3, smollm3

__all__ = ["build", "gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "tasks"]

#: What a program is compiled for unless something else is asked for.
TASKS = ("causal_lm",)


def build(fields: dict[str, Any], tasks: Sequence[str] = TASKS) -> str:
    """:func:`surogate.dsl.build` with the loss of a language model."""
    return dsl.build(fields, tasks)
