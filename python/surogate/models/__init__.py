"""The architectures, one file each. Importing a file registers it."""

from ..dsl import build
from . import llama, mistral, qwen2, qwen3

__all__ = ["build", "llama", "mistral", "qwen2", "qwen3"]
