"""Every architecture on a GPU: training as on the CPU, and generating as the forward pass.

    python bench/device/families.py                                  # float32: losses of the CPU, answers of its forward pass
    python bench/device/families.py --dtype bfloat16                 # answers of the GPU's own forward pass, wide heads
    python bench/device/families.py --gpus 2 --family qwen3_next     # rows that two GPUs share
    python bench/device/families.py --family falcon_h1 --seed 7 --jobs 8

Each family gets a configuration of `tests/oracle/draw_configs.py` and random weights. It trains a few steps on packed rows in full,
with LoRA, DoRA and QLoRA, and continues prompts of several lengths at once by the likeliest token. Prints a line for each family: how
far losses are from those of the CPU, relatively, and how far the logit of a token that was generated is from the largest one of the
forward pass, in standard deviations of the logits. Ends with 1 if one of them is above its limit. Needs transformers, which makes
the configurations.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import surogate

TESTS = pathlib.Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS / "oracle"), str(TESTS / "python")]

#: Limits of losses, relatively, and of logits, in standard deviations.
LIMITS = {"float32": (5e-5, 1e-3), "bfloat16": (0.0, 0.15)}
STEPS, ROW, ANSWER = 3, 96, 12
#: Lengths of prompts: one token, below and above a chunk of states, at its end, and more than a part of a prompt that is read at once.
PROMPTS = {"float32": (1, 7, 40, 70), "bfloat16": (1, 63, 64, 150, 200)}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"lora": False},
    "lora": {"lora_rank": 4, "lora_dropout": 0.0},
    "dora": {"lora_rank": 4, "lora_dropout": 0.0, "lora_dora": True},
    "qlora": {"lora_rank": 4, "lora_dropout": 0.0, "qlora_bnb": True},
}
#: Fields that count heads.
HEADS = (
    "num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads",
    "mamba_num_heads", "mamba_n_groups", "n_groups",
)  # fmt: skip
#: Widths of heads that kernels on tensor cores take.
WIDE = {
    "linear_key_head_dim": 128, "linear_value_head_dim": 64, "mamba_d_state": 128, "ssm_state_size": 128, "mamba_d_head": 64,
    "mamba_head_dim": 64, "head_dim": 64,
}  # fmt: skip
WIDE_OF = {
    "falcon_h1": {"mamba_n_heads": 2, "mamba_n_groups": 1, "mamba_d_ssm": 128},
    "granitemoehybrid": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "mamba_n_heads": 2, "mamba_expand": 2},
}


def draw(family: str, seed: int, gpus: int) -> dict[str, Any]:
    """The config.json of a family with 101 to 333 tokens, whose heads `gpus` can share."""
    import draw_configs

    draw_configs.drawn[:] = [family]
    for number in range(seed, seed + 5000):
        config = draw_configs.draw_config(random.Random(number))
        text = config.get_text_config().to_dict()
        shared = all((text.get(name) or gpus) % gpus == 0 for name in HEADS)
        if 101 <= text["vocab_size"] <= 333 and shared:
            break
    else:
        raise SystemExit(f"{family}: no configuration of 5000 has heads that {gpus} GPUs can share")
    with tempfile.TemporaryDirectory() as place:
        config.save_pretrained(place)
        return json.loads((pathlib.Path(place) / "config.json").read_text())


def make_model(fields: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """A model folder with random weights and a tokenizer of single characters."""
    from gguf_models import model_folder
    from surogate.dsl.model import ARCHITECTURES

    if not fields.get("architectures"):
        known = [of.name for of in ARCHITECTURES.values() if of.model_type == fields["model_type"]]
        fields["architectures"] = known[:1]
    return model_folder(folder, fields, spread=0.1)


def batch(vocabulary: int, seed: int) -> dict[str, np.ndarray]:
    """Two packed rows of three documents."""
    ids = np.random.default_rng(seed).integers(3, vocabulary, (1, 2, ROW)).astype(np.int32)
    places = np.concatenate([np.arange(length) for length in (40, 9, ROW - 49)]).astype(np.int32)
    return {"input_ids": ids, "labels": ids, "position_ids": np.tile(places, (1, 2, 1))}


def losses(folder: pathlib.Path, device: str, vocabulary: int, options: dict[str, Any]) -> np.ndarray:
    """The losses of a few steps."""
    run = {"model": str(folder), "torch_dtype": "float32", "device": device, "sequence_len": ROW, **options}
    # Gradients that are rounding alone, as those of unused routers, move nothing.
    rows = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "adamw_epsilon": 1e-3}
    with tempfile.TemporaryDirectory() as output:
        trainer = surogate.Trainer({**rows, **run, "output_dir": output})
        return np.array([trainer.step(batch(vocabulary, seed), learning_rate=1e-2)["loss"] for seed in range(STEPS)])


def logits_after(model: surogate.Model, prompt: list[int], answer: list[int], by_length: bool) -> np.ndarray:
    """The logits before each token of an answer. `by_length`: rotations follow from the length of the row."""
    if by_length:
        rows = [np.asarray(model.forward([prompt + answer[:count]]))[0, -1] for count in range(len(answer))]
        return np.array(rows, np.float64)
    return np.asarray(model.forward([prompt + answer]))[0].astype(np.float64)[len(prompt) - 1 : -1]


def distance(folder: pathlib.Path, reference: str, dtype: str, by_length: bool) -> float:
    """The largest distance of a generated token's logit from the largest one of the forward pass."""
    lengths = PROMPTS[dtype]
    prompts = [[(7 * t + 11 * t * t + 3 * n) % 90 + 3 for t in range(length)] for n, length in enumerate(lengths)]
    letters = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    letter = {number: text for text, number in letters.items()}
    gpu = surogate.load(folder, device="cuda", dtype=dtype)
    generation = gpu.start(["".join(letter[token] for token in prompt) for prompt in prompts], max_new_tokens=ANSWER, ignore_end_tokens=True)
    while not generation.done:
        generation.step()
    found = [list(generation.answer(number)) for number in range(len(prompts))]
    assert all(len(answer) == ANSWER for answer in found), found
    other = gpu if reference == "cuda" else surogate.load(folder, device=reference, dtype=dtype)
    most = 0.0
    for prompt, answer in zip(prompts, found, strict=True):
        logits = logits_after(other, prompt, answer, by_length)
        gaps = logits.max(-1) - logits[np.arange(ANSWER), answer]
        most = max(most, float((gaps / logits.std(-1)).max()))
    return most


def family(name: str, a: argparse.Namespace) -> tuple[bool, str]:
    """True if a family is within the limits, and its line."""
    begun, said, right = time.monotonic(), [], True
    fields = draw(name, a.seed, a.gpus)
    text = fields.get("text_config", fields)
    if a.dtype == "bfloat16":
        text |= {key: value for key, value in WIDE.items() if key in text} | WIDE_OF.get(name, {})
    vocabulary = text["vocab_size"]
    of_losses, of_logits = LIMITS[a.dtype]
    with tempfile.TemporaryDirectory() as place:
        folder = make_model(fields, pathlib.Path(place))
        for kind, options in KINDS.items() if a.dtype == "float32" else ():
            more = {"gpus": a.gpus, "sequence_parallel_size": a.gpus} if a.gpus > 1 else {}
            try:
                expected = losses(folder, "cpu", vocabulary, options)
                found = losses(folder, "cuda", vocabulary, options | more)
            except surogate.SurogateError as problem:
                said.append(f"{kind} rejected ({str(problem).splitlines()[-1][:90]})")
                continue
            apart = float((np.abs(found - expected) / np.abs(expected)).max())
            right &= apart < of_losses
            said.append(f"{kind} {apart:.1e}")
        if a.gpus == 1:
            by_length = any(f'"{kind}"' in json.dumps(text) for kind in ("dynamic", "longrope"))
            gap = distance(folder, "cpu" if a.dtype == "float32" else "cuda", a.dtype, by_length)
            right &= gap < of_logits
            said.append(f"generated {gap:.1e}")
    return right, f"{name:20} {', '.join(said)}  ({time.monotonic() - begun:.0f} s)"


def in_process(name: str, a: argparse.Namespace) -> tuple[bool, str]:
    """A family in a process of its own."""
    words = ["--family", name, "--seed", str(a.seed), "--dtype", a.dtype, "--gpus", str(a.gpus), "--alone"]
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    ended = f"{name:20} ended with {done.returncode}: {done.stderr.strip()[-300:]}"
    return done.returncode == 0, lines[-1] if lines and done.returncode in (0, 1) else ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", help="only these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=list(LIMITS), default="float32")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--alone", action="store_true", help="one family, in this process")
    a = parser.parse_args()
    if a.alone:
        right, line = family(a.family[0], a)
        print("ok    " if right else "FAILED", line, flush=True)
        return int(not right)
    import draw_configs

    wrong = 0
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        for right, line in pool.map(lambda name: in_process(name, a), a.family or draw_configs.FAMILIES):
            print(line, flush=True)
            wrong += not right
    print(f"{wrong} families are above a limit")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
