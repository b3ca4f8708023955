"""Learning rates of single parameters, frozen parameters, LoRA+ and rsLoRA, restarts, and shares of datasets."""

from __future__ import annotations

import json

import numpy as np
import pytest
import surogate
from conftest import tiny_llama
from safetensors.numpy import load_file
from test_api import random_batch, trainer

OPTIMIZERS = ("adamw", "adamw_8bit", "normuon")

#: With tensors that have 8-bit states, and others.
FIELDS = tiny_llama(initializer_range=0.3, hidden_size=64, head_dim=16, intermediate_size=64)


@pytest.fixture
def llama(make_model):
    return make_model(FIELDS)


def steps(run: surogate.Trainer, numbers: range, rows: int = 1) -> list[float]:
    return [run.step(random_batch((rows, 2, 12), number))["loss"] for number in numbers]


def result(run: surogate.Trainer, folder) -> dict[str, np.ndarray]:
    run.export(folder)
    files = [folder / name for name in ("model.safetensors", "adapter_model.safetensors")]
    return tensors(next(file for file in files if file.is_file()))


def tensors(path) -> dict[str, np.ndarray]:
    """The tensors of a file in f32 or bf16, as f32: numpy has no bf16."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, of in json.loads(content[8:begin]).items():
        if name != "__metadata__":
            data = content[slice(*(begin + offset for offset in of["data_offsets"]))]
            is_half = of["dtype"] == "BF16"
            values = np.frombuffer(data, np.uint16).astype(np.uint32) << 16 if is_half else np.frombuffer(data, np.uint32)
            found[name] = values.view(np.float32).reshape(of["shape"])
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_parameter_has_its_rate(llama, tmp_path, optimizer, dtype):
    """After a step, what a pattern means is as in a run with its rate, the rest as without the pattern: bit for bit."""
    options = {"lora": False, "optimizer": optimizer, "max_grad_norm": 0.0, "torch_dtype": dtype}
    # Stochastic rounding follows the places of parameters, which differ: copies are rounded to nearest.
    options |= {"master_dtype": "float32"} if dtype == "bfloat16" else {}
    rates = {"q_proj": 4e-3, "norm": 4e-3, r"model\.layers\.1\.mlp": 4e-3, "lm_head": 4e-3}
    found = {}
    for name, more in {
        "mixed": {"learning_rate": 1e-3, "learning_rates": rates},
        "low": {"learning_rate": 1e-3},
        "high": {"learning_rate": 4e-3},
    }.items():
        run = trainer(llama, tmp_path, weight_decay=0.5, lr_scheduler_type="constant", **options, **more)
        steps(run, range(1))
        found[name] = result(run, tmp_path / name)
    differing = 0
    for name, values in found["mixed"].items():
        is_high = "q_proj" in name or name == "model.norm.weight" or "layers.1.mlp" in name or name == "lm_head.weight"
        np.testing.assert_array_equal(values, found["high" if is_high else "low"][name], name)
        differing += not np.array_equal(found["high"][name], found["low"][name])
    assert differing >= len(found["mixed"]) - 4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_second_matrices_of_adapters_learn_faster(llama, tmp_path, optimizer):
    options = {"optimizer": optimizer, "weight_decay": 0.0, "max_grad_norm": 0.0, "lora_rank": 4, "lora_dropout": 0.0}
    found = []
    for ratio in (None, 16.0):
        run = trainer(llama, tmp_path, learning_rate=1e-3, loraplus_lr_ratio=ratio, **options)
        before = result(run, tmp_path / f"before{ratio}")
        steps(run, range(1))
        after = result(run, tmp_path / f"after{ratio}")
        found.append({name: after[name] - before[name] for name in before})
    for name, plain in found[0].items():
        factor = 16 if "lora_B" in name else 1
        np.testing.assert_allclose(found[1][name], factor * plain, rtol=1e-4, atol=1e-7, err_msg=name)
    assert any(np.abs(of).max() > 0 for name, of in found[0].items() if "lora_B" in name)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_hybrid", "nvfp4"])
def test_frozen_parameters_stay(llama, tmp_path, recipe):
    options = {"lora": False, "learning_rate": 1e-2, "max_grad_norm": 0.0, "optimizer": "adamw"}
    if recipe != "bf16":
        options |= {"recipe": recipe, "torch_dtype": "bfloat16"}
        options |= {"fp4_backend": "emulate"} if recipe == "nvfp4" else {}
    run = trainer(llama, tmp_path, frozen_parameters=["layers.0", "embed_tokens", "k_proj"], **options)
    before = result(trainer(llama, tmp_path, **options), tmp_path / "before")
    whole = trainer(llama, tmp_path, **options)
    losses = [steps(of, range(1))[0] for of in (run, whole)]
    assert losses[0] == losses[1] if recipe == "bf16" else losses[0] == pytest.approx(losses[1], rel=1e-2)
    after, all_trained = result(run, tmp_path / "after"), result(whole, tmp_path / "whole")
    for name, values in after.items():
        is_frozen = "layers.0." in name or "embed_tokens" in name or "k_proj" in name
        if is_frozen or recipe == "bf16":
            np.testing.assert_array_equal(values, (before if is_frozen else all_trained)[name], name)
        assert is_frozen or not np.array_equal(values, before[name]), name
    run.save(tmp_path / "checkpoint")
    states = [*load_file(tmp_path / "checkpoint" / "optimizer.safetensors")]
    assert any("layers.1.self_attn.q_proj" in name for name in states)
    assert not any("layers.0." in name or "embed_tokens" in name or "k_proj" in name for name in states)
    gradients = run.model.loss_and_gradients(**random_batch((2, 12)))[1]
    assert set(gradients) == {
        name for name in after if "layers.0." not in name and "embed" not in name and "k_proj" not in name
    }


RESUMED = {
    "patterns": {"lora": False, "learning_rates": {"q_proj": 3e-2}, "frozen_parameters": ["layers.0.mlp"]},
    "adapter": {"loraplus_lr_ratio": 4.0, "lora_rslora": True, "lora_rank": 4, "learning_rates": {"layers.1": 1e-3}},
    "restarts": {"lora": False, "lr_scheduler_type": "cosine_with_restarts", "lr_cycles": 3},
}


@pytest.mark.parametrize("form", RESUMED)
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "normuon"])
def test_a_resumed_run_has_the_same_bits(llama, tmp_path, form, optimizer):
    options = {"optimizer": optimizer, "learning_rate": 1e-2, **RESUMED[form]}
    whole = trainer(llama, tmp_path, **options)
    wanted = steps(whole, range(6))
    first = trainer(llama, tmp_path, **options)
    assert steps(first, range(3)) == wanted[:3]
    first.save(tmp_path / "checkpoint")
    second = trainer(llama, tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint"), **options)
    assert steps(second, range(3, 6)) == wanted[3:]


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("form", ["patterns", "adapter"])
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "normuon"])
def test_ranks_share_parameters_with_rates(llama, tmp_path, form, optimizer, level):
    options = {"optimizer": optimizer, "learning_rate": 1e-3, "lora_dropout": 0.0, **RESUMED[form]}
    one = steps(trainer(llama, tmp_path, **options), range(4), rows=2)
    two = steps(trainer(llama, tmp_path, gpus=2, zero_level=level, **options), range(4), rows=2)
    assert two == pytest.approx(one, rel=1e-5)


def test_ranks_of_any_size_have_scales_alike(llama, tmp_path):
    """alpha / √rank: 8 / √4 as 16 / 4."""
    plain = trainer(llama, tmp_path, lora_rank=4, lora_alpha=16, learning_rate=1e-2)
    stable = trainer(llama, tmp_path, lora_rank=4, lora_alpha=8, lora_rslora=True, learning_rate=1e-2)
    assert steps(plain, range(3)) == steps(stable, range(3))
    stable.export(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["use_rslora"] is True
    further = trainer(llama, tmp_path, adapter=str(tmp_path / "adapter"), learning_rate=1e-2)
    assert steps(further, range(3, 5)) == pytest.approx(steps(stable, range(3, 5)), rel=1e-1)
    with pytest.raises(surogate.ConfigError, match="`lora_rslora` is false, but the adapter in .* has true"):
        trainer(llama, tmp_path, adapter=str(tmp_path / "adapter"), lora_rslora=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"frozen_parameters": ["layers.0"]}, "`frozen_parameters` needs `lora: false`"),
        ({"lora": False, "frozen_parameters": ["layer.0"]}, "`layer.0` matches no parameter that is trained"),
        ({"lora": False, "frozen_parameters": [".*"]}, "leaves nothing to train"),
        ({"lora": False, "frozen_parameters": ["("]}, "is not a regular expression"),
        ({"learning_rates": {"embed_tokens": 1e-3}}, "`embed_tokens` matches no parameter that is trained"),
        ({"learning_rates": {"q_proj": 1e-3, "layers.0": 2e-3}}, "different rates"),
        ({"learning_rates": {"q_proj": 0.0}}, "expected a number above 0"),
        ({"learning_rates": {"q_proj": 1.0}, "learning_rate": 0.0}, "relative to `learning_rate`, which is 0"),
        ({"lora": False, "loraplus_lr_ratio": 4.0}, "`loraplus_lr_ratio` needs `lora: true`"),
        ({"lora": False, "lora_rslora": True}, "`lora_rslora` needs `lora: true`"),
        ({"lr_cycles": 3}, "`lr_cycles` needs `lr_scheduler_type: cosine_with_restarts`"),
        ({"interleave_stopping": "all_exhausted"}, "`interleave_stopping` needs `interleave_probs"),
    ],
)
def test_mistakes_are_named(llama, tmp_path, options, said):
    with pytest.raises(surogate.ConfigError, match=said):
        trainer(llama, tmp_path, **options)


def mixture(llama, tmp_path, **options) -> surogate.Trainer:
    """40 documents of 4 tokens, 10 of 8."""
    datasets = []
    for name, (count, length) in {"short": (40, 4), "long": (10, 8)}.items():
        file = tmp_path / f"{name}.jsonl"
        rows = ({"input_ids": [(i + j) % 90 + 1 for j in range(length)]} for i in range(count))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        datasets.append({"path": str(file), "type": "tokens"})
    options = {"datasets": datasets, "num_epochs": 1, "max_steps": -1, "validation_split_ratio": 0.0, **options}
    return trainer(llama, tmp_path, sequence_len=16, lora_rank=2, **options)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 40 * 4 + 10 * 8),
        ({"interleave_probs": [0.5, 0.5]}, 10 * 4 + 10 * 8),
        ({"interleave_probs": [0.5, 0.5], "interleave_stopping": "all_exhausted"}, 40 * 4 + 40 * 8),
        ({"interleave_probs": [0.9, 0.1], "interleave_stopping": "first_exhausted"}, 40 * 4 + 4 * 8),
        ({"interleave_probs": [0.25, 0.75], "interleave_stopping": "first_exhausted"}, 3 * 4 + 10 * 8),
    ],
)
def test_datasets_have_their_shares(llama, tmp_path, options, tokens):
    assert sum(metrics["tokens"] for metrics in mixture(llama, tmp_path, **options)) == tokens


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"interleave_probs": [1.0]}, "has 1 numbers for 2 datasets"),
        ({"interleave_probs": [0.5, 0.6]}, "adds up to 1.1"),
        ({"interleave_probs": [1.5, -0.5]}, "not above 0"),
        ({"interleave_probs": [0.5, 0.5], "shuffle": False}, "`interleave_probs` needs `shuffle: true`"),
    ],
)
def test_mistakes_in_shares_are_named(llama, tmp_path, options, said):
    with pytest.raises(surogate.ConfigError, match=said):
        mixture(llama, tmp_path, **options)
