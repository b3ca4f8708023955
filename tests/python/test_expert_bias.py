"""Loss-free balancing: the biases that experts are chosen by, against a few lines of numpy."""

from __future__ import annotations

import os

import numpy as np
import pytest
import surogate
from conftest import tiny_llama
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from surogate.errors import ConfigError
from test_hybrids import tiny_lfm2_moe
from test_mixtures import tiny_deepseek_v3, tiny_ernie4_5_moe, tiny_glm4_moe, tiny_mixtral

DEVICE = os.environ.get("SUROGATE_TEST_DEVICE", "cpu")
RATE = 0.01

#: Of the only mixture of two layers, whose load is all that a step reports.
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"

#: Two micro-batches for each of four steps.
IDS = np.random.default_rng(6).integers(1, 90, (4, 2, 2, 12))


def trainer(folder, **options) -> surogate.Trainer:
    base = {"model": str(folder), "torch_dtype": "float32", "device": DEVICE, "lora": False, "optimizer": "adamw"}
    base |= {"router_bias_update_rate": RATE, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    return surogate.Trainer(base | options)


def step(trainer: surogate.Trainer, number: int, **given) -> dict:
    return trainer.step({"input_ids": IDS[number], "labels": IDS[number]}, **{"learning_rate": 1e-2, **given})


def weights(trainer: surogate.Trainer, folder) -> dict[str, np.ndarray]:
    trainer.export(folder)
    return load_file(folder / "model.safetensors")


def moved(bias: np.ndarray, load: np.ndarray) -> np.ndarray:
    """What the rule says, of the shares of the experts in all choices."""
    return bias + np.float32(RATE) * np.sign(1 / len(load) - load).astype(np.float32)


def two_of_lfm2_moe() -> dict[str, object]:
    return tiny_lfm2_moe(num_hidden_layers=2, layer_types=["full_attention", "conv"])


RANKS = {"gpus": 2, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("make", [tiny_deepseek_v3, tiny_glm4_moe, tiny_ernie4_5_moe, two_of_lfm2_moe])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"torch_dtype": "bfloat16", "master_dtype": "float32"},
        {"optimizer": "normuon"},
        RANKS | {"zero_level": 1},
        RANKS | {"zero_level": 2},
        RANKS | {"zero_level": 3},
    ],
)
def test_biases_follow_the_loads_of_whole_steps(make, options, make_model, tmp_path):
    folder = make_model(make())
    before = load_file(folder / "model.safetensors")
    [name] = [name for name in before if name.endswith(("e_score_correction_bias", "expert_bias"))]
    expected = before[name]
    live = trainer(folder, **options)
    loads = []
    for number in range(4):
        loads.append(np.array(step(live, number)["expert_load"]))
        expected = moved(expected, loads[-1])
    assert len(np.unique(np.sign(np.stack(loads) - 1 / loads[0].size))) > 1, "loads are uneven"
    live.export(tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        found = file.get_tensor(name)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_loads_become_even(make_model):
    """What is moved is what experts are chosen by: one that its bias gives all tokens loses them."""
    folder = make_model(tiny_deepseek_v3())
    tensors = load_file(folder / "model.safetensors")
    tensors[BIAS][0] += 0.5
    save_file(tensors, folder / "model.safetensors")
    live = trainer(folder, router_bias_update_rate=0.02)
    first, *between, last = (step(live, 0, learning_rate=0.0)["expert_load"][0] for _ in range(30))
    assert first == pytest.approx(1 / 3), "of each token's three choices one"
    assert last < 0.2


@pytest.mark.parametrize("options", [{}, RANKS | {"zero_level": 1}, RANKS | {"zero_level": 2}])
def test_nothing_else_of_a_step_changes(options, make_model, tmp_path):
    """Loads are no gradients: they count neither in the norm nor in what is clipped."""
    folder = make_model(tiny_deepseek_v3())
    results = []
    for rate in (RATE, None):
        live = trainer(folder, **options, router_bias_update_rate=rate, max_grad_norm=0.1)
        results.append((step(live, 0)["grad_norm"], weights(live, tmp_path / f"{rate}")))
    (norm, found), (plain, expected) = results
    assert norm == plain > 0.1
    for name, value in expected.items():
        assert np.array_equal(found[name], value) == (name != BIAS), name


def test_a_resumed_run_has_the_biases_of_an_uninterrupted_one(make_model, tmp_path):
    folder = make_model(tiny_deepseek_v3())
    live = trainer(folder, output_dir=str(tmp_path / "run"))
    step(live, 0), step(live, 1)
    live.save(tmp_path / "checkpoint")
    step(live, 2), step(live, 3)
    resumed = trainer(folder, output_dir=str(tmp_path / "again"), resume_from_checkpoint=str(tmp_path / "checkpoint"))
    step(resumed, 2), step(resumed, 3)
    found, expected = weights(resumed, tmp_path / "a"), weights(live, tmp_path / "b")
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (tiny_llama, {}, "LlamaForCausalLM has no bias that experts are chosen by"),
        (tiny_mixtral, {}, "MixtralForCausalLM has no bias that experts are chosen by"),
        (tiny_deepseek_v3, {"lora": True}, "`router_bias_update_rate` cannot be combined with `lora: true`"),
        (tiny_deepseek_v3, {"router_bias_update_rate": 0}, "router_bias_update_rate"),
        (
            tiny_deepseek_v3,
            {"gradient_compression": "bf16", "gpus": 2},
            "`router_bias_update_rate` cannot be combined with `gradient_compression: bf16`",
        ),
    ],
)
def test_where_there_is_nothing_to_move_the_option_is_refused(make, options, message, make_model):
    with pytest.raises(ConfigError, match=message):
        trainer(make_model(make()), **options)
