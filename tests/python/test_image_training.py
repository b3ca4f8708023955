"""Runs on conversations with images: what is learned, packing, ranks, resuming, and what is refused."""

from __future__ import annotations

import json
import re
import shutil

import colored_images
import numpy as np
import pytest
import surogate
from colored_images import COLORS, IMAGE, TOKENS, VOCABULARY
from image_models import png
from surogate.cli.commands import main
from surogate.errors import ConfigError


@pytest.fixture
def folder(shared, tmp_path_factory):
    """A tiny Qwen3-VL and 96 questions on the color of an image."""
    base = tmp_path_factory.mktemp("images")
    colored_images.write(shared, base)
    return base


def options(folder, tmp_path, **more):
    return {
        "model": str(folder / "model"), "init": "random", "device": "cpu", "torch_dtype": "float32", "lora": False,
        "datasets": [{"path": str(folder / "train.jsonl"), "type": "auto"}], "validation_split_ratio": 0.0,
        "sequence_len": 128, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 4,
        "learning_rate": 3e-3, "optimizer": "adamw", "output_dir": str(tmp_path / "run"), "data_cache": "off", **more,
    }  # fmt: skip


def losses(config, steps=4):
    trainer = surogate.Trainer(config)
    return [trainer.step()["loss"] for _ in range(steps)]


def test_a_processor_with_another_number_of_frames_than_the_model_is_refused(folder, tmp_path):
    path = folder / "model/preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temporal_patch_size": 1}))
    wanted = "patches have 2 frames by `config.json`, and 1 by the processor of `preprocessor_config.json`"
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        surogate.Trainer(options(folder, tmp_path))


def test_the_color_of_an_image_is_learned(folder, tmp_path):
    config = options(folder, tmp_path, max_steps=120, learning_rate=1e-2, lr_scheduler_type="constant")
    trainer = surogate.Trainer(config)
    first, *_, last = [trainer.step()["loss"] for _ in range(120)]
    trainer.export(tmp_path / "model")
    # Chance among four colors would leave a loss of ln 4 on one of three trained tokens.
    assert first > 4 and last < 0.3, (first, last)
    stored = {name for name, _ in tensors(tmp_path / "model")}
    assert "model.visual.patch_embed.proj.weight" in stored
    assert dict(tensors(tmp_path / "model"))["model.visual.patch_embed.proj.weight"] == (32, 3, 2, 8, 8)
    assert (tmp_path / "model/preprocessor_config.json").is_file()
    # The same answer by a model that was read from the folder.
    tokenizer, model = surogate.Tokenizer(tmp_path / "model"), surogate.load(tmp_path / "model")
    right = 0
    for number in range(8):
        asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which color?"}]},
                 {"role": "assistant", "content": "?"}]  # fmt: skip
        image = folder / f"{number}.png"
        ids, labels, _, _ = tokenizer.labels(asked, images=[image])
        begin = next(t for t, label in enumerate(labels) if label != -100)
        logits = model.forward([ids[:begin]], images=[image])
        right += tokenizer.decode([int(logits[0, -1].argmax())]) == list(COLORS)[number % 4]
    assert right == 8


def test_a_tower_with_bounds_is_trained_and_read_back(folder, shared, tmp_path):
    model = folder / "gemma4"
    shutil.copytree(folder / "model", model)
    tokens = {"<|image_pad|>": "<|image|>", "<|vision_start|>": "<|image>", "<|vision_end|>": "<image|>"}
    text = (model / "tokenizer.json").read_text()
    for known, own in tokens.items():
        text = text.replace(known, own)
    (model / "tokenizer.json").write_text(text)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image|>"))
    config = json.loads((shared / "golden/gemma4_mm/config.json").read_text()) | {"image_token_id": IMAGE}
    config["text_config"] |= {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
    config["text_config"]["eos_token_id"] = TOKENS["<|im_end|>"]
    config["vision_config"]["patch_size"] = 8
    (model / "config.json").write_text(json.dumps(config))
    processor = json.loads((shared / "golden/gemma4_mm/preprocessor_config.json").read_text())
    processor |= {"patch_size": 8, "do_resize": True, "max_soft_tokens": 16}
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
    config = options(folder, tmp_path, model=str(model), learning_rate=1e-2)
    trainer = surogate.Trainer(config)
    first, *_, last = [trainer.step()["loss"] for _ in range(4)]
    assert last < first
    trainer.export(tmp_path / "model")
    shapes = dict(tensors(tmp_path / "model"))
    tower = "model.vision_tower."
    assert shapes[f"{tower}encoder.layers.1.mlp.up_proj.input_max"] == ()
    assert shapes[f"{tower}patch_embedder.position_embedding_table"] == (2, 16, 32)
    ids = [[5, *[IMAGE] * surogate.process_images(tmp_path / "model", [folder / "0.png"])[0]["tokens"], 7]]
    result = surogate.load(tmp_path / "model")
    seen = [result.forward(ids, images=[folder / name]) for name in ("0.png", "3.png")]
    assert np.isfinite(seen[0]).all() and not np.array_equal(*seen)


def tensors(folder):
    with open(folder / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [(name, tuple(of["shape"])) for name, of in header.items() if name != "__metadata__"]


def test_packed_rows_have_the_loss_of_their_documents(folder, tmp_path):
    sets = [{"path": str(folder / "train.jsonl"), "type": "auto", "samples": 4}]
    config = options(folder, tmp_path, datasets=sets, per_device_train_batch_size=1, learning_rate=0.0, sequence_len=180)
    packed = surogate.Trainer({**config, "sample_packing": True}).step()
    alone = surogate.Trainer({**config, "sample_packing": False})
    steps = [alone.step() for _ in range(4)]
    # Each answer is one word and the end of the turn.
    assert packed["tokens"] == sum(step["tokens"] for step in steps)
    assert packed["loss"] == pytest.approx(np.mean([step["loss"] for step in steps]), rel=1e-5)


def test_two_ranks_take_the_steps_of_one(folder, tmp_path):
    one = losses(options(folder, tmp_path, gradient_accumulation_steps=2))
    for level in (1, 3):
        two = losses(options(folder, tmp_path, gpus=2, zero_level=level))
        assert two == pytest.approx(one, rel=1e-5)


def test_a_resumed_run_takes_the_same_steps(folder, tmp_path):
    output = tmp_path / "run"
    config = options(folder, tmp_path, output_dir=str(output), save_steps=2, lora=True, lora_rank=4)
    (tmp_path / "run.yaml").write_text(json.dumps(config))

    def run(*more):
        """The losses of the steps, and the adapter; the log is taken away."""
        assert main(["sft", str(tmp_path / "run.yaml"), "--quiet", *more]) == 0
        (log,) = output.glob("log-*.json")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        log.unlink()
        steps = {line["step"]: line["loss"] for line in lines if line["event"] == "step"}
        return steps, (output / "adapter/adapter_model.safetensors").read_bytes()

    whole, weights = run()
    names = header(output / "adapter/adapter_model.safetensors")
    assert names and not any("visual" in name for name in names)
    (shape,) = json.loads((output / "checkpoint-2/state.json").read_text())["shapes"]
    assert shape["patches"] > 0
    for late in ("checkpoint-4", "adapter"):
        shutil.rmtree(output / late)
    again, resumed = run("--set", "resume_from_checkpoint=true")
    assert again == {step: whole[step] for step in (2, 3)}
    assert resumed == weights


def test_rows_with_images_are_kept_and_train_the_same(folder, tmp_path, capsys):
    output, kept = tmp_path / "run", tmp_path / "rows"

    def printed(cache):
        """The words of `surogate tokenize` on the rows."""
        config = options(folder, tmp_path, output_dir=str(output), save_steps=2, data_cache=str(cache))
        (tmp_path / "run.yaml").write_text(json.dumps(config))
        assert main(["tokenize", str(tmp_path / "run.yaml")]) == 0
        return capsys.readouterr().out

    def trained(*more):
        assert main(["sft", str(tmp_path / "run.yaml"), "--quiet", *more]) == 0
        weights = (output / "model/model.safetensors").read_bytes()
        shutil.rmtree(output / "model")
        return weights

    assert "cache" not in printed("off")
    plain = trained()
    shutil.rmtree(output)
    assert "were encoded and are kept in" in printed(kept)
    assert "are from the cache in" in printed(kept)
    assert trained() == plain
    shutil.rmtree(output / "checkpoint-4")
    assert trained("--set", "resume_from_checkpoint=true") == plain

    # Another color of the same size; then none.
    path = folder / "3.png"
    content = path.read_bytes()
    shutil.copyfile(folder / "2.png", path)
    assert "3.png has changed since the rows of" in printed(kept)
    assert "are from the cache in" in printed(kept)
    path.unlink()
    assert "3.png" in printed(kept) and "there is no file" in printed(kept)
    path.write_bytes(content)
    assert "were encoded and are kept in" in printed(kept)


def header(path):
    with open(path, "rb") as file:
        return [name for name in json.loads(file.read(int.from_bytes(file.read(8), "little"))) if name != "__metadata__"]


def test_the_area_of_images_is_an_option(folder, tmp_path):
    usual, small = (
        surogate.Trainer(options(folder, tmp_path, **more)).step() for more in ({}, {"max_pixels": 256, "min_pixels": 256})
    )
    assert usual["loss"] != small["loss"]


@pytest.mark.parametrize(
    "more",
    [{"recipe": "fp8_hybrid", "lora": False}, {"recipe": "nvfp4", "fp4_backend": "emulate", "lora": False}, {"qlora_bnb": True}],
)
def test_quantized_products_go_with_images(more, folder, tmp_path, capfd):
    config = json.loads((folder / "model/config.json").read_text())
    config["text_config"] |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    config["text_config"]["rope_parameters"] |= {"mrope_section": [3, 3, 2]}
    config["vision_config"] |= {"out_hidden_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    (model / "config.json").write_text(json.dumps(config))
    surogate.Trainer(options(folder, tmp_path, model=str(model), torch_dtype="bfloat16")).export(tmp_path / "weights")
    adapters = {"lora": more.get("lora", True), "lora_rank": 4, "lora_dropout": 0.0}
    own = options(folder, tmp_path, model=str(tmp_path / "weights"), init="pretrained", torch_dtype="bfloat16") | adapters
    plain, coded = losses(own), losses(own | more)
    assert plain != coded and coded == pytest.approx(plain, rel=0.03)
    (tmp_path / "run.yaml").write_text(json.dumps(own | more))
    capfd.readouterr()
    assert main(["sft", str(tmp_path / "run.yaml"), "--max-steps", "1"]) == 0
    assert "the products of the vision tower stay in the compute type" in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"gpus": 2, "sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"max_pixels": 100, "min_pixels": 200}, "max_pixels"),
    ],
)
def test_options_that_do_not_go_with_images_are_named(more, named, folder, tmp_path):
    with pytest.raises(ConfigError, match=f"`{named}"):
        surogate.Trainer(options(folder, tmp_path, **more)).step()


@pytest.mark.parametrize("more", [{}, {"lora": True, "lora_rank": 4, "torch_dtype": "bfloat16"}])
def test_the_model_in_training_sees_images_and_answers(more, folder, tmp_path):
    config = options(folder, tmp_path, max_steps=6, learning_rate=1e-2, **more)
    plain = losses(config, 6)
    trainer = surogate.Trainer(config)
    model, seen = trainer.model, []
    asked = [{"role": "user", "content": [{"type": "image", "image": folder / "0.png"}, {"type": "text", "text": "Color?"}]}]
    text = [{"role": "user", "content": "Which color has the sky?"}]
    for _ in range(6):
        seen.append(trainer.step()["loss"])
        found = model.generate([asked, text], max_new_tokens=4, ignore_end_tokens=True)
    # Looking changes no step.
    assert seen == plain
    if not more:
        result = tmp_path / "result"
        trainer.export(result)
        alone = surogate.load(result)
        assert alone.generate([asked, text], max_new_tokens=4, ignore_end_tokens=True) == found
        ids = [[5, *[IMAGE] * surogate.process_images(result, [folder / "0.png"])[0]["tokens"], 7]]
        both = [of.forward(ids, images=[folder / "0.png"]) for of in (model, alone)]
        np.testing.assert_allclose(*both, atol=1e-4)


def test_prompts_are_answered_in_a_run_on_images(folder, tmp_path):
    sampled = {"sample_prompts": ["Which color?"], "sample_tokens": 4, "eval_strategy": "steps", "eval_steps": 2}
    (tmp_path / "run.yaml").write_text(json.dumps(options(folder, tmp_path, validation_split_ratio=0.2, **sampled)))
    assert main(["sft", str(tmp_path / "run.yaml")]) == 0
    (log,) = (tmp_path / "run").glob("log-*.json")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    found = [event["samples"][0] for event in events if event["event"] == "samples"]
    assert len(found) >= 2 and all(of["tokens"] >= 1 for of in found)


def test_prompts_with_images_are_answered_as_the_result_answers_them(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    asked = [{"role": "user", "content": [{"type": "image", "image": "0.png"}, {"type": "text", "text": "Which color?"}]}]
    of_column = {"messages": [{"role": "user", "content": "<image><image> Same?"}], "images": ["1.png", str(folder / "2.png")]}
    sampled = {"sample_prompts": [{"messages": asked}, "Which color?", of_column], "sample_tokens": 4,
               "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(options(folder, tmp_path, validation_split_ratio=0.2, **sampled)))
    assert main(["sft", str(tmp_path / "run.yaml")]) == 0
    (log,) = (tmp_path / "run").glob("log-*.json")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    found = [event["samples"] for event in events if event["event"] == "samples"]
    assert [of["prompt"] for of in found[-1]] == ["<image>Which color?", "Which color?", "<image><image> Same?"]
    named = [[(of["name"], of["width"], of["height"]) for of in sample.get("images", [])] for sample in found[0]]
    assert named == [[("./0.png", 48, 48)], [], [("./1.png", 64, 32), (str(folder / "2.png"), 32, 64)]]
    copies = [[of.get("copy", "")[:23] for sample in at for of in sample.get("images", [])] for at in found]
    assert copies[0] == ["data:image/jpeg;base64,"] * 3 and copies[-1] == [""] * 3
    model = surogate.load(tmp_path / "run/model")
    alone = model.generate([asked, [{"role": "user", "content": "Which color?"}]], max_new_tokens=4)
    assert [of["text"] for of in found[-1]][:2] == alone
    report = (tmp_path / "run/report.html").read_text()
    assert report.count('<img src="data:image/jpeg;base64,') == 3 * len(found)


@pytest.mark.parametrize(("prompt", "said"), [
    ({"messages": [{"role": "user", "content": [{"type": "image", "image": "no.png"}]}]}, "prompt 2 of 2: wrong type: image 1: there is no file"),
    ({"words": "a"}, "prompt 2 of 2: there is none of prompt, messages, conversations, text"),
    ({}, "`sample_prompts[1]` is empty"),
])  # fmt: skip
def test_prompts_that_are_none_are_named_before_the_run(folder, tmp_path, prompt, said):
    given = options(folder, tmp_path, validation_split_ratio=0.2, eval_strategy="steps", sample_prompts=["Which?", prompt])
    with pytest.raises(ConfigError, match=re.escape(said)):
        surogate.Trainer(given)


def test_broken_images_are_rows_in_error_and_changed_ones_end_the_run(folder, tmp_path):
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for number in range(96):
        shutil.copy(folder / f"{number}.png", tmp_path)
    rows[1]["messages"][0]["content"][0]["image"] = "missing.png"
    (tmp_path / "2.png").write_bytes((folder / "2.png").read_bytes()[:60])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = options(folder, tmp_path, datasets=[{"path": str(tmp_path / "rows.jsonl"), "type": "auto"}])
    trainer = surogate.Trainer({**config, "dataloader_num_workers": 0})
    assert trainer.step()["loss"] > 0
    for number in range(3, 96):
        (tmp_path / f"{number}.png").write_bytes(png(np.zeros((48, 48, 3), np.uint8)))
    with pytest.raises(surogate.SurogateError, match="has changed since the row was read"):
        for _ in range(3):
            trainer.step()


def test_an_adapter_on_the_convolution_of_patches_has_its_axes(folder, tmp_path):
    config = options(folder, tmp_path, lora=True, lora_rank=2, lora_target_modules=[r".*patch_embed\.proj"], max_steps=2)
    trainer = surogate.Trainer(config)
    assert trainer.step()["loss"] != trainer.step()["loss"]
    trainer.export(tmp_path / "adapter")
    with open(tmp_path / "adapter/adapter_model.safetensors", "rb") as file:
        tensors = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = {name.rsplit(".", 2)[1]: of["shape"] for name, of in tensors.items() if name != "__metadata__"}
    assert shapes == {"lora_A": [2, 3, 2, 8, 8], "lora_B": [32, 2, 1, 1, 1]}


def test_rows_with_images_calibrate_nothing(folder, tmp_path, capsys):
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(options(folder, tmp_path, task="sft")))
    surogate.Trainer(options(folder, tmp_path)).export(tmp_path / "model")
    asked = ["--scheme", "w4a16", "--method", "gptq", "--calibration", str(run)]
    assert main(["quantize", str(tmp_path / "model"), "--output", str(tmp_path / "out"), *asked]) == 4
    assert "message 1 has an image, and only text is trained here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_expected_time_of_a_tower_depends_on_the_images_and_not_on_the_layout_of_rows(folder, tmp_path, capsys):
    path = folder / "model/config.json"
    config = json.loads(path.read_text())
    config["vision_config"] |= {"hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "depth": 12}
    config["vision_config"]["deepstack_visual_indexes"] = []
    config["text_config"]["max_position_embeddings"] = 4096
    path.write_text(json.dumps(config))
    processor = folder / "model/preprocessor_config.json"
    fields = json.loads(processor.read_text())
    fields["size"] = {"shortest_edge": 65536, "longest_edge": 65536}  # 1024 patches
    processor.write_text(json.dumps(fields))
    found = {}
    for packed, length, rows in [(True, 8 * 320, 1), (False, 320, 8)]:
        run = options(folder, tmp_path, sample_packing=packed, sequence_len=length, per_device_train_batch_size=rows,
                      device="auto", torch_dtype="bfloat16", lora=True, lora_dropout=0.0)  # fmt: skip
        file = tmp_path / f"{packed}.json"
        file.write_text(json.dumps(run))
        assert main(["plan", str(file), "--machine", "h200", "--json"]) == 0
        found[packed] = json.loads(capsys.readouterr().out)["estimate"]["step_seconds"]
    assert found[True] == pytest.approx(found[False], rel=0.15), found
