"""What is trained of a vision tower and its projector: their gradients, rates, files, and that the rest stays."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import surogate
from golden import WITH_IMAGES
from image_models import png, with_tokenizer
from surogate.errors import ConfigError

#: Beginnings of the names of projectors in files.
PROJECTORS = ("merger.", "deepstack_merger_list.", "multi_modal_projector.", "connector.", "embed_vision.")
TOWERS = ("visual.", "vision_tower.", "vision_model.")


@pytest.fixture
def load_file(shared):
    return pytest.importorskip("safetensors.numpy").load_file


def part_of(name):
    if any(part in name for part in PROJECTORS):
        return "projector"
    return "tower" if any(part in name for part in TOWERS) else "text"


def run(shared, load_file, family, base, resizes=True, **more):
    """A run of a recorded model on two conversations with its images; `resizes`: to what its table of positions holds."""
    golden = shared / "golden"
    folder = base / "model"
    if not folder.exists():
        with_tokenizer(golden, family, folder)
        if family == "gemma4_mm" and resizes:
            processor = json.loads((folder / "preprocessor_config.json").read_text())
            processor |= {"do_resize": True, "max_soft_tokens": 16}
            (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        inputs = load_file(golden / family / "inputs.safetensors")
        rows = []
        for number in range(3):
            (base / f"{number}.png").write_bytes(png(inputs[f"image.{number}"]))
            parts = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "w5 w6"}]
            answer = [{"type": "text", "text": f"w{number + 1} w9"}]
            rows.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]})
        (base / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    return {
        "model": str(folder), "device": "cpu", "torch_dtype": "float32", "lora_rank": 2, "lora_dropout": 0.0,
        "datasets": [{"path": str(base / "train.jsonl"), "type": "auto"}], "validation_split_ratio": 0.0,
        "sequence_len": 128, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 4,
        "learning_rate": 1e-3, "optimizer": "adamw", "output_dir": str(base / "run"), "data_cache": "off", **more,
    }  # fmt: skip


def moved(before, after):
    """The parts of which a tensor changed."""
    assert set(before) == set(after)
    return {part_of(name) for name in before if not np.array_equal(before[name], after[name])}


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_full_training_moves_the_parts_that_are_chosen(family, shared, load_file, tmp_path):
    def trained(**more):
        config = run(shared, load_file, family, tmp_path, lora=False, **more)
        trainer = surogate.Trainer(config)
        trainer.step()
        trainer.export(tmp_path / "result")
        after = load_file(tmp_path / "result" / "model.safetensors")
        shutil.rmtree(tmp_path / "result")
        return moved(load_file(tmp_path / "model" / "model.safetensors"), after)

    assert trained() == {"text", "tower", "projector"}
    assert trained(train_vision=False) == {"text", "projector"}
    assert trained(train_vision=False, train_projector=False) == {"text"}


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_parts_are_trained_alongside_adapters_and_saved_with_them(family, shared, load_file, tmp_path):
    recorded = load_file(shared / "golden" / family / "reference.safetensors")
    for parts in ({"train_vision": True}, {"train_projector": True}):
        config = run(shared, load_file, family, tmp_path, **parts)
        trainer = surogate.Trainer(config)
        for _ in range(2):
            trainer.step()
        trainer.export(tmp_path / "adapter")
        stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        own = {name for name in stored if ".lora_" not in name}
        expected = "tower" if "train_vision" in parts else "projector"
        assert own and {part_of(name) for name in own} == {expected}
        whole = {name for name in recorded if name.startswith("grad.") and part_of(name) == expected}
        assert len(own) == len(whole)
        fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert fields["modules_to_save"]
        # Read back, the adapter computes what the model in training does.
        ids = [[5, *[88] * surogate.process_images(tmp_path / "model", [tmp_path / "0.png"])[0]["tokens"], 7]]
        if family not in ("mistral3", "smolvlm"):  # These frame images by words, which the ids here do not have.
            loaded = surogate.load(tmp_path / "model", tmp_path / "adapter")
            both = [of.forward(ids, images=[tmp_path / "0.png"]) for of in (trainer.model, loaded)]
            np.testing.assert_allclose(*both, atol=1e-4)
        shutil.rmtree(tmp_path / "adapter")


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_gradients_of_the_parts_are_those_of_transformers(family, shared, load_file, tmp_path):
    config = run(shared, load_file, family, tmp_path, resizes=False, train_vision=True, train_projector=True)
    trainer = surogate.Trainer(config)
    names = trainer.model.parameter_names
    recorded = load_file(shared / "golden" / family / "reference.safetensors")
    expected = {name.removeprefix("grad.") for name in recorded if name.startswith("grad.")}
    vision = {name for name in expected if part_of(name) != "text"}
    given = {name for name in names if ".lora_" not in name}
    assert len(given) == len(vision)
    inputs = load_file(shared / "golden" / family / "inputs.safetensors")
    images = [inputs[f"image.{number}"] for number in range(3)]
    ids, labels = inputs["input_ids"].astype(np.int32), inputs["labels"].astype(np.int32)
    _, gradients = trainer.model.loss_and_gradients(ids, labels, images=images)
    # Files of some families leave out `model.`, which modules have. A new adapter adds nothing to the model.
    named = {name.removeprefix("base_model.model.").removeprefix("model."): of for name, of in gradients.items()}
    compared = 0
    for name in vision:
        of, found = recorded[f"grad.{name}"], named[name.removeprefix("model.")]
        if np.linalg.norm(of) >= 1e-6:
            assert np.linalg.norm(found.reshape(of.shape) - of) <= 5e-4 * np.linalg.norm(of), name
            compared += 1
    assert compared > 5


def test_a_rate_of_its_own_and_resuming(shared, load_file, tmp_path):
    from surogate.cli.commands import main

    def weights(**more):
        config = run(shared, load_file, "qwen3_vl", tmp_path, lora=False, optimizer="adamw", weight_decay=0.0, **more)
        trainer = surogate.Trainer(config)
        trainer.step()
        trainer.export(tmp_path / "result")
        after = load_file(tmp_path / "result" / "model.safetensors")
        shutil.rmtree(tmp_path / "result")
        return after

    before = load_file(shared / "golden" / "qwen3_vl" / "model.safetensors")
    slow, fast = weights(), weights(vision_learning_rate=1e-2)
    changes = [sum(np.abs(of[name] - before[name]).sum() for name in before if part_of(name) != "text") for of in (slow, fast)]
    assert changes[1] == pytest.approx(10 * changes[0], rel=0.05)
    assert all(np.array_equal(slow[name], fast[name]) for name in before if part_of(name) == "text")
    more = {"train_vision": True, "train_projector": True, "vision_learning_rate": 5e-4, "max_steps": 4, "save_steps": 2}
    config = run(shared, load_file, "qwen3_vl", tmp_path, **more)
    results = []
    for name, words in (("whole", []), ("cut", ["--max-steps", "2"])):
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(config | {"output_dir": str(tmp_path / name), "lr_scheduler_type": "constant"}))
        assert main(["sft", str(path), "--quiet", *words]) == 0
        if words:
            assert main(["sft", str(path), "--quiet", "--resume-from-checkpoint", "true"]) == 0
        results.append(load_file(tmp_path / name / "adapter" / "adapter_model.safetensors"))
    assert all(np.array_equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"vision_learning_rate": 1e-4}, "`vision_learning_rate: 0.0001`, but neither"),
        ({"train_vision": True, "data": "text"}, "`train_vision`: the data have no images"),
    ],
)
def test_options_without_effect_are_refused(more, problem, shared, load_file, tmp_path):
    more = dict(more)
    text = more.pop("data", None)
    config = run(shared, load_file, "qwen3_vl", tmp_path, **more)
    if text:
        rows = [{"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}] * 8
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=problem):
        surogate.Trainer(config)
