"""Reward functions: those of a user, found by name, and the built-in ones.

A function takes `prompts` and `completions`, lists of texts or of messages, and the columns of the rows by name, each a list
with a value for each answer, as functions for TRL do. It returns a number for each answer, or None for one that it does not
judge.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import numbers
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError

RewardFunction = Callable[..., Sequence[float | None]]

#: Signs of a number, with groups of thousands, a fraction and an exponent.
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")


def text_of(completion: Any) -> str:
    """The text of an answer: its own, or that of its messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def load(options: Mapping[str, Any]) -> RewardFunction:
    """Finds a function by its options. Errors: there is no such module or function."""
    name = options["function"]
    if ":" in name:
        return named(name)
    match name:
        case "number":
            return _number(options.get("field") or "answer")
        case "regex":
            return _regex(options["pattern"])
        case "length":
            return _length(int(options["tokens"]))
        case "json":
            return is_json
        case "environment":
            return of_environments
    raise ConfigError(f"rewards: there is no function `{name}`")


def named(name: str, option: str = "rewards") -> Callable[..., Any]:
    """The function or class of `module:name`, or of `file.py:name`, that an option names."""
    place, _, attribute = name.rpartition(":")
    try:
        if place.endswith(".py"):
            path = Path(place).expanduser()
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec and spec.loader, place
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            if str(Path.cwd()) not in sys.path:
                sys.path.append(str(Path.cwd()))
            module = importlib.import_module(place)
    except Exception as error:
        raise ConfigError(f"{option}: `{name}`: {place} cannot be imported: {type(error).__name__}: {error}") from None
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [of for of, value in vars(module).items() if (inspect.isfunction(value) or inspect.isclass(value)) and not of.startswith("_")]
        hint = f"; it has {', '.join(sorted(known))}" if known else ""
        raise ConfigError(f"{option}: `{name}`: {place} has no function or class `{attribute}`{hint}")
    return function


def last_number(text: str) -> float | None:
    """The last number of a text."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _number(field: str) -> RewardFunction:
    def number(completions: Sequence[Any], **columns: Any) -> list[float]:
        """1 where the last number of the answer is that of the row's field, else 0."""
        if field not in columns:
            raise ConfigError(f"rewards: `number` reads the field `{field}`, which the rows do not have (`field` names another)")
        rewards = []
        for completion, right in zip(completions, columns[field], strict=True):
            expected = float(right) if isinstance(right, numbers.Real) else last_number(str(right))
            if expected is None:
                raise ConfigError(f"rewards: `number`: the field `{field}` has no number in {str(right)[:80]!r}")
            found = last_number(text_of(completion))
            rewards.append(float(found is not None and math.isclose(found, expected, rel_tol=1e-9)))
        return rewards

    return number


def _regex(pattern: str) -> RewardFunction:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"rewards: `regex`: {pattern!r} is no regular expression: {error}") from None

    def regex(completions: Sequence[Any], **_: Any) -> list[float]:
        """1 where the answer contains the pattern, else 0."""
        return [float(compiled.search(text_of(completion)) is not None) for completion in completions]

    return regex


def is_json(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 where the answer is JSON, alone or as its only fenced block, else 0."""
    return [float(_parses(text_of(completion))) for completion in completions]


def _parses(text: str) -> bool:
    blocks = re.findall(r"```(?:json)?\s*(.*?)```", text, re.DOTALL)
    try:
        json.loads(blocks[0] if len(blocks) == 1 else text)
    except ValueError:
        return False
    return True


def of_environments(environments: Sequence[Any], **_: Any) -> list[float]:
    """The attribute `reward` of each answer's environment."""
    if lacking := next((of for of in environments if not hasattr(of, "reward")), None):
        raise ConfigError(f"rewards: `environment`: {type(lacking).__name__} has no attribute `reward`")
    return [of.reward for of in environments]


def _length(tokens: int) -> RewardFunction:
    def length(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """0 up to `tokens`, then less by the share that is beyond them: −1 at twice as many."""
        return [-max(len(ids) - tokens, 0) / tokens for ids in completion_ids]

    return length


def call(function: RewardFunction, prompts: list[Any], completions: list[Any], columns: Mapping[str, Any]) -> list[float | None]:
    """Calls a function. Errors: it raises, with the first answer that makes it do so, or its result is not a number for each
    answer."""
    try:
        found = function(prompts=prompts, completions=completions, **columns)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{type(error).__name__}: {error}{_place(function, prompts, completions, columns)}") from error
    if inspect.isawaitable(found):
        raise ConfigError("it is an asynchronous function, expected a plain one")
    rewards = list(found) if not isinstance(found, (str, bytes)) and hasattr(found, "__iter__") else None
    if rewards is None or len(rewards) != len(completions):
        raise ConfigError(f"it returned {str(found)[:80]}, expected {len(completions)} numbers")
    return [_reward(reward) for reward in rewards]


def _reward(reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        value = float(reward)
    except (TypeError, ValueError):
        raise ConfigError(f"it returned {reward!r}, expected a number or None") from None
    if math.isinf(value):
        raise ConfigError(f"it returned {value}, expected a finite number or None")
    return None if math.isnan(value) else value


def _place(function: RewardFunction, prompts: list[Any], completions: list[Any], columns: Mapping[str, Any]) -> str:
    """The first answer alone for which a function raises, in words; empty where there is none."""
    for index, completion in enumerate(completions):
        row = {name: [values[index]] for name, values in columns.items()}
        try:
            function(prompts=[prompts[index]], completions=[completion], **row)
        except Exception:
            return f"; first for the answer {text_of(completion)[:120]!r} to {str(prompts[index])[:120]!r}"
    return ""
