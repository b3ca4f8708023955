"""No accepted option is inert: each one changes the numbers, the plan, the files or the log of a small run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import surogate
from conftest import REPOSITORY, tiny_llama

pytestmark = pytest.mark.xdist_group("options")

Options = dict[str, Any]

STEPS = 3
"""Steps of every run."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Options:
    """A run on packed tokens, with dropout, clipping, decay and a part held out for evaluation."""
    folder = tmp_path_factory.mktemp("options")
    rows = [{"input_ids": [(7 * i + j * j) % 90 + 1 for j in range(4 + i % 9)]} for i in range(80)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"prompt": "a b" * (i % 3 + 1), "answer": f"c {i}", "text": f"d e {i}"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps(tiny_llama(initializer_range=0.3, vocab_size=192)))
    options: Options = {
        "model": str(folder / "config"),
        "init": "random",
        "device": "cpu",
        "torch_dtype": "float32",
        "datasets": [{"path": str(folder / "data.jsonl"), "type": "tokens"}],
        "sequence_len": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 2e-2,
        "output_dir": str(folder / "output"),
    }
    trained = surogate.Trainer({**options, "lora_rank": 4})
    trained.step()
    trained.export(folder / "adapter")
    for name, seed in (("model", 5), ("other", 6)):
        surogate.Trainer({**options, "lora": False, "train_seed": seed}).export(folder / name)
    return {**options, "model": str(folder / "model")}


def numbers(options: Options, _: Path) -> Any:
    """Loss, norm and rate of every step, and the loss held out."""
    trainer = surogate.Trainer(options)
    steps = [trainer.step() for _ in range(STEPS)]
    taken = [[s[name] for name in ("loss", "grad_norm", "learning_rate", "tokens")] if s else None for s in steps]
    held_out = trainer.evaluate()
    return taken, held_out and held_out["loss"]


def plan(options: Options, folder: Path) -> Any:
    """The plan as JSON."""
    from contextlib import redirect_stdout
    from io import StringIO

    from surogate.cli.commands import main

    (folder / "run.yaml").write_text(json.dumps(options))
    out = StringIO()
    with redirect_stdout(out):
        main(["plan", str(folder / "run.yaml"), "--json"])
    return json.loads(out.getvalue())


def files(options: Options, folder: Path) -> Any:
    """The results of a run: names of files, and the log without its times."""
    from surogate.cli.commands import main

    options = {**options, "output_dir": str(folder / "output")}
    (folder / "run.yaml").write_text(json.dumps(options))
    assert main(["sft", str(folder / "run.yaml")]) == 0
    times = ("second", "time", "memory", "mfu")
    logs = [path for path in folder.rglob("*.json*") if path.read_text().startswith('{"event"')]
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    clean = [{k: v for k, v in line.items() if not any(word in k for word in times)} for line in lines]
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return names, [str(line.get("event")) + str(line.get("loss")) for line in clean]


def lines(options: Options, folder: Path) -> Any:
    """The lines of the steps on the console."""
    (folder / "run.yaml").write_text(json.dumps({**options, "output_dir": str(folder / "output")}))
    words = [sys.executable, "-m", "surogate", "sft", str(folder / "run.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("Step ")]


def uploads(options: Options, folder: Path) -> Any:
    """What is requested of the Hub, in its place."""
    from huggingface_hub import HfApi
    from surogate.cli.commands import main

    asked: list[Any] = []
    (folder / "run.yaml").write_text(json.dumps({**options, "output_dir": str(folder / "output")}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HfApi, "create_repo", lambda self, name, **given: asked.append((name, given["private"])))
        patch.setattr(
            HfApi,
            "upload_folder",
            lambda self, **given: asked.append((given["repo_id"], sorted(os.listdir(given["folder_path"])))),
        )
        assert main(["sft", str(folder / "run.yaml"), "--quiet"]) == 0
    return asked


def sibling(options: Options, name: str) -> str:
    """A folder next to the model."""
    return str(Path(options["model"]).parent / name)


def tokens(**changes: Any) -> Callable[[Options], Options]:
    """Changes to the dataset."""
    return lambda options: {"datasets": [{**options["datasets"][0], **changes}]}


def parts(options: Options) -> list[Options]:
    """A part of the dataset."""
    return [{**options["datasets"][0], "samples": 20}]


FULL = {"lora": False}
KEPT = {"recompute_rmsnorm": False, "recompute_swiglu": False, "recompute_qkv": False}
RATES = {"lr_scheduler_type": "wsd", "cooldown_steps": 2}

# Option → (what is observed, what is changed, what both runs also set).
EFFECTS: dict[str, tuple[Callable[[Options, Path], Any], Any, Any]] = {
    "num_epochs": (numbers, 1, {"max_steps": -1}),
    "save_steps": (files, 2, {}),
    "save_total_limit": (files, 1, {"save_steps": 1}),
    "save_strategy": (files, "epoch", {"max_steps": -1, "num_epochs": 2}),
    "eval_strategy": (files, "epoch", {"max_steps": -1, "num_epochs": 2}),
    "early_stopping_patience": (files, 1, {"eval_steps": 1, "learning_rate": 0.0}),
    "early_stopping_threshold": (files, 100.0, {"eval_steps": 1, "early_stopping_patience": 1}),
    "load_best_model_at_end": (files, True, {"eval_steps": 1}),
    "logging_steps": (lines, 2, {}),
    "push_to_hub": (uploads, "owner/name", {}),
    "hub_private_repo": (uploads, False, {"push_to_hub": "owner/name"}),
    "checkpoint_dir": (files, "elsewhere", {"save_steps": 1}),
    "eval_steps": (files, 1, {}),
    "eval_seed": (numbers, 3, {}),
    "log_file": (files, "elsewhere", {}),
    "run_name": (files, "other", {"run_name": "one"}),
    "merge_adapter": (files, True, {}),
    "model": (numbers, lambda o: {"model": sibling(o, "other")}, {"init": "pretrained"}),
    "init": (numbers, "pretrained", {}),
    "init_projections_to_zero": (numbers, True, FULL),
    "sequence_len": (numbers, 24, {}),
    "max_model_len": (numbers, 24, {"sequence_len": "auto"}),
    "rope_scaling": (numbers, {"rope_type": "linear", "factor": 4.0}, {}),
    "torch_dtype": (numbers, "bfloat16", {}),
    "per_device_train_batch_size": (numbers, 1, {}),
    "gradient_accumulation_steps": (numbers, 1, {}),
    "max_steps": (numbers, 2, {}),
    "optimizer": (numbers, "adamw", FULL),
    "learning_rate": (numbers, 1e-3, {}),
    "lr_scheduler_type": (numbers, "cosine", {}),
    "lr_cycles": (numbers, 3, {"lr_scheduler_type": "cosine_with_restarts"}),
    "learning_rates": (numbers, {"q_proj": 1e-3}, {}),
    "frozen_parameters": (numbers, ["layers.0"], FULL),
    "warmup_ratio": (numbers, 0.5, {}),
    "warmup_steps": (numbers, 2, {}),
    "cooldown_steps": (numbers, 1, {**RATES}),
    "final_lr_fraction": (numbers, 0.5, {}),
    "weight_decay": (numbers, 0.9, {}),
    "max_grad_norm": (numbers, 1e-3, {"adamw_epsilon": 1e-3}),
    "adamw_beta1": (numbers, 0.5, {}),
    "adamw_beta2": (numbers, 0.5, {}),
    "adamw_epsilon": (numbers, 1e-2, {}),
    "normuon_momentum": (numbers, 0.5, {"optimizer": "normuon"}),
    "normuon_beta2": (numbers, 0.5, {"optimizer": "normuon"}),
    "normuon_cautious_wd": (numbers, False, {"optimizer": "normuon", "weight_decay": 5.0}),
    "neftune_noise_alpha": (numbers, 5.0, {}),
    "validation_split_ratio": (numbers, 0.4, {}),
    "train_seed": (numbers, 7, {}),
    "sample_packing": (numbers, False, {}),
    "shuffle": (numbers, False, {}),
    "lora": (numbers, False, {}),
    "lora_rank": (numbers, 8, {}),
    "lora_alpha": (numbers, 8, {}),
    "lora_rslora": (numbers, True, {}),
    "loraplus_lr_ratio": (numbers, 16.0, {}),
    "lora_dropout": (numbers, 0.4, {}),
    "lora_dtype": (numbers, "bfloat16", {}),
    "lora_target_modules": (numbers, ["q_proj"], {}),
    "lora_target_parameters": (numbers, ["k_proj.weight"], {"lora_target_modules": ["q_proj"], "lora_dropout": 0.0}),
    "lora_dora": (numbers, True, {}),
    "modules_to_save": (numbers, ["embed_tokens"], {}),
    "adapter": (numbers, lambda o: {"adapter": sibling(o, "adapter")}, {"lora_rank": 4}),
    "qlora_bnb": (numbers, True, {}),
    "qlora_fp8": (numbers, True, {}),
    "qlora_fp4": (numbers, True, {}),
    "qlora_bnb_block_size": (numbers, 512, {"qlora_bnb": True}),
    "qlora_bnb_double_quant": (numbers, False, {"qlora_bnb": True}),
    "qlora_four_over_six": (numbers, False, {"qlora_fp4": True}),
    "master_dtype": (numbers, "float32", {**FULL, "torch_dtype": "bfloat16"}),
    "recompute_swiglu": (plan, True, {**KEPT}),
    "recompute_rmsnorm": (plan, True, {**KEPT}),
    "recompute_ffn": (plan, True, {"recompute_rmsnorm": False, "recompute_qkv": False}),
    "recompute_qkv": (plan, True, {**KEPT}),
    "recompute_att": (plan, True, {"recompute_rmsnorm": False, "recompute_swiglu": False}),
    "recompute_block": (plan, True, {}),
    "recompute_lora": (plan, False, {"recompute_block": True}),
    "lmhead_chunks": (plan, 4, {}),
    "attn_bwd_chunks": (plan, 2, {}),
    "max_length": (numbers, 9, {}),
    "truncation_strategy": (numbers, "right", {"max_length": 9}),
    "datasets": (numbers, lambda o: {"datasets": o["datasets"] * 2}, {}),
    "validation_datasets": (numbers, lambda o: {"validation_datasets": o["datasets"]}, {}),
    "interleave_probs": (numbers, [0.25, 0.75], lambda o: {"datasets": o["datasets"] + parts(o)}),
    "interleave_stopping": (
        numbers,
        "all_exhausted",
        lambda o: {"datasets": o["datasets"] + parts(o), "interleave_probs": [0.25, 0.75]},
    ),
    "streaming": (numbers, True, {}),
    "shuffle_buffer_size": (numbers, 3, {"streaming": True}),
    "datasets.samples": (numbers, tokens(samples=20), {}),
    "datasets.repeats": (numbers, tokens(repeats=2.0), {}),
}

# Options whose effect another test shows: the file that it stands in, which gives the option a value.
ELSEWHERE = {
    "task": "tests/python/test_preference.py",
    "streaming_disk_limit": "tests/python/test_data_streaming.py",
    "loss_type": "tests/python/test_preference.py",
    "loss_weights": "tests/python/test_preference.py",
    "beta": "tests/python/test_preference.py",
    "label_smoothing": "tests/python/test_preference.py",
    "f_divergence_type": "tests/python/test_preference.py",
    "f_alpha_divergence_coef": "tests/python/test_preference.py",
    "ld_alpha": "tests/python/test_preference.py",
    "discopop_tau": "tests/python/test_preference.py",
    "use_weighting": "tests/python/test_preference.py",
    "reference_free": "tests/python/test_preference.py",
    "reference": "tests/python/test_preference.py",
    "max_pixels": "tests/python/test_image_training.py",
    "norm_bbox": "tests/python/test_image_rows.py",
    "min_pixels": "tests/python/test_image_training.py",
    "desirable_weight": "tests/python/test_preference_losses.py",
    "undesirable_weight": "tests/python/test_preference_losses.py",
    "cpo_alpha": "tests/python/test_preference_losses.py",
    "simpo_gamma": "tests/python/test_preference_losses.py",
    "alpha": "tests/python/test_preference_losses.py",
    "nll": "tests/python/test_preference_losses.py",
    "teacher": "tests/python/test_distillation.py",
    "temperature": "tests/python/test_distillation.py",
    "loss_top_k": "tests/python/test_distillation.py",
    "loss_add_tail": "tests/python/test_distillation.py",
    "precompute_teacher": "tests/python/test_distillation.py",
    "cross_entropy_weight": "tests/python/test_distillation.py",
    "epsilon": "tests/python/test_sampled_losses.py",
    "epsilon_high": "tests/python/test_sampled_losses.py",
    "delta": "tests/python/test_sampled_losses.py",
    "importance_sampling_level": "tests/python/test_sampled_losses.py",
    "top_entropy_quantile": "tests/python/test_sampled_losses.py",
    "use_bias_correction_kl": "tests/python/test_sampled_losses.py",
    "off_policy_mask_threshold": "tests/python/test_sampled_losses.py",
    "vllm_importance_sampling_correction": "tests/python/test_sampled_losses.py",
    "vllm_importance_sampling_mode": "tests/python/test_sampled_losses.py",
    "vllm_importance_sampling_clip_max": "tests/python/test_sampled_losses.py",
    "vllm_importance_sampling_clip_min": "tests/python/test_sampled_losses.py",
    "sapo_temperature_pos": "tests/python/test_sampled_losses.py",
    "sapo_temperature_neg": "tests/python/test_sampled_losses.py",
    "vespo_k_pos": "tests/python/test_sampled_losses.py",
    "vespo_lambda_pos": "tests/python/test_sampled_losses.py",
    "vespo_k_neg": "tests/python/test_sampled_losses.py",
    "vespo_lambda_neg": "tests/python/test_sampled_losses.py",
    "rewards": "tests/python/test_sampled_runs.py",
    "reward_timeout": "tests/python/test_sampled_runs.py",
    "num_generations_eval": "tests/python/test_sampled_evaluations.py",
    "lmbda": "tests/python/test_own_answers.py",
    "sampling_temperature": "tests/python/test_own_answers.py",
    "precompute_ref_log_probs": "tests/python/test_known_references.py",
    "share_prompts": "tests/python/test_shared_prompts.py",
    "num_generations": "tests/python/test_sampled_runs.py",
    "max_completion_length": "tests/python/test_sampled_runs.py",
    "top_p": "tests/python/test_sampled_runs.py",
    "top_k": "tests/python/test_sampled_runs.py",
    "min_p": "tests/python/test_sampled_runs.py",
    "num_iterations": "tests/python/test_sampled_runs.py",
    "exact_sampling": "tests/python/test_exact_sampling.py",
    "environment": "tests/python/test_environments.py",
    "max_turns": "tests/python/test_environments.py",
    "max_turn_length": "tests/python/test_environments.py",
    "scale_rewards": "tests/python/test_sampled_runs.py",
    "multi_objective_aggregation": "tests/python/test_sampled_runs.py",
    "mask_truncated_completions": "tests/python/test_sampled_runs.py",
    "center_rewards_coefficient": "tests/python/test_preference_losses.py",
    "apply_recommended_values": "crates/train/tests/it/recommend.rs",
    "memory_limit": "tests/python/test_plan.py",
    "offload_master": "crates/train/tests/it/offload.rs",
    "offload_residual": "crates/train/tests/it/offload.rs",
    "offload_optimizer": "crates/train/tests/it/offload.rs",
    "offload_grads": "crates/train/tests/it/offload.rs",
    "offload_quants": "crates/train/tests/it/offload.rs",
    "use_zero_copy": "crates/train/tests/it/offload.rs",
    "use_write_combined": "crates/train/tests/it/offload.rs",
    "qlora_block_size": "crates/train/tests/it/qlora.rs",
    "output_dir": "tests/python/test_cli.py",
    "model_name": "crates/train/src/config/tests.rs",
    "dataset": "tests/python/test_guides.py",
    "runs": "tests/python/test_runs.py",
    "model_type": "crates/train/src/config/tests.rs",
    "resume_from_checkpoint": "crates/train/tests/it/resume.rs",
    "device": "crates/train/tests/it/gpu.rs",
    "gpus": "crates/train/tests/it/ranks.rs",
    "sequence_parallel_size": "crates/train/tests/it/ranks.rs",
    "pipeline_parallel_size": "crates/train/tests/it/stages.rs",
    "zero_level": "crates/train/tests/it/ranks.rs",
    "shard_gradients": "crates/train/tests/it/ranks.rs",
    "shard_weights": "crates/train/tests/it/ranks.rs",
    "gradient_compression": "crates/train/tests/it/ranks.rs",
    "compression_warmup_steps": "crates/train/tests/it/nodes.rs",
    "shard_scope": "crates/train/tests/it/nodes.rs",
    "memcpy_all_gather": "crates/train/src/engine/device.rs",
    "memcpy_send_recv": "crates/train/src/engine/device.rs",
    "deterministic": "crates/train/tests/it/formats.rs",
    "gradient_dtype": "crates/train/tests/it/fp8.rs",
    "recipe": "crates/train/tests/it/fp8.rs",
    "quantize_aware": "tests/python/test_quantize_aware.py",
    "quantize_aware_group_size": "tests/python/test_quantize_aware.py",
    "quantize_aware_asymmetric": "tests/python/test_quantize_aware.py",
    "fp8_amax_history": "crates/train/tests/it/fp8.rs",
    "fp4_backend": "crates/train/src/config/tests.rs",
    "fp4_stochastic_rounding": "crates/train/tests/it/nvfp4.rs",
    "skip_quant_first_layers": "crates/train/tests/it/fp8.rs",
    "skip_quant_last_layers": "crates/train/tests/it/fp8.rs",
    "distributed": "crates/train/tests/it/nodes.rs",
    "report_to": "tests/python/test_trackers.py",
    "metrics_address": "tests/python/test_metrics_address.py",
    "log_format": "tests/python/test_metrics_address.py",
    "save_grace_seconds": "tests/python/test_preempted.py",
    "batch_size": "tests/python/test_preempted.py",
    "micro_batch_size": "crates/train/tests/it/split.rs",
    "trained_logits_only": "tests/python/test_trained_logits.py",
    "wandb_project": "tests/python/test_trackers.py",
    "wandb_name": "tests/python/test_trackers.py",
    "aim_experiment": "tests/python/test_trackers.py",
    "aim_repo": "tests/python/test_trackers.py",
    "aim_name": "tests/python/test_trackers.py",
    "sample_prompts": "crates/train/tests/it/watch.rs",
    "sample_tokens": "crates/train/tests/it/watch.rs",
    "log_gpu_util": "crates/train/tests/it/watch.rs",
    "debug_time_breakdown": "crates/train/tests/it/watch.rs",
    "debug_memory_breakdown": "crates/train/tests/it/watch.rs",
    "template": "tests/python/test_data.py",
    "padding_side": "tests/python/test_data.py",
    "padding_free": "tests/python/test_data.py",
    "response_prefix": "tests/python/test_data.py",
    "agent_template": "tests/python/test_data.py",
    "loss_scale": "tests/python/test_data.py",
    "system": "tests/python/test_data.py",
    "clock": "tests/python/test_data.py",
    "use_chat_template": "tests/python/test_data.py",
    "data_cache": "tests/python/test_data_cache.py",
    "preference_split": "crates/train/src/config/tests.rs",
    "truncation_mode": "crates/train/src/config/tests.rs",
    "new_tokens": "tests/python/test_extend.py",
    "train_router": "tests/python/test_mixtures.py",
    "train_vision": "tests/python/test_vision_parts.py",
    "train_projector": "tests/python/test_vision_parts.py",
    "vision_learning_rate": "tests/python/test_vision_parts.py",
    "router_aux_loss_coef": "tests/python/test_mixtures.py",
    "router_bias_update_rate": "tests/python/test_expert_bias.py",
}

# Permissions, and threads: what they allow may not change a result.
WITHOUT_TRACE = {
    "use_fused_rope",
    "use_cuda_graphs",
    "dataloader_num_workers",
    "persistent_quants",
    "use_all_to_all_reduce",
}


def available() -> list[str]:
    """Names of the options that are available; those of a dataset are looked at in test_data.py."""
    properties = json.loads((REPOSITORY / "docs" / "surogate.schema.json").read_text())["properties"]
    names = [name for name, row in properties.items() if "Not available yet." not in row.get("description", "")]
    return names


@pytest.mark.parametrize("option", EFFECTS)
def test_each_option_changes_something(base, tmp_path, option):
    observe, change, in_both = EFFECTS[option]
    before = {**base, **(in_both(base) if callable(in_both) else in_both)}
    changed = change(before) if callable(change) else {option: change}
    folders = [tmp_path / "before", tmp_path / "after"]
    for folder in folders:
        folder.mkdir()
    if option in ("checkpoint_dir", "log_file"):
        changed = {option: str(folders[1] / "elsewhere")}
    first, second = observe(before, folders[0]), observe({**before, **changed}, folders[1])
    assert first != second
    assert observe is not numbers or first == observe(before, folders[0]), "two runs of the same options differ"


def test_every_available_option_is_looked_at():
    unknown = [name for name in available() if name not in EFFECTS.keys() | ELSEWHERE.keys() | WITHOUT_TRACE]
    assert not unknown, f"available, but no test shows what they change: {unknown}"
    silent = [name for name, file in ELSEWHERE.items() if not sets(name, (REPOSITORY / file).read_text())]
    assert not silent, f"the tests that should show what they change do not set them: {silent}"


def sets(option: str, text: str) -> bool:
    """Whether a source gives an option a value: as a key, as an argument, or before its value in a pair."""
    own = rf"(?<![\w.]){option}"
    return bool(re.search(rf"{own}\s*(:\s|=(?!=))|\"{option}\"\s*(:|,)", text))


def test_a_word_in_a_text_sets_no_option():
    assert not any(sets("system", text) for text in ['Message("a system")', "of.system == 1", "subsystem: 1", "system("])
    assert all(sets("system", text) for text in ['{"system": 1}', "system=1", "system: x", '("system", 1)'])
