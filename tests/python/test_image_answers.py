"""Answers to conversations with images: the tokens are those of whole forward passes, alone, in batches and in training."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import surogate
from golden import DEVICE, WITH_IMAGES
from image_models import SPECIAL, png, with_tokenizer
from surogate.cli import chat
from surogate.cli.commands import main
from surogate.errors import SurogateError

TOKENS = 12
#: Logits that are as close as these may change places, as sums are computed in another order.
CLOSE = 1e-4


@pytest.fixture
def golden(shared):
    pytest.importorskip("safetensors.numpy")
    return shared / "golden"


def images_of(golden, family):
    from safetensors.numpy import load_file

    inputs = load_file(golden / family / "inputs.safetensors")
    return [inputs[f"image.{number}"] for number in range(3)]


def image(of):
    return {"type": "image", "image": of}


def text(words):
    return {"type": "text", "text": words}


def conversations(images):
    """Images in several turns, none, and one at the end; with the images of each."""
    first = {"role": "user", "content": [text("w5 w6"), image(images[0]), text("w7 w8 w9")]}
    answer = {"role": "assistant", "content": [text("w11 w12")]}
    second = {"role": "user", "content": [image(images[1]), text("w17"), image(images[2]), text("w3")]}
    alone = {"role": "user", "content": [text("w5 w6")]}
    last = {"role": "user", "content": [text("w2"), image(images[2])]}
    return [([first, answer, second], images), ([alone], []), ([first], images[:1]), ([last], images[2:])]


def answers(model, prompts, **options):
    generation = model.start(prompts, max_new_tokens=TOKENS, ignore_end_tokens=True, **options)
    while not generation.done:
        generation.step()
    return [generation.answer(prompt) for prompt in range(len(prompts))]


def ids_of(tokenizer, messages):
    """The tokens of a prompt, as training has them before the last answer."""
    whole = [*messages, {"role": "assistant", "content": [text("w1")]}]
    ids, labels, *_ = tokenizer.labels(json.loads(json.dumps(whole, default=lambda of: of.tolist())), images=[])
    end = max(t for t in range(1, len(labels)) if labels[t] != -100 and labels[t - 1] == -100)
    return list(ids[:end])


def follow(model, family, ids, images, answer):
    """Checks that each token of an answer is the likeliest after those before it."""
    compared = 0
    for token in answer:
        logits = (model.forward([ids], images=images) if images else model.forward([ids]))[0, -1]
        assert logits[token] >= logits.max() - CLOSE, (compared, token, int(logits.argmax()))
        compared += 1
        ids = [*ids, token]
        if token in SPECIAL[family]:
            break  # A token for images that the model wrote itself is a word, and no image is there for it.
    assert compared > 0
    return compared


def files(tmp_path, images):
    paths = [tmp_path / f"{number}.png" for number in range(len(images))]
    for path, of in zip(paths, images, strict=True):
        path.write_bytes(png(of))
    return [str(path) for path in paths]


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_tokens_are_those_of_whole_forward_passes(family, golden, tmp_path):
    folder = with_tokenizer(golden, family, tmp_path / "model")
    arrays = images_of(golden, family)
    given = conversations(files(tmp_path, arrays))
    model, tokenizer = surogate.load(folder, device=DEVICE), surogate.Tokenizer(folder)
    prompts = [messages for messages, _ in given]
    together = answers(model, prompts)
    compared = 0
    for (messages, images), answer in zip(given, together, strict=True):
        compared += follow(model, family, ids_of(tokenizer, messages), images, answer)
    assert compared > TOKENS
    assert [answers(model, [prompt])[0] for prompt in prompts] == together
    # The weights of the text alone give the answer to a text, too.
    assert answers(surogate.load(folder, device=DEVICE), prompts[1:2]) == together[1:2]
    held = conversations([png(of) for of in arrays])[2][0], conversations(arrays)[2][0]
    assert answers(model, list(held)) == [together[2]] * 2


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3_mm", "gemma4_mm", "qwen3_5_vl"])
def test_a_long_prompt_is_read_in_parts_that_cut_no_image(family, golden, tmp_path):
    folder = with_tokenizer(golden, family, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 2048
    (folder / "config.json").write_text(json.dumps(config))
    arrays = images_of(golden, family)
    paths = files(tmp_path, arrays)
    model, tokenizer = surogate.load(folder, device=DEVICE), surogate.Tokenizer(folder)
    # The first part would end at 1024 tokens, inside of the second image.
    words = [f"w{number % 60 + 1}" for number in range(1000)]
    content = [image(paths[0]), text(" ".join(words)), image(paths[1]), text("w4 w5")]
    messages = [{"role": "user", "content": content}]
    content[1]["text"] += " w1" * (1023 - ids_of(tokenizer, messages).index(88, 500))
    ids = ids_of(tokenizer, messages)
    assert ids[1022] != 88 and ids[1023] == ids[1024] == 88
    (answer,) = answers(model, [messages])
    follow(model, family, ids, arrays[:2], answer[:3])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3_mm", "qwen3_5_vl"])
def test_adapters_and_bfloat16_answer_too(family, golden, tmp_path):
    folder = with_tokenizer(golden, family, tmp_path / "model")
    arrays = images_of(golden, family)
    messages, images = conversations(files(tmp_path, arrays))[0]
    model, tokenizer = surogate.load(folder, golden / family / "lora", device=DEVICE), surogate.Tokenizer(folder)
    (adapted,) = answers(model, [messages])
    follow(model, family, ids_of(tokenizer, messages), images, adapted)
    assert adapted != answers(surogate.load(folder, device=DEVICE), [messages])[0]
    model = surogate.load(folder, dtype="bfloat16", device=DEVICE)
    (rounded,) = answers(model, [messages])
    logits = model.forward([ids_of(tokenizer, messages)], images=images)[0, -1]
    assert logits[rounded[0]] >= logits.max() - 0.05


def test_bounds_of_the_area_change_the_number_of_tokens(golden, tmp_path):
    folder = with_tokenizer(golden, "qwen3_vl", tmp_path / "model")
    messages, _ = conversations(files(tmp_path, images_of(golden, "qwen3_vl")))[2]
    model = surogate.load(folder, device=DEVICE)
    sizes = [model.start([messages], max_new_tokens=1, **of).prompt_tokens(0) for of in ({}, {"max_pixels": 256})]
    assert sizes[0] > sizes[1]


def test_what_cannot_be_answered_has_its_place(golden, tmp_path):
    folder = with_tokenizer(golden, "qwen3_vl", tmp_path / "model")
    (path, *_) = files(tmp_path, images_of(golden, "qwen3_vl"))
    (tmp_path / "broken.png").write_bytes((tmp_path / "0.png").read_bytes()[:60])
    model = surogate.load(folder, device=DEVICE)

    def user(*parts):
        return [{"role": "user", "content": list(parts)}]

    place = text("<|image_pad|>")
    for prompt, problem in (
        (user(image("missing.png")), "there is no file `missing.png`"),
        (user(image(path), image(str(tmp_path / "broken.png"))), "image 2, .*broken.png"),
        (user(image(path), place), "writes 2 of 1 images"),
        (user({"type": "image"}), "image 1: the row has no image for it"),
        ({"messages": user(image(path)), "images": [path]}, "1 more images than places"),
        ({"text": "w1", "images": [path]}, "`images` go into the chat template"),
    ):
        with pytest.raises(SurogateError, match=f"prompt 2 of 2: .*{problem}"):
            model.start([user(text("w1")), prompt], max_new_tokens=1)
    for settings, problem in (({"max_pixels": 100, "min_pixels": 200}, "`min_pixels` 200 is above `max_pixels` 100"),):
        with pytest.raises(SurogateError, match=problem):
            model.start([user(image(path))], **settings)
    with pytest.raises(SurogateError, match="max_pixels: no prompt has an image"):
        model.start([user(text("w1"))], max_pixels=100)
    # An empty place takes the image of the column, and a prompt in error leaves the others their answers.
    column = {"messages": user({"type": "image"}, text("w1")), "images": [path]}
    assert answers(model, [column]) == answers(model, [user(image(path), text("w1"))])
    generation = model.start([column, user(image("missing.png"))], goes_on=True, max_new_tokens=2)
    while not generation.done:
        generation.step()
    assert "missing.png" in generation.refusal(1) and generation.refusal(0) is None
    words = with_tokenizer(golden, "qwen3_vl", tmp_path / "text")
    config = json.loads((golden / "qwen3" / "config.json").read_text())
    (words / "config.json").write_text(json.dumps(config))
    (words / "model.safetensors").write_bytes((golden / "qwen3" / "model.safetensors").read_bytes())
    with pytest.raises(SurogateError, match="message 1: an image, and Qwen3ForCausalLM, as it is loaded, reads none"):
        surogate.load(words).generate(user(image(path)))


def test_commands_take_images(golden, tmp_path, monkeypatch, capsys):
    folder = with_tokenizer(golden, "qwen3_vl", tmp_path / "model")
    (path, other, *_) = files(tmp_path, images_of(golden, "qwen3_vl"))
    more = ["--max-new-tokens", "4", "--ignore-end-tokens"]
    model = surogate.load(folder, device=DEVICE)

    def expected(*parts):
        return model.generate([{"role": "user", "content": list(parts)}], max_new_tokens=4, ignore_end_tokens=True)

    assert main(["generate", str(folder), "--prompt", "w3", "--chat", "--image", path, "--image", other, *more]) == 0
    assert capsys.readouterr().out == expected(image(path), image(other), text("w3")) + "\n"
    rows = [
        {"messages": [{"role": "user", "content": [image("0.png"), text("w3")]}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}, text("w3")]}], "images": ["no.png"]},
        "w3",
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["generate", str(folder), "--prompts", str(tmp_path / "prompts.jsonl"), *more]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["finish"] for line in lines] == ["length", "error", "length"]
    assert lines[0]["text"] == expected(image(path), text("w3")) and "prompts.jsonl:2: " in err and "no.png" in err
    assert main(["generate", str(folder), "--prompt", "w3", "--image", path]) == 2
    assert "--image: images belong to a message" in capsys.readouterr().err
    said = ["w3", "/reset", f"/image {other}", "/image no.png", "w3", "/exit"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(said) + "\n"))
    shown = []
    answer = chat._answer
    monkeypatch.setattr(chat, "_answer", lambda *of: shown.append(of[1]["messages"][-1]) or answer(*of))
    assert main(["chat", str(folder), "--image", path, "--max-pixels", "4096", *more]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[1] == expected(image(path), text("w3")) and lines[3] == expected(image(other), text("w3"))
    assert [of["content"][0] for of in shown] == [image(path), image(other)] and "no.png: there is no such file" in err
