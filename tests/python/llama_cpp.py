"""llama.cpp itself, by the package `xllamacpp`, on one thread of the CPU: what it computes of a GGUF file.

    python tests/python/llama_cpp.py < request.json > answer.json

llama.cpp ends the process where it finds a fault, so each file is read by a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT = 512


class LlamaCppError(Exception):
    """llama.cpp did not load or run a file. The message is what it printed."""


def ask(file: Path, *, prompts: list[list[int]] = (), texts: list[str] = (), size: int = 0) -> dict[str, Any]:
    """Asks llama.cpp about a file. `logprobs` are those of the token after each of the `prompts`, [prompts, size] in
    f64; `tokens` are the ids of each of the `texts`."""
    request = {"file": str(file), "prompts": list(prompts), "texts": list(texts), "size": size}
    answer: dict[str, Any] = run(__file__, request)
    answer["logprobs"] = np.array(answer["logprobs"], dtype=np.float64)
    return answer


def run(script: str, request: dict[str, Any]) -> Any:
    """The answer of a script like this one, in a process of its own."""
    done = subprocess.run(
        [sys.executable, script], input=json.dumps(request), capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = [line for line in done.stderr.splitlines() if not line.startswith("#") and "No such file" not in line]
        raise LlamaCppError(f"{request['file']}: exit code {done.returncode}\n" + "\n".join(said[-25:]))
    return json.loads(lines[-1])


def settings(file: str) -> Any:
    """The settings of a server for a file, on one thread."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = CONTEXT, CONTEXT, CONTEXT, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = params.n_threads_http = 1
    params.n_gpu_layers, params.warmup, params.use_jinja = 0, False, False
    # Numbers of the reference are of f32: neither keys and values nor their products are rounded more than needed.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.fit_params, params.cache_ram_mib, params.swa_full = False, 0, False
    return params


def call(server: Any, path: str, body: dict[str, Any] | None = None) -> Any:
    """Returns the answer of the server to a request, with a body or without one."""
    data = None if body is None else json.dumps(body).encode()
    place = urllib.request.Request(server.listening_address + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(place, timeout=60) as reply:
        return json.loads(reply.read())


def next_token(server: Any, prompt: Any, size: int) -> tuple[int, list[float]]:
    """The number of tokens of a prompt, and the log-probabilities of the one after it."""
    asked = {"prompt": prompt, "n_predict": 1, "temperature": 0.0, "n_probs": size, "cache_prompt": False}
    said = call(server, "/completion", asked | {"post_sampling_probs": False, "samplers": []})
    by_id = {of["id"]: of["logprob"] for of in said["completion_probabilities"][0]["top_logprobs"]}
    # What is too improbable for a number there is the smallest one here.
    return said["tokens_evaluated"], [-1e30 if by_id[i] is None else by_id[i] for i in range(size)]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp

    server = xllamacpp.Server(settings(request["file"]))
    logprobs = []
    for prompt in request["prompts"]:
        count, values = next_token(server, prompt, request["size"])
        assert count == len(prompt)
        logprobs.append(values)
    tokens = []
    for text in request["texts"]:
        asked = {"content": text, "add_special": False, "parse_special": True}
        tokens.append(call(server, "/tokenize", asked)["tokens"])
    return {"logprobs": logprobs, "tokens": tokens}


if __name__ == "__main__":
    print("\n" + json.dumps(answer(json.load(sys.stdin))), flush=True)
    # Threads of the server hold the end of the process up.
    os._exit(0)
