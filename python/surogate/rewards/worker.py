"""The process of reward functions: a line of JSON for each request on standard input, and its answer on standard output.

What functions print goes to standard error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

from ..errors import ConfigError
from .functions import RewardFunction, call, load


def main() -> None:
    """Answers requests until there are none."""
    # Ctrl-C reaches the run's whole group: the run finishes its step and needs the rewards of its answers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    functions: list[tuple[str, RewardFunction]] = []
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _answer(request, functions)
        except ConfigError as error:
            answer = {"error": str(error)}
        except Exception:
            answer = {"error": f"rewards: {traceback.format_exc(limit=-3)}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(request: dict[str, Any], functions: list[tuple[str, RewardFunction]]) -> dict[str, Any]:
    if "load" in request:
        functions[:] = [(options["function"].rpartition(":")[2], load(options)) for options in request["load"]]
        return {}
    name, function = functions[request["function"]]
    try:
        return {"rewards": call(function, request["prompts"], request["completions"], request["columns"])}
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("rewards: ") else f"reward `{name}`: {text}") from None


if __name__ == "__main__":
    main()
