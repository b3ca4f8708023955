"""The graphs that tests in Rust read are those that the models make today. SUROGATE_RECORD=1 records them again."""

import json
import os
from pathlib import Path

import pytest

from surogate import models

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "crates/train/tests/ir"

#: Every family in a small form, a line each: its name, its configuration and its graph.
FAMILIES = RECORDED / "families.jsonl"

OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "vocab_size": 1024, "hidden_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512,
    "num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip

#: Layers that hand on keys and values, have inputs of their own and experts.
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"], "vocab_size": 512, "vocab_size_per_layer_input": 512, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 16,
    "layer_types": ["full_attention"] * 2, "global_head_dim": 32, "num_kv_shared_layers": 1, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
    "moe_intermediate_size": 16, "max_position_embeddings": 64,
}  # fmt: skip

CONFIGS = {
    "gemma4": GEMMA4,
    "llama": json.loads((ROOT / "tests/golden/llama/config.json").read_text()),
    "olmoe": OLMOE,
    "qwen3": json.loads((ROOT / "tests/golden/qwen3/config.json").read_text()),
    "stories": json.loads((ROOT / "examples/stories/model/config.json").read_text()),
}


def without_lines(value):
    """Without the lines of the models' sources, which change with every edit."""
    if isinstance(value, dict):
        return {key: without_lines(of) for key, of in value.items() if key != "at"}
    return [without_lines(of) for of in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_graphs_are_those_of_today(name):
    path = RECORDED / f"{name}.json"
    made = json.loads(models.build(CONFIGS[name]))
    if os.environ.get("SUROGATE_RECORD"):
        path.write_text(json.dumps(made, indent=1) + "\n")
    assert without_lines(json.loads(path.read_text())) == without_lines(made)


def family_configs(golden: Path) -> dict[str, dict]:
    """The configurations of the small models that have recorded values."""
    folders = {path.parent.name: json.loads(path.read_text()) for path in golden.glob("*/config.json")}
    drawn = json.loads((ROOT / "tests/golden/families.json").read_text())
    return folders | {name: of["config"] for name, of in (drawn["images"] | drawn["families"]).items()}


def test_recorded_families_are_all_and_those_of_today(shared):
    made = [
        {"name": name, "config": config, "ir": without_lines(json.loads(models.build(config)))}
        for name, config in sorted(family_configs(shared / "golden").items())
    ]
    if os.environ.get("SUROGATE_RECORD"):
        FAMILIES.write_text("".join(json.dumps(of, separators=(",", ":")) + "\n" for of in made))
    recorded = [json.loads(line) for line in FAMILIES.read_text().splitlines()]
    assert [of["name"] for of in recorded] == [of["name"] for of in made]
    for found, expected in zip(recorded, made, strict=True):
        assert found == expected, expected["name"]


def test_every_recorded_graph_is_compared():
    assert {path.stem for path in RECORDED.glob("*.json")} == set(CONFIGS)
