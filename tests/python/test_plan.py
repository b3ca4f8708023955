"""The plan: what it says of a run, and that no decision about memory changes a number."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import surogate
from surogate.cli.commands import main

STEPS = 3


@pytest.fixture
def options(tmp_path, make_model) -> dict[str, object]:
    """A run of a few packed steps with dropout, on data of its own."""
    from conftest import tiny_qwen3

    data = tmp_path / "data.jsonl"
    rows = [{"input_ids": [(7 * i + j) % 90 + 1 for j in range(5 + i % 9)]} for i in range(60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": str(make_model(tiny_qwen3(initializer_range=0.3, num_hidden_layers=3))),
        "device": "cpu",
        "torch_dtype": "float32",
        "datasets": [{"path": str(data), "type": "tokens"}],
        "validation_split_ratio": 0.0,
        "sequence_len": 48,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
    }


def losses(options: dict[str, object], **changes: object) -> list[float]:
    trainer = surogate.Trainer({**options, **changes})
    return [trainer.step()[name] for _ in range(STEPS) for name in ("loss", "grad_norm")]


def plan(options: dict[str, object], tmp_path, capsys, **changes: object) -> tuple[int, dict, str]:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**options, **changes}))
    code = main(["plan", str(path), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def one_head(options: dict[str, object], tmp_path) -> str:
    """The model of the options with a single head of keys; a plan needs no weights."""
    folder = tmp_path / "one_head"
    folder.mkdir()
    fields = json.loads((Path(str(options["model"])) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "num_key_value_heads": 1}))
    return str(folder)


KEPT = {
    "recompute_rmsnorm": False,
    "recompute_swiglu": False,
    "recompute_qkv": False,
    "lmhead_chunks": 1,
    "attn_bwd_chunks": 1,
}

CHOICES = [
    {"recompute_swiglu": True},
    {"recompute_rmsnorm": True},
    {"recompute_ffn": True, "recompute_swiglu": "auto"},
    {"recompute_qkv": True},
    {"recompute_att": True, "recompute_qkv": "auto"},
    {"recompute_block": True, "recompute_rmsnorm": "auto", "recompute_swiglu": "auto", "recompute_qkv": "auto"},
    {"recompute_lora": True, "recompute_rmsnorm": "auto", "recompute_swiglu": "auto", "recompute_qkv": "auto"},
    {"attn_bwd_chunks": 4},
    {"lmhead_chunks": 3},
]


@pytest.mark.parametrize("lora", [True, False])
def test_each_option_changes_the_plan_and_no_number(options, tmp_path, capsys, lora):
    options = {**options, **KEPT, "lora": lora}
    expected = losses(options)
    _, kept, _ = plan(options, tmp_path, capsys)
    for choice in CHOICES:
        if not lora and "recompute_lora" in choice:
            continue
        found = losses(options, **choice)
        if lora or "lmhead_chunks" not in choice:
            assert found == expected, choice
        else:
            assert found == pytest.approx(expected, rel=1e-5), choice
        _, changed, _ = plan(options, tmp_path, capsys, **choice)
        assert changed["decisions"] != kept["decisions"], choice
        assert changed["memory_bytes"] < kept["memory_bytes"] or "attn_bwd_chunks" in choice, choice


def test_less_memory_gives_a_smaller_plan_and_the_same_numbers(options, tmp_path, capsys):
    expected = losses(options)
    _, full, _ = plan(options, tmp_path, capsys, **KEPT)
    code, _, err = plan(options, tmp_path, capsys, memory_limit=1)
    assert code == 3 and "gradient_accumulation_steps" not in err
    smallest = int(err.split("(")[1].split(" bytes")[0])
    sizes = []
    for part in (4, 3, 2, 1, 0):
        limit = smallest + (full["memory_bytes"] - smallest) * part // 5
        code, found, _ = plan(options, tmp_path, capsys, memory_limit=limit)
        assert code == 0 and found["memory_bytes"] <= limit
        sizes.append(found["memory_bytes"])
        assert losses(options, memory_limit=limit) == expected
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) >= 4, sizes


def test_what_does_not_fit_names_changes_that_would(options, tmp_path, capsys):
    code, _, err = plan(options, tmp_path, capsys, memory_limit=1)
    smallest = int(err.split("(")[1].split(" bytes")[0])
    limit = smallest - 1
    code, _, err = plan(options, tmp_path, capsys, memory_limit=limit)
    assert code == 3
    assert "`per_device_train_batch_size: 2` with `gradient_accumulation_steps: 4`" in err, err
    changed = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert plan(options, tmp_path, capsys, memory_limit=limit, **changed)[0] == 0
    with pytest.raises(surogate.MemoryPlanError, match="per_device_train_batch_size: 2"):
        losses(options, memory_limit=limit)


def test_several_gpus_may_share_the_rows_that_do_not_fit(options, tmp_path, capsys):
    """Named as a change where it is possible: not more GPUs than the model has heads for."""
    ranks = {"gpus": 8, "zero_level": 3, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    code, _, err = plan(options, tmp_path, capsys, memory_limit=1, **ranks)
    assert code == 3
    limit = int(err.split("(")[1].split(" bytes")[0]) - 1
    code, _, err = plan(options, tmp_path, capsys, memory_limit=limit, **ranks)
    assert code == 3 and "`sequence_parallel_size: 2` with `gradient_accumulation_steps: 4`" in err, err
    assert "sequence_parallel_size: 8" not in err
    changed = {**ranks, "sequence_parallel_size": 2, "gradient_accumulation_steps": 4}
    assert plan(options, tmp_path, capsys, memory_limit=limit, **changed)[0] == 0


def test_the_plan_accounts_for_every_byte(options, tmp_path, capsys):
    for lora in (True, False):
        _, found, _ = plan(options, tmp_path, capsys, lora=lora)
        classes = {line["class"]: line["bytes"] for line in found["memory"]}
        assert sum(classes.values()) == found["memory_bytes"]
        assert sum(line["bytes"] for line in found["activations"]) == classes["activations"]
        assert {line["class"] for line in found["activations_by_phase"]} >= {"forward", "backward", "evaluate"}
        assert found["estimate"]["step_flops"] > 0 and found["estimate"]["step_bytes"] > 0
        assert all(line["words"]["reason"] for line in found["decisions"])


@pytest.mark.parametrize("family", ["llama", "gemma2", "glm4", "olmo2"])
def test_layers_that_are_recomputed_cost_their_inputs_alone(tmp_path, capsys, family):
    """Norms after attention and MLP are fused with those of the next layer, and yet no layer waits for another."""
    batch, length, hidden = 2, 1024, 256
    fields = {
        "model_type": family,
        "torch_dtype": "bfloat16",
        "vocab_size": 128,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "pad_token_id": 0,
    }
    (tmp_path / "data.jsonl").write_text(json.dumps({"input_ids": [1] * length}) + "\n")

    def activations(layers: int) -> int:
        (tmp_path / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": layers}))
        options = {
            "model": str(tmp_path),
            "init": "random",
            "datasets": [{"path": str(tmp_path / "data.jsonl"), "type": "tokens"}],
            "validation_split_ratio": 0.0,
            "per_device_train_batch_size": batch,
            "sequence_len": length,
            "recompute_block": True,
        }
        path = tmp_path / "run.json"
        path.write_text(json.dumps(options))
        assert main(["plan", str(path), "--json", "--machine", "h100"]) == 0
        found = json.loads(capsys.readouterr().out)
        return next(line["bytes"] for line in found["memory"] if line["class"] == "activations")

    residual_stream = 2 * batch * length * hidden
    assert activations(10) - activations(4) <= 6 * 1.2 * residual_stream


def test_decisions_are_values_for_scripts(options, tmp_path, capsys):
    asked = {"recompute_swiglu": True, "recompute_qkv": False, "recompute_rmsnorm": False, "lmhead_chunks": 4}
    _, found, _ = plan(options, tmp_path, capsys, **asked)
    decided = {of["subject"]: of for of in found["decisions"] if of["entry"] == "first_micro_step"}
    assert all(of["layers"] == [[0, 2]] for name, of in decided.items() if of["kind"] == "recompute"), decided
    named = {name: (of["kind"], of["value"], of["reason"]) for name, of in decided.items()}
    assert named["activation"] == ("recompute", True, "requested")
    assert named["projections"] == named["rotation"] == ("recompute", False, "requested")
    assert named["attention"] == ("recompute", False, "requested"), "a part of it is asked to be kept"
    assert named["norms"] == ("recompute", False, "requested")
    assert named["feed_forward"] == ("recompute", False, "fastest")
    assert named["residual_stream"] == ("offload", False, "recompute_source")
    assert named["output_head"] == ("chunks", 4, "requested")
    assert named["attention_backward"] == ("chunks", 1, "fastest")
    assert decided["activation"]["words"]["sentence"] == "recomputed: feed-forward activation, layers 0–2 (requested)"
    assert main(["plan", str(tmp_path / "plan.json")]) == 0
    text = capsys.readouterr().out
    reported = [of["words"] for of in found["decisions"] if of["value"] != 1 or of["value"] is True]
    assert reported and all(f"{of['decision']}" in text and f"({of['reason']})" in text for of in reported), text
    # One row of a batch, and on this machine one key head of it, is not done in parts.
    alone = {"per_device_train_batch_size": 1, "model": one_head(options, tmp_path)}
    _, found, _ = plan(options, tmp_path, capsys, **alone)
    attention = next(of for of in found["decisions"] if of["subject"] == "attention_backward")
    assert (attention["value"], attention["reason"], attention["obstacle"]) == (1, "impossible", "indivisible")


def test_the_pass_that_breaks_a_result_can_be_found(options, tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**options, "recompute_swiglu": True}))

    def said(*command: str, passes: str) -> tuple[int, str, str]:
        monkeypatch.setenv("SUROGATE_PASSES", passes)
        return main([*command, str(path)]), *capsys.readouterr()

    graphs = [said("show", "graph", passes=passes)[1] for passes in ("6", "9", "14")]
    without_fuse, fused, whole = (len(text.splitlines()) for text in graphs)
    assert without_fuse > fused and whole > fused, "fusing leaves fewer nodes, recomputing more"
    _, text, _ = said("plan", passes="9")
    assert "SUROGATE_PASSES=9 leaves out split_head" in text and "recomputed" not in text, text
    _, text, _ = said("plan", passes="14")
    assert "SUROGATE_PASSES" not in text and "recomputed" in text, text
    for wrong in ("15", "-1", "fuse"):
        code, _, err = said("plan", passes=wrong)
        assert code != 0 and f"SUROGATE_PASSES is `{wrong}`, expected a whole number from 0 to 14" in err, err


def test_the_plan_reads_what_is_at_hand_and_says_what_it_assumed(options, tmp_path, capsys):
    _, found, _ = plan(options, tmp_path, capsys)
    assert found["assumed"] is None and found["data_away"] is None and found["steps"] == STEPS
    assert found["estimate"]["run_seconds"] == pytest.approx(STEPS * found["estimate"]["step_seconds"])
    gone = [{"path": str(tmp_path / "gone.jsonl"), "type": "tokens"}]
    _, found, _ = plan(options, tmp_path, capsys, datasets=gone)
    assert "gone.jsonl" in found["data_away"] and "rows of 48 tokens" in found["assumed"]
    # What the hub's cache does not hold is not fetched for a plan.
    _, found, _ = plan(options, tmp_path, capsys, datasets=[{"path": "missing/nothing", "type": "auto"}])
    assert found["data_away"] == "`missing/nothing` is not in the hub's cache"
    _, found, _ = plan(options, tmp_path, capsys, datasets=[{"path": "s3://bucket/data", "type": "auto"}])
    assert found["data_away"] == "`s3://bucket/data` is in object storage"


def test_a_model_and_data_alone_are_a_run(options, tmp_path, capfd):
    run = tmp_path / "least.yaml"
    run.write_text(f"model: {options['model']}\ndatasets: {json.dumps(options['datasets'])}\ninit: random\n")
    assert main(["plan", str(run), "--device", "cpu"]) == 0
    text = capfd.readouterr().out
    assert "`sequence_len` is not set: rows have" in text and "the longest document has 13" in text
    assert "GiB, with headroom for the system" in text
    assert main(["sft", str(run), "--device", "cpu", "--max-steps", "2", "--output-dir", str(tmp_path / "out")]) == 0
    assert "`sequence_len` is not set: rows have" in capfd.readouterr().out


def test_machines_are_named_in_one_form(options, tmp_path, capsys):
    run = tmp_path / "run.json"
    run.write_text(json.dumps({**options, "device": "auto", "torch_dtype": "bfloat16"}))

    def planned(name: str) -> tuple[int, str, str]:
        code = main(["plan", str(run), "--machine", name])
        return code, *capsys.readouterr()

    for name in ("a100-40", "a100-80", "l40s", "rtx3090", "RTX4090", "rtx5090", "b200"):
        code, out, err = planned(name)
        assert code == 0 and f" on {name.lower()} (sm_" in out and "from the data sheet" in out, err
    for name in ("H100", "1xH200"):
        code, out, _ = planned(name)
        assert code == 0 and "measured on another device of this kind" in out
    code, out, _ = planned("2xh200")
    assert code == 0 and " on 2 × h200 (sm_" in out and "for each rank from the others per step" in out
    assert "level 1: ZeRO sharding (fits, and is fastest)" in out
    code, _, err = planned("2x8xh200")
    assert code == 2 and "expected the rate between them in GB/s for each GPU" in err
    code, _, err = planned("a100")
    assert code == 2 and "a100-40" in err


def test_several_nodes_are_computed_from_one(options, tmp_path, capsys):
    run = tmp_path / "run.json"
    on_gpus = {**options, "device": "auto", "torch_dtype": "bfloat16"}
    run.write_text(json.dumps(on_gpus))

    def sizes(name: str) -> dict[int, dict[str, float]]:
        assert main(["plan", str(run), "--machine", name, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["nodes"]
        assert found["meaning"] == "computed from the plan of one node, not measured"
        return {size["gpus"]: size for size in found["sizes"]}

    fast, slow = sizes("4x8xh200@50"), sizes("4x8xh200@0.05")
    assert list(fast) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert fast[1]["share_of_linear"] == 1 and fast[8]["between_bytes"] == 0
    assert fast[32]["between_bytes"] == pytest.approx(1.5 * fast[16]["between_bytes"])
    assert fast[32]["memory_bytes"] == fast[8]["memory_bytes"]
    for gpus, size in slow.items():
        assert size["step_seconds"] >= fast[gpus]["step_seconds"], gpus
    assert slow[1024]["share_of_linear"] < fast[1024]["share_of_linear"] <= 1
    assert main(["plan", str(run), "--machine", "3x8xh200@50"]) == 0
    text = capsys.readouterr().out
    assert "3 nodes of 8 GPUs, 50 GB/s between nodes for each GPU. Computed from the plan of one node" in text
    rows = re.findall(r"^(.) +(\d+) +(\d+) .* % █+$", text, re.MULTILINE)
    assert [row[1] for row in rows if row[0] == "*"] == ["24"] and len(rows) == 12, text
    for compression, share in [("bf16", 1 / 2), ("int8", 260 / 1024), ("topk", 80 / 1024), ("onebit", 36 / 1024)]:
        run.write_text(json.dumps({**on_gpus, "gradient_compression": compression}))
        assert sizes("2x8xh200@50")[16]["between_bytes"] == pytest.approx(share * fast[16]["between_bytes"])


def test_a_calibrated_machine_is_a_file_that_plans_read(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SUROGATE_MACHINES", str(tmp_path / "machines"))
    file = tmp_path / "this.json"
    assert main(["doctor", "--calibrate=least", "--output", str(file)]) == 0
    table = capsys.readouterr().out
    assert "product" in table and "attention backward" in table and str(file) in table
    assert not (tmp_path / "machines").exists(), "a trial is kept nowhere else"
    run = tmp_path / "run.json"
    run.write_text(json.dumps(options))
    assert main(["plan", str(run), "--machine", str(file)]) == 0
    assert "from rates measured on this device" in capsys.readouterr().out
    assert main(["plan", str(run), "--machine", f"2x3x{file}@0.1"]) == 0
    assert "2 nodes of 3 ranks, 0.1 GB/s between nodes for each rank" in capsys.readouterr().out
    assert main(["doctor", "--output", str(file)]) == 2
    assert "--calibrate" in capsys.readouterr().err


def test_recommended_values_make_enough_steps_of_few_data(options, tmp_path, capsys):
    """Fewer rows in a step where the data would make few steps; not where rows or steps are given."""
    left = {"per_device_train_batch_size", "gradient_accumulation_steps", "max_steps"}
    base = {name: value for name, value in options.items() if name not in left} | {"apply_recommended_values": True}

    def planned(**more: object) -> tuple[int, str]:
        run = tmp_path / "few.json"
        run.write_text(json.dumps({**base, "num_epochs": 2, **more}))
        assert main(["plan", str(run), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["plan", str(run)]) == 0
        return found["batch"] * found["micro_steps"], capsys.readouterr().out

    rows, text = planned()
    assert rows < 8 and f"{rows} row{'s' if rows > 1 else ''} per step, since 8 would make" in text, text
    assert planned(num_epochs=100)[0] == 8 and planned(max_steps=3)[0] == 8
    assert planned(gradient_accumulation_steps=3)[0] == 6
