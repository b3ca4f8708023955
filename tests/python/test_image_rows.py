"""Conversations with images: ids, positions and labels against transformers' processors on the recorded rows."""

from __future__ import annotations

import base64
import gzip
import json
import shutil
from pathlib import Path

import pytest
import surogate
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


def encoded(folder, row, monkeypatch):
    monkeypatch.chdir(VISION / "images")
    given = filled(row["row"])
    messages = given.get("messages") or given["conversations"]
    column = given.get("images", given.get("image"))
    column = column if isinstance(column, list) or column is None else [column]
    paths = [of["path"] if isinstance(of, dict) else of for of in column or []]
    return surogate.Tokenizer(folder).labels(messages, tools=given.get("tools"), images=paths)


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
