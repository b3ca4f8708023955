"""Reward functions: those of a user, found by name, and the built-in ones.

A function takes `prompts` and `completions`, lists of texts or of messages, and the columns of the rows by name, each a list
with a value for each answer, as functions for TRL do. It returns a number for each answer, or None for one that it does not
judge. It may be asynchronous.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import numbers
import re
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from ..errors import ConfigError

RewardFunction = Callable[..., Sequence[float | None]]

#: Arguments of functions for TRL that are not passed here.
NOT_PASSED = ("trainer_state", "log_extra", "log_metric")

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
    except BaseException as error:
        raise ConfigError(f"{option}: `{name}`: {place} cannot be imported: {in_words(error)}") from None
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


def in_words(error: BaseException) -> str:
    """The type and the text of an exception, also of one whose text cannot be read."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException:
        return f"{name}, whose text cannot be read"
    return f"{name}: {text}" if text else name


def awaited(value: Any) -> Any:
    """The result of an asynchronous function. Another value is returned as it is."""
    return _runner().run(_result(value)) if inspect.isawaitable(value) else value


@functools.cache
def _runner() -> asyncio.Runner:
    """One loop for all calls: clients that a module keeps belong to the loop of their first call."""
    return asyncio.Runner()


async def _result(value: Any) -> Any:
    return await value


def call(function: RewardFunction, prompts: list[Any], completions: list[Any], columns: Mapping[str, Any]) -> list[float | None]:
    """Calls a function. Errors: it raises, with the first answer that makes it do so, or its result is not a number for each
    answer."""
    given = {"prompts": prompts, "completions": completions}
    if taken := given.keys() & columns.keys():
        raise ConfigError(f"the rows have a column `{min(taken)}`, which is an argument of reward functions: rename it")
    given |= columns
    _check_arguments(function, given)
    try:
        rewards = _called(function, given, len(completions))
    except ConfigError:
        raise
    except BaseException as error:
        raise ConfigError(f"{in_words(error)}{_place(function, given)}") from error
    return [_reward(reward, number) for number, reward in enumerate(rewards, 1)]


def _check_arguments(function: RewardFunction, given: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    named = [of for of in parameters if of.kind in (of.POSITIONAL_OR_KEYWORD, of.KEYWORD_ONLY)]
    passed = f"{', '.join(given)} are passed"
    missing = [of.name for of in named if of.default is of.empty and of.name not in given]
    if missing:
        hint = " (give it the default None)" if missing[0] in NOT_PASSED else ""
        raise ConfigError(f"it takes `{missing[0]}`, which is not passed{hint}; {passed}")
    unknown = sorted(set(given) - {of.name for of in named})
    if unknown and not any(of.kind == of.VAR_KEYWORD for of in parameters):
        raise ConfigError(f"it does not take `{unknown[0]}`; {passed} (`**_` takes what a function does not read)")


def _called(function: RewardFunction, given: Mapping[str, Any], count: int) -> list[Any]:
    """The values that a function returns for copies of its arguments, one for each answer."""
    found = awaited(function(**{name: _copy(value) for name, value in given.items()}))
    is_listed = hasattr(found, "__iter__") and not isinstance(found, (str, bytes, bytearray, Mapping, Set))
    rewards = list(itertools.islice(found, count + 1)) if is_listed and getattr(found, "ndim", None) != 0 else None
    if rewards is None or len(rewards) != count:
        what = "" if is_listed else f"a value of type {type(found).__name__}, "
        raise ConfigError(f"it returned {what}{str(found)[:80]}, expected {count} numbers, one for each answer")
    return rewards


def _copy(value: Any) -> Any:
    """A copy of lists and of objects of JSON. What they hold of other types is shared."""
    if type(value) is list:
        return [_copy(of) if type(of) in (list, dict) else of for of in value]
    return {name: _copy(of) for name, of in value.items()} if type(value) is dict else value


def _reward(reward: Any, number: int) -> float | None:
    if reward is None:
        return None
    try:
        value = float(reward)
    except BaseException:
        raise ConfigError(f"it returned {reward!r:.80} for answer {number}, expected a number or None") from None
    if not math.isfinite(value):
        raise ConfigError(f"it returned {value} for answer {number}, expected a finite number, or None for no verdict")
    return value


def _place(function: RewardFunction, given: Mapping[str, Any]) -> str:
    """The first answer alone for which a function raises, in words; empty where there is none."""
    for index, completion in enumerate(given["completions"]):
        try:
            _called(function, {name: [values[index]] for name, values in given.items()}, 1)
        except ConfigError:
            continue
        except BaseException:
            return f"; first for the answer {text_of(completion)[:120]!r} to {str(given['prompts'][index])[:120]!r}"
    return ""
