"""`surogate tokenize --debug` of rows with images: pictures with boxes on the page, their names on the terminal."""

from __future__ import annotations

import base64
import html
import json
import re

import numpy as np
import pytest
import surogate
from conftest import REPOSITORY
from surogate.cli.commands import main
from test_image_rows import blank

MODEL = REPOSITORY / "examples/shapes/model"


def shown(tmp_path, capsys, rows) -> tuple[str, str]:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"model": str(MODEL), "init": "random", "device": "cpu", "sequence_len": 256, "shuffle": False,
               "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "conversation"}], "data_cache": "off",
               "validation_split_ratio": 0.0, "output_dir": str(tmp_path / "out")}  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(options))
    assert main(["tokenize", "--debug", str(tmp_path / "run.yaml")]) == 0
    return capsys.readouterr().out, (tmp_path / "out/data.html").read_text(encoding="utf-8")


def talk(answer: str, **columns) -> dict:
    return {"messages": [{"role": "user", "content": "<image> What is this ?"}, {"role": "assistant", "content": answer}], **columns}


def uris(page: str) -> list[bytes]:
    return [base64.b64decode(of) for of in re.findall('href="data:image/jpeg;base64,([^"]*)"', page)]


def test_images_stand_beside_the_text_with_the_boxes_of_their_objects(tmp_path, capsys):
    name = "<script>'\"&\x1b[2J"
    blank(tmp_path / "a & b.png", 96, 64)
    objects = {"ref": [name, "point"], "bbox": [[16, 24, 48, 96], [32, 48]]}
    row = talk("<ref-object><bbox><ref-object><bbox>", images=["a & b.png"], objects=objects)
    text, page = shown(tmp_path, capsys, [row] * 3)
    caption = f"image 1: {tmp_path / 'a & b.png'}, 64 × 96 pixels, 12 tokens"
    assert caption in text and "<|image_pad|> × 12" in text and "\x1b" not in text
    assert html.escape(caption, quote=False) in page and "<|image_pad|> × 12" in html.unescape(page)
    assert '<rect class="o" x="16.0" y="24.0" width="32.0" height="72.0"/>' in page
    assert '<circle class="o" cx="32.0" cy="48.0" r="4"/>' in page and ">point</text>" in page
    assert "<script" not in page and ">&lt;script&gt;'&quot;&amp;␛[2J</text>" in page and "http" not in page
    (made,) = surogate.process_images({"image_processor_type": "SiglipImageProcessor", "do_resize": False}, uris(page)[:1])
    assert made["views"][0].shape == (96, 64, 3) and np.all(made["views"][0] > 250), "the image itself"


def test_large_images_are_small_copies_and_a_page_has_few(tmp_path, capsys):
    blank(tmp_path / "large.png", 1500, 750)
    content = base64.b64encode((tmp_path / "large.png").read_bytes()).decode()
    length = len((tmp_path / "large.png").read_bytes())
    two = talk("two", images=[{"bytes": content}, {"bytes": content}])
    two["messages"][0]["content"] = "<image><image>"
    text, page = shown(tmp_path, capsys, [two] * 40)
    assert f"image 2: {length} bytes in the row, 750 × 1500 pixels, " in text
    pictures = uris(page)
    drawn, named = len(pictures), page.count("<figcaption>")
    assert drawn == min(64, named) and page.count("; not drawn, as the page has pictures enough") == named - drawn
    assert 'viewBox="0 0 128 256"' in page and len(page) < 20_000 * drawn


@pytest.mark.parametrize("changed", [b"", b"something else"])
def test_a_file_that_changes_between_is_named(tmp_path, capsys, monkeypatch, changed):
    blank(tmp_path / "x.png", 32, 32)
    text, page = shown(tmp_path, capsys, [talk("it", images=["x.png"])] * 2)
    assert "image 1: " in text and len(uris(page)) == 2
    (tmp_path / "x.png").write_bytes(changed)
    assert main(["tokenize", "--debug", str(tmp_path / "run.yaml")]) != 0
    assert "x.png" in capsys.readouterr().err
