"""Rows that differ from the first ones of their set: columns that come late, other forms, values of another kind."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser

import pytest
import surogate
from conftest import REPOSITORY
from surogate.cli.commands import main

TEMPLATE = (
    "{{ bos_token }}{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TOOL = {"name": "look_up", "parameters": {"type": "object", "properties": {}}}
FIRST = 70


class Texts(HTMLParser):
    """The tokens of a page, one text."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.inside = "", False

    def handle_starttag(self, tag, attrs) -> None:
        self.inside = tag == "i" and "title" in dict(attrs)

    def handle_endtag(self, tag) -> None:
        self.inside = False

    def handle_data(self, data) -> None:
        self.all += data if self.inside else ""


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (REPOSITORY / "examples" / "stories" / "model").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def read(rows, model, tmp_path, capsys, **options):
    """The exit code of the data check, its output, and the text of all tokens that training takes."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"model": str(model), "datasets": [{"path": str(data), "type": "auto"}], "sequence_len": 512,
              "device": "cpu", "output_dir": str(tmp_path / "out"), "data_cache": "off",
              "validation_split_ratio": 0.0, "shuffle": False, **options}  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    code = main(["tokenize", "--debug", str(path)])
    page = Texts()
    if code == 0:
        page.feed((tmp_path / "out" / "data.html").read_text(encoding="utf-8"))
    said = capsys.readouterr()
    return code, said.out + said.err, page.all


@pytest.mark.parametrize(
    ("early", "late", "seen"),
    [
        ({"messages": TALK}, {"messages": TALK, "tools": [TOOL]}, "look_up"),
        ({"messages": TALK, "tools": None}, {"messages": TALK, "tools": [TOOL]}, "look_up"),
        ({"messages": TALK}, {"messages": TALK, "system": "Be a pirate"}, "system:·Be·a·pirate"),
        ({"instruction": "Hi", "output": "a"}, {"instruction": "Hi", "input": "Tom", "output": "b"}, "Tom"),
        (
            {"instruction": "Hi", "output": "a"},
            {"instruction": "Hi", "output": "b", "history": [["Who", "Lily"]]},
            "Lily",
        ),
        ({"instruction": "Hi", "output": "a"}, {"instruction": "Hi", "output": "b", "system": "Be Tom"}, "Be·Tom"),
    ],
)
def test_optional_columns_count_in_the_rows_that_fill_them(early, late, seen, model, tmp_path, capsys):
    code, said, text = read([early] * FIRST + [late] * 3, model, tmp_path, capsys)
    assert code == 0, said
    assert text.replace(" ", "·").count(seen) == 3, text[-800:]


def test_a_preference_reads_tools_of_later_rows(model, tmp_path, capsys):
    pair = {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [{"role": "assistant", "content": "No"}]}
    rows = [pair] * FIRST + [pair | {"tools": [TOOL]}]
    code, said, text = read(rows, model, tmp_path, capsys, task="dpo")
    assert code == 0 and "look_up" in text, said


def test_other_columns_of_later_rows_are_named(model, tmp_path, capsys):
    rows = [{"messages": TALK, "id": 1}] * FIRST + [{"messages": TALK, "id": 2, "notes": "two words"}]
    code, said, _ = read(rows, model, tmp_path, capsys)
    assert code == 0 and "columns that only later rows fill, and that are not used: `notes`" in said, said
    code, said, _ = read(rows[:FIRST], model, tmp_path, capsys)
    assert code == 0 and "later rows" not in said, said


def test_a_system_column_stands_before_messages_that_have_none(model, tmp_path, capsys):
    own = [{"role": "system", "content": "Be Sue"}, *TALK]
    rows = [{"messages": TALK, "system": "Be Tom"}, {"messages": own, "system": "Be Ben"}]
    code, said, text = read(rows, model, tmp_path, capsys)
    assert code == 0 and "Be Tom" in text and "Be Sue" in text and "Be Ben" not in text, text
    assert "the system prompts of 1 row are not read: their messages begin with one of their own" in said, said


def test_a_second_column_of_a_kind_is_named(model, tmp_path, capsys):
    rows = [{"messages": TALK, "system": "Be Tom", "system_prompt": "Be very kind"}] * 3
    code, said, text = read(rows, model, tmp_path, capsys)
    assert code == 0 and "not used: `system_prompt`" in said and "Be Tom" in text, said


def test_rows_without_a_system_column_that_others_have_are_kept(model, tmp_path, capsys):
    task = {"instruction": "Hi", "input": "x", "output": "a"}
    rows = [task | {"system": "Be Tom"}] * 3 + [task, task | {"system": {"text": "no"}}]
    code, said, text = read(rows[:4], model, tmp_path, capsys)
    assert code == 0 and re.search("^ *4 +4 +0 ", said, re.M) and text.count("Be Tom") == 3, said
    code, said, _ = read([task] * 3 + rows[4:], model, tmp_path, capsys)
    assert code == 0 and "`system` of 1 row is not read" in said, said


@pytest.mark.parametrize("other", ["", "null", "[{'role': 'user', 'content': 'x'}]", json.dumps(TALK)[:30]])
def test_a_bad_row_does_not_make_messages_a_text(other, model, tmp_path, capsys):
    rows = [{"messages": json.dumps(TALK)}] * 3 + [{"messages": other}]
    code, said, text = read(rows, model, tmp_path, capsys)
    assert code == 0 and "as JSON text" in said and "dropped 1 row" in said, said
    assert text.count("Hello") == 3 and "role" not in text, text


def test_messages_among_texts_are_named(model, tmp_path, capsys):
    rows = [{"text": "Once upon a time"}] * FIRST + [{"text": json.dumps(TALK)}]
    code, said, _ = read(rows, model, tmp_path, capsys)
    assert code == 0 and "1 text is messages as JSON, whose source is trained as text" in said, said
    code, said, _ = read(rows[-1:] + rows[:3], model, tmp_path, capsys)
    assert code != 0 and "holds messages in some rows (such as row 1), and text in others" in said, said


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK, "system": True},
        {"messages": TALK, "tools": 3},
        {"messages": TALK, "tools": ["hammer"]},
        {"instruction": "Hi", "output": "a", "context": ["p", "q"]},
        {"question": "Hi", "answer": "a", "history": "The patient has a cough"},
    ],
)
@pytest.mark.parametrize("at", ["first", "later"])
def test_usual_names_with_values_of_another_kind_are_not_read(row, at, model, tmp_path, capsys):
    name = list(row)[-1]
    plain = {key: value for key, value in row.items() if key != name}
    rows = [row] * 3 if at == "first" else [plain] * FIRST + [row]
    code, said, _ = read(rows, model, tmp_path, capsys)
    assert code == 0 and re.search(rf"^ *{len(rows)} +{len(rows)} +0 ", said, re.M), said
    if at == "later":
        assert f"`{name}` of 1 row is not read: its value is of another kind" in said, said


@pytest.mark.parametrize("answer", ['{"user": {"role": "admin"}}', '{"from": 1, "to": 2} because', '[INST] "role": x'])
def test_answers_of_json_are_answers(answer, model, tmp_path, capsys):
    rows = [{"prompt": "Write JSON:", "chosen": answer, "rejected": "no"}] * 3
    code, said, _ = read(rows, model, tmp_path, capsys, task="dpo")
    assert code == 0 and re.search("^ *3 +3 +0 ", said, re.M), said


PARTS = '[{"type": "text", "text": "Tom"}]'
KEPT = "3 contents that are lists of parts as JSON are kept as text: other messages of the row are plain texts"
READ = "6 contents that are lists of parts as JSON are read as parts"


@pytest.mark.parametrize(
    ("row", "seen", "said"),
    [
        ({"messages": [{"role": "user", "content": "Write"}, {"role": "assistant", "content": PARTS}]}, PARTS, KEPT),
        ({"conversations": [{"from": "human", "value": "Write"}, {"from": "gpt", "value": PARTS}]}, PARTS, KEPT),
        ({"prompt": [{"role": "user", "content": "Write"}], "completion": [{"role": "assistant", "content": PARTS}]}, PARTS, KEPT),
        ({"prompt": [{"role": "user", "content": "Write"}], "completion": PARTS}, PARTS, KEPT),
        ({"prompt": [{"role": "user", "content": "Write"}], "completion": '{"name": "Tom"}'}, '{"name": "Tom"}', None),
        ({"prompt": [{"role": "user", "content": "Write"}], "completion": "[]"}, "[]", None),
        ({"instruction": "Write", "output": PARTS}, PARTS, None),
        ({"messages": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS}]}, "assistant: Tom", READ),
    ],
)
def test_an_answer_that_is_json_is_trained_as_it_is(row, seen, said, model, tmp_path, capsys):
    code, told, text = read([row] * 3, model, tmp_path, capsys)
    assert code == 0 and re.search("^ *3 +3 +0 ", told, re.M), told
    assert seen in text.replace("·", " "), text
    assert (said in told) if said else ("lists of parts" not in told), told


@pytest.mark.parametrize("answers", [[PARTS, "no"], ["yes", PARTS]])
def test_answers_of_a_pair_that_are_json_are_kept_among_texts(answers, model, tmp_path, capsys):
    def said(role: str, content: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content}]

    pair = {"prompt": said("user", "Write"), "chosen": said("assistant", answers[0]), "rejected": said("assistant", answers[1])}
    code, told, text = read([pair] * 3, model, tmp_path, capsys, task="dpo")
    assert code == 0 and PARTS in text.replace("·", " "), told
    assert KEPT in told


@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_data_that_are_no_regular_file_are_refused(target, model, tmp_path, capsys):
    path = tmp_path / "endless.jsonl"
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    config = {"model": str(model), "datasets": [{"path": str(path), "type": "text"}], "sequence_len": 64,
              "device": "cpu", "output_dir": str(tmp_path / "out")}  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    assert main(["tokenize", str(tmp_path / "run.yaml")]) != 0
    assert "is no regular file" in capsys.readouterr().err


def test_prompts_are_read_as_rows_of_data_are(model):
    loaded = surogate.load(str(model))

    def tokens(prompt):
        return loaded.start([prompt], max_new_tokens=1).prompt_tokens(0)

    usual = tokens({"messages": TALK[:1], "tools": [{"type": "function", "function": TOOL}]})
    for other in (
        {"messages": TALK[:1], "tools": [TOOL]},
        {"messages": json.dumps(TALK[:1]), "tools": json.dumps([TOOL])},
        {"conversations": [{"from": "human", "value": "Hi"}], "tools": [TOOL]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "tools": [TOOL]},
    ):
        assert tokens(other) == usual, other
