"""What number formats do to training: held-out losses of a real model next to those of its own format.

    python bench/device/quality.py split MODEL.gguf PARTS        # into files that travel one by one
    python bench/device/quality.py expand PARTS TOKENIZER MODEL  # the model of these parts, in bf16: numpy, nothing else
    python bench/device/quality.py run MODEL ROWS.jsonl [--steps 300] [--seeds 1,2,3] [--only bf16,fp8_hybrid] [--device cuda]

`run` trains all weights in bf16, `fp8_hybrid` and emulated `nvfp4`, and adapters on an NF4 base and on the bf16 model that
holds that base's values, which must end alike to the bit. Every seed orders the same rows in its own way; the held-out rows
are the same for all. What a recipe trained is also evaluated in bf16, as its users will run it. Prints losses, and for each format
the distance to its yardstick and that of seeds; ends with 1 if the adapters differ. Rows have a `question` and an `answer`. Knows no reference numbers.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

PART = 40 << 20
HELD_OUT = 400

ADAPTERS = {"lora": True, "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.0, "learning_rate": 1e-3}
WEIGHTS: dict[str, Any] = {"lora": False}
NF4 = {"qlora_bnb": True, "qlora_bnb_double_quant": False}

# Name, options, whether on the values of the NF4 base, the row that it is compared with.
ROWS: list[tuple[str, dict[str, Any], bool, str | None]] = [
    ("bf16", WEIGHTS, False, None),
    ("fp8_hybrid", WEIGHTS | {"recipe": "fp8_hybrid"}, False, "bf16"),
    ("nvfp4", WEIGHTS | {"recipe": "nvfp4", "fp4_backend": "emulate"}, False, "bf16"),
    ("lora on NF4's values", ADAPTERS, True, None),
    ("lora on NF4", ADAPTERS | NF4, False, "lora on NF4's values"),
]

# Ends the name of a row whose result is evaluated in bf16.
IN_BF16 = ", in bf16"

# --- the model -----------------------------------------------------------------------------------------------------

# Of the container: sizes of its scalar types; a text is 8, a list 9.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BLOCK = 32
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


class Container:
    """A GGUF file: its facts, and its tensors as (shape, type, bytes)."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        magic, _, tensors, facts = self.take("IIQQ")
        if magic != 0x46554747:
            raise SystemExit("the parts are no GGUF file")
        self.facts = {self.text(): self.value(self.take("I")[0]) for _ in range(facts)}
        found = []
        for _ in range(tensors):
            name = self.text()
            shape = self.take("Q" * self.take("I")[0])[::-1]
            found.append((name, shape, *self.take("IQ")))
        alignment = int(self.facts.get("general.alignment", 32))
        self.first = (self.at + alignment - 1) // alignment * alignment
        self.tensors = {name: (shape, kind, self.first + offset) for name, shape, kind, offset in found}

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            of, count = self.take("IQ")
            return [self.value(of) for _ in range(count)]
        return self.take(SCALARS[kind])[0]

    def numbers(self, name: str) -> np.ndarray:
        """A tensor in f32: plain numbers, codes of eight bits with a scale for 32, or of four with scale and offset."""
        shape, kind, first = self.tensors[name]
        count = int(np.prod(shape))
        if kind in (0, 1):
            plain = np.dtype("<f4" if kind == 0 else "<f2")
            return np.frombuffer(self.data, plain, count, first).astype(np.float32).reshape(shape)
        scales = {8: 1, 3: 2}.get(kind)
        if scales is None:
            raise SystemExit(f"`{name}` has type {kind}: only f32, f16, Q8_0 and Q4_1 are read")
        size = 2 * scales + (BLOCK if kind == 8 else BLOCK // 2)
        blocks = np.frombuffer(self.data, np.uint8, count // BLOCK * size, first).reshape(-1, size)
        of = blocks[:, : 2 * scales].copy().view("<f2").astype(np.float32)
        codes = blocks[:, 2 * scales :]
        if kind == 8:
            return (codes.view(np.int8).astype(np.float32) * of[:, :1]).reshape(shape)
        both = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float32)
        return (both * of[:, :1] + of[:, 1:]).reshape(shape)


def as_bf16(x: np.ndarray) -> np.ndarray:
    """The bits of the nearest bf16 numbers, ties to even."""
    bits = np.ascontiguousarray(x, "<f4").view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_tensors(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, bits in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for bits in tensors.values():
            file.write(bits.tobytes())


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a file as bits of bf16."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, of in header.items():
        begin, end = of["data_offsets"]
        plain = np.dtype({"BF16": "<u2", "F32": "<f4", "F16": "<f2"}[of["dtype"]])
        values = np.frombuffer(data[8 + length + begin : 8 + length + end], plain)
        tensors[name] = (values if of["dtype"] == "BF16" else as_bf16(values.astype(np.float32))).reshape(of["shape"])
    return tensors


def expand(a: argparse.Namespace) -> int:
    """Writes the folder of the model whose file was split."""
    file = Container(b"".join(part.read_bytes() for part in sorted(a.parts.glob("part-*"))))
    facts = file.facts
    if facts["general.architecture"] != "llama":
        raise SystemExit("only models of the architecture llama are expanded")
    of = {name.removeprefix("llama."): value for name, value in facts.items()}
    heads = {"attn_q": of["attention.head_count"], "attn_k": of["attention.head_count_kv"]}
    tensors = {}
    for name, (shape, _, _) in file.tensors.items():
        parts = name.split(".")
        layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        kind = parts[2] if layer else parts[0]
        x = file.numbers(name)
        if kind in heads:
            # Rows of a head lie in pairs that are rotated together; a half apart in the published form.
            x = x.reshape(heads[kind], shape[0] // heads[kind] // 2, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        tensors[f"{layer}{NAMES[kind]}.weight"] = as_bf16(x)
    a.model.mkdir(parents=True)
    write_tensors(a.model / "model.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": of["embedding_length"],
        "intermediate_size": of["feed_forward_length"],
        "num_hidden_layers": of["block_count"],
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": of["context_length"],
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{of['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": of["rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (a.model / "config.json").write_text(json.dumps(config, indent=2))
    copy_tokenizer(a.tokenizer, a.model)
    print(f"{a.model}: {sum(bits.size for bits in tensors.values())} parameters")
    return 0


def copy_tokenizer(source: pathlib.Path, to: pathlib.Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copyfile(source / name, to / name)


def split(a: argparse.Namespace) -> int:
    data = a.file.read_bytes()
    a.parts.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, len(data), PART)):
        (a.parts / f"part-{number}").write_bytes(data[first : first + PART])
    print(f"{a.parts}: {(len(data) + PART - 1) // PART} parts")
    return 0


# --- the values of the NF4 base ------------------------------------------------------------------------------------

# Quantiles of a normal distribution, scaled to ±1 (Dettmers et al. 2023).
NF4_VALUES = np.array(
    "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 "
    "-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 "
    "0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0".split(),
    np.float32,
)


def as_nf4(bits: np.ndarray, block: int = 64) -> np.ndarray:
    """What a matrix is after its stay in NF4, blocks with one scale each, across rows."""
    x = from_bf16(bits).reshape(-1)
    padded = np.concatenate([x, np.zeros(-x.size % block, np.float32)]).reshape(-1, block)
    most = np.abs(padded).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(most > 0, np.float32(1) / most, np.float32(0)).astype(np.float32)
    between = ((NF4_VALUES[1:].astype(np.float64) + NF4_VALUES[:-1]) / 2).astype(np.float32)
    codes = np.searchsorted(between, (padded * inverse).astype(np.float32), side="left")
    return as_bf16((NF4_VALUES[codes] * most).reshape(-1)[: x.size].reshape(bits.shape))


def write_base(model: pathlib.Path, to: pathlib.Path) -> None:
    """The model whose linears hold what they are in NF4."""
    to.mkdir(parents=True)
    tensors = read_tensors(model / "model.safetensors")
    for name, bits in tensors.items():
        if ".layers." in name and bits.ndim == 2:
            tensors[name] = as_nf4(bits)
    write_tensors(to / "model.safetensors", tensors)
    shutil.copyfile(model / "config.json", to / "config.json")
    copy_tokenizer(model, to)


# --- the runs ------------------------------------------------------------------------------------------------------


# A step that changes nothing, with the held-out loss after it.
UNCHANGED = ADAPTERS | {"learning_rate": 0.0, "warmup_steps": 0, "max_steps": 1, "save_steps": 1, "eval_steps": 1}


def final_losses(
    a: argparse.Namespace, folder: pathlib.Path, model: pathlib.Path, seed: int, own: dict[str, Any]
) -> list[float]:
    """The held-out loss after the last step of a run; with a recipe, also that of its result in bf16."""
    losses = [held_out_loss(a, folder, model, seed, own)]
    if "recipe" in own:
        losses.append(held_out_loss(a, folder.with_name(folder.name + "-in-bf16"), folder / "model", seed, UNCHANGED))
    shutil.rmtree(folder)
    return losses


def held_out_loss(
    a: argparse.Namespace, folder: pathlib.Path, model: pathlib.Path, seed: int, own: dict[str, Any]
) -> float:
    dataset = {"type": "instruction", "instruction_field": "question", "output_field": "answer"}
    if a.prompt:
        dataset["prompt_format"] = a.prompt
    options = {
        "model": str(model),
        "torch_dtype": "bfloat16",
        "device": a.device,
        "datasets": [dataset | {"path": str(a.out / "train.jsonl")}],
        "validation_datasets": [dataset | {"path": str(a.out / "held-out.jsonl")}],
        "output_dir": str(folder),
        "sequence_len": a.sequence_len,
        "per_device_train_batch_size": a.rows,
        "gradient_accumulation_steps": 1,
        "max_steps": a.steps,
        "save_steps": a.steps,
        "eval_steps": a.steps,
        "warmup_steps": max(1, a.steps // 20),
        "train_seed": seed,
        "learning_rate": a.learning_rate,
    }
    run = folder.with_suffix(".yaml")
    run.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in (options | own).items()))
    done = subprocess.run([sys.executable, "-m", "surogate", "sft", str(run), "--quiet"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder.name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    (log,) = folder.glob("log-*.json")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    shutil.copyfile(log, a.out / f"{folder.name}.log.json")
    return [event["loss"] for event in events if event["event"] == "evaluation"][-1]


def run(a: argparse.Namespace) -> int:
    a.out.mkdir(parents=True, exist_ok=True)
    lines = a.data.read_text().splitlines()
    held_out = min(HELD_OUT, len(lines) // 4)
    (a.out / "held-out.jsonl").write_text("\n".join(lines[:held_out]) + "\n")
    (a.out / "train.jsonl").write_text("\n".join(lines[held_out:]) + "\n")
    seeds = [int(seed) for seed in a.seeds.split(",")]
    losses: dict[str, list[float]] = {}
    chosen = [row for row in ROWS if not a.only or row[0] in a.only.split(",")]
    with tempfile.TemporaryDirectory() as place:
        base = pathlib.Path(place) / "base"
        write_base(a.model, base)
        for name, own, on_base, _ in chosen:
            began = time.monotonic()
            losses[name] = []
            for seed in seeds:
                folder = pathlib.Path(place) / f"{name.replace(' ', '-')}-{seed}"
                loss, *in_bf16 = final_losses(a, folder, base if on_base else a.model, seed, own)
                losses[name].append(loss)
                if in_bf16:
                    losses.setdefault(name + IN_BF16, []).extend(in_bf16)
            shown = "  ".join(f"{loss:.5f}" for loss in losses[name])
            print(f"{name:22} {shown}   {(time.monotonic() - began) / len(seeds):.1f} s a run", flush=True)
    return show(losses)


def show(losses: dict[str, list[float]]) -> int:
    """Distances to the yardsticks; 1 where what must be equal is not."""
    print(f"\n{'':22} {'mean':>8} {'of seeds':>9}   next to its yardstick")
    yardsticks = {name: other for name, _, _, other in ROWS}
    for name in losses:
        other = yardsticks[name.removesuffix(IN_BF16)]
        of = losses[name]
        line = f"{name:22} {statistics.mean(of):8.5f} {max(of) - min(of):9.5f}"
        if other in losses:
            away = [100 * (x / y - 1) for x, y in zip(of, losses[other], strict=True)]
            line += f"   {statistics.mean(away):+.3f} %, by seed {', '.join(f'{x:+.3f}' for x in away)}"
        print(line)
    both = [losses.get(name) for name in ("lora on NF4", "lora on NF4's values")]
    if None in both:
        return 0
    alike = both[0] == both[1]
    print(f"adapters on NF4 and on its values {'end alike' if alike else 'DIFFER'}")
    return 0 if alike else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(required=True)
    way = ways.add_parser("split")
    way.add_argument("file", type=pathlib.Path)
    way.add_argument("parts", type=pathlib.Path)
    way.set_defaults(do=split)
    way = ways.add_parser("expand")
    for name in ("parts", "tokenizer", "model"):
        way.add_argument(name, type=pathlib.Path)
    way.set_defaults(do=expand)
    way = ways.add_parser("run")
    way.add_argument("model", type=pathlib.Path)
    way.add_argument("data", type=pathlib.Path)
    way.add_argument("--steps", type=int, default=300)
    way.add_argument("--seeds", default="1,2,3")
    way.add_argument("--rows", type=int, default=8)
    way.add_argument("--sequence-len", type=int, default=512)
    way.add_argument("--learning-rate", type=float, default=5e-5, help="of all weights; adapters have their own")
    way.add_argument("--only", default="", help="names of rows with commas between")
    way.add_argument("--prompt", help="how questions are written for a model without a template: '{instruction} '")
    way.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    out = pathlib.Path(__file__).resolve().parents[2] / "output" / "quality"
    way.add_argument("--out", type=pathlib.Path, default=out)
    way.set_defaults(do=run)
    return parser.parse_args()


def main() -> int:
    a = arguments()
    return a.do(a)


if __name__ == "__main__":
    raise SystemExit(main())
