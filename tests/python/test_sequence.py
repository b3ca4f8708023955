"""Rows that several ranks share (`sequence_parallel_size`): what attention, rotations, noise and experts need of the
whole batch, held against one device."""

from __future__ import annotations

import os

import numpy as np
import pytest
import surogate
from conftest import tiny_gemma4, tiny_llama, tiny_phi3
from surogate.errors import SurogateError
from test_hybrids import tiny_falcon_h1, tiny_granitemoehybrid, tiny_lfm2, tiny_qwen3_5, tiny_qwen3_5_moe, tiny_qwen3_next
from test_mixtures import tiny_gpt_oss, tiny_mixtral, tiny_qwen3_moe

DEVICE = os.environ.get("SUROGATE_TEST_DEVICE", "cpu")
STEPS = 20
LENGTH = 24
ROWS = 4
IDS = np.random.default_rng(7).integers(1, 90, (ROWS, 1, LENGTH))
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
REPORTED = ("loss", "grad_norm", "router_entropy", "router_loss")


def packed() -> np.ndarray:
    """Positions of rows of two documents, which end in the middle of parts of a row."""
    ends = [5, 9, 15, 19]
    return np.array([[[i if i < end else i - end for i in range(LENGTH)]] for end in ends])


def curve(folder, *, positions: np.ndarray | None = None, rate: float = 2e-3, **options: object) -> np.ndarray:
    """What the steps report, a row for each."""
    base = {"model": str(folder), "torch_dtype": "float32", "device": DEVICE, "optimizer": "adamw", "lora": False}
    base |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS, "max_grad_norm": 0.5}
    trainer = surogate.Trainer(base | options)
    batch = {"input_ids": IDS, "labels": IDS}
    if positions is not None:
        batch["position_ids"] = positions
    steps = [trainer.step(batch, learning_rate=rate) for _ in range(STEPS)]
    numbers = [[step[name] for name in REPORTED if name in step] for step in steps]
    return np.array([of + list(step.get("expert_load", [])) for of, step in zip(numbers, steps, strict=True)])


def agree(folder, sizes: tuple[int, ...], **options) -> None:
    """The curve of one device for each number of ranks to a row, the last of them at ZeRO level 3 with two rows at once."""
    alone = curve(folder, **options)
    assert alone[-1, 0] < alone[0, 0], "nothing was learned"
    for size in sizes:
        found = curve(folder, **options, gpus=size, sequence_parallel_size=size)
        np.testing.assert_allclose(found, alone, rtol=1e-5, err_msg=f"{size} ranks")
    ranks = {"gpus": 2 * size, "sequence_parallel_size": size, "zero_level": 3}
    ranks["gradient_accumulation_steps"] = ROWS // 2
    found = curve(folder, **options, **ranks)
    np.testing.assert_allclose(found, alone, rtol=1e-5, err_msg=f"two rows, {size} ranks each")
    assert np.array_equal(found, curve(folder, **options, **ranks)), "run again"


@pytest.mark.parametrize("lora", [False, True])
def test_heads_with_sinks(lora, make_model):
    """Each rank has the sinks of its heads, and their gradients add up."""
    folder = make_model(tiny_gpt_oss(**HEADS, initializer_range=0.1))
    agree(folder, (2, 4), lora=lora, positions=packed())


def test_sinks_are_trained(make_model, tmp_path):
    from safetensors.numpy import load_file

    folder = make_model(tiny_gpt_oss(**HEADS, initializer_range=0.1))

    def sinks(**options: object) -> dict[str, np.ndarray]:
        base = {"model": str(folder), "torch_dtype": "float32", "device": DEVICE, "optimizer": "adamw", "lora": False}
        trainer = surogate.Trainer(base | {"gradient_accumulation_steps": ROWS} | options)
        trainer.step({"input_ids": IDS, "labels": IDS}, learning_rate=1e-2)
        output = tmp_path / str(options.get("gpus", 1))
        trainer.export(output)
        return {name: value for name, value in load_file(output / "model.safetensors").items() if "sinks" in name}

    before = {name: value for name, value in load_file(folder / "model.safetensors").items() if "sinks" in name}
    alone, shared = sinks(), sinks(gpus=4, sequence_parallel_size=4)
    assert before and all(not np.any(alone[name] == before[name]) for name in before)
    for name in before:
        np.testing.assert_allclose(shared[name], alone[name], rtol=1e-5)


FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0]}


@pytest.mark.parametrize(
    "fields",
    [
        tiny_llama(**HEADS, rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=16),
        tiny_phi3(
            **HEADS,
            rope_scaling={"type": "longrope", **FACTORS},
            partial_rotary_factor=1.0,
            original_max_position_embeddings=16,
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_rotations_that_follow_the_longest_document(fields, make_model):
    """Only some rows have positions beyond the original length, 16, and only some of their parts."""
    folder = make_model({**fields, "initializer_range": 0.1})
    lengths = [5, 9, 2, 12]
    positions = np.array([[[i if i < end else i - end for i in range(LENGTH)]] for end in lengths])
    assert [row.max() >= 16 for row in positions] == [True, False, True, False]
    agree(folder, (2, 4), positions=positions)


def test_noise_on_embeddings(make_model):
    """The noise of a token follows from its place in the batch and the length of its document."""
    folder = make_model(tiny_llama(**HEADS, initializer_range=0.1))
    agree(folder, (2, 4), positions=packed(), neftune_noise_alpha=5.0, lora=True)
    agree(folder, (2,), neftune_noise_alpha=5.0)


@pytest.mark.parametrize("make", [tiny_qwen3_moe, tiny_mixtral, tiny_gpt_oss])
def test_even_loads_of_experts(make, make_model):
    """The loss of uneven loads is that of all tokens of a micro-batch, and so is what is reported."""
    folder = make_model(make(**HEADS, initializer_range=0.1))
    agree(folder, (2, 4), positions=packed(), router_aux_loss_coef=0.5, **CALM)


def test_loads_are_those_of_the_whole_batch(make_model):
    """Parts that were evened out each by itself would have another loss."""
    folder = make_model(tiny_mixtral(**HEADS, initializer_range=0.1))
    plain, even = (curve(folder, router_aux_loss_coef=c, gpus=2, sequence_parallel_size=2)[0, 0] for c in (0.0, 1.0))
    loss = curve(folder, router_aux_loss_coef=1.0)[0]
    assert even - plain == pytest.approx(loss[REPORTED.index("router_loss")], rel=1e-4)


#: Of models whose curves drift apart from rounding alone at the usual rate, on ranks with rows of their own, too.
CALM = {"rate": 1e-4, "lora_dropout": 0.0}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("make", [tiny_qwen3_5, tiny_qwen3_5_moe, tiny_qwen3_next])
def test_states_of_heads_and_windows_of_channels(make, lora, make_model):
    """A rank has the states of its heads over whole rows, and its channels of the convolution before them."""
    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    folder = make_model(make(**HEADS, **sizes, initializer_range=0.1))
    agree(folder, (2, 4), lora=lora, positions=packed(), **CALM)


@pytest.mark.parametrize("lora", [False, True])
def test_gated_convolutions(lora, make_model):
    folder = make_model(tiny_lfm2(**HEADS, initializer_range=0.1))
    agree(folder, (2, 4), lora=lora, positions=packed(), **CALM)


@pytest.mark.parametrize("lora", [False, True])
def test_layers_that_read_keys_and_values_of_others(lora, make_model):
    from safetensors.numpy import load_file, save_file

    folder = make_model(tiny_gemma4(**HEADS, initializer_range=0.1))
    weights = load_file(folder / "model.safetensors")  # scores are not scaled, and are made smaller here
    calm = {name: value * (value.size**-0.5 if name.endswith("q_norm.weight") else 1) for name, value in weights.items()}
    save_file(calm, folder / "model.safetensors")
    agree(folder, (2, 4), lora=lora, positions=packed(), **{**CALM, "rate": 2e-5})


@pytest.mark.parametrize(
    ("make", "count"),
    [(tiny_llama, 2), (tiny_gpt_oss, 1), (tiny_qwen3_5, 2), (tiny_falcon_h1, 1), (tiny_falcon_h1, 2), (tiny_granitemoehybrid, 1)],
)
def test_keys_and_values_of_fewer_heads_than_ranks(make, count, make_model):
    """Four ranks share one or two heads of keys, and one or two groups of the heads of a state-space model."""
    sizes = {"linear_num_key_heads": count, "linear_num_value_heads": 4, "mamba_n_groups": count}
    fields = make(num_attention_heads=4, num_key_value_heads=count, initializer_range=0.1)
    folder = make_model(fields | {name: value for name, value in sizes.items() if name in fields})
    agree(folder, (4,), positions=packed(), **CALM)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (tiny_gpt_oss(num_attention_heads=2, num_key_value_heads=2), "2 heads of attention"),
        (tiny_qwen3_5(**HEADS, linear_num_value_heads=2), "2 heads of gated delta nets"),
        (tiny_falcon_h1(**HEADS, mamba_n_heads=2, mamba_d_head=16), "2 heads of state-space models"),
    ],
)
def test_rows_that_cannot_be_shared_are_refused_by_name(fields, what, make_model):
    folder = make_model(fields)
    with pytest.raises(SurogateError, match=f"`sequence_parallel_size: 4`: {what} cannot be shared evenly"):
        curve(folder, gpus=4, sequence_parallel_size=4)
