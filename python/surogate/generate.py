"""`surogate generate`: text that continues prompts, on the terminal or as a file of lines.

Knows the places of model, adapter and prompts; what text follows is the engine's.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _native, export, hub, json_file, merge
from .arguments import UsageError, generation_options
from .errors import ConfigError
from .terminal import show_piece

if TYPE_CHECKING:
    from .model import Model

#: Fields of a line of a file of prompts, in the order in which they are looked for.
FIELDS = ("prompt", "messages", "text")


def open_model(options: Namespace) -> Model:
    """The model of the command line: a folder, a name on the hub, or what a run has made."""
    from .model import load

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
    prompts = [options.prompt] if options.prompts is None else list(read_prompts(Path(options.prompts)))
    if options.chat:
        prompts = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    model = open_model(options)
    generation = model.start(prompts, **generation_options(options))
    if options.prompts is None and not options.json:
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
            line = {"prompt": prompts[shown], "text": texts[shown], "finish": ends[shown]}
            show_piece(json.dumps({**line, "tokens": len(generation.answer(shown))}, ensure_ascii=False) + "\n")
            shown += 1
    return 0


def pieces(generation: _native.Generation) -> Iterator[tuple[int, str, str | None]]:
    """What the steps of a generation give, to its end."""
    while not generation.done:
        yield from generation.step()


def read_prompts(path: Path) -> Iterator[Any]:
    """The prompts of a file: each line of a `.jsonl` an object or a text, each other line that is not empty a text."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the prompts cannot be read: {error}") from None
    found = False
    for number, line in enumerate(lines, 1):
        if line.strip():
            found, place = True, f"{path}:{number}"
            yield _prompt(json_file.parse(line, place), place) if path.suffix == ".jsonl" else line
    if not found:
        raise ConfigError(f"{path}: the file holds no prompts, expected one per line")


def _prompt(value: Any, place: str) -> Any:
    if isinstance(value, str):
        return value
    named = [value[name] for name in FIELDS if isinstance(value, dict) and name in value]
    if not named:
        raise ConfigError(f"{place}: expected a string, or an object with one of {', '.join(FIELDS)}")
    return named[0]

