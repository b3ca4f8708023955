"""Generation: tokens of transformers, every family against whole rows, batches, stops, the command line."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import surogate
from conftest import REPOSITORY
from golden import DEVICE, FAMILIES, MIXTURES
from surogate import terminal
from surogate.cli import chat
from surogate.cli.commands import main
from surogate.errors import ConfigError
from test_golden import of_family

pytestmark = pytest.mark.xdist_group("generate")

STORIES = REPOSITORY / "examples" / "stories" / "model"

#: What transformers 5.23 generates in float32 on the CPU, the likeliest token each time.
PROMPT = "Once upon a time"
STORY = (
    ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball. "
    "She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's go to the park.\" Lily was "
    "sad and didn't know what to do. She said, \"I want to play with your ball, but I can'"
)


@pytest.fixture(scope="module")
def stories():
    return surogate.load(STORIES, device=DEVICE)


def answers(model: surogate.Model, prompts: list, **options) -> list[list[int]]:
    generation = model.start(prompts, **options)
    while not generation.done:
        generation.step()
    return [generation.answer(index) for index in range(len(prompts))]


def test_a_story_of_transformers(stories):
    text = stories.generate(PROMPT, max_new_tokens=120)
    assert text == STORY
    assert "".join(stories.stream(PROMPT, max_new_tokens=120)) == text


@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES])
def test_the_tokens_of_every_family_are_those_of_transformers(name, golden_folder):
    """The likeliest tokens in float32, recorded; prompts of several lengths at once, past windows and changing rotations.
    The first two logits of every step are at least 1e-4 apart."""
    golden = of_family(name, golden_folder)
    recorded = json.loads((Path(__file__).parent / "greedy.json").read_text())["answers"][name]
    model = surogate.load(golden.folder, device=DEVICE)
    ids = golden.inputs["input_ids"].reshape(-1) % 90 + 3
    prompts = [ids[:1].tolist(), ids[1:20].tolist(), ids[20:37].tolist()]
    assert answers(model, prompts, max_new_tokens=64, ignore_end_tokens=True) == recorded


def test_a_prompt_gives_the_same_alone_and_in_a_batch(stories):
    prompts = [PROMPT, "Lily", "The big dog went to the park and", "One day, a"]
    for options in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}, {"temperature": 1.5, "top_k": 10}):
        alone = [stories.generate(prompt, max_new_tokens=30, **options) for prompt in prompts]
        assert stories.generate(prompts, max_new_tokens=30, **options) == alone
        assert stories.generate(prompts, max_new_tokens=30, batch_size=2, **options) == alone
    drawn = {stories.generate(PROMPT, max_new_tokens=20, temperature=1.0, seed=seed) for seed in range(4)}
    assert len(drawn) == 4


def test_an_answer_is_cut_before_a_text_that_ends_it(stories):
    whole = stories.generate(PROMPT, max_new_tokens=60)
    for stop in ("Lily", "red ball", "ed b", ". She"):
        found = stories.generate(PROMPT, max_new_tokens=60, stop=["nowhere", stop])
        assert found == whole[: whole.index(stop)], stop


def test_a_long_prompt_is_read_in_parts(stories):
    words = (PROMPT + STORY) * 3
    ids = surogate.Tokenizer(STORIES).encode(words)[:400]
    logits = stories.forward([ids])[0, -1]
    assert answers(stories, [ids], max_new_tokens=1) == [[int(logits.argmax())]]


def test_an_adapter_is_applied(tmp_path, golden_folder):
    golden = of_family("llama", golden_folder)
    adapter = next(path.parent for path in sorted(golden.folder.glob("**/adapter_config.json")))
    prompt = [golden.inputs["input_ids"].reshape(-1)[:12].tolist()]
    model = surogate.load(golden.folder, adapter, device=DEVICE)
    found = answers(model, prompt, max_new_tokens=30, ignore_end_tokens=True)[0]
    logits = model.forward([prompt[0] + found])[0, len(prompt[0]) - 1 : -1]
    assert logits.argmax(axis=1).tolist() == found
    base = surogate.load(golden.folder, device=DEVICE)
    assert found != answers(base, prompt, max_new_tokens=30, ignore_end_tokens=True)[0]


@pytest.mark.parametrize("off", [{"top_k": 0, "top_p": 1, "min_p": 0.0}, {"temperature": "0.0", "top_k": "0", "top_p": "1.0"}])
def test_options_that_leave_no_token_out_go_with_temperature_zero(stories, off):
    options = {"temperature": 0, "max_new_tokens": 5}
    assert answers(stories, [PROMPT], **{**options, **off}) == answers(stories, [PROMPT], **options)


def test_what_cannot_be_generated_is_refused(stories, tmp_path):
    for prompt, options, message in [
        ([3] * 512, {}, "the prompt has 512 tokens, and the model allows sequences of 512"),
        ([512], {}, "token id 512 is outside of the vocabulary of 512"),
        ([3], {"temperature": 0, "top_k": 3}, "top_k narrows what is drawn"),
        ([3], {"top_p": 2.0}, "top_p"),
        ([3], {"max_tokens": 3}, "max_new_tokens"),
        ([{"role": "user", "content": "Hello"}], {}, "the model has no chat template"),
    ]:
        with pytest.raises(ConfigError, match=message):
            stories.start([prompt], **options)
    assert len(answers(stories, [[3] * 500], max_new_tokens=100, ignore_end_tokens=True)[0]) == 12
    for file in ("config.json", "model.safetensors"):
        shutil.copy(STORIES / file, tmp_path)
    with pytest.raises(ConfigError, match="tokenizer.json"):
        surogate.load(tmp_path, device=DEVICE).generate("a")


TEMPLATE = (
    "{% for m in messages %}{{ '<s>' if m.role == 'user' }}{{ m.content }}"
    "{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
    "{{ ' ' if add_generation_prompt }}"
)


@pytest.fixture
def talkative(tmp_path) -> Path:
    """The stories with a chat template."""
    folder = tmp_path / "talkative"
    shutil.copytree(STORIES, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_conversation_is_answered_by_the_template(talkative):
    model = surogate.load(talkative, device=DEVICE)
    text = surogate.Tokenizer(talkative).apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True
    )
    ids = surogate.Tokenizer(talkative).encode(text, add_special_tokens=False)
    messages = [{"role": "user", "content": PROMPT}]
    assert model.start([messages]).prompt_tokens(0) == len(ids)
    expected = surogate.Tokenizer(talkative).decode(answers(model, [ids], max_new_tokens=20)[0])
    assert model.generate(messages, max_new_tokens=20) == expected
    assert model.generate([messages, messages], max_new_tokens=20) == [expected] * 2


def test_the_command_continues_a_text(capsys):
    assert main(["generate", str(STORIES), "--prompt", PROMPT, "--max-new-tokens", "30", "--device", DEVICE]) == 0
    out = capsys.readouterr().out
    assert STORY.startswith(out.removesuffix("\n")) and len(out) > 60


def test_the_command_reads_files_of_prompts(tmp_path, capsys, talkative):
    file = tmp_path / "prompts.jsonl"
    lines = [PROMPT, {"prompt": "Lily"}, {"messages": [{"role": "user", "content": "Tom"}]}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    options = ["--max-new-tokens", "8", "--device", DEVICE, "--stop", "ball", "--stop", "dog"]
    assert main(["generate", str(talkative), "--prompts", str(file), *options]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in found] == [PROMPT, "Lily", lines[2]["messages"]]
    assert all(line["finish"] == "length" and line["tokens"] == 8 for line in found)
    (tmp_path / "bad.jsonl").write_text('"a"\n{"question": 1}\n')
    assert main(["generate", str(talkative), "--prompts", str(tmp_path / "bad.jsonl")]) == 2
    assert "bad.jsonl:2" in capsys.readouterr().err


def test_prompts_in_a_list_of_json_are_items_and_other_data_are_refused(tmp_path, capsys):
    rows = [{"prompt": "One day"}, "A dog"]
    options = ["--max-new-tokens", "3", "--device", DEVICE]
    for name in ("list.json", "list.jsonl"):
        (tmp_path / name).write_text(json.dumps(rows, indent=1))
        assert main(["generate", str(STORIES), "--prompts", str(tmp_path / name), *options]) == 0
        lines = [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()]
        assert lines == ["One day", "A dog"], name
    (tmp_path / "bad.json").write_text('[{"prompt": "x"}, 3]')
    (tmp_path / "rows.csv").write_text("prompt\nOne day\n")
    (tmp_path / "half.jsonl").write_text('"One day"\n{"prompt": "\\ud83d\\ude00 \\ud800"}\n')
    refused = [("bad.json", "bad.json, item 2: expected a string"), ("rows.csv", "not from .csv")]
    for name, words in (*refused, ("half.jsonl", "half.jsonl:2: half of a surrogate pair")):
        assert main(["generate", str(STORIES), "--prompts", str(tmp_path / name), *options]) == 2
        assert words in capsys.readouterr().err


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

WITH_TOOLS = "{% for tool in tools or [] %}{{ 'can ' + tool.function.name + '. ' }}{% endfor %}{{ extra or '' }}" + TEMPLATE


def test_rows_have_options_of_their_own_and_do_not_lose_each_other(tmp_path, capsys, talkative):
    (talkative / "chat_template.jinja").write_text(WITH_TOOLS)
    model = surogate.load(talkative, device=DEVICE)
    hello = [{"role": "user", "content": "Hello"}]
    rows = [
        {"messages": hello, "tools": TOOLS},
        {"messages": hello, "tools": json.dumps(TOOLS), "max_new_tokens": 3},
        {"messages": hello, "chat_template_kwargs": {"extra": "so "}, "id": 7, "label\u2028": "x"},
        {"text": "word " * 600, "id": 8},
        {"text": "Lily", "temperature": 5.0, "max_new_tokens": 12},
        {"text": "Lily", "temperature": "hot"},
        {"text": "Lily", "tools": TOOLS},
        {"text": None, "prompt": "Lily", "tools": None, "max_new_tokens": 12},
    ]
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([lines[0], "", *lines[1:]]).encode())
    assert main(["generate", str(talkative), "--prompts", str(file), "--max-new-tokens", "5", "--device", DEVICE]) == 0
    out, err = capsys.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    assert [line["finish"] for line in found] == [
        "length", "length", "length", "context", "length", "error", "error", "length",
    ]
    assert [line["tokens"] for line in found] == [5, 3, 5, 0, 12, 0, 0, 12]
    # Places are those of the file, in which the second line is empty.
    for number, said in [(5, "the model allows sequences of 512"), (7, "`temperature` is \"hot\""), (8, "the prompt is a text")]:
        assert f"{file}:{number}: " in err and said in err, err
    assert f"`id` ({file}:4)" in err and "`label" in err
    assert found[4]["text"] != found[7]["text"] == model.generate("Lily", max_new_tokens=12)
    prompts = [model.start([row]).prompt_tokens(0) for row in ({"messages": hello}, rows[0], rows[2])]
    assert prompts[0] < prompts[2] < prompts[1], prompts
    # One alone, and several from Python, are an error.
    with pytest.raises(ConfigError, match="^the prompt has"):
        model.generate("word " * 600)
    with pytest.raises(ConfigError, match="^prompt 2 of 2: the prompt has"):
        model.generate(["a", "word " * 600])


def test_tools_of_a_file_reach_the_template(tmp_path, capsys, monkeypatch, talkative):
    (talkative / "chat_template.jinja").write_text(WITH_TOOLS)
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    given = ["--max-new-tokens", "6", "--device", DEVICE]
    answers = {}
    for name, more in {"without": [], "with": ["--tools", str(tmp_path / "tools.json")]}.items():
        assert main(["generate", str(talkative), "--chat", "--prompt", "Hello", *more, *given]) == 0
        said = capsys.readouterr().out
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
        assert main(["chat", str(talkative), *more, *given]) == 0
        assert said.strip() in capsys.readouterr().out
        answers[name] = said
    model = surogate.load(talkative, device=DEVICE)
    prompt = {"messages": [{"role": "user", "content": "Hello"}], "tools": TOOLS}
    generation = model.start([prompt], max_new_tokens=6)
    text = ""
    while not generation.done:
        text += "".join(piece for _, piece, _ in generation.step())
    assert answers["with"] == text + "\n"
    with_tools = ["generate", str(talkative), "--prompt", "a", "--tools"]
    assert main([*with_tools, str(tmp_path / "tools.json")]) == 2
    assert "give --chat" in capsys.readouterr().err
    (tmp_path / "one.json").write_text("{}")
    for file, said in (("one.json", "expected a list of function definitions"), ("none.json", "there is no such file")):
        assert main([*with_tools, str(tmp_path / file)]) == 2
        assert said in capsys.readouterr().err


def test_tools_that_a_template_does_not_show_are_refused(tmp_path, capsys, talkative):
    tools, prompts = tmp_path / "tools.json", tmp_path / "prompts.jsonl"
    tools.write_text(json.dumps(TOOLS))
    hello = [{"role": "user", "content": "Hello"}]
    rows = [{"messages": hello, **of} for of in ({"tools": TOOLS}, {"tools": []}, {})]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--max-new-tokens", "2", "--device", DEVICE]
    assert main(["generate", str(talkative), "--chat", "--prompt", "Hello", "--tools", str(tools), *given]) != 0
    assert "the chat template has no place for tools" in capsys.readouterr().err
    assert main(["generate", str(talkative), "--prompts", str(prompts), *given]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["finish"] for line in out.splitlines()] == ["error", "length", "length"]
    assert "prompts.jsonl:1: the chat template has no place for tools" in err


@pytest.mark.parametrize("content", ["Once upon", "Once upon ", "", None, [{"type": "text", "text": "Once upon"}]])
def test_an_answer_that_has_begun_is_continued(talkative, content):
    """As transformers' `continue_final_message`: no end of turn after it, no new turn."""
    parts = "{% set text = m.content if m.content is string else (m.content or [{'text': ''}])[0].text %}"
    (talkative / "chat_template.jinja").write_text(TEMPLATE.replace("{{ m.content }}", parts + "{{ text }}"))
    tokenizer = surogate.Tokenizer(talkative)
    model = surogate.load(talkative, device=DEVICE)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": content}]
    written = content[0]["text"] if isinstance(content, list) else content or ""
    expected = tokenizer.encode("<s>Hello" + written, add_special_tokens=False)
    assert model.start([messages]).prompt_tokens(0) == len(expected)
    assert answers(model, [messages], max_new_tokens=6) == answers(model, [expected], max_new_tokens=6)
    # One with calls is complete.
    called = [messages[0], {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    whole = tokenizer.encode("<s>Helloa</s> ", add_special_tokens=False)
    assert model.start([called]).prompt_tokens(0) == len(whole)


def test_what_the_model_says_of_generation_is_done_or_named(tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(STORIES, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    plain = surogate.load(folder, device=DEVICE)
    (ids,) = answers(plain, [PROMPT], max_new_tokens=60)
    words = surogate.Tokenizer(folder)

    def with_fields(**fields) -> tuple[list[int], str]:
        (folder / "generation_config.json").write_text(json.dumps(fields))
        model = surogate.load(folder, device=DEVICE)
        return answers(model, [PROMPT], **({} if "max_new_tokens" in fields or "max_length" in fields else {"max_new_tokens": 60}))[0], model.generate(PROMPT)

    assert with_fields(max_new_tokens=7)[0] == ids[:7]
    prompt = plain.start([PROMPT]).prompt_tokens(0)
    assert with_fields(max_length=prompt + 9)[0] == ids[:9]
    assert ids[3] not in with_fields(suppress_tokens=[ids[3]])[0]
    assert with_fields(begin_suppress_tokens=[ids[0]])[0][0] != ids[0]
    other = with_fields(bad_words_ids=[[ids[4], ids[5]]])[0]
    assert other[:5] == ids[:5] and other[5] != ids[5]
    found = with_fields(no_repeat_ngram_size=2)[0]
    pairs = list(zip(found, found[1:], strict=False))
    assert len(set(pairs)) == len(pairs) and len(set(zip(ids, ids[1:], strict=False))) < len(ids) - 1
    assert with_fields(max_new_tokens=5, forced_eos_token_id=2)[0] == [*ids[:4], 2]
    ended = with_fields(eos_token_id=[ids[6]])[0]
    assert ended == ids[:7] or ended[-1] == ids[6]
    assert len(with_fields(eos_token_id=[ids[6]], min_new_tokens=20)[0]) >= 20
    text = words.decode(ids)
    stopped = with_fields(stop_strings=["Lily"])[1]
    assert text.startswith(stopped) and "Lily" not in stopped
    (folder / "generation_config.json").write_text(json.dumps({"typical_p": 0.9, "num_beams": 1, "use_cache": True}))
    assert main(["generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", "3", "--device", DEVICE]) == 0
    err = capsys.readouterr().err
    assert err.count("not applied of the model's generation_config.json: typical_p: 0.9") == 1 and "num_beams" not in err


def test_a_prompt_of_the_models_whole_length_is_refused(tmp_path):
    """`max_length` counts prompt and answer, as in transformers."""
    folder = tmp_path / "model"
    shutil.copytree(STORIES, folder)
    (folder / "generation_config.json").write_text(json.dumps({"max_length": 3}))
    model = surogate.load(folder, device=DEVICE)
    generation = model.start([PROMPT, "a"], goes_on=True)
    texts = {number: finish for _ in iter(lambda: generation.done, True) for number, _, finish in generation.step() if finish}
    assert texts[0] == "context" and "`max_length` of the model's generation_config.json is 3" in generation.refusal(0)
    assert generation.refusal(1) is None
    assert model.generate(PROMPT, max_new_tokens=4)


def test_values_of_numpy_are_options_and_fields_that_nothing_reads_are_named(stories):
    expected = stories.generate(PROMPT, max_new_tokens=4, temperature=0.0)
    assert stories.generate(PROMPT, max_new_tokens=np.int64(4), temperature=np.float32(0)) == expected
    assert stories.generate(np.array([[1, 403]]), max_new_tokens=4) == stories.generate([[1, 403]], max_new_tokens=4)
    with pytest.warns(UserWarning, match="not used of the prompts: `max_tokens`; they have"):
        assert stories.generate({"prompt": PROMPT, "max_tokens": 3}, max_new_tokens=4) == expected


def test_parameters_of_transformers_are_no_variables_of_a_template(talkative):
    tokenizer, messages = surogate.Tokenizer(talkative), [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=True) == "<s>Hello"
    for name in ("tokenize", "continue_final_message", "return_tensors"):
        with pytest.raises(TypeError, match=f"`{name}` is no variable of a template"):
            tokenizer.apply_chat_template(messages, **{name: True})


def test_what_joins_characters_is_written_as_it_is(monkeypatch, capsys):
    joined = "\u0645\u06cc\u200c\u062e 👩\u200d🔬 א\u200f!"
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        terminal.show_piece(joined + "\u202e\x1b[2J")
        expected = joined + ("\\u202e\\u001b[2J" if is_terminal else "\u202e\x1b[2J")
        assert capsys.readouterr().out == expected


def test_a_terminal_shows_the_prompt_in_front_of_what_continues_it(monkeypatch, capsys):
    command = ["generate", str(STORIES), "--prompt", PROMPT, "--max-new-tokens", "3", "--device", DEVICE]
    assert main(command) == 0
    alone = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(command) == 0
    assert capsys.readouterr().out == f"\x1b[2m{PROMPT}\x1b[0m{alone}"
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(command) == 0
    assert capsys.readouterr().out == PROMPT + alone


def test_commands_say_what_they_miss(tmp_path, capsys):
    for arguments, message in [
        (["generate", str(STORIES)], "--prompt TEXT or --prompts FILE"),
        (["generate", str(STORIES), "--prompt", "a", "--temprature", "1"], "temprature"),
        (["generate", str(STORIES), "--prompt", "a", "--temperature", "hot"], "temperature"),
        (["generate", str(tmp_path), "--prompt", "a"], "no model, adapter or checkpoint"),
        (["generate", str(STORIES), "--prompt", "a", "--base", "x"], "--base names the model of an adapter"),
        (["chat", str(STORIES), "--prompt", "a"], "prompt"),
    ]:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_a_run_is_used_by_its_folder(tmp_path, capsys):
    source = REPOSITORY / "examples" / "stories.yaml"
    overrides = ["--output-dir", str(tmp_path / "out"), "--max-steps", "2"]
    assert main(["sft", str(source), "--quiet", *overrides]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "out"), "--prompt", PROMPT, "--max-new-tokens", "5"]) == 0
    of_run = capsys.readouterr().out
    given = ["--adapter", str(tmp_path / "out"), "--prompt", PROMPT, "--max-new-tokens", "5"]
    assert main(["generate", str(STORIES), *given]) == 0
    assert capsys.readouterr().out == of_run != ""


def test_a_conversation_on_the_terminal(talkative, monkeypatch, capsys):
    said = ["Once upon a time", "/what", "/reset", "Once upon a time", "and then", "/exit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(said) + "\n"))
    assert main(["chat", str(talkative), "--max-new-tokens", "12", "--device", DEVICE]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == chat.HELP and "/what is not known" in err
    first, reset = lines[1], lines.index("The conversation is empty.")
    assert first and lines[reset + 1] == first and len(lines) > reset + 2


def test_a_message_may_have_several_lines_and_help_is_at_hand(talkative, monkeypatch, capsys):
    asked = []
    answer = chat._answer
    monkeypatch.setattr(chat, "_answer", lambda model, prompt, settings: asked.append(prompt["messages"][-1]["content"]) or answer(model, prompt, settings))
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\nOnce\\\nupon a\\\ntime\nthe end\\"))
    assert main(["chat", str(talkative), "--max-new-tokens", "2", "--device", DEVICE]) == 0
    assert asked == ["Once\nupon a\ntime", "the end"]
    assert capsys.readouterr().out.splitlines()[:2] == [chat.HELP] * 2


def test_a_model_that_cannot_be_talked_to_is_told_before_it_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(chat.generate, "open_model", lambda options: pytest.fail("it is loaded"))
    assert main(["chat", str(STORIES)]) == 2
    err = capsys.readouterr().err
    assert "has no chat template" in err and f"surogate generate {STORIES} --prompt TEXT" in err


def test_thoughts_are_set_apart(capsys):
    shown = chat.Thoughts(coloured=True)
    for piece in ("<th", "ink>so", " so</thi", "nk>\n\nyes <", "b"):
        shown.show(piece)
    shown.end()
    assert capsys.readouterr().out == "\x1b[2m<think>so so</think>\x1b[0m\n\nyes <b"
    assert chat.without_thoughts("<think>so</think>\n\nyes") == "yes"
    assert chat.without_thoughts("yes") == "yes" and chat.without_thoughts("<think>so") == ""


def test_objects_have_seeds_of_their_own():
    """Several answers to one prompt; a seed gives the same answer alone and among others."""
    model = surogate.load(str(STORIES))
    options = {"max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    asked = [{"prompt": "Once upon a time", "seed": seed} for seed in range(8)]
    texts = model.generate(asked, **options)
    assert len(set(texts)) > 2
    assert model.generate(asked[3], **options) == texts[3]
    assert model.generate("Once upon a time", seed=5, **options) == texts[5]
    with pytest.raises(surogate.SurogateError, match="`seed` is -1, expected a whole number from 0"):
        model.generate([{"prompt": "x", "seed": -1}])
