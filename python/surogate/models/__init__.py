"""The architectures, one file each. Importing a file registers it."""

from ..dsl import build
from . import gpt2, llama, mistral, qwen2, qwen3, smollm3

__all__ = ["build", "gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3"]
