"""The script that holds plans to runs: what it draws can be built, and what it judges is what was promised."""

from __future__ import annotations

import random

import pytest
from conftest import REPOSITORY
from surogate import models


@pytest.fixture
def calibrate(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench" / "device"))
    import calibrate

    return calibrate


def test_drawn_shapes_are_models_of_the_same_seed(calibrate):
    shapes = [calibrate.draw(random.Random(f"{seed}"), tiny=False) for seed in range(40)]
    assert shapes == [calibrate.draw(random.Random(f"{seed}"), tiny=False) for seed in range(40)]
    for shape in shapes:
        assert models.build(shape["model"])
        tokens = shape["options"]["per_device_train_batch_size"] * shape["options"]["sequence_len"]
        assert 8192 <= tokens <= 32768
    assert {shape["model"]["model_type"] for shape in shapes} == {"llama", "qwen2", "qwen3", "mistral", "smollm3"}
    assert any(shape["model"].get("sliding_window") for shape in shapes) and any(shape["median"] for shape in shapes)


def test_a_plan_holds_within_a_tenth_in_time_and_a_hundredth_in_memory(calibrate):
    result = {
        **calibrate.draw(random.Random(1), tiny=False),
        "expected": {"step_seconds": 0.105},
        "tokens_per_step": 1000.0,
        "tokens_per_second": 10_000.0,
        "planned_before": 40 << 30,
        "planned_memory": 40 << 30,
        "memory_in_log": 40 << 30,
        "used": 40 << 30,
    }
    line, held = calibrate.judge(result)
    assert held and "105.0 | 100.0 | +5.0%" in line
    assert not calibrate.judge(result | {"expected": {"step_seconds": 0.111}})[1]
    assert not calibrate.judge(result | {"used": 41 << 30})[1]
    assert not calibrate.judge(result | {"planned_before": (40 << 30) + 1})[1]
    assert not calibrate.judge(result | {"error": "it ended"})[1]
