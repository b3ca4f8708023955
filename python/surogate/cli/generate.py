"""`surogate generate`: text that continues prompts, on the terminal or as a file of lines.

Knows the places of model, adapter and prompts; what text follows is the engine's.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _native
from ..convert import export, merge
from ..errors import ConfigError
from ..storage import hub, json_file
from ..terminal import show_piece, show_prompt, warn
from .arguments import UsageError, generation_options

if TYPE_CHECKING:
    from ..model import Model

#: Fields of a line that hold its prompt, and those that are options of its own.
PROMPTS, OWN = _native.prompt_fields()


def open_model(options: Namespace) -> Model:
    """The model of the command line: a folder, a name on the hub, or what a run has made."""
    from ..model import load

    model, adapter = places(options.model, options.adapter, options.base)
    return load(model, adapter, device=options.device, dtype=options.dtype)


def tokenizer_folder(options: Namespace) -> Path:
    """The folder of the model's tokenizer: an adapter's own before its model's."""
    model, adapter = places(options.model, options.adapter, options.base)
    if adapter is not None and (adapter / "tokenizer.json").is_file():
        return adapter
    return hub.folder(model, weights=False)


def places(place: str, adapter: str | None, base: str | None) -> tuple[str, Path | None]:
    """Model and adapter of a place, which may be an adapter, or a run that made one."""
    local = Path(place).expanduser()
    found = export.result(local) if local.is_dir() else None
    if found is None or not (found / "adapter_config.json").is_file():
        if base:
            raise UsageError(f"--base names the model of an adapter, and {place} is a model")
        own = merge.adapter_folder(hub.folder(adapter, what="adapter")) if adapter else None
        return str(found or place), own
    if adapter:
        raise UsageError(f"{place} is itself an adapter: give its model, and the adapter with --adapter")
    base = base or _native.adapter_base(found)
    if not base:
        raise UsageError(f"{found} does not say which model it belongs to: give --base")
    return base, found


def run(options: Namespace) -> int:
    """Generates, and shows or writes what came of it."""
    if (options.prompt is None) == (options.prompts is None):
        raise UsageError("generate needs --prompt TEXT or --prompts FILE")
    if options.image and (options.prompt is None or not options.chat):
        raise UsageError("--image: images belong to a message (give --prompt TEXT and --chat)")
    lines = [("", options.prompt)] if options.prompts is None else list(read_prompts(Path(options.prompts)))
    tools = read_tools(options.tools) if options.tools else None
    prompts = [_asked(value, options.chat, tools, options.image) for _, value in lines]
    if tools and not any("tools" in prompt for prompt in prompts):
        raise UsageError("--tools: tools go into the chat template of messages (give --chat, or messages with --prompts)")
    model = open_model(options)
    folder = None if options.prompts is None else Path(options.prompts).parent
    goes_on = options.prompts is not None
    generation = model.start(prompts, goes_on, folder=folder, **generation_options(options))
    if options.prompts is None and not options.json:
        if not options.chat:
            show_prompt(options.prompt)
        for _, text, _ in pieces(generation):
            show_piece(text)
        show_piece("\n")
        return 0
    texts, ends = [""] * len(prompts), [""] * len(prompts)
    shown = 0
    for prompt, text, end in pieces(generation):
        texts[prompt] += text
        ends[prompt] = end or ""
        while shown < len(prompts) and ends[shown]:
            line = {"prompt": _shown(prompts[shown]), "text": texts[shown], "finish": ends[shown]}
            line["tokens"] = len(generation.answer(shown))
            if why := generation.refusal(shown):
                line["error"] = why
                warn(f"surogate: {lines[shown][0]}: {why}")
            show_piece(json.dumps(line, ensure_ascii=False) + "\n")
            shown += 1
    return 1 if all(generation.refusal(prompt) for prompt in range(len(prompts))) else 0


def read_tools(path: str) -> list[Any]:
    """The functions of a file: a list of definitions as JSON."""
    try:
        tools = json_file.read(Path(path).expanduser())
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{path}: expected a list of function definitions")
    return tools


def message(text: str, images: list[str]) -> dict[str, Any]:
    """A user's message with images before its text."""
    parts = [*({"type": "image", "image": path} for path in images), {"type": "text", "text": text}]
    return {"role": "user", "content": parts if images else text}


def _asked(value: Any, chat: bool, tools: list[Any] | None, images: list[str]) -> dict[str, Any]:
    """The prompt of a line as the engine takes it; a text becomes a user's message where it is to be answered."""
    prompt = {"prompt": value} if not isinstance(value, dict) else {name: value[name] for name in value if name in (*PROMPTS, *OWN)}
    name = next((name for name in PROMPTS if prompt.get(name) is not None), None)
    if chat and name and isinstance(prompt[name], str):
        prompt = {**prompt, name: [message(prompt[name], images)]}
    if tools and name and not isinstance(prompt[name], str) and prompt.get("tools") is None:
        prompt["tools"] = tools
    return prompt


def _shown(prompt: dict[str, Any]) -> Any:
    """The part of the prompt that a line of the output repeats."""
    return next((prompt[name] for name in PROMPTS if prompt.get(name) is not None), None)


def pieces(generation: _native.Generation) -> Iterator[tuple[int, str, str | None]]:
    """Yields the additions of a generation's steps, to its end."""
    while not generation.done:
        yield from generation.step()


#: Files with an object or a text on each line.
LINES = (".jsonl", ".ndjson")

#: Files of data that no prompts are read from: their lines would be taken for texts.
OTHERS = (".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".yaml", ".yml")


def read_prompts(path: Path) -> Iterator[tuple[str, Any]]:
    """The prompts of a file with their places: each line of a `.jsonl` an object or a text, as each item of a list of JSON, each
    line of a text that is not empty a text. Fields of objects that nothing reads are named."""
    if (ending := path.suffix.lower()) in OTHERS:
        raise ConfigError(f"{path}: prompts are read from .jsonl, .ndjson, .json and lines of text, not from {ending}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the prompts cannot be read: {error}") from None
    found, unused = False, dict[str, str]()
    for place, value in _values(path, text):
        found = True
        if isinstance(value, dict):
            read = (next(name for name in PROMPTS if value.get(name) is not None), *OWN)
            unused = {name: place for name in value if name not in read} | unused
        yield place, value
    if not found:
        raise ConfigError(f"{path}: the file holds no prompts, expected one per line")
    if unused:
        named = ", ".join(f"`{name}` ({place})" for name, place in unused.items())
        warn(f"surogate: not used of the lines, each with its first place: {named}")


def _values(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The prompts of a text by the file's ending, with their places."""
    ending = path.suffix.lower()
    if ending == ".json" or ending in LINES and text.lstrip().startswith("["):
        values = json_file.parse(text, str(path)) if text.strip() else []
        for number, value in enumerate(values if isinstance(values, list) else [values], 1):
            place = f"{path}, item {number}"
            yield place, _prompt(value, place)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, _prompt(json_file.parse(line, place), place) if ending in LINES else line


def _prompt(value: Any, place: str) -> Any:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{place}: half of a surrogate pair (such as \\ud800), which is no character") from None
    if isinstance(value, str) or isinstance(value, dict) and any(value.get(name) is not None for name in PROMPTS):
        return value
    raise ConfigError(f"{place}: expected a string, or an object with one of {', '.join(PROMPTS)}")
