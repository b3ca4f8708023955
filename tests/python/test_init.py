"""`surogate init`: the file that it writes loads, runs, and is what the plan says of the machine."""

from __future__ import annotations

import json
import re

import pytest
from conftest import REPOSITORY
from surogate import _native
from surogate.cli import foreign
from surogate.cli.commands import main
from surogate.cli.init import draft

MODEL = str(REPOSITORY / "examples/stories/model")
DATA = str(REPOSITORY / "examples/stories/data/shakespeare.txt")


def test_the_file_runs_and_is_not_overwritten(tmp_path, capfd):
    path = tmp_path / "run.yaml"
    words = ["init", MODEL, DATA, "--output", str(path), "--output-dir", str(tmp_path / "out"), "--sequence-len", "64"]
    assert main([*words, "--max-steps", "2"]) == 0, capfd.readouterr().err
    text = path.read_text()
    assert "recognised as text" in text and re.search(r"Planned for cpu: \d+\.\d\d of \d+ GiB", text)
    assert main(["sft", str(path), "--device", "cpu"]) == 0, capfd.readouterr().err
    assert (tmp_path / "out" / "adapter").is_dir()
    capfd.readouterr()
    assert main(words) == 1
    assert "is not overwritten" in capfd.readouterr().err and path.read_text() == text


@pytest.mark.parametrize("task", ["sft", "pt"])
def test_what_is_asked_for_wins_and_every_line_is_an_option(task):
    asked = [("learning_rate", "1e-3"), ("optimizer", "adamw"), ("sequence_len", "64")]
    text = draft(MODEL, DATA, task, "h200", asked)
    config = _native.Config.from_yaml(text, "run.yaml", task, [])
    resolved = config.resolved_yaml()
    assert "learning_rate: 0.001" in resolved and "optimizer: adamw " in resolved and "sequence_len: 64" in resolved
    assert f"lora: {'true' if task == 'sft' else 'false'}" in resolved and text.count("learning_rate:") == 1


def test_less_memory_gives_smaller_micro_batches():
    def rows(limit: str) -> int:
        text = draft(MODEL, DATA, "pt", "h200", [("sequence_len", "512"), ("num_epochs", "20"), ("memory_limit", limit)])
        assert values(text, "batch_size") == "8"
        return int(re.search(r"8 rows per step, (\d+) at once", text)[1])

    much, little = rows("100GiB"), rows("612MiB")
    assert much > little


def test_a_mistake_is_reported_before_anything_is_written(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    assert main(["init", MODEL, str(tmp_path / "none.jsonl"), "--output", str(path)]) == 2
    assert main(["init", MODEL, DATA, "--output", str(path), "--learning-rte", "1"]) == 2
    assert "did you mean `learning_rate`" in capsys.readouterr().err and not path.exists()


def values(text: str, name: str) -> str:
    return re.search(f"^{name}: (.+)$", text, re.MULTILINE)[1]


def test_few_data_get_enough_steps(tmp_path, capfd):
    """Fewer rows in a step, then rows of single documents, then more epochs; not against what was said."""

    def drafted(rows: int, *overrides: tuple[str, str]) -> tuple[int, str]:
        data = tmp_path / f"{rows}.jsonl"
        data.write_text("".join(json.dumps({"text": f"Once upon a time there was a cat, number {i}."}) + "\n" for i in range(rows)))
        text = draft(MODEL, str(data), "sft", "h200", [("sequence_len", "128"), ("validation_split_ratio", "0"), *overrides])
        return int(values(text, "batch_size")), text

    step, text = drafted(900)
    assert step == 8 and "sample_packing" not in text and values(text, "num_epochs") == "1"
    step, text = drafted(200)
    assert step < 8 and "sample_packing" not in text and "optimizer steps:" not in text
    step, text = drafted(30)
    assert "sample_packing: false" in text and values(text, "num_epochs") == "1" and "optimizer steps:" not in text
    step, text = drafted(7)
    assert step == 1 and "sample_packing: false" in text and values(text, "num_epochs") == "3"
    step, text = drafted(30, ("max_steps", "3"))
    assert step == 8 and "sample_packing" not in text


AXOLOTL = """
base_model: examples/stories/model
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
lora_modules_to_save: [embed_tokens]
datasets:
  - path: examples/stories/data/shakespeare.txt
    type: completion
    field: text
  - path: owner/chats
    type: chat_template
    field_messages: conversations
    message_field_role: from
    message_field_content: value
    roles: {assistant: [gpt]}
val_set_size: 0.05
output_dir: ./outputs/out
sequence_len: 256
sample_packing: true
pad_to_sequence_len: true
wandb_project: mine
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2.e-4
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_steps: 2
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
"""

LLAMA_FACTORY = """
model_name_or_path: examples/stories/model
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
dataset_dir: {folder}
template: llama3
cutoff_len: 256
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
report_to: none
mask_history: true
"""

TRL = """
model_name_or_path: examples/stories/model
dataset_name: owner/texts
dataset_config: main
dataset_test_split: test
eval_strategy: steps
eval_steps: 100
learning_rate: 2.0e-5
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
optim: paged_adamw_8bit
max_length: 256
use_peft: true
lora_r: 16
lora_target_modules: [q_proj, v_proj]
dtype: bfloat16
report_to: [wandb, swanlab]
push_to_hub: true
deepspeed: zero3.json
"""


def converted(tmp_path, monkeypatch, capsys, text: str, *words: str) -> tuple[dict[str, object], str, str]:
    """The options of the file that is written, its text, and what is printed."""
    monkeypatch.chdir(REPOSITORY)
    (tmp_path / "foreign.yaml").write_text(text)
    output = tmp_path / "run.yaml"
    output.unlink(missing_ok=True)
    code = main(["init", *words, "--from", str(tmp_path / "foreign.yaml"), "--output", str(output)])
    said = capsys.readouterr()
    assert code == 0, said.err
    written = output.read_text()
    task = "pt" if "surogate pt" in said.out else "sft"
    _native.Config.from_yaml(written, "run.yaml", task, [])
    return json.loads(_native.read_yaml(written, "run.yaml")), written, said.out


def test_a_file_of_axolotl(tmp_path, monkeypatch, capsys):
    options, text, said = converted(tmp_path, monkeypatch, capsys, AXOLOTL)
    assert options["model"] == "examples/stories/model" and options["lora"] is True and options["qlora_bnb"] is True
    assert options["lora_rank"] == 32 and options["lora_target_modules"] == ["all-linear"]
    assert options["modules_to_save"] == ["embed_tokens"] and options["lora_dropout"] == 0.0
    assert options["datasets"][0] == {"path": "examples/stories/data/shakespeare.txt", "type": "text", "text_field": "text"}
    mapping = {"role": "from", "content": "value"}
    expected = {"path": "owner/chats", "type": "conversation", "messages_field": "conversations"}
    assert options["datasets"][1] == {**expected, "message_property_mappings": mapping}
    assert options["validation_split_ratio"] == 0.05 and options["per_device_train_batch_size"] == 2
    assert options["optimizer"] == "adamw_8bit" and options["learning_rate"] == 2e-4 and options["torch_dtype"] == "bfloat16"
    assert options["save_strategy"] == "epoch" and "eval_strategy" not in options
    assert options["wandb_project"] == "mine" and options["report_to"] == ["wandb"]
    for name in ("special_tokens", "gradient_checkpointing", "evals_per_epoch", "datasets.roles"):
        assert f"\n  {name}: " in said and f"#   {name}: " in text, said
    for name in ("flash_attention", "tf32", "pad_to_sequence_len"):
        assert name not in said and name not in text
    full, _, _ = converted(tmp_path, monkeypatch, capsys, AXOLOTL.replace("adapter: qlora", "").replace("load_in_4bit: true", ""))
    assert full["lora"] is False and not any(name.startswith("lora_") for name in full)


def test_a_file_of_llama_factory(tmp_path, monkeypatch, capsys):
    listed = {
        "alpaca_en_demo": {"file_name": "alpaca.json"},
        "identity": {"file_name": "identity.json", "formatting": "sharegpt", "columns": {"messages": "turns", "tools": "tools"},
                     "tags": {"role_tag": "role", "content_tag": "content"}},
        "pairs": {"file_name": "pairs.json", "ranking": True},
    }  # fmt: skip
    (tmp_path / "dataset_info.json").write_text(json.dumps(listed))
    text = LLAMA_FACTORY.format(folder=tmp_path)
    options, _, said = converted(tmp_path, monkeypatch, capsys, text)
    assert "Without a counterpart" not in said, said
    identity = {"path": f"{tmp_path}/identity.json", "type": "conversation", "messages_field": "turns", "tools_field": "tools"}
    identity["message_property_mappings"] = {"role": "role", "content": "content"}
    alpaca = {"path": f"{tmp_path}/alpaca.json", "type": "auto"}
    assert options["datasets"] == [{**identity, "samples": 1000}, {**alpaca, "samples": 1000}]
    assert options["lora_rank"] == 8 and options["lora_alpha"] == 16 and options["lora_target_modules"] == ["all-linear"]
    assert options["sequence_len"] == 256 and options["num_epochs"] == 3 and options["loss_scale"] == "last_round"
    assert options["sample_packing"] is False and options["validation_split_ratio"] == 0.0 and options["weight_decay"] == 0.0
    assert options["template"] == "llama3" and options["learning_rate"] == 1e-4 and options["warmup_ratio"] == 0.1
    _, text, said = converted(tmp_path, monkeypatch, capsys, text.replace("identity,alpaca_en_demo", "unknown"))
    assert "dataset unknown: it is in no" in said and '{"path": "unknown"' in text
    full = LLAMA_FACTORY.format(folder=tmp_path).replace("type: lora", "type: full").replace("stage: sft", "stage: pt")
    options, _, said = converted(tmp_path, monkeypatch, capsys, full)
    assert options["lora"] is False and options["datasets"][0]["type"] == "text" and "surogate pt" in said
    for wrong, why in (("stage: ppo", "there is no such task"), ("dataset: pairs", "set `stage: dpo`")):
        key = wrong.split(":")[0]
        (tmp_path / "foreign.yaml").write_text(re.sub(f"(?m)^{key}: .*$", wrong, LLAMA_FACTORY.format(folder=tmp_path)))
        assert main(["init", "--from", str(tmp_path / "foreign.yaml"), "--output", str(tmp_path / "none.yaml")]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "task", "expected"),
    [
        ("base_model: m\nadapter: lora\nrl: dpo\nrl_beta: 0.2\nrpo_alpha: 0.5\n", "dpo",
         {"beta": 0.2, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
        ("base_model: m\nrl: ipo\n", "dpo", {"loss_type": "ipo"}),
        ("base_model: m\nrl: simpo\nsimpo_gamma: 0.7\n", "cpo", {"loss_type": "simpo", "simpo_gamma": 0.7}),
        ("base_model: m\nrl: kto\nkto_undesirable_weight: 0.5\n", "kto", {"undesirable_weight": 0.5}),
        ("base_model: m\nrl: orpo\norpo_alpha: 0.3\n", "orpo", {"beta": 0.3}),
        ("base_model: m\nreward_model: true\n", "reward", {}),
        ("model_name_or_path: m\nstage: dpo\npref_loss: simpo\npref_beta: 2.0\n", "cpo", {"loss_type": "simpo", "beta": 2.0}),
        ("model_name_or_path: m\nstage: dpo\npref_loss: hinge\n", "dpo", {"loss_type": "hinge"}),
        ("model_name_or_path: m\nstage: kto\nkto_chosen_weight: 1.5\n", "kto", {"desirable_weight": 1.5}),
        ("model_name_or_path: m\nstage: rm\n", "reward", {}),
        ("model_name_or_path: m\nbeta: 0.3\nloss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.5]\n", "dpo",
         {"beta": 0.3, "loss_type": ["sigmoid", "sft"]}),
        ("model_name_or_path: m\nloss_type: apo_zero_unpaired\n", "kto", {"loss_type": "apo_zero_unpaired"}),
        ("model_name_or_path: m\ncenter_rewards_coefficient: 0.01\n", "reward", {"center_rewards_coefficient": 0.01}),
        ("model_name_or_path: m\nreward_funcs: [a.b.c, d.py:e]\nreward_weights: [2.0, 0.5]\nscale_rewards: false\n", "grpo",
         {"rewards": [{"function": "a.b:c", "weight": 2.0}, {"function": "d.py:e", "weight": 0.5}], "scale_rewards": "none"}),
        ("model_name_or_path: m\nreward_funcs: a.b\nscale_rewards: true\n", "grpo",
         {"rewards": [{"function": "a:b"}], "scale_rewards": "group"}),
        ("model_name_or_path: m\nreward_funcs: [a.b]\nscale_rewards: batch\n", "grpo", {"scale_rewards": "batch"}),
    ],
)  # fmt: skip
def test_tasks_of_preferences_are_read_from_other_tools(text, task, expected, tmp_path):
    found = foreign.convert(text + "learning_rate: 1e-5\n", "foreign.yaml")
    assert found.task == task
    assert {name: found.options.get(name) for name in expected} == expected, found.left_out
    assert not found.left_out.keys() & {"reward_funcs", "reward_weights", "scale_rewards", "truncation_strategy"}


@pytest.mark.parametrize(
    ("text", "task", "rate"),
    [
        ("beta: 0.1\n", "dpo", None),
        ("loss_type: kto\n", "kto", None),
        ("cpo_alpha: 1.0\n", "cpo", None),
        ("num_generations: 8\nreward_funcs: [a.b]\n", "grpo", None),
        ("center_rewards_coefficient: 0.01\n", "reward", None),
        ("packing: true\n", "sft", 2e-5),
    ],
)
def test_a_file_of_trl_without_a_learning_rate_has_that_of_its_task(text, task, rate):
    found = foreign.convert("model_name_or_path: m\n" + text, "foreign.yaml")
    assert (found.task, found.options.get("learning_rate")) == (task, rate)
    assert "learning_rate" not in found.left_out


@pytest.mark.parametrize(
    ("text", "name", "why", "rewards"),
    [
        ("reward_funcs: [a.b, owner/judge]\n", "reward_funcs", "owner/judge is a reward model", [{"function": "a:b"}]),
        ("reward_funcs: [think_format_reward]\n", "reward_funcs", "needs it installed", [{"function": "trl.rewards:think_format_reward"}]),
        ("reward_funcs: [a.b]\nreward_weights: [1.0, 2.0]\n", "reward_weights", "2 weights for 1 functions", [{"function": "a:b"}]),
    ],
)
def test_rewards_of_trl_that_are_no_functions_here_are_named(text, name, why, rewards):
    found = foreign.convert("model_name_or_path: m\n" + text, "foreign.yaml")
    assert why in found.left_out[name] and found.options["rewards"] == rewards


def test_a_file_of_trl(tmp_path, monkeypatch, capsys):
    options, _, said = converted(tmp_path, monkeypatch, capsys, TRL)
    assert options["datasets"] == [{"path": "owner/texts", "subset": "main", "type": "auto"}]
    assert options["validation_datasets"] == [{"path": "owner/texts", "subset": "main", "type": "auto", "split": "test"}]
    assert options["sequence_len"] == 256 and options["sample_packing"] is True and options["optimizer"] == "adamw_8bit"
    assert options["lora"] is True and options["lora_target_modules"] == ["q_proj", "v_proj"]
    assert options["report_to"] == ["wandb"] and options["torch_dtype"] == "bfloat16"
    for name in ("report_to", "deepspeed", "assistant_only_loss", "gradient_checkpointing"):
        assert f"\n  {name}: " in said, said
    options, _, _ = converted(tmp_path, monkeypatch, capsys, TRL.replace("use_peft: true", ""), MODEL, DATA)
    assert options["lora"] is False and options["datasets"] == [{"path": DATA, "type": "auto"}] and options["model"] == MODEL


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base_model: m\nadapter: lora\npeft_use_rslora: true\nmodel_type: AutoModelForCausalLM\n", {"lora_rslora": True, "model_type": None}),
        ("base_model: m\nlr_scheduler: cosine\ncosine_min_lr_ratio: 0.1\n", {"lr_scheduler_type": "cosine", "final_lr_fraction": 0.1}),
        ("model_name_or_path: m\nuse_peft: true\nuse_rslora: true\n", {"lora_rslora": True, "sequence_len": 1024}),
        ("model_name_or_path: m\nmax_length: null\n", {"sequence_len": None}),
        ("model_name_or_path: m\nlr_scheduler_type: cosine_with_restarts\n", {"lr_scheduler_type": "cosine_with_restarts", "lr_cycles": 1}),
        ("model_name_or_path: m\nlr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 3}\n", {"lr_cycles": 3}),
        ("model_name_or_path: m\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.25}\n",
         {"lr_scheduler_type": "cosine", "final_lr_fraction": 0.25}),
        ("model_name_or_path: m\nlearning_rate: 1e-4\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-5}\n",
         {"final_lr_fraction": 0.1}),
        ("model_name_or_path: m\nstage: sft\npacking: true\nneat_packing: false\n", {"sample_packing": True}),
        ("model_name_or_path: m\nstage: sft\n", {"sample_packing": False}),
        ("model_name_or_path: m\nstage: pt\n", {"sample_packing": True}),
        ("model_name_or_path: m\nstage: pt\npacking: false\n", {"sample_packing": False}),
        ("model_name_or_path: m\nstage: sft\ndataset: a,b\nmix_strategy: interleave_over\ninterleave_probs: 0.7,0.3\n",
         {"interleave_probs": [0.7, 0.3]}),
    ],
)  # fmt: skip
def test_entries_of_other_tools_mean_what_they_mean_there(text, expected):
    found = foreign.convert(text, "foreign.yaml")
    assert {name: found.options.get(name) for name in expected} == expected, found.left_out
    assert not found.left_out.keys() & {"use_rslora", "peft_use_rslora", "lr_scheduler_kwargs", "lr_scheduler_type", "mix_strategy"}


def test_what_is_no_configuration_of_another_tool_is_refused(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("model: x\n")
    for words, why in (
        (["--from", str(tmp_path / "a.yaml")], "not the configuration of a tool that is known here"),
        (["--from", str(tmp_path / "none.yaml")], "cannot be read"),
        ([MODEL], "init needs MODEL and DATASET, or --from"),
    ):
        assert main(["init", *words, "--output", str(tmp_path / "run.yaml")]) == 2
        assert why in capsys.readouterr().err


def test_a_run_that_samples_answers_gets_the_reward_that_its_data_allow(tmp_path, capfd):
    rows = [{"prompt": f"{i} and {i} make", "answer": f"{2 * i}"} for i in range(40)]
    data, path = tmp_path / "sums.jsonl", tmp_path / "run.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["init", "--task", "grpo", MODEL, str(data), "--output", str(path), "--output-dir", str(tmp_path / "out")]
    assert main([*words, "--max-completion-length", "16", "--max-steps", "2"]) == 0, capfd.readouterr().err
    text = path.read_text()
    assert 'rewards: [{"function": "number"}]' in text and "max_completion_length: 16" in text
    assert "64 answers per step" in text and "sequence_len: 64" in text
    assert main(["grpo", str(path), "--device", "cpu"]) == 0, capfd.readouterr().err
    assert (tmp_path / "out" / "adapter").is_dir()


def test_init_asks_for_a_reward_where_no_built_in_one_fits(tmp_path, capfd):
    data, path = tmp_path / "texts.jsonl", tmp_path / "run.yaml"
    data.write_text('{"prompt": "Say hello", "answer": "hello"}\n')
    words = ["init", "--task", "grpo", MODEL, str(data), "--output", str(path)]
    assert main(words) == 2 and not path.exists()
    said = capfd.readouterr().err
    assert "no column has the answer as a number (columns: answer)" in said and "--set 'rewards=" in said
    assert main([*words, "--set", "rewards=[{function: length, tokens: 9}]"]) == 0
    assert "rewards: [{function: length, tokens: 9}]" in path.read_text()
