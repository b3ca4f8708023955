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
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(request), capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = [line for line in done.stderr.splitlines() if not line.startswith("#") and "No such file" not in line]
        raise LlamaCppError(f"{file.name}: exit code {done.returncode}\n" + "\n".join(said[-25:]))
    answer: dict[str, Any] = json.loads(lines[-1])
    answer["logprobs"] = np.array(answer["logprobs"], dtype=np.float64)
    return answer


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = request["file"]
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = CONTEXT, CONTEXT, CONTEXT, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = params.n_threads_http = 1
    params.n_gpu_layers, params.warmup, params.use_jinja = 0, False, False
    # Numbers of the reference are of f32: neither keys and values nor their products are rounded more than needed.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.fit_params, params.cache_ram_mib, params.swa_full = False, 0, False
    server = xllamacpp.Server(params)

    def post(path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        place = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(place, timeout=60) as reply:
            return json.loads(reply.read())

    logprobs = []
    for prompt in request["prompts"]:
        size = request["size"]
        asked = {"prompt": prompt, "n_predict": 1, "temperature": 0.0, "n_probs": size, "cache_prompt": False}
        said = post("/completion", asked | {"post_sampling_probs": False, "samplers": []})
        assert said["tokens_evaluated"] == len(prompt), said
        by_id = {of["id"]: of["logprob"] for of in said["completion_probabilities"][0]["top_logprobs"]}
        # What is too improbable for a number there is the smallest one here.
        logprobs.append([-1e30 if by_id[i] is None else by_id[i] for i in range(size)])
    tokens = []
    for text in request["texts"]:
        tokens.append(post("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"])
    return {"logprobs": logprobs, "tokens": tokens}


if __name__ == "__main__":
    print("\n" + json.dumps(answer(json.load(sys.stdin))), flush=True)
    # Threads of the server hold the end of the process up.
    os._exit(0)
