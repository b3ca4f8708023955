"""`surogate tokenize --debug`: the rows that training takes, on a terminal and as a page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

from conftest import REPOSITORY
from surogate.cli.commands import main

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"


class Page(HTMLParser):
    """The texts of the page's tokens, the trained ones apart."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.trained, self.inside = "", "", None
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        named = dict(attrs)
        self.inside = (named.get("class") or "given") if tag == "i" and "title" in named else None

    def handle_endtag(self, tag) -> None:
        self.inside = None

    def handle_data(self, data) -> None:
        if self.inside is not None:
            self.all += data
            self.trained += data if self.inside.startswith("t") else ""


def shown(tmp_path, capsys, **options) -> tuple[str, str]:
    model = tmp_path / "model"
    if not model.exists():
        model.mkdir()
        for file in (REPOSITORY / "examples" / "stories" / "model").iterdir():
            (model / file.name).symlink_to(file)
        (model / "chat_template.jinja").write_text(TEMPLATE)
    talk = [{"role": "user", "content": "<b>One</b> day\x1b[2J"}, {"role": "assistant", "content": "a cat & a dog"}]
    data = tmp_path / "talk.jsonl"
    data.write_text((json.dumps({"messages": talk}) + "\n") * 12)
    path = tmp_path / "run.yaml"
    config = {"model": str(model), "dataset": str(data), "sequence_len": 256, "device": "cpu"}
    path.write_text(json.dumps(config | {"output_dir": str(tmp_path / "out"), **options}))
    assert main(["tokenize", "--debug", str(path)]) == 0
    return capsys.readouterr().out, (tmp_path / "out" / "data.html").read_text(encoding="utf-8")


def test_rows_are_shown_as_they_are_trained(tmp_path, capsys):
    text, page = shown(tmp_path, capsys)
    assert "rows  kept" in text and "row 1, document 1: " in text and "document 2: " in text
    assert "\x1b" not in text, "no colours where there is no terminal, and none from the data"
    assert all(len(line) <= 120 for line in text[text.index("⟦") :].splitlines() if "page:" not in line)
    pieces = {re.sub(r"[·↵\s]", "", piece) for piece in re.findall("⟦(.*?)⟧", text, re.S)[1:]}
    assert pieces == {"acat&adog</s>"}, pieces
    parser = Page()
    parser.feed(page)
    assert "script" not in parser.tags and "b" in parser.tags and "http" not in page
    assert "<b>One</b> day␛[2J" in parser.all
    trained, answer = re.sub(r"\s", "", parser.trained), "acat&adog</s>"
    assert trained and trained == answer * trained.count(answer), parser.trained
    assert 'name="viewport"' in page and "prefers-color-scheme:dark" in page
    assert (tmp_path / "out" / "data.html").exists() and [file.name for file in (tmp_path / "out").iterdir()] == [
        "data.html"
    ]


def test_padded_rows_and_weights_are_shown(tmp_path, capsys):
    weights = {"user": 0.5, "assistant": 1.0}
    text, page = shown(tmp_path, capsys, sample_packing=False, loss_scale=weights)
    assert "of padding" in text and 'class="t w"' in page and "weight 0.5" in page
