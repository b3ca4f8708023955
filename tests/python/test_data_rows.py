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


def checked(tmp_path, capsys, name: str, content: str) -> str:
    """The words of the data check of a file, be they an error."""
    (tmp_path / name).write_text(content)
    said = {"datasets": [{"path": str(tmp_path / name), "type": "auto"}], "validation_split_ratio": 0}
    model = tmp_path / "model"
    if not model.exists():
        shown(tmp_path, capsys)
    path = tmp_path / "check.yaml"
    path.write_text(json.dumps({"model": str(model), "sequence_len": 256, "device": "cpu"} | said))
    main(["tokenize", str(path)])
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_roles_that_are_not_known_are_named(tmp_path, capsys):
    def rows(*roles: str) -> str:
        return (json.dumps({"messages": [{"role": role, "content": f"word {role}"} for role in roles]}) + "\n") * 3

    said = checked(tmp_path, capsys, "late.jsonl", rows("user", "assistant", "user", "agent"))
    assert "3 messages are of role `agent`, which is none of `system`, `developer`, `user`, `assistant`, `tool`" in said, said
    said = checked(tmp_path, capsys, "all.jsonl", rows("customer", "agent"))
    assert "its messages are of the roles `agent`, `customer`" in said, said
    said = checked(tmp_path, capsys, "spaced.jsonl", rows("user ", " Assistant\n"))
    assert "of role" not in said and "conversation (OpenAI form)" in said, said
    said = checked(tmp_path, capsys, "one.jsonl", rows("user", "assistant").splitlines()[0])
    assert "1 document to train on" in said and "1 row of up to" in said, said


def test_separators_that_are_not_known_are_refused_and_spaces_after_them_are_taken_out(tmp_path, capsys):
    for sign in ("^", ":", "\x01", "~"):
        said = checked(tmp_path, capsys, "rows.csv", f"prompt{sign}completion\nhello{sign}world\na{sign}b\n")
        assert "as often as the first" in said and "prompt and completion" not in said, said
    said = checked(tmp_path, capsys, "named.csv", "sep=^\nprompt^completion\nhello^world\na^b\n")
    assert "`prompt` and `completion`" in said, said
    said = checked(tmp_path, capsys, "spaces.csv", "prompt, completion\nhello, world\na, b\n")
    assert "`prompt` and `completion`" in said, said
    said = checked(tmp_path, capsys, "text.csv", "text\nSo: what?\nNothing\n")
    assert "recognised as text in `text`" in said, said


def test_padded_rows_and_weights_are_shown(tmp_path, capsys):
    weights = {"user": 0.5, "assistant": 1.0}
    text, page = shown(tmp_path, capsys, sample_packing=False, loss_scale=weights)
    assert "of padding" in text and 'class="t w"' in page and "weight 0.5" in page
