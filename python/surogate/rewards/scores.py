"""Scores of a reward model: rows become tokens as in training, and the last token of each is scored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, SurogateError

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

#: Tokens of a batch, padding included.
BATCH_TOKENS = 16384

CLASSIFIER = "ForSequenceClassification"


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


def encoded(tokenizer: Tokenizer, row: Any, place: str) -> list[int]:
    """The tokens of a row: a text, which EOS ends, a conversation, `{"prompt", "completion"}`, or token ids."""
    if isinstance(row, Mapping):
        known = {"messages", "prompt", "completion", "text", "tools"}
        if unknown := set(row) - known:
            raise DataError(f"{place}: has {', '.join(map(str, sorted(unknown)))}; expected some of {', '.join(sorted(known))}")
        if "messages" in row:
            return tokenizer.labels(row["messages"], row.get("tools"))[0]
        prompt, completion = row.get("prompt", ""), row.get("completion", row.get("text", ""))
        if isinstance(prompt, str) and isinstance(completion, str):
            return encoded(tokenizer, prompt + completion, place)
        return tokenizer.labels([*_messages(prompt, "user"), *_messages(completion, "assistant")], row.get("tools"))[0]
    if isinstance(row, str):
        ids, end = tokenizer.encode(row), tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]
    if isinstance(row, Sequence) and row and all(isinstance(of, Mapping) for of in row):
        return tokenizer.labels(row)[0]
    if hasattr(row, "__len__") and len(row) > 0:
        return [int(token) for token in row]
    raise DataError(f"{place}: is {row!r:.60}, expected a text, a conversation or token ids")


def _messages(of: Any, role: str) -> list[Any]:
    return [{"role": role, "content": of}] if isinstance(of, str) else list(of)


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


def read(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a JSONL file with their places."""
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number}: this is not JSON: {error}") from None


def refuse(what: str) -> SurogateError:
    """The error of a call that a reward model cannot answer."""
    return SurogateError(f"{what}: this is a reward model, which gives scores in the place of logits: call `rewards`, or run `surogate score`")
