"""Data from the command line and from Python: the check before a run, recognised types, what is trained."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import surogate
from conftest import REPOSITORY
from surogate.cli.commands import main

STORIES = REPOSITORY / "examples" / "stories"

TALK = [
    {"role": "user", "content": "One day"},
    {"role": "assistant", "content": "a cat"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "7 dogs"},
]

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def chat_model(tmp_path):
    """The model of the examples with a chat template."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (STORIES / "model").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def tokenize(capsys, tmp_path, model, **options: object) -> tuple[int, str]:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": str(model), "sequence_len": 256, "device": "cpu", **options}))
    code = main(["tokenize", str(path)])
    out, err = capsys.readouterr()
    return code, out + err


def test_tokenize_shows_what_became_of_the_rows(capsys, tmp_path, chat_model):
    data = tmp_path / "talk.jsonl"
    long = [*TALK, {"role": "user", "content": "x " * 110}, TALK[1]]
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in [TALK] * 8 + [long]) + "broken\n")
    code, text = tokenize(capsys, tmp_path, chat_model, dataset=str(data))
    assert code == 0, text
    assert "recognised as conversation (OpenAI form) in `messages`" in text
    assert "dropped 1 row: too long (first:" in text and "dropped 1 row: unreadable (first:" in text
    assert "7 documents to train on, 1 for evaluation" in text
    table = text[text.index("rows  kept") :]
    header, row = (line.split() for line in table.splitlines()[:2])
    assert header[:3] == ["rows", "kept", "dropped"] and row[:3] == ["10", "8", "2"]


def test_data_that_cannot_be_trained_on_ends_with_code_4(capsys, tmp_path, chat_model):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    code, text = tokenize(capsys, tmp_path, chat_model, dataset=str(pairs))
    assert code == 4 and "preference pairs" in text, text
    # The template writes no token that ends a turn.
    (chat_model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"messages": TALK}) + "\n")
    code, text = tokenize(capsys, tmp_path, chat_model, dataset=str(talk))
    assert code == 4 and "never learn to stop" in text, text
    code, text = tokenize(capsys, tmp_path, chat_model, dataset=str(tmp_path / "absent.jsonl"))
    assert code == 2 and "no such file" in text, text


def trained(tokenizer: surogate.Tokenizer, **options: object) -> list[str]:
    """The trained pieces of the talk, each with its weight."""
    ids, labels, weights = tokenizer.labels(TALK, **options)
    assert len(ids) == len(labels) == len(weights)
    pieces: list[tuple[float, list[int]]] = []
    previous = None
    for id_, label, weight in zip(ids, labels, weights, strict=True):
        assert label in (-100, id_)
        if label != -100:
            if previous == weight:
                pieces[-1][1].append(id_)
            else:
                pieces.append((weight, [id_]))
        previous = weight if label != -100 else None
    return [f"{tokenizer.decode(piece).strip()} @{weight:g}" for weight, piece in pieces]


def test_labels_follow_loss_scale(chat_model):
    tokenizer = surogate.Tokenizer(chat_model)
    assert trained(tokenizer) == ["a cat</s> @1", "7 dogs</s> @1"]
    assert trained(tokenizer, loss_scale="last_round") == ["7 dogs</s> @1"]
    everything = tokenizer.labels(TALK, loss_scale="all")
    assert everything[0] == everything[1] and set(everything[2]) == {1.0}
    weighted = trained(tokenizer, loss_scale={"user": 0.25, "assistant": 0.5, "[0-9]+": 2})
    assert [piece for piece in weighted if piece.endswith("@2")], weighted
    assert any("One day" in piece and piece.endswith("@0.25") for piece in weighted), weighted
    with pytest.raises(ValueError, match="not a number from 0"):
        tokenizer.labels(TALK, loss_scale={"assistant": -1})
    with pytest.raises(surogate.DataError, match="weight"):
        tokenizer.labels([TALK[0], {**TALK[1], "weight": -1}])


def test_a_response_prefix_is_given_and_not_trained(chat_model):
    tokenizer = surogate.Tokenizer(chat_model)
    ids, _, _ = tokenizer.labels(TALK, response_prefix="So: ")
    assert tokenizer.decode(ids).count("assistant: So: ") == 2
    assert trained(tokenizer, response_prefix="So: ") == ["a cat</s> @1", "7 dogs</s> @1"]


def test_tools_need_a_place_or_a_form(chat_model):
    tokenizer = surogate.Tokenizer(chat_model)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(surogate.DataError, match="no place for tools"):
        tokenizer.labels(TALK, tools)
    ids, _, _ = tokenizer.labels(TALK, tools, agent_template="react")
    assert '{"name":"f","parameters":{}}' in tokenizer.decode(ids)
    ids, _, _ = tokenizer.labels(TALK, tools, agent_template="hermes")
    assert "You are a function calling AI model." in tokenizer.decode(ids)


def test_the_page_on_data_shows_the_prompt_with_tools_of_the_hermes_models(chat_model):
    tokenizer = surogate.Tokenizer(chat_model)
    page = (REPOSITORY / "docs" / "data.md").read_text()
    blocks = re.findall("```text\n(.*?)\n```", page, re.S)
    [shown] = [block for block in blocks if block.startswith("You are a function")]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "18 C"}]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    ids, _, _ = tokenizer.labels([*talk, TALK[1]], tools, agent_template="hermes")
    written = tokenizer.decode(ids)
    places = [written.find(part) for part in shown.split("\n\n")]
    assert len(places) == 3 and -1 not in places and places == sorted(places), (places, written)


def test_the_tokenizer_agrees_with_itself(chat_model):
    tokenizer = surogate.Tokenizer(chat_model)
    text = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True)
    assert text == "<s>user: One day</s>\nassistant: "
    assert tokenizer.encode(text, add_special_tokens=False)[0] == 1
    assert tokenizer.decode(tokenizer.encode("One day", add_special_tokens=False)).strip() == "One day"


@pytest.mark.parametrize(
    "options",
    [
        {"padding_side": "left", "sample_packing": False},
        {"padding_free": True, "sample_packing": False},
        {"sample_packing": False},
        {"truncation_strategy": "left", "max_length": 24},
    ],
)
def test_rows_of_every_layout_train(tmp_path, chat_model, options):
    data = tmp_path / "talk.jsonl"
    rows = [{"messages": TALK[: 2 + 2 * (n % 2)], "n": n} for n in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = {}
    for name, given in {"given": options, "packed": {}}.items():
        trainer = surogate.Trainer(
            {
                "model": str(chat_model),
                "datasets": [{"path": str(data), "type": "conversation"}],
                "validation_split_ratio": 0,
                "shuffle": False,
                "sequence_len": 512,
                "per_device_train_batch_size": 6,
                "gradient_accumulation_steps": 1,
                "num_epochs": 1,
                "torch_dtype": "float32",
                "lora_dropout": 0,
                "device": "cpu",
                "output_dir": str(tmp_path / name),
                **given,
            }
        )
        losses[name] = trainer.step()["loss"]
    if "max_length" in options:
        assert losses["given"] != pytest.approx(losses["packed"], rel=1e-4)
    else:
        assert losses["given"] == pytest.approx(losses["packed"], rel=1e-5)


def test_conversations_need_the_template_that_use_chat_template_forbids(capsys, tmp_path, chat_model):
    data = tmp_path / "talk.jsonl"
    data.write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(4)))
    datasets = [{"path": str(data), "type": "conversation"}]
    assert tokenize(capsys, tmp_path, chat_model, datasets=datasets)[0] == 0
    code, text = tokenize(capsys, tmp_path, chat_model, datasets=datasets, use_chat_template=False)
    assert code == 2 and "`use_chat_template: false`" in text


def test_what_stands_around_a_conversation_is_as_requested(capsys, tmp_path, chat_model):
    (chat_model / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}\n" + TEMPLATE)
    data = tmp_path / "talk.jsonl"
    data.write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(4)))
    datasets = [{"path": str(data), "type": "conversation"}]

    def shown(**options: object) -> str:
        path = tmp_path / "run.yaml"
        run = {"model": str(chat_model), "sequence_len": 256, "datasets": datasets, "validation_split_ratio": 0}
        path.write_text(json.dumps({**run, "output_dir": str(tmp_path / "output"), "device": "cpu", **options}))
        assert main(["tokenize", str(path), "--debug"]) == 0
        return capsys.readouterr().out.replace("·", "")  # between tokens

    clock = shown(clock="2026-11-20")
    assert "20 Nov 2026" in clock and "21 Nov 2026" in shown(clock="2026-11-21")
    assert "system: Be brief." in shown(system="Be brief.") and "system:" not in clock
    (tmp_path / "other.jinja").write_text(TEMPLATE.replace(": ", " says "))
    assert "user says One day" in shown(template=str(tmp_path / "other.jinja")) and "user: One day" in clock


QUESTION = {"question": "One day", "answer": "a cat", "more": "and then", "before": "Be brief.", "other": "7 dogs"}
ASKED = {"type": "instruction", "instruction_field": "question", "output_field": "answer"}
OF_A_FIELD = {**ASKED, "system_prompt_type": "field", "system_prompt_field": "before"}
FIXED = {**ASKED, "system_prompt_type": "fixed", "system_prompt": "Be kind."}
CHAT = {"messages": TALK, "talk": TALK[:2], "about": "Be brief.", "tools": [{"name": "look", "parameters": {}}]}
CALLED = {"messages": [{**m, "from": n["role"]} for m, n in zip(TALK, TALK[1:] + TALK[:1], strict=True)]}
TOOLS = "{% for tool in tools or [] %}tool {{ tool.name }}\n{% endfor %}"

# Option of a dataset → (a row, what both runs set, what one of them sets).
ROWS: dict[str, tuple[dict[str, object], dict[str, object], dict[str, object]]] = {
    "type": ({"text": "One day", **QUESTION}, {"type": "text"}, ASKED),
    "max_row_size": ({"text": "a cat " * 40}, {"type": "text"}, {"max_row_size": "64B"}),
    "text_field": ({"text": "One day", **QUESTION}, {"type": "text"}, {"text_field": "other"}),
    "instruction_field": (QUESTION, ASKED, {"instruction_field": "more"}),
    "output_field": (QUESTION, ASKED, {"output_field": "other"}),
    "input_field": (QUESTION, ASKED, {"input_field": "more"}),
    "system_prompt_type": (QUESTION, ASKED, FIXED),
    "system_prompt_field": (QUESTION, OF_A_FIELD, {"system_prompt_field": "other"}),
    "system_prompt": (QUESTION, FIXED, {"system_prompt": "Be brief."}),
    "prompt_format": (
        QUESTION,
        {**ASKED, "input_field": "more"},
        {"prompt_format": "Q {instruction} {input} A {output}"},
    ),
    "prompt_format_no_input": (
        QUESTION,
        {**ASKED, "input_field": "none", "prompt_format": "Q {instruction} {input} A {output}"},
        {"prompt_format_no_input": "Ask {instruction} A {output}"},
    ),
    "messages_field": (CHAT, {"type": "conversation"}, {"messages_field": "talk"}),
    "system_field": (CHAT, {"type": "conversation"}, {"system_field": "about"}),
    "tools_field": (CHAT, {"type": "conversation"}, {"tools_field": "tools"}),
    "message_property_mappings": (CALLED, {"type": "conversation"}, {"message_property_mappings": {"role": "from"}}),
}

# Those whose effect another test shows.
ROWS_ELSEWHERE = {"path", "subset", "split", "samples", "repeats"}
# The columns of preferences, which crates/data/tests/it/preference.rs names.
ROWS_ELSEWHERE |= {f"{column}_field" for column in ("prompt", "chosen", "rejected", "margin", "completion", "label")}


@pytest.mark.parametrize("option", ROWS)
def test_each_option_of_a_dataset_changes_what_is_trained(capsys, tmp_path, chat_model, option):
    row, in_both, changed = ROWS[option]
    (chat_model / "chat_template.jinja").write_text(TOOLS + TEMPLATE)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(4)))

    def shown(**options: object) -> str:
        path = tmp_path / "run.yaml"
        datasets = [{"path": str(data), **in_both, **options}]
        run = {"model": str(chat_model), "sequence_len": 256, "datasets": datasets, "validation_split_ratio": 0}
        path.write_text(json.dumps({**run, "output_dir": str(tmp_path / "output"), "device": "cpu"}))
        code = main(["tokenize", str(path), "--debug"])
        out, err = capsys.readouterr()
        assert code == 0 or option == "max_row_size", out + err
        return out + err

    assert shown(**changed) != shown()


def test_every_option_of_a_dataset_is_looked_at():
    schema = json.loads((REPOSITORY / "docs" / "surogate.schema.json").read_text())
    [rows] = [form["items"]["properties"] for form in schema["properties"]["datasets"]["anyOf"] if "items" in form]
    available = {name for name, row in rows.items() if "Not available yet." not in row.get("description", "")}
    assert available == ROWS.keys() | ROWS_ELSEWHERE


def test_rows_that_are_too_long_are_worth_a_warning_and_then_an_error(capsys, tmp_path, chat_model):
    data = tmp_path / "talk.jsonl"
    long = [*TALK, {"role": "user", "content": "x " * 110}, TALK[1]]

    def check(long_ones: int, **options: object) -> tuple[int, str]:
        talks = [long] * long_ones + [TALK] * (20 - long_ones)
        data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        return tokenize(capsys, tmp_path, chat_model, dataset=str(data), **options)

    code, text = check(0)
    assert code == 0 and "Warning" not in text, text
    code, text = check(1)
    assert code == 0 and "Warning: 5.0 % of the rows of" in text and text.count("keeps 99 % of them") == 1, text
    code, text = check(11)
    assert code == 4 and "11 of 20 rows are too long" in text and "truncation_strategy" in text, text
    code, text = check(11, truncation_strategy="right")
    assert code == 0 and "55.0 % of the rows of" in text and "cut" in text, text


def test_a_warning_of_long_rows_is_told_once(capfd, tmp_path, chat_model):
    data, path = tmp_path / "talk.jsonl", tmp_path / "run.yaml"
    model = shutil.copytree(chat_model, tmp_path / "copied")
    long = [*TALK, {"role": "user", "content": "x " * 110}, TALK[1]]
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in [long] * 13 + [TALK] * 87))
    options = {"model": str(model), "sequence_len": 256, "device": "cpu", "dataset": str(data), "max_steps": 1}
    options |= {"validation_split_ratio": 0, "truncation_strategy": "delete", "output_dir": str(tmp_path / "out")}
    path.write_text(json.dumps(options))
    for command in ("plan", "tokenize", "sft"):
        assert main([command, str(path)]) == 0
        said = "".join(capfd.readouterr())
        assert said.count("Warning: 13.0 % of the rows of") == said.count("keeps 99 % of them") == 1, (command, said)
    with pytest.warns(UserWarning, match="13.0 % of the rows of") as caught:
        surogate.Trainer({**options, "output_dir": str(tmp_path / "trainer")})
    assert len([warning for warning in caught if "too long" in str(warning.message)]) == 1
    assert "too long" not in "".join(capfd.readouterr())


def test_what_rows_hold_and_training_does_not_see_is_reported(capsys, tmp_path, chat_model):
    (chat_model / "chat_template.jinja").write_text(
        TEMPLATE.replace("for m in messages", "for m in messages if m.role != 'critic'")
    )
    data = tmp_path / "talk.jsonl"
    talk = [TALK[0], {"role": "critic", "content": "a"}, {**TALK[1], "id": 7}]
    data.write_text("".join(json.dumps({"messages": talk, "history": [["a", "b"]]}) + "\n" for _ in range(4)))
    code, text = tokenize(capsys, tmp_path, chat_model, dataset=str(data))
    assert code == 0, text
    assert "recognised as conversation (OpenAI form) in `messages`; not used: `history`" in text
    assert "4 messages of role `critic` are not shown by the template" in text
    assert "fields of messages that change nothing: `id` (of 4 messages)" in text
