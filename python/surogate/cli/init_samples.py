"""The part of `surogate init` for runs that sample their answers: rewards that the data allow, and lengths of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .arguments import UsageError

#: Answers to a prompt, and of a step.
GROUP, ANSWERS = 8, 64

#: Tokens of an answer.
ANSWER = 512

#: Columns whose number is the answer, the most telling first.
ANSWERS_IN = ("answer", "solution", "final_answer", "target", "label", "result")

_HINT = (
    "name one: --set 'rewards=[{function: my_rewards.py:is_right}]', a function of yours, or a built-in one "
    "(docs/reinforcement.md, Rewards)"
)


def chosen(base: dict[str, Any], given: dict[str, str], look: Callable[[dict[str, Any]], tuple[str, str]]) -> tuple[str, dict[str, Any]]:
    """Options of a run of samples for a dataset, with the table of the data check. `look` checks the data with options and
    returns table and counts. Raises UsageError where no built-in reward fits the data and none is given."""
    answer = int(given.get("max_completion_length", ANSWER))
    if "sequence_len" not in given and answer >= base["sequence_len"]:
        answer = base["sequence_len"] // 2
    found: dict[str, Any] = {"max_completion_length": answer, "num_generations": int(given.get("num_generations", GROUP))}
    table, text = look(found)
    counts = json.loads(text)
    if "rewards" not in given:
        numbers = [name for name in ANSWERS_IN if name in counts["columns_with_numbers"]]
        if not numbers:
            names = ", ".join(counts["columns"]) or "none"
            raise UsageError(f"init finds no reward for the data: no column has the answer as a number (columns: {names}); {_HINT}")
        field = {} if numbers[0] == "answer" else {"field": numbers[0]}
        found["rewards"] = [{"function": "number", **field}]
    if "sequence_len" not in given:
        found["sequence_len"] = min(base["sequence_len"], -(-(counts["longest"] + answer) // 64) * 64)
    return table, found


def lines(options: dict[str, Any], given: dict[str, str], remark: Callable[[str], str]) -> list[str]:
    """The lines of the file that only such a run has."""
    rewards = given.pop("rewards", None) or json.dumps(options["rewards"])
    found = [
        remark("What judges an answer. `number`: 1 if its last number is that of the row's field; see docs/reinforcement.md."),
        f"rewards: {rewards}",
        remark("Answers to each prompt, and tokens of an answer at most."),
    ]
    for name in ("num_generations", "max_completion_length"):
        found.append(f"{name}: {given.pop(name, options[name])}")
    return [*found, ""]
