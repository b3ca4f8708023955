"""`surogate chat`: a conversation with a model, by its own template.

Keeps what was said; what is answered is the engine's.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..images import have_images
from ..terminal import DIM, put, show, show_piece, warn
from ..tokenizer import Tokenizer
from . import generate
from .arguments import generation_options

if TYPE_CHECKING:
    from ..model import Model

HELP = (
    "/reset clears the conversation, /image FILE shows an image with the next message, /exit (or the end of the input) "
    "ends, /help shows this, Ctrl-C stops an answer. A line that ends with \\ goes on in the next one."
)

#: What models put around what they think before they answer.
THINKING = ("<think>", "</think>")


def run(options: Namespace) -> int:
    """Answers until the user ends. Raises ConfigError, before the model is loaded, where it has no chat template."""
    if Tokenizer(generate.tokenizer_folder(options)).chat_template is None:
        hint = f"it continues texts: surogate generate {options.model} --prompt TEXT"
        raise ConfigError(f"{options.model} has no chat template, so it cannot be talked to ({hint})")
    model = generate.open_model(options)
    settings = generation_options(options)
    more = {"tools": generate.read_tools(options.tools)} if options.tools else {}
    system = [{"role": "system", "content": options.system}] if options.system else []
    messages, images = list(system), _checked(options.image)
    show(HELP)
    while True:
        try:
            text = _ask()
        except EOFError:
            show("")
            return 0
        if text == "/exit":
            return 0
        if text == "/help":
            show(HELP)
        elif text == "/reset":
            messages, images = list(system), []
            show("The conversation is empty.")
        elif text.split()[:1] == ["/image"]:
            try:
                images += _checked([text.removeprefix("/image").strip()])
            except ConfigError as error:
                warn(f"surogate: {error}")
        elif text.startswith("/"):
            warn(f"{text.split()[0]} is not known. {HELP}")
        elif text:
            messages.append(generate.message(text, images))
            answer = _answer(model, {"messages": messages, **more}, _without_bounds(settings, messages))
            if answer is None:
                messages.pop()
            else:
                images = []
                messages.append({"role": "assistant", "content": without_thoughts(answer)})


def _checked(images: list[str]) -> list[str]:
    """The paths of images. Raises ConfigError where one is no file."""
    for path in images:
        if not path:
            raise ConfigError("/image needs a FILE")
        if not Path(path).expanduser().is_file():
            raise ConfigError(f"{path}: there is no such file")
    return [str(Path(path).expanduser()) for path in images]


def _without_bounds(settings: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings; bounds of images only where there is an image already."""
    if have_images([messages]):
        return settings
    return {name: value for name, value in settings.items() if name not in ("max_pixels", "min_pixels")}


def _ask() -> str:
    """A message: a line, and the lines after those that end with a backslash."""
    lines: list[str] = []
    while True:
        if sys.stdin.isatty():
            show("… " if lines else "> ", end="")
            sys.stdout.flush()
        line = sys.stdin.readline()
        if not line and not lines:
            raise EOFError
        body = line.rstrip("\n")
        lines.append(body.removesuffix("\\"))
        if not line or not body.endswith("\\"):
            return "\n".join(lines).strip()


def _answer(model: Model, prompt: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """The answer, shown as it comes; what there is of it where the user stops it, nothing where it cannot begin."""
    parts: list[str] = []
    shown = Thoughts(sys.stdout.isatty())
    try:
        generation = model.start([prompt], **settings)
        for _, text, _ in generate.pieces(generation):
            parts.append(text)
            shown.show(text)
    except KeyboardInterrupt:
        shown.end()
        warn("\n(stopped)")
        return "".join(parts) or None
    except ConfigError as error:
        warn(f"surogate: {error}")
        return None
    shown.end()
    show_piece("\n")
    return "".join(parts)


class Thoughts:
    """Shows text, what the model thinks dimmed."""

    def __init__(self, coloured: bool) -> None:
        self._coloured = coloured
        self._held = ""
        self._inside = False

    def show(self, text: str) -> None:
        """Shows what is settled: the beginning of a mark is held back."""
        self._held += text
        while True:
            mark = THINKING[self._inside]
            before, found, rest = self._held.partition(mark)
            if not found:
                break
            self._put(before)
            if not self._inside:
                self._colour(0)
            self._put(mark)
            if self._inside:
                self._colour(1)
            self._inside = not self._inside
            self._held = rest
        mark = THINKING[self._inside]
        kept = max((n for n in range(len(mark)) if self._held.endswith(mark[:n])), default=0)
        self._put(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]

    def end(self) -> None:
        """Shows the rest, in the usual colour again."""
        self._put(self._held)
        self._held = ""
        if self._inside:
            self._colour(1)

    def _put(self, text: str) -> None:
        if text:
            show_piece(text)

    def _colour(self, which: int) -> None:
        if self._coloured:
            put(DIM[which])


def without_thoughts(answer: str) -> str:
    """An answer without its thoughts, as templates want earlier answers."""
    begin, end = THINKING
    _, found, rest = answer.partition(end)
    if found:
        return rest.lstrip("\n")
    return answer.partition(begin)[0] if begin in answer else answer
