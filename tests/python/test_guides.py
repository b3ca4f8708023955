"""The guides' configurations are read as they are."""

from __future__ import annotations

import pytest
from surogate import _native

CONFIGURATIONS = {
    "several GPUs": "model: m\ngpus: 4\n",
    "sharded optimizer and gradients": "model: m\nzero_level: 2\n",
    "sharded weights": "model: m\nshard_weights: true\n",
    "sharded gradients": "model: m\nshard_gradients: true\n",
    "several nodes": """
model: meta-llama/Llama-3.1-8B
per_device_train_batch_size: 2
sequence_len: 2048
distributed:
  ray_address: "auto"
  num_nodes: 2
  gpus_per_node: 8
  worker_output_dir: null
""",
    "a model on two nodes": """
model_name: meta-llama/Llama-3.1-8B
dataset: timdettmers/openassistant-guanaco
per_device_train_batch_size: 4
sequence_len: 2048
gradient_accumulation_steps: 4
num_epochs: 3
learning_rate: 2e-5
warmup_steps: 100
output_dir: ./output/llama-3.1-8b-guanaco
distributed:
  ray_address: "auto"
  num_nodes: 2
  gpus_per_node: 8
""",
    "texts": """
model: m
datasets:
  - path: "HuggingFaceFW/fineweb-edu"
    type: text
    text_field: text
    split: train
    samples: 100000
""",
    "instructions": """
model: m
datasets:
  - path: "yahma/alpaca-cleaned"
    type: instruction
    instruction_field: instruction
    input_field: input
    output_field: output
    system_prompt_type: fixed
    system_prompt: "You are a helpful AI assistant."
""",
    "conversations": """
model: m
datasets:
  - path: "HuggingFaceH4/ultrachat_200k"
    type: conversation
    messages_field: messages
    split: train_sft
""",
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_guides_are_read_as_they_are(name):
    _native.Config.from_yaml(CONFIGURATIONS[name], "run.yaml", "sft", [])
