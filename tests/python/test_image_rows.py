"""Conversations with images: ids, positions and labels against transformers' processors on the recorded rows."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
import re
import shutil
import zlib
from pathlib import Path

import pytest
import surogate
from surogate.cli.commands import main
from surogate.errors import DataError, SurogateError

SHARED = Path(__file__).parents[2].parent / "shared"
VISION = SHARED / "golden" / "vision"
FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def rows(family):
    path = VISION / "text" / f"{family}.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [row for row in map(json.loads, lines) if not row["id"].startswith("BATCH_")]


def expanded(runs):
    return [value for value, count in runs for _ in range(count)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model folder of each family: its template and processor with the tokenizer of Qwen3."""
    made = {}
    for family in FAMILIES:
        folder = made[family] = tmp_path_factory.mktemp(family)
        assets = SHARED / "assets/tokenizers/qwen3"
        (folder / "tokenizer.json").write_bytes(gzip.decompress((assets / "tokenizer.json.gz").read_bytes()))
        shutil.copy(assets / "tokenizer_config.json", folder)
        config = json.loads((SHARED / "golden" / family / "config.json").read_text())
        config["image_token_id"] = 151655
        meta = json.loads((VISION / "text" / f"{family}.meta.json").read_text())["image_processor"]
        config["vision_config"] |= {"patch_size": meta["patch_size"], "window_size": 8 * meta["patch_size"]}
        (folder / "config.json").write_text(json.dumps(config))
        processor = {"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 2, **meta}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        shutil.copy(VISION / "text/templates" / f"{family}.jinja", folder / "chat_template.jinja")
    return made


def filled(value):
    """A row with the contents of files where it has a word for them."""
    if isinstance(value, dict):
        return {key: filled(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [filled(inside) for inside in value]
    for word, before in (("BASE64:", ""), ("DATA_URI:", "data:image/png;base64,")):
        if isinstance(value, str) and value.startswith(word):
            return before + base64.b64encode((VISION / "images" / value.removeprefix(word)).read_bytes()).decode()
    return value


def cases():
    for family in FAMILIES:
        for row in rows(family):
            if row.get("template_arguments") is None:
                yield pytest.param(family, row, id=f"{family}-{row['id']}")


#: The tokenizer of a folder, which takes longer to read than the rows of a test.
tokenizer = functools.cache(surogate.Tokenizer)


def encoded(folder, row, monkeypatch):
    monkeypatch.chdir(VISION / "images")
    given = filled(row["row"])
    messages = given.get("messages") or given["conversations"]
    column = given.get("images", given.get("image"))
    column = column if isinstance(column, list) or column is None else [column]
    paths = [of["path"] if isinstance(of, dict) else of for of in column or []]
    return tokenizer(folder).labels(messages, tools=given.get("tools"), images=paths)


@pytest.mark.parametrize(("family", "row"), list(cases()))
def test_rows_become_the_recorded_tokens(family, row, folders, shared, monkeypatch):
    # A template without a place for tools drops them, in transformers without a word.
    if row.get("expected") == "error" or (family == "qwen2_5_vl" and "tool" in row["id"]):
        with pytest.raises((DataError, SurogateError)):
            encoded(folders[family], row, monkeypatch)
        return
    ids, labels, weights, axes = encoded(folders[family], row, monkeypatch)
    assert ids == expanded(row["input_ids_runs"])
    if row["images"]:
        assert axes == row["position_ids"]
    # transformers' mask holds the line break after a turn, which is not trained here, and tokens of images.
    mask = expanded(row["assistant_mask_runs"])
    images = expanded(row["mm_token_type_runs"])
    trained = [label != -100 for label in labels]
    assert any(trained)
    for t, (ours, theirs) in enumerate(zip(trained, mask, strict=True)):
        assert not (ours and images[t]) and (theirs or not ours)
        if theirs and not ours:
            assert images[t] or ids[t] in (198, 151652, 151653), (t, ids[t])
    assert all((weight != 0) == ours for weight, ours in zip(weights, trained, strict=True))


BOXES = [json.loads(line) for line in (VISION / "boxes.jsonl").read_text().splitlines()] if VISION.is_dir() else []


def blank(path, height, width):
    """Writes a white image."""
    row = b"\0" + b"\xff" * ((width + 7) // 8)
    parts = [(b"IHDR", width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0]))]
    parts += [(b"IDAT", zlib.compress(row * height)), (b"IEND", b"")]
    chunks = (len(of).to_bytes(4, "big") + kind + of + zlib.crc32(kind + of).to_bytes(4, "big") for kind, of in parts)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def resized(model, path, bounds, of):
    """A box in pixels of the image as the model reads it."""
    (made,) = surogate.process_images(model, [path], min_pixels=bounds["min_pixels"], max_pixels=bounds["max_pixels"])
    height, width = made["views"][0].shape[:2]
    sides = [(width, of["image_w"]), (height, of["image_h"])] * 2
    return [max(0, min(round(at * (new / old)), new - 1)) for at, (new, old) in zip(of["box_xyxy"], sides, strict=True)]


@pytest.mark.parametrize(
    ("family", "norm"), [("qwen2_5_vl", None), ("qwen2_5_vl", "norm1000"), ("qwen3_vl", None), ("qwen3_vl", "none")]
)
def test_boxes_become_the_recorded_numbers(family, norm, folders, shared, tmp_path):
    """All recorded boxes as one answer of one row with all images."""
    model = tmp_path / "model"
    shutil.copytree(folders[family], model)
    config = json.loads((model / "config.json").read_text())
    config.get("text_config", config).update({"vocab_size": 151936, "max_position_embeddings": 8192})
    (model / "config.json").write_text(json.dumps(config))
    sizes = sorted({(of["image_h"], of["image_w"]) for of in BOXES})
    for number, (height, width) in enumerate(sizes):
        blank(tmp_path / f"{number}.png", height, width)
    objects = {"ref": ["it"], "bbox": [of["box_xyxy"] for of in BOXES],
               "image_id": [sizes.index((of["image_h"], of["image_w"])) for of in BOXES]}  # fmt: skip
    answer = "<ref-object>:" + " <bbox>" * len(BOXES)
    row = {"messages": [{"role": "user", "content": "<image>" * len(sizes)}, {"role": "assistant", "content": answer}],
           "images": [f"{number}.png" for number in range(len(sizes))], "objects": objects}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    in_pixels, bounds = (norm or {"qwen2_5_vl": "none"}.get(family)) == "none", BOXES[0]["absolute"][2]
    options = {"model": str(model), "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "conversation"}],
               "output_dir": str(tmp_path / "out"), "data_cache": "off", "validation_split_ratio": 0.0, "sequence_len": 8192,
               "min_pixels": bounds["min_pixels"], "max_pixels": bounds["max_pixels"], "init": "random"}  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(options | ({"norm_bbox": norm} if norm else {})))
    assert main(["tokenize", str(tmp_path / "run.yaml"), "--debug"]) == 0
    shown = html.unescape(re.sub(r"<[^>]*>", "", (tmp_path / "out/data.html").read_text()))
    found = shown[shown.rindex("it: [") :].split("<|im_end|>")[0]
    if in_pixels and family == "qwen3_vl":  # not recorded: multiples of 32 pixels
        recorded = [resized(model, tmp_path / f"{image}.png", bounds, of) for image, of in zip(objects["image_id"], BOXES, strict=True)]
    else:
        recorded = [of["absolute"][2]["rounded_clamped"] if in_pixels else of["norm1000_round_clamped"] for of in BOXES]
    boxes = [json.loads(f"[{numbers}]") for numbers in re.findall(r"\[([^]]*)\]", found)]
    assert boxes == recorded
