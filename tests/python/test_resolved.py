"""`resolved.yaml`: the file that a run writes about its options is a run of its own, with the same numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY
from surogate.cli.commands import main

DEVICE = os.environ.get("SUROGATE_TEST_DEVICE", "cpu")
STORIES = REPOSITORY / "examples" / "stories"
PAIRS = {"path": "pairs.jsonl", "type": "preference"}
VERDICTS = {"path": "verdicts.jsonl", "type": "auto"}
TALKS = {"path": "talks.jsonl", "type": "conversation"}
TASKS = {"path": "tasks.jsonl", "type": "instruction", "instruction_field": "q", "output_field": "a", "prompt_format": "{instruction} "}
TEXTS = {"path": "texts.txt", "type": "text"}
SAMPLED = {"num_generations": 4, "max_completion_length": 8, "rewards": [{"function": "length", "tokens": 3}]}

#: The command and the options of a run, by its name.
RUNS: dict[str, tuple[str, dict[str, object]]] = {
    "sft": ("sft", {"datasets": [TEXTS]}),
    "conversations": ("sft", {"datasets": [TALKS], "template": "chat.jinja", "loss_scale": {"assistant": 0.5}}),
    "instructions": ("sft", {"datasets": [TASKS], "sample_packing": False, "lora_rslora": True}),
    "by their columns": ("sft", {"datasets": [{"path": "tasks.jsonl", "type": "auto"}, {**TALKS, "type": "auto"}], "template": "chat.jinja"}),
    "a batch of all": ("sft", {"datasets": [TEXTS], "batch_size": 4, "per_device_train_batch_size": ..., "gradient_accumulation_steps": ...}),
    "samples": ("sft", {"datasets": [TEXTS], "sample_prompts": ["Once: #1"], "sample_tokens": 4, "neftune_noise_alpha": 2.0}),
    "two sets": ("sft", {"datasets": [{**TEXTS, "samples": 2}, TASKS], "interleave_probs": [0.5, 0.5]}),
    "held out": ("sft", {"datasets": [TEXTS], "validation_datasets": [TEXTS], "load_best_model_at_end": True}),
    "recommended": ("sft", {"datasets": [TEXTS], "apply_recommended_values": True}),
    "rates": ("sft", {"datasets": [TEXTS], "learning_rates": {"q_proj": 1e-4}, "lr_scheduler_type": "linear"}),
    "pt": ("pt", {"datasets": [TEXTS]}),
    "pt from nothing": ("pt", {"datasets": [TEXTS], "init": "random", "optimizer": "normuon"}),
    "pt on ranks": ("pt", {"datasets": [TEXTS], "gpus": 2, "zero_level": 2}),
    "dpo": ("dpo", {"datasets": [PAIRS]}),
    "dpo of all weights": ("dpo", {"datasets": [PAIRS], "lora": False, "loss_type": ["ipo", "sft"]}),
    "kto": ("kto", {"datasets": [VERDICTS]}),
    "orpo": ("orpo", {"datasets": [PAIRS]}),
    "cpo": ("cpo", {"datasets": [PAIRS], "loss_type": "simpo", "beta": 2.0}),
    "reward": ("reward", {"datasets": [PAIRS], "center_rewards_coefficient": 0.01}),
    "grpo": ("grpo", {"datasets": [{**PAIRS, "type": "auto"}], **SAMPLED}),
    "grpo with a reference": ("grpo", {"datasets": [{**PAIRS, "type": "auto"}], "beta": 0.1, **SAMPLED}),
    "distil": ("distil", {"datasets": [TASKS], "teacher": str(STORIES / "model")}),
    "distil on own answers": (
        "distil",
        {"datasets": [TASKS], "teacher": str(STORIES / "model"), "lmbda": 1, "max_completion_length": 8},
    ),
    "in four bits": ("sft", {"datasets": [TEXTS], "qlora_bnb": True}),
    "on nodes": ("pt", {"datasets": [TEXTS], "distributed": {"gpus_per_node": 2}}),
    "by its option": ("sft", {"task": "dpo", "datasets": [PAIRS]}),
    "quantize_aware": (
        "sft",
        {"datasets": [TEXTS], "lora": False, "quantize_aware": "w8a16", "quantize_aware_group_size": -1},
    ),
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with data of every form, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    words = [f"Tom saw a {color} cat number {n}." for n in range(6) for color in ("red", "big")]

    def rows(name: str, of: list[dict[str, object]]) -> None:
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in of))

    rows("pairs.jsonl", [{"prompt": f"{text} Then", "chosen": " he ran.", "rejected": " it."} for text in words])
    rows("verdicts.jsonl", [{"prompt": f"{text} Then", "completion": " he ran.", "label": n % 2 == 0} for n, text in enumerate(words)])
    rows("tasks.jsonl", [{"q": text, "a": "He ran home.", "question": text, "answer": "He ran."} for text in words])
    said = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cat."}]
    rows("talks.jsonl", [{"messages": said} for _ in words])
    Path("chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}")
    Path("texts.txt").write_text("\n\n".join(words * 4))
    return tmp_path


def losses(output: Path) -> list[tuple[int, float]]:
    (log,) = output.glob("log-*.json")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [(event["step"], event["loss"]) for event in events if event["event"] == "step"]


@pytest.mark.parametrize("name", RUNS)
def test_every_resolved_file_is_a_run_with_the_same_numbers(name, place, capfd):
    command, options = RUNS[name]
    usual = {
        "model": str(STORIES / "model"), "device": DEVICE, "torch_dtype": "float32", "sequence_len": 64, "lora_rank": 4,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 2, "report_to": [],
        "run_name": "a run", "output_dir": "output", "optimizer": "adamw", "learning_rate": 1e-3,
    }  # fmt: skip
    given = {name: value for name, value in {**usual, **options}.items() if value is not ...}
    Path("run.yaml").write_text(yaml.safe_dump(given))
    assert main([command, "run.yaml"]) == 0, capfd.readouterr().err
    output, kept = Path("output"), Path("kept")
    output.rename(kept)
    assert main([command, "kept/resolved.yaml"]) == 0, capfd.readouterr().err
    assert losses(output) == losses(kept) and len(losses(kept)) == 2
    first, second = (yaml.safe_load((path / "resolved.yaml").read_text()) for path in (kept, output))
    assert first == second
