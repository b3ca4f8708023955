"""Requests and answers of OpenAI's API for chat and completions, as JSON.

What is requested and not supported is an error with its name; nothing is ignored but labels that change no text.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..model import OFF

#: Reasons of the engine for the end of an answer, in the API's words.
ENDS = {"end": "stop", "stop": "stop", "length": "length", "context": "length"}

#: Fields that are labels of the client and change no text.
LABELS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}

#: Fields that are accepted with the value that changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logprobs": (False, None),
    "top_logprobs": (None,),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": (None, ""),
    "parallel_tool_calls": (True, None),
    "tool_choice": ("auto", None),
}

#: Field → option of the engine, and whether a prompt may have one of its own.
OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
}

#: Sequences of `stop`, and answers to one prompt, at most.
MOST_STOPS, MOST_ANSWERS = 16, 64

#: Seeds of random numbers.
SEEDS = 1 << 64


class BadRequest(Exception):
    """An error for the client: a message, the field, a status of HTTP, and headers."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code, self.headers = param, status, code, headers

    def body(self) -> dict[str, Any]:
        """The error as the JSON object that OpenAI's clients read."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass
class Request:
    """A request that is understood."""

    model: str
    is_chat: bool
    #: Prompts as the engine takes them, `n` times each.
    prompts: list[dict[str, Any]]
    #: Options of all its answers, as YAML text.
    options: dict[str, str]
    streams: bool
    reports_usage: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


def read(body: bytes, is_chat: bool, most_tokens: int, most_sequences: int) -> Request:
    """Understands the body of a request. Raises BadRequest."""
    try:
        of = json.loads(body)
        # Halves of characters are none: no text has them.
        json.dumps(of, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest("the body has a part of a surrogate pair alone, expected Unicode text") from None
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON") from None
    if not isinstance(of, dict):
        raise BadRequest("the body is no JSON object")
    _check_fields(of, is_chat)
    model = _get(of, "model", str, "")
    texts = _messages(of) if is_chat else _texts(of)
    count = _whole(of, "n", 1, 1, MOST_ANSWERS)
    if len(texts) * count > most_sequences:
        raise BadRequest(f"{len(texts)} prompts with `n: {count}` are more than {most_sequences} sequences", "n")
    name = "max_completion_tokens" if of.get("max_completion_tokens") is not None else "max_tokens"
    tokens = _whole(of, name, most_tokens, 1, most_tokens)
    prompts = [{**text, "max_new_tokens": tokens, **_own_seed(of, number)} for text in texts for number in range(count)]
    options = {option: json.dumps(_number(of, name)) for name, option in OPTIONS.items() if of.get(name) is not None}
    if of.get("temperature") == 0 and (narrows := [name for name, off in OFF.items() if of.get(name, off) not in (None, off)]):
        hint = f"give a temperature above 0, or leave `{narrows[0]}` out"
        raise BadRequest(f"`{narrows[0]}` narrows what is drawn, and with `temperature: 0` nothing is ({hint})", narrows[0])
    if (stop := of.get("stop")) is not None:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(text, str) and text for text in stops):
            raise BadRequest(f"`stop` is a text or up to {MOST_STOPS} texts", "stop")
        options["stop"] = json.dumps(stops)
    streams = _get(of, "stream", bool, False)
    wishes = _get(of, "stream_options", dict, {})
    return Request(model, is_chat, prompts, options, streams, bool(wishes.get("include_usage")))


def _own_seed(of: dict[str, Any], number: int) -> dict[str, int]:
    """The seed of an answer after the first to the same prompt: with the same one it would be the same text."""
    seed = of.get("seed") or 0
    return {"seed": (seed + number) % SEEDS} if number and type(seed) is int else {}


def _check_fields(of: dict[str, Any], is_chat: bool) -> None:
    own = {"messages", "tools", "chat_template_kwargs", "max_completion_tokens"} if is_chat else {"prompt"}
    known = own | {"model", "max_tokens", "n", "stop", "stream", "stream_options"} | LABELS | OPTIONS.keys() | NEUTRAL.keys()
    for name, value in of.items():
        if name not in known:
            raise BadRequest(f"`{name}` is not known", name, code="unknown_parameter")
        # `0` asks for one, where `False` asks for none.
        if name in NEUTRAL and not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in NEUTRAL[name]):
            raise BadRequest(f"`{name}` is not supported", name, code="unsupported_parameter")


def _messages(of: dict[str, Any]) -> list[dict[str, Any]]:
    messages = of.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("`messages` is a list of at least one message", "messages")
    found: dict[str, Any] = {"messages": [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]}
    if of.get("tools"):
        found["tools"] = _get(of, "tools", list, [])
    if of.get("chat_template_kwargs"):
        found["chat_template_kwargs"] = _get(of, "chat_template_kwargs", dict, {})
    return [found]


def _message(message: Any, place: str) -> dict[str, Any]:
    """A message with text alone: an image would be read from this machine."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"`{place}` is no object with `role` and `content`", place)
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            raise BadRequest(f"`{place}.content` has a part that is no text, which is not supported", place)
        content = "".join(part["text"] for part in content)
    # A message that calls a tool may have no text; every other has one, and templates fail without it.
    calls = message.get("tool_calls") or message.get("function_call")
    if not isinstance(content, str) and (content is not None or not calls):
        raise BadRequest(f"`{place}.content` is no text", place)
    if isinstance(content, str) and content.lstrip("\ufeff \t\r\n").startswith(("[", '"')):
        # In rows of data a text of JSON may stand for parts; here a text is a text.
        content = [{"type": "text", "text": content}]
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": content}


def _texts(of: dict[str, Any]) -> list[dict[str, Any]]:
    prompt = of.get("prompt")
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(part) is int for part in prompt)
    prompts = [prompt] if isinstance(prompt, str) or is_ids else prompt
    if not isinstance(prompts, list) or not prompts:
        raise BadRequest("`prompt` is a text, token ids, or a list of these", "prompt")
    for one in prompts:
        if not isinstance(one, str) and not (isinstance(one, list) and one and all(type(part) is int for part in one)):
            raise BadRequest("`prompt` has an item that is neither a text nor token ids", "prompt")
    return [{"prompt": one} for one in prompts]


def _get(of: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = of.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise BadRequest(f"`{name}` is no {kind.__name__}", name)
    return value


def _whole(of: dict[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = of.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise BadRequest(f"`{name}` is {value!r}, expected a whole number from {least} to {most}", name)
    return value


def _number(of: dict[str, Any], name: str) -> float:
    value = of[name]
    try:
        is_number = type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        is_number = False
    if not is_number:
        raise BadRequest(f"`{name}` is no number", name)
    return value


def usage(prompt: int, completion: int) -> dict[str, int]:
    """The tokens of a request."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def answer(request: Request, texts: list[str], ends: list[str], tokens: dict[str, int]) -> dict[str, Any]:
    """The body of a whole answer."""

    def choice(index: int) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": texts[index]}} if request.is_chat else {"text": texts[index]}
        return {"index": index, **content, "finish_reason": ENDS[ends[index]], "logprobs": None}

    return {**_head(request, chunk=False), "choices": [choice(index) for index in range(len(texts))], "usage": tokens}


def pieces(request: Request) -> Callable[[int, str, str | None], list[dict[str, Any]]]:
    """Gives the chunks of a stream for each piece of text; the first one of a chat's answer names its role."""
    begun: set[int] = set()

    def of(index: int, text: str, end: str | None) -> list[dict[str, Any]]:
        def chunk(content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            part = {"delta": content} if request.is_chat else {"text": content.get("content", "")}
            return {**_head(request), "choices": [{"index": index, **part, "finish_reason": reason, "logprobs": None}]}

        found = []
        if request.is_chat and index not in begun:
            found.append(chunk({"role": "assistant", "content": ""}))
        begun.add(index)
        if text:
            found.append(chunk({"content": text}))
        if end:
            found.append(chunk({}, ENDS[end]))
        return found

    return of


def usage_chunk(request: Request, tokens: dict[str, int]) -> dict[str, Any]:
    """The last chunk of a stream, on request."""
    return {**_head(request), "choices": [], "usage": tokens}


def _head(request: Request, chunk: bool = True) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if request.is_chat else "text_completion"
    name = f"chatcmpl-{request.id}" if request.is_chat else f"cmpl-{request.id}"
    return {"id": name, "object": kind, "created": request.created, "model": request.model}


def models(names: list[str], created: int) -> dict[str, Any]:
    """The body of the list of models."""
    listed = [{"id": name, "object": "model", "created": created, "owned_by": "surogate"} for name in names]
    return {"object": "list", "data": listed}
