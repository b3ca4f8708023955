"""Environments: objects of a user's class, one for each answer, that say what follows a turn.

A class is called without arguments. `reset(prompt, **row)`, which it may leave out, gets the prompt and the columns of its row, and
returns messages (after a prompt that is a text: a text) that go after the prompt, or None. `step(text)` gets the text of a turn and
returns what follows in the same way, None at the end of the answer. Its attribute `reward` is what the reward `environment` gives.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import ConfigError
from .functions import awaited, named


class Environments:
    """The environments of the answers of a round."""

    def __init__(self, name: str) -> None:
        """Finds the class of `module:name`. Errors: there is none, or it has no method `step`."""
        self._name = name.rpartition(":")[2]
        self._class: Callable[[], Any] = named(name, "environment")
        if isinstance(self._class, type) and not callable(getattr(self._class, "step", None)):
            raise ConfigError(f"environment: `{name}` has no method `step`")
        self.all: list[Any] = []

    def reset(self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Makes an environment for each answer. Returns what goes after its prompt."""
        self.all = []
        replies = []
        for index, prompt in enumerate(prompts):
            row = {name: values[index] for name, values in columns.items()}
            self.all.append(self._guarded(index, prompt, self._class))
            reset = getattr(self.all[-1], "reset", None)
            replies.append(None if reset is None else self._guarded(index, prompt, partial(reset, prompt, **row)))
        return replies

    def step(self, turns: Sequence[tuple[int, str]]) -> list[Any]:
        """Gives environments, by the number of the answer, the texts of turns. Returns what follows each."""
        return [self._guarded(index, text, partial(self.all[index].step, text)) for index, text in turns]

    def _guarded(self, index: int, about: Any, call: Callable[[], Any]) -> Any:
        try:
            reply = awaited(call())
        except ConfigError:
            raise
        except BaseException:
            why = traceback.format_exc(limit=-3)
            raise ConfigError(f"environment `{self._name}`: answer {index + 1}, {str(about)[-300:]!r}: {why}") from None
        if call is self._class:
            return reply
        if isinstance(reply, Mapping):
            reply = [reply]
        try:
            json.dumps(reply, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"environment `{self._name}`: answer {index + 1}: it returned {reply!r:.200}: {error}") from None
        if not (reply is None or isinstance(reply, (str, list))):
            raise ConfigError(f"environment `{self._name}`: answer {index + 1}: it returned {reply!r:.200}, expected messages, a text or None")
        return reply or None
