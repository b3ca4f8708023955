"""llama.cpp itself, by the package `xllamacpp`, on one thread of the CPU: what it computes of texts with images.

    python tests/python/llama_cpp_images.py < request.json > answer.json
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from image_models import png
from llama_cpp import call, next_token, run, settings

CONTEXT = 1024
#: The place of an image in a prompt.
PLACE = "<IMAGE>"

#: A text with places of images, and these, uint8 [H, W, 3].
Prompt = tuple[str, list[np.ndarray]]


def ask(text: Path, tower: Path, prompts: list[Prompt], size: int) -> list[tuple[int, np.ndarray]]:
    """The number of tokens of each prompt, and the log-probabilities of the token after it, f64 [size]."""
    given = [(words, [base64.b64encode(png(image)).decode() for image in images]) for words, images in prompts]
    found = run(__file__, {"file": str(text), "tower": str(tower), "prompts": given, "size": size})
    return [(count, np.array(values, dtype=np.float64)) for count, values in found]


def answer(request: dict[str, Any]) -> list[tuple[int, list[float]]]:
    import xllamacpp

    params = settings(request["file"])
    params.n_ctx = params.n_batch = params.n_ubatch = CONTEXT
    params.mmproj.path, params.mmproj_use_gpu = request["tower"], False
    # Its own bounds would resize the small images of tests.
    params.image_min_tokens, params.image_max_tokens = 1, 4096
    server = xllamacpp.Server(params)
    marker = call(server, "/props")["media_marker"]
    found = []
    for words, images in request["prompts"]:
        prompt = {"prompt_string": words.replace(PLACE, marker), "multimodal_data": images}
        found.append(next_token(server, prompt, request["size"]))
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(answer(json.load(sys.stdin))), flush=True)
    # Threads of the server hold the end of the process up.
    os._exit(0)
