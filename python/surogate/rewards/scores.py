"""Scores of a reward model: rows become tokens as in training, and the last token of each is scored."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, SurogateError

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

#: Tokens of a batch, padding included.
BATCH_TOKENS = 16384

CLASSIFIER = "ForSequenceClassification"

#: Columns of a row, and those that belong together.
COLUMNS = {"messages", "prompt", "completion", "text", "tools"}
ROWS = "`messages`, `prompt` and `completion`, or `text`"


def is_reward_model(fields: Mapping[str, Any]) -> bool:
    """True for the config.json of a model with a score in the place of logits."""
    names = fields.get("architectures")
    return isinstance(names, list) and bool(names) and str(names[0]).endswith(CLASSIFIER)


def with_score(fields: dict[str, Any], adapter: Path) -> dict[str, Any]:
    """The fields of a base model with the head that its adapter brings."""
    file = adapter / "adapter_config.json"
    if is_reward_model(fields) or not file.is_file():
        return fields
    if json.loads(file.read_text(encoding="utf-8")).get("task_type") != "SEQ_CLS":
        return fields
    names = [
        str(name).removesuffix("ForCausalLM").removesuffix("LMHeadModel") + CLASSIFIER
        for name in fields.get("architectures") or []
    ]
    return {**fields, "architectures": names}


def rows_of(given: Iterable[Any]) -> list[Any]:
    """The rows of a call. Raises DataError for one row alone, whose letters or names would be taken for rows."""
    if isinstance(given, (str, bytes, Mapping)):
        raise DataError(f"rows: is {given!r:.60}, expected a list of rows: `rewards([row])`")
    return list(given)


def encoded(tokenizer: Tokenizer, row: Any, place: str) -> list[int]:
    """The tokens of a row: a text, which EOS ends, a conversation, `{"prompt", "completion"}`, or token ids. Raises DataError,
    which names the place."""
    try:
        return _encoded(tokenizer, row, place)
    except DataError:
        raise
    except (SurogateError, TypeError, ValueError) as error:
        raise DataError(f"{place}: {error}") from None


def _encoded(tokenizer: Tokenizer, row: Any, place: str) -> list[int]:
    if isinstance(row, Mapping):
        return _of_columns(tokenizer, row, place)
    if isinstance(row, str):
        if not row:
            raise DataError(f"{place}: the text is empty")
        ids, end = tokenizer.encode(row), tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]
    if isinstance(row, Sequence) and row and all(isinstance(of, Mapping) for of in row):
        return tokenizer.labels(row)[0]
    try:
        ids = [] if isinstance(row, bytes) else [operator.index(token) for token in row]
    except TypeError:
        ids = []
    if not ids:
        raise DataError(f"{place}: is {row!r:.60}, expected {ROWS}, a text, a conversation or token ids")
    return ids


def _of_columns(tokenizer: Tokenizer, row: Mapping[Any, Any], place: str) -> list[int]:
    if unknown := set(row) - COLUMNS:
        named = ", ".join(sorted(map(str, unknown)))
        raise DataError(f"{place}: has {named}; expected some of {', '.join(sorted(COLUMNS))}")
    given = {name: value for name, value in row.items() if value is not None}
    tools = given.pop("tools", None)
    if not given or "messages" in given and len(given) > 1 or {"text", "completion"} <= set(given):
        raise DataError(f"{place}: has {', '.join(given) or 'no text'}, expected {ROWS}")
    if "messages" in given:
        return tokenizer.labels(given["messages"], tools)[0]
    parts = [(name, row[name]) for name in ("prompt", "completion", "text") if name in (given if name == "text" else row)]
    for name, part in parts:
        if not isinstance(part, str) and not (isinstance(part, list) and all(isinstance(of, Mapping) for of in part)):
            raise DataError(f"{place}: `{name}` is {json.dumps(part, default=repr):.60}, expected a text or messages")
    if all(isinstance(part, str) for _, part in parts):
        return _encoded(tokenizer, "".join(part for _, part in parts), place)
    roles = {"prompt": "user"}
    messages = [
        of
        for name, part in parts
        for of in ([{"role": roles.get(name, "assistant"), "content": part}] if isinstance(part, str) else part)
    ]
    return tokenizer.labels(messages, tools)[0]


def batches(lengths: Sequence[int], tokens: int = BATCH_TOKENS) -> Iterator[list[int]]:
    """Rows of similar lengths, as their numbers."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    found: list[int] = []
    for index in order:
        if found and (len(found) + 1) * lengths[index] > tokens:
            yield found
            found = []
        found.append(index)
    if found:
        yield found


def read(path: Path) -> dict[str, Any]:
    """The rows of a JSONL file by their places. Raises DataError where there are none."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the rows cannot be read: {error}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found[f"{path}:{number}"] = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: this is not JSON: {error}") from None
    if not found:
        raise DataError(f"{path}: the file holds no rows, expected one per line")
    return found


def refuse(what: str) -> SurogateError:
    """The error of a call that a reward model cannot answer."""
    return SurogateError(f"{what}: this is a reward model, which gives scores in the place of logits: call `rewards`, or run `surogate score`")
