"""The rows of the table: what each one trains, on what, and the number that it is held against.

Deliberately unknown here: how a row is run or shown. The models' sizes are those of their public `config.json`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
from typing import Any

VOCABULARY = 151936

# hidden, intermediate, layers, heads, key heads, tied embeddings
SIZES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
}

# Mixtures of experts: what their public `config.json` says beyond that.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "olmoe-7b": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}

# What a mixture has instead where it is to be small; one has no `moe_intermediate_size` of its own.
TINY_MIXTURE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_EXPERTS = 8

# Adapters of attention alone.
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

# Small enough for a CPU: the table's own test.
TINY = (64, 128, 2, 4, 2)
TINY_VOCABULARY = 512


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. Rates in tokens per second."""

    name: str
    model: str
    work: str
    batch: int
    accumulation: int
    must_beat: float | None = None
    target: float | None = None
    # The row whose rate this one is compared with, and the share of it that is wanted.
    baseline: tuple[str, float] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    packed: bool = False

    @property
    def peer_settings(self) -> list[tuple[int, int]]:
        """Batch and accumulation of the peer: ours, then smaller batches where that does not fit."""
        return [(self.batch, self.accumulation)] + ([(4, 1), (2, 1)] if self.work == "full" else [])


def _rows() -> list[Row]:
    adapters = {"0.6b": (102.9, 128), "1.7b": (56.1, 65), "4b": (25.6, 29), "8b": (16.0, 17.3)}
    weights = {"0.6b": (110.9, 113), "1.7b": (49.0, 51), "4b": (21.2, 22), "8b": (11.9, 12.5)}
    rows = []
    for size, (least, target) in adapters.items():
        model, name = f"qwen3-{size}", f"lora-{size}"
        rows.append(Row(name, model, "lora", 2, 4, least * 1e3, target * 1e3))
        dropout = (("lora_dropout", 0.05),)
        rows.append(Row(f"{name}-dropout", model, "lora", 2, 4, baseline=(name, 0.97), options=dropout))
        rows.append(Row(f"{name}-packed", model, "lora", 2, 4, baseline=(name, 1.0), packed=True))
    for size, (least, target) in weights.items():
        rows.append(Row(f"full-{size}", f"qwen3-{size}", "full", 8, 1, least * 1e3, target * 1e3))
    attention = (("lora_target_modules", ATTENTION),)
    experts = (*attention, ("lora_target_parameters", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
    rows.append(Row("lora-30b-a3b", "qwen3-30b-a3b", "lora", 2, 4, options=attention))
    rows.append(Row("lora-30b-a3b-experts", "qwen3-30b-a3b", "lora", 2, 4, options=experts))
    rows.append(Row("lora-gpt-oss-20b", "gpt-oss-20b", "lora", 2, 4, options=attention))
    rows.append(Row("full-olmoe-7b", "olmoe-7b", "full", 8, 4))
    return rows


ROWS = {row.name: row for row in _rows()}


def write_model(folder: pathlib.Path, model: str, tiny: bool) -> pathlib.Path:
    """The `config.json` of a model, which is all that random weights need."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = mixture(model, tiny) if model in MIXTURES else dense(model, tiny)
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    return folder


def vocabulary(model: str, tiny: bool) -> int:
    """Tokens of a model."""
    return TINY_VOCABULARY if tiny else MIXTURES.get(model, {}).get("vocab_size", VOCABULARY)


def mixture(model: str, tiny: bool) -> dict[str, Any]:
    fields = MIXTURES[model] | {"initializer_range": 0.02, "torch_dtype": "bfloat16"}
    if tiny:
        experts = "num_local_experts" if "num_local_experts" in fields else "num_experts"
        fields |= {name: value for name, value in TINY_MIXTURE.items() if name in fields}
        fields |= {experts: TINY_EXPERTS, "vocab_size": TINY_VOCABULARY}
        if "moe_intermediate_size" in fields:
            fields["moe_intermediate_size"] = 32
    return fields


def dense(model: str, tiny: bool) -> dict[str, Any]:
    *sizes, tied = SIZES[model]
    hidden, intermediate, layers, heads, key_heads = TINY if tiny else sizes
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": TINY_VOCABULARY if tiny else VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": 16 if tiny else 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def write_data(path: pathlib.Path, packed: bool, length: int, tokens: int, vocabulary: int) -> pathlib.Path:
    """Rows of random tokens for `type: tokens`: full ones, or documents of 20 to 600 tokens, 150 in the mean, as
    questions with worked answers have them."""
    draw = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        written = 0
        while written < tokens:
            count = length
            if packed:
                count = min(length, 600, max(20, round(draw.gauss(150, 60))))
            file.write(json.dumps({"input_ids": [draw.randrange(1, vocabulary) for _ in range(count)]}) + "\n")
            written += count
    return path
