"""Sizes of grouped-query attention, as the fields of config.json give them."""

from __future__ import annotations

from ..dsl import ModelConfig, Reader


class HeadsConfig(ModelConfig):
    """Base of the configs of decoders with grouped-query attention."""

    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_key_value_heads: int = 0  # one for each attention head
    head_dim: int = 0  # hidden_size / num_attention_heads

    def derive(self, reader: Reader) -> None:
        """Fills in head sizes. `num_key_value_heads: null` means one for each attention head, whatever
        an architecture has where the field is missing."""
        if reader.fields.get("num_key_value_heads", 0) is None or not self.num_key_value_heads:
            self.num_key_value_heads = self.num_attention_heads
        if not self.head_dim and self.hidden_size % self.num_attention_heads:
            reader.problem("head_dim", "is missing, and num_attention_heads does not divide hidden_size")
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            reader.problem("num_key_value_heads", f"{self.num_key_value_heads} does not divide num_attention_heads")

    @property
    def queries(self) -> int:
        """Columns of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Columns of all key heads."""
        return self.num_key_value_heads * self.head_dim
