"""The sampler gives each token the log-probability that training gives it, bit for bit: runs on CPUs, plans on GPUs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import surogate
import yaml
from conftest import tiny_gemma2, tiny_gemma3, tiny_gpt2, tiny_llama, tiny_seed_oss
from surogate.cli.commands import main
from surogate.errors import ConfigError, RunError
from surogate.tasks import grpo
from test_hybrids import tiny_falcon_h1, tiny_lfm2, tiny_qwen3_5_moe
from test_mixtures import tiny_deepseek_v3, tiny_gpt_oss, tiny_qwen3_moe
from test_sampled_runs import STORIES, options

HAS_BF16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
DISTANCE = "sampling/sampling_logp_difference/max"


def exact(folder: Path, **more: object) -> dict[str, object]:
    return options(folder, device="cpu", exact_sampling=True, **more)


def distances(run: dict[str, object]) -> list[float]:
    """The largest distance of each step; the tokens must have probabilities at all."""
    found = []
    for metrics in surogate.Trainer(run):
        assert metrics["entropy"] > 0 and metrics["completions/mean_length"] > 0
        found.append(metrics[DISTANCE])
    return found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "lora": False, "learning_rate": 1e-3},
        {"share_prompts": False},
        {"num_iterations": 2},
        {"gpus": 2},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
        # One answer after another and sixty-four at once.
        {"num_generations": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 2},
        {"num_generations": 32, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 2, "max_steps": 2},
    ],
)
def test_sampler_and_training_have_the_same_bits(tmp_path: Path, more: dict[str, object]) -> None:
    assert set(distances(exact(tmp_path, **more))) == {0.0}


def drawn(folder: Path, fields: dict[str, object]) -> dict[str, object]:
    """The options of a run that draws a model with the tokenizer of the stories."""
    model = folder / "model"
    model.mkdir()
    vocabulary = json.loads((STORIES / "model" / "config.json").read_text())["vocab_size"]
    (model / "config.json").write_text(json.dumps({**fields, "vocab_size": vocabulary, "initializer_range": 0.3}))
    for file in (STORIES / "model").glob("*token*"):
        shutil.copy(file, model)
    return {"model": str(model), "init": "random", "lora": False, "learning_rate": 1e-3}


@pytest.mark.parametrize("share", [True, False])
def test_answers_of_many_blocks_of_keys_have_the_same_bits(tmp_path: Path, share: bool) -> None:
    """Longer than the stretches of 512 keys that sums are made of, after prompts of several lengths."""
    more = {
        "max_completion_length": 560,
        "sequence_len": 640,
        "num_generations": 2,
        "max_steps": 1,
        "share_prompts": share,
    }
    model = drawn(tmp_path, tiny_llama(max_position_embeddings=1024))
    assert distances(exact(tmp_path, per_device_train_batch_size=2, top_k=50, **more, **model)) == [0.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "fields",
    [
        tiny_llama, tiny_gemma2, tiny_gemma3, tiny_gpt2, tiny_qwen3_moe, tiny_gpt_oss, tiny_deepseek_v3, tiny_qwen3_5_moe,
        tiny_falcon_h1, tiny_lfm2,
    ],
)  # fmt: skip
def test_all_kinds_of_layers_sample_as_they_train(
    tmp_path: Path, fields: Callable[[], dict[str, object]], dtype: str
) -> None:
    """Windows, soft caps, sinks, latent attention, experts, delta nets, state-space models, convolutions."""
    more = {"max_completion_length": 30, "max_steps": 2, **drawn(tmp_path, fields())}
    run = exact(tmp_path, torch_dtype=dtype, **more)
    if dtype == "bfloat16" and not HAS_BF16:
        with pytest.raises(ConfigError, match="this processor lacks AVX-512 BF16"):
            surogate.Trainer(run)
        return
    assert distances(run) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"lora_dropout": 0.1}, "`lora_dropout: 0.1` is on in training"),
        ({"neftune_noise_alpha": 5}, "`neftune_noise_alpha: 5` is on in training"),
        ({"torch_dtype": "float16"}, "sums of float16 depend on"),
        ({"recipe": "fp8_hybrid", "torch_dtype": "bfloat16"}, "with `recipe: fp8_hybrid` the scales"),
    ],
)
def test_a_run_that_cannot_sample_exactly_is_refused(tmp_path: Path, more: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=f"`exact_sampling: true` is not available here: .*{why}"):
        surogate.Trainer(exact(tmp_path, **more))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (lambda: tiny_seed_oss(residual_dropout=0.1), "the model's configuration has dropout"),
        (lambda: tiny_llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "the model's rotation follows from"),
    ],
)
def test_a_model_that_trains_otherwise_than_it_samples_is_refused(
    tmp_path: Path, fields: Callable[[], dict[str, object]], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        surogate.Trainer(exact(tmp_path, **drawn(tmp_path, fields())))


def test_a_step_that_differs_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss at another temperature than that of the samples."""
    monkeypatch.setattr(grpo, "at_temperature", lambda logits, _: logits * 0.5)
    with pytest.raises(RunError, match="step 0: the log-probabilities of sampler and training differ by up to"):
        distances(exact(tmp_path))
    assert max(distances(options(tmp_path, device="cpu", max_steps=1))) > 0.0


def test_the_plan_says_whether_sampling_is_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(options(tmp_path, device="cpu")))
    assert main(["plan", str(path)]) == 0
    assert "exact sampling: the log-probabilities of sampler and training have the same bits" in capsys.readouterr().out
    assert main(["plan", str(path), "exact_sampling=false"]) == 0
    assert "`exact_sampling: false` has no effect" in capsys.readouterr().out


def test_a_plan_for_a_gpu_says_what_takes_exact_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(options(tmp_path, **drawn(tmp_path, tiny_llama()), torch_dtype="bfloat16")))
    on_gpu = ["plan", str(path), "--machine", "h200", "device=auto"]
    assert main(on_gpu) == 0
    assert (
        "sampling is not exact: on a GPU it takes kernels that are slower; `exact_sampling: true`"
        in capsys.readouterr().out
    )
    assert main([*on_gpu, "exact_sampling=true"]) == 0
    assert "exact sampling: the log-probabilities of sampler and training have the same bits" in capsys.readouterr().out
    assert main([*on_gpu, "exact_sampling=true", "torch_dtype=float32"]) == 2
    assert "its products are not all of bfloat16" in capsys.readouterr().err
    assert main(["plan", str(path), "--machine", "rtx4090", "device=auto", "exact_sampling=true"]) == 2
    assert "`exact_sampling: true` is not available here: on this GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "more", "why"),
    [
        (tiny_llama, {"lora": True}, "takes adapters of rank [8, 16, 24, 32, 40, 48, 56, 64] on this machine, not 4"),
        (tiny_llama, {"lora": True, "lora_rank": 128}, "takes adapters of rank"),
        (
            lambda: tiny_llama(intermediate_size=44),
            {},
            "an operand of a product has 44 columns, expected a multiple of 8",
        ),
        (tiny_llama, {"lora": True, "lora_rank": 8}, None),
        (tiny_gemma2, {}, None),
        (tiny_gemma3, {"lora": True, "lora_rank": 16}, None),
        (tiny_qwen3_moe, {}, None),
        (lambda: tiny_gpt_oss(intermediate_size=24), {}, None),
        (tiny_gpt2, {"lora": True, "lora_rank": 8}, "weights that lie transposed have no adapters"),
        (lambda: tiny_deepseek_v3(v_head_dim=16), {}, "its products are not all of bfloat16"),
        (tiny_deepseek_v3, {}, "its heads have 12 columns, expected a multiple of 8 up to 256"),
        (tiny_qwen3_5_moe, {}, "carries a state from token to token"),
        (tiny_falcon_h1, {}, "carries a state from token to token"),
        (tiny_lfm2, {}, "`causal_conv` carries a state from token to token"),
    ],
)
def test_a_plan_for_a_gpu_names_what_has_no_kernel_of_one_order(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fields: Callable[[], dict[str, object]],
    more: dict[str, object],
    why: str | None,
) -> None:
    path = tmp_path / "run.yaml"
    run = {"exact_sampling": True, "torch_dtype": "bfloat16", **drawn(tmp_path, fields()), **more}
    path.write_text(yaml.safe_dump(options(tmp_path, **run)))
    code = main(["plan", str(path), "--machine", "h200", "device=auto"])
    printed = capsys.readouterr()
    assert code == (0 if why is None else 2), printed.err
    assert (why or "exact sampling: ") in printed.out + printed.err, printed
