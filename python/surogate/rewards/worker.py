"""The process of reward functions and environments: a line of JSON for each request on standard input, and its answer on standard output.

What functions print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from ..environment.signals import leave_to_the_run
from ..errors import ConfigError
from .environments import Environments
from .functions import RewardFunction, call, load


def main() -> None:
    """Answers requests until there are none."""
    # The run finishes its step after a signal, and needs the rewards of its answers.
    leave_to_the_run()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    process = Process()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = process.answer(request)
        except ConfigError as error:
            answer = {"error": str(error)}
        except BaseException:
            answer = {"error": f"rewards: {traceback.format_exc(limit=-3)}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Process:
    """The loaded reward functions, and the environments of a round."""

    def __init__(self) -> None:
        """Nothing is loaded before the first request says what."""
        self._functions: list[tuple[str, RewardFunction]] = []
        self._environments: Environments | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        if "load" in request:
            self._functions = [(options["function"].rpartition(":")[2], load(options)) for options in request["load"]]
            name = request.get("environment")
            self._environments = None if name is None else Environments(name)
            return {}
        if "reset" in request or "step" in request:
            assert self._environments is not None, "an environment was loaded"
            if "step" in request:
                return {"replies": self._environments.step(request["step"])}
            return {"replies": self._environments.reset(**request["reset"])}
        name, function = self._functions[request["function"]]
        columns = request["columns"]
        if self._environments is not None:
            columns = {**columns, "environments": self._environments.all}
        try:
            return {"rewards": call(function, request["prompts"], request["completions"], columns)}
        except ConfigError as error:
            text = str(error)
            raise ConfigError(text if text.startswith("rewards: ") else f"reward `{name}`: {text}") from None


if __name__ == "__main__":
    main()
