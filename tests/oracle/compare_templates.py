"""Chat templates as the engine renders them against transformers' apply_chat_template, byte for byte.

    python tests/oracle/compare_templates.py PATH... [--seed S] [--random N] [--show N]

A PATH is a template (`*.jinja`), a `tokenizer_config.json` that holds one, or a folder in which either is looked for.
Every template is rendered over the conversations below and N drawn ones, each with several sets of options. Where
transformers raises, the engine may render (it is checked that it ends) or refuse; where transformers renders, the
engine must give the same text. Needs `transformers`, `tokenizers` and `surogate`. Exit code 1 if any text differs.
Knows no labels: those are held to the renderings by the tests of the data crate.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import surogate
from tokenizers import Tokenizer, models
from transformers.utils.chat_template_utils import render_jinja_template

Counts = collections.Counter[str]

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Current weather in a place. "Quoted" <b>&amp;</b> é 日本',
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "City's name\nand country"},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 14, "multipleOf": 0.5},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {"type": "object", "properties": {"lat": {"type": "number", "minimum": -90.0}}},
            },
            "required": ["location"],
        },
        "return": {"type": "string", "description": "A report."},
    },
}
PLAIN = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def talk(*middle: dict[str, Any]) -> list[dict[str, Any]]:
    return [say("user", "What is the weather in Paris?"), *middle]


RESULT = say("tool", '{"temperature": 21.5, "sky": "clear"}', name="get_weather", tool_call_id="abcdefghi")
ONE_CALL = call(
    "get_weather", {"location": "Paris", "days": 2, "share": 0.25, "none": None, "yes": True}, id="abcdefghi"
)

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [say("user", "Hi")],
    "answer": [say("user", "Hi"), say("assistant", "Hello.")],
    "system": [say("system", "Be brief."), say("user", "Hi"), say("assistant", "Hello.")],
    "developer": [say("developer", "Be brief."), say("user", "Hi"), say("assistant", "Hello.")],
    "rounds": [say("system", "S")] + [say(role, f"{role} {i}") for i in range(3) for role in ("user", "assistant")],
    "white": [say("user", "  \n two \n\n"), say("assistant", "\n\n x \t\n"), say("user", ""), say("assistant", "")],
    "tokens": [say("user", "<|im_end|><s></s><|eot_id|>[INST]"), say("assistant", "</think><think>a</think>b")],
    "marks": [say("user", "{{ messages }} {% if %} &amp; <b>'\"\\n\\"), say("assistant", "é😀\u2028 \x00\x7f")],
    "thought": [say("user", "1+1"), say("assistant", "<think>\nadd\n</think>\n\n2"), say("user", "2+2")],
    "reasoned": [
        say("user", "1+1"),
        say("assistant", "2", reasoning_content="add"),
        say("user", "2+2"),
        say("assistant", "4", reasoning_content="add\nagain"),
    ],
    "thinking": [say("user", "1+1"), say("assistant", "2", thinking="add")],
    "reasoning": [say("user", "1+1"), say("assistant", "2", reasoning="add", reasoning_content=None)],
    "call": talk(say("assistant", "", tool_calls=[ONE_CALL])),
    "null call": talk(say("assistant", None, tool_calls=[ONE_CALL]), RESULT, say("assistant", "Clear, 21.5.")),
    "no content": talk({"role": "assistant", "tool_calls": [ONE_CALL]}, RESULT, say("assistant", "Clear.")),
    "text call": talk(
        say("assistant", "Let me look.", tool_calls=[call("get_weather", '{"location": "Paris"}', id="abcdefghi")]),
        RESULT,
        say("assistant", "Clear."),
        say("user", "Thanks."),
    ),
    "two calls": talk(
        say("assistant", "", tool_calls=[ONE_CALL, call("now", {}, id="123456789")]),
        RESULT,
        say("tool", "12:00", name="now", tool_call_id="123456789"),
        say("assistant", "Noon and clear."),
    ),
    "call of a thought": talk(
        say("assistant", "", reasoning_content="I must look.", tool_calls=[ONE_CALL]),
        RESULT,
        say("assistant", "Clear."),
    ),
    "parts": [
        say("user", [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]),
        say("assistant", "Yo"),
    ],
    "image": [say("user", [{"type": "image"}, {"type": "text", "text": "What?"}]), say("assistant", "A cat.")],
    "bad role": [say("user", "Hi"), say("critic", "Bad.")],
    "two users": [say("user", "a"), say("user", "b"), say("assistant", "c")],
    "assistant first": [say("assistant", "Welcome."), say("user", "Hi"), say("assistant", "Hello.")],
    "late system": [say("user", "Hi"), say("system", "Be brief."), say("assistant", "Hello.")],
}

OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"tools": [WEATHER, PLAIN], "add_generation_prompt": True},
    {"tools": [WEATHER]},
    {"enable_thinking": False, "add_generation_prompt": True},
    {"enable_thinking": True, "thinking": True, "add_generation_prompt": True, "reasoning_effort": "high"},
    {"date_string": "26 Jul 2024", "custom_tools": [PLAIN], "tools_in_user_message": False},
    {"documents": [{"title": "A", "text": "B", "contents": "C"}], "add_generation_prompt": True},
]

PIECES = ["a", " ", "\n", "<think>", "</think>", "é", "😀", '"', "'", "\\", "{", "}}", "{%", "<|im_end|>", "</s>", "\t"]


def drawn(rng: random.Random) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation of random texts."""
    text = lambda: "".join(rng.choices(PIECES, k=rng.randrange(8)))  # noqa: E731
    value = lambda: rng.choice([text(), 1, -3, 0.1, 1e-7, 1e22, 3.0, True, None, [text()], {text(): text()}])  # noqa: E731
    messages = [say("system", text())] if rng.random() < 0.4 else []
    for _ in range(rng.randrange(1, 4)):
        messages.append(say("user", text()))
        if rng.random() < 0.3:
            arguments = {f"k{i}": value() for i in range(rng.randrange(4))}
            messages.append(say("assistant", text(), tool_calls=[call("now", arguments, id="abcdefghi")]))
            messages.append(say("tool", text(), name="now", tool_call_id="abcdefghi"))
        messages.append(say("assistant", text()))
        if rng.random() < 0.3:
            messages[-1]["reasoning_content"] = text()
    return messages, rng.choice(OPTIONS)


def found(paths: list[Path]) -> list[tuple[str, str]]:
    """The templates of the paths, by name."""
    templates = []
    for path in paths:
        files = [path] if path.is_file() else sorted([*path.rglob("*.jinja"), *path.rglob("tokenizer_config.json")])
        for file in files:
            if file.suffix != ".json":
                templates.append((file.stem, file.read_text(encoding="utf-8")))
                continue
            template = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
            named = template if isinstance(template, list) else [{"name": "", "template": template}]
            place = "/".join(file.parts[-3:-1])
            templates += [(f"{place} {one['name']}".strip(), one["template"]) for one in named if one["template"]]
    return templates


def tokenizer_folder(folder: Path) -> Path:
    """The least that a tokenizer's folder holds."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL.values())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    return folder


def outcome(render: Any) -> tuple[str, str]:
    """("text", it) or ("raised", why)."""
    try:
        return "text", render()
    except Exception as error:  # whatever a template makes its engine do
        return "raised", f"{type(error).__name__}: {error}"


def compare(
    name: str, template: str, folder: Path, cases: list[Any], counts: collections.Counter[str], show: int
) -> None:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
    opened = outcome(lambda: surogate.Tokenizer(folder))
    for case, messages, options in cases:
        if opened[0] == "raised":
            ours = opened
        else:
            ours = outcome(lambda: opened[1].apply_chat_template(messages, **options))
        theirs = outcome(lambda: render_jinja_template([messages], chat_template=template, **SPECIAL, **options)[0][0])
        kind = f"{theirs[0]}/{ours[0]}"
        if kind == "text/text" and theirs[1] != ours[1]:
            kind = "differ"
        counts[kind] += 1
        counts[f"{kind} {name}"] += 1
        if kind in ("differ", "text/raised") and counts[f"{kind} {name}"] <= show:
            reported = {key: value for key, value in options.items() if key != "tools"} | {"tools": "tools" in options}
            at = next((i for i, (a, b) in enumerate(zip(theirs[1], ours[1], strict=False)) if a != b), 0)
            print(f"{name} | {case} | {reported}\n  theirs {theirs[1][max(at - 60, 0) : at + 90]!r}")
            print(f"  ours   {(ours[1][max(at - 60, 0) : at + 90] if kind == 'differ' else ours[1])!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", type=int, default=20)
    parser.add_argument("--show", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    cases = [(name, talk, more) for (name, talk), more in itertools.product(CONVERSATIONS.items(), OPTIONS)]
    cases += [(f"drawn {i}", *drawn(rng)) for i in range(options.random)]
    counts: Counts = collections.Counter()
    templates = found(options.paths)
    with tempfile.TemporaryDirectory() as folder:
        place = tokenizer_folder(Path(folder))
        for name, template in templates:
            compare(name, template, place, cases, counts, options.show)
    same, both = counts["text/text"], counts["raised/raised"]
    wrong = counts["differ"] + counts["text/raised"]
    lenient = counts["raised/text"]
    print(f"{len(templates)} templates, {same + both + wrong + lenient} renderings: {same} the same text, {both} both")
    print(f"refuse, {lenient} only transformers refuses, {counts['differ']} differ, {counts['text/raised']} we refuse")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
