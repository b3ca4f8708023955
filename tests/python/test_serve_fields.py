"""Requests whose fields are wrong or say nothing, and paths of other methods."""

from __future__ import annotations

import http.client
import json
import socket

import pytest
from test_serve import address, folder  # noqa: F401


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_variable_of_the_template_that_the_prompt_gives_is_refused(address, name):  # noqa: F811
    body = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 2, "chat_template_kwargs": {name: False}}
    status, _, text = fetched(address, "POST", "/v1/chat/completions", json.dumps(body))
    assert status == 400 and f"`chat_template_kwargs` has `{name}`" in json.loads(text)["error"]["message"], text


def fetched(of: str, method: str, path: str, body: str | None = None) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection(of.split("/")[2], timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "`temperature` is `-1`, expected a number from 0"),
        ({"top_p": 0}, "top_p", "`top_p` is `0`, expected a number above 0 and up to 1"),
        ({"seed": 1.5, "n": 2}, "seed", "`seed` is `1.5`, expected a whole number from 0"),
        ({"top_k": -1}, "top_k", "`top_k` is `-1`, expected a whole number from 0"),
        (
            {"temperature": 0, "min_p": 0.5},
            "min_p",
            "`min_p` narrows what is drawn, and with `temperature: 0` nothing is",
        ),
        ({"logprobs": 0}, "logprobs", "`logprobs` is not supported"),
        ({"logprobs": False, "echo": False, "frequency_penalty": 0.0}, None, None),
        ({"prompt": [1, 99999]}, "prompt", "token id 99999 is outside of the vocabulary of 512"),
        ({"prompt": "once " * 600}, "prompt", "allows sequences of 512"),
        ({"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}, None, None),
    ],
)
def test_a_wrong_field_is_named_in_one_sentence(address, change, param, message):  # noqa: F811
    body = {"prompt": "Once", "max_tokens": 2, **change}
    status, _, text = fetched(address, "POST", "/v1/completions", json.dumps(body))
    assert (status == 200) == (message is None), text
    if message is not None:
        error = json.loads(text)["error"]
        assert (status, error["param"]) == (400, param)
        assert message in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/v1/completions", 405, "POST"),
        ("GET", "/v1/chat/completions?a=b", 405, "POST"),
        ("POST", "/v1/models", 405, "GET"),
        ("PUT", "/v1/completions", 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET"),
        ("OPTIONS", "/v1/chat/completions", 405, "POST"),
        ("GET", "/v1/other", 404, None),
        ("POST", "/v1/other", 404, None),
    ],
)
def test_a_path_of_another_method_names_it(address, method, path, status, allowed):  # noqa: F811
    found, headers, text = fetched(address, method, path)
    assert (found, headers["Allow"]) == (status, allowed)
    assert (f"takes {allowed}, not {method}" if allowed else "there is no /v1/other") in text


def test_a_health_check_may_ask_for_the_head_alone(address):  # noqa: F811
    status, headers, text = fetched(address, "HEAD", "/health")
    assert (status, text) == (200, "") and int(headers["Content-Length"]) > 0
    status, headers, text = fetched(address, "HEAD", "/v1/completions")
    assert (status, headers["Allow"], text) == (405, "POST", "")


@pytest.mark.parametrize("seed", [None, 7, (1 << 64) - 1])
def test_answers_to_one_prompt_differ_and_the_first_has_the_seed_of_the_request(address, seed):  # noqa: F811
    body = {"prompt": "Once", "max_tokens": 12, "temperature": 1.5, "seed": seed}

    def texts(**more: int) -> list[str]:
        status, _, text = fetched(address, "POST", "/v1/completions", json.dumps({**body, **more}))
        assert status == 200, text
        return [of["text"] for of in json.loads(text)["choices"]]

    several = texts(n=3)
    assert len(set(several)) == 3 and several == texts(n=3)
    assert several[:1] == texts() and several[1:2] == texts(seed=((seed or 0) + 1) % (1 << 64))


def test_an_error_says_that_the_connection_ends(address):  # noqa: F811
    connection = http.client.HTTPConnection(address.split("/")[2], timeout=60)
    for body, status, ends in [("{", 400, "close"), (json.dumps({"prompt": "Once", "max_tokens": 2}), 200, None)]:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Connection"]) == (status, ends), answer.read()
        answer.read()
    connection.close()


def test_a_client_of_an_older_protocol_gets_a_stream_without_chunks(address):  # noqa: F811
    host, port = address.split("/")[2].split(":")
    body = json.dumps({"prompt": "Once", "max_tokens": 4, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nHost: {host}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(head.encode() + body)
        text = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()
    head, _, pieces = text.partition("\r\n\r\n")
    assert " 200 " in head and "chunked" not in head and "Connection: close" in head
    assert pieces.endswith("data: [DONE]\n\n") and all(line.startswith("data: ") for line in pieces.split("\n\n") if line)
