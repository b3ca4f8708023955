"""The command line's grammar: commands and flags by argparse, options of the run as overrides.

Only the engine knows the options, their types and defaults: `--key value` is passed on as text, and
the help page is generated from the engine's tables.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import _native
from ..errors import ConfigError

#: Flags of the commands themselves, with the number of words that follow.
FLAGS = {
    "--help": 0,
    "--help-all": 0,
    "-h": 0,
    "--json": 0,
    "--operations": 0,
    "--own-kernels": 0,
    "--calibrate": 0,
    "--quiet": 0,
    "--machine": 1,
    "--task": 1,
    "--set": 1,
    "--version": 0,
    "--dump": 1,
}

#: Commands that train, with their help.
TRAIN = {
    "sft": "fine-tune a model",
    "pt": "pretrain on text: continue a model, or start from scratch",
    "dpo": "train on pairs of a better and a worse answer",
    "kto": "train on answers that are good or bad",
    "orpo": "fine-tune on the better of two answers, away from the other, without a reference",
    "cpo": "train on pairs of answers without a reference: CPO, SimPO",
    "reward": "train a reward model on pairs of answers",
    "grpo": "train on answers that the model samples and reward functions judge",
    "distil": "train on the distributions of tokens of a teacher",
}

#: Other spellings of commands.
ALIASES = {"distill": "distil"}

#: Flags of single commands, which are options of the run elsewhere.
COMMAND_FLAGS = {
    "init": {"--output": 1, "--from": 1},
    "new-model": {"--output": 1},
    "extend": {"--tokens": 1, "--multiple": 1, "--output": 1},
    "merge": {"--model": 1, "--base": 1, "--output": 1},
    "report": {"--output": 1},
    **{name: {"--run": 1} for name in TRAIN},
    "show": {"--run": 1},
    "plan": {"--run": 1},
    "tokenize": {"--debug": 0, "--run": 1},
    "doctor": {"--output": 1, "--only": 1, "--seconds": 1, "--report": 1},
    "push": {"--public": 0, "--dry-run": 0},
    "generate": {
        "--prompt": 1, "--prompts": 1, "--chat": 0, "--image": 1, "--tools": 1, "--adapter": 1, "--base": 1,
        "--device": 1, "--dtype": 1,
    },
    "chat": {"--system": 1, "--image": 1, "--tools": 1, "--adapter": 1, "--base": 1, "--device": 1, "--dtype": 1},
    "score": {"--prompts": 1, "--adapter": 1, "--base": 1, "--device": 1, "--dtype": 1},
    "evaluate": {
        "--tasks": 1, "--include-path": 1, "--num-fewshot": 1, "--limit": 1, "--chat": 0, "--system": 1, "--max-length": 1,
        "--batch-size": 1, "--batch-tokens": 1, "--output": 1, "--samples": 0,
        "--adapter": 1, "--base": 1, "--device": 1, "--dtype": 1,
    },
    "quantize": {
        "--scheme": 1, "--method": 1, "--smoothing-strength": 1, "--observer": 1, "--group-size": 1, "--asymmetric": 0,
        "--include": 1, "--calibration": 1, "--samples": 1, "--base": 1, "--device": 1, "--output": 1, "--plan": 0,
    },
    "prune": {
        "--layers": 1, "--hidden-size": 1, "--intermediate-size": 1, "--heads": 1, "--key-value-heads": 1, "--experts": 1,
        "--parameters": 1, "--latency": 1, "--request": 1, "--machine": 1, "--layers-by": 1, "--calibration": 1, "--samples": 1, "--over-tokens": 1, "--over-rows": 1, "--scores": 1, "--base": 1, "--device": 1,
        "--output": 1,
    },
    "serve": {
        "--address": 1, "--adapters": 1, "--token-file": 1, "--max-sequences": 1, "--max-waiting": 1, "--max-tokens": 1,
        "--max-adapters": 1, "--max-body": 1, "--timeout": 1, "--adapter": 1, "--base": 1, "--device": 1, "--dtype": 1,
    },
    "export": {"--format": 1, "--encoding": 1, "--text-only": 0, "--model": 1, "--output": 1},
}


#: Number formats of `quantize`.
SCHEMES = ["fp8-dynamic", "fp8-static", "fp8-block", "int8-w8a8", "w4a16", "w8a16", "nvfp4", "nvfp4a16", "mxfp4a16"]

#: Parts of a model that `quantize --include` names.
PARTS = ["lm_head", "routers", "towers"]

#: Choices of codes of `quantize`.
METHODS = ["rtn", "gptq", "refine", "awq", "smoothquant"]

#: Commands that generate text.
GENERATE = ["generate", "chat"]

#: Commands whose words can be options of a run.
READ_RUN = [*TRAIN, "tokenize", "show", "plan", "init"]

#: `learning_rate=1e-3`, as other programs take it.
ASSIGNMENT = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)

#: The values of an option that is true or false; after `--lora`, any other word is the next argument.
TRUTHS = ("true", "false", "auto", "null")


class UsageError(Exception):
    """The command line cannot be read."""


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separates `--key value`, `--key=value` and `--set key=value` from what argparse reads."""
    if arguments:
        arguments = [ALIASES.get(arguments[0], arguments[0]), *arguments[1:]]
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    flags = FLAGS | _flags(arguments[0] if arguments else "")
    words = Words(arguments)
    reads_run = bool(arguments) and arguments[0] in READ_RUN
    for word in words:
        name, equals, value = word.partition("=")
        if reads_run and ASSIGNMENT.fullmatch(word) and not Path(word).exists():
            overrides.append((name, value))
        elif not word.startswith("--") or name in flags and name != "--set":
            rest.append(word)
            if flags.get(name) and not equals:
                rest.append(words.value_of(name))
        elif name == "--set":
            key, equals, value = (value if equals else words.value_of(name)).partition("=")
            if not equals:
                raise UsageError(f"--set {key}: expected key=value")
            overrides.append((key, value))
        else:
            overrides.append(_option(name, value if equals else None, words))
    return rest, overrides


def _flags(command: str) -> dict[str, int]:
    """Flags of a command, with the number of words that follow."""
    if command not in GENERATE:
        return COMMAND_FLAGS.get(command, {})
    return COMMAND_FLAGS[command] | {_flag(row): int(row["type"] != "bool") for row in _generation()}


def _flag(row: dict[str, Any]) -> str:
    return f"--{row['name'].replace('_', '-')}"


def _generation() -> list[dict[str, Any]]:
    """The options of generation, from the engine's table."""
    rows: list[dict[str, Any]] = json.loads(_native.generation_help())
    return rows


def generation_options(options: argparse.Namespace) -> dict[str, Any]:
    """The given options of generation: texts as in YAML, a list where a flag may come several times."""
    given = {row["name"]: getattr(options, row["name"]) for row in _generation()}
    return {name: value for name, value in given.items() if value is not None}


class Words:
    """Words of a command line, one after the other."""

    def __init__(self, words: Sequence[str]) -> None:
        self._left = list(words)

    def __iter__(self) -> Words:
        return self

    def __next__(self) -> str:
        if not self._left:
            raise StopIteration
        return self._left.pop(0)

    def upcoming(self) -> str | None:
        """The next word, which is not taken."""
        return self._left[0] if self._left else None

    def value_of(self, name: str) -> str:
        """Takes the value of a flag."""
        value = self.upcoming()
        if value is None or value.startswith("--"):
            raise UsageError(f"{name} needs a value")
        return next(self)


def _option(flag: str, value: str | None, words: Words) -> tuple[str, str]:
    """An option of the run: `--lora` and `--no-lora` stand for true and false. What is no option is passed on, for the
    engine to name the one that is meant; it takes the next word only if that can be a value."""
    name = flag[2:].replace("-", "_")
    kinds = _kinds()
    upcoming = words.upcoming()
    if value is not None:
        return name, value
    if kinds.get(name) == "bool":
        return name, next(words) if upcoming in TRUTHS else "true"
    if kinds.get(name, "").startswith("bool or ") and (upcoming is None or upcoming.startswith("--")):
        return name, "true"
    if name not in kinds and kinds.get(name.removeprefix("no_")) == "bool":
        return name.removeprefix("no_"), "false"
    if name not in kinds and "." not in name:
        is_value = upcoming is not None and not upcoming.startswith("--") and not upcoming.endswith((".yaml", ".yml"))
        return name, next(words) if is_value else "true"
    return name, words.value_of(flag)


def _kinds() -> dict[str, str]:
    """The options with their types. `model_name` and `dataset` are second names."""
    found = {row["name"]: row["type"] for row in json.loads(_native.config_help()) if not row["of_item"]}
    return {**found, "model_name": "string", "dataset": "string"}


def parser() -> argparse.ArgumentParser:
    """Commands, their positional arguments and their own flags."""
    root = CommandParser(
        prog="surogate", description="Trains and fine-tunes large language models.", formatter_class=HelpFormatter
    )
    root.add_argument("--version", action="version", version=f"surogate {_native.__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    of_run: list[argparse.ArgumentParser] = []
    for name, text in TRAIN.items():
        command = _command(commands, name, f"{text}: {name} run.yaml")
        command.add_argument("config", metavar="run.yaml", type=_path)
        shown = command.add_mutually_exclusive_group()
        shown.add_argument("--quiet", action="store_true", help="print errors only; everything else is in the log")
        shown.add_argument("--json", action="store_true", help="print the log: one JSON object per line")
        of_run.append(command)
    tokenize = _command(commands, "tokenize", "read, encode and check the data of a run, without training")
    tokenize.add_argument("config", metavar="run.yaml", type=_path)
    tokenize.add_argument("--debug", action="store_true", help="show the first rows as training sees them, also as a page in output_dir")
    tokenize.add_argument("--task", type=_task, choices=list(TRAIN), default="sft", help="command whose defaults apply")
    show = _command(commands, "show", "print one stage of a run: show graph run.yaml")
    show.add_argument("what", choices=["config", "graph", "program", "memory"])
    show.add_argument("config", metavar="run.yaml", type=_path)
    plan = _command(commands, "plan", "memory and time of a run, without running it")
    plan.add_argument("config", metavar="run.yaml", type=_path)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    of_run += [tokenize, show, plan]
    for command in (show, plan):
        command.add_argument("--machine", type=_path, help="machine to plan for instead of this one: a name such as h100, or a file")
        command.add_argument("--task", type=_task, choices=list(TRAIN), default="sft", help="command whose defaults apply")
    for command in of_run:
        command.add_argument("--run", metavar="NAME", help="select one of the runs of the file")
    init = _command(commands, "init", "write a run.yaml for a model and a dataset, planned for this machine")
    init.add_argument("model", metavar="MODEL", type=_path, nargs="?", help="folder or name of the model")
    init.add_argument("dataset", metavar="DATASET", type=_path, nargs="?", help="file, folder or name of the dataset")
    of_from = "configuration of Axolotl, LLaMA-Factory or TRL to convert; MODEL and DATASET replace its own"
    init.add_argument("--from", metavar="FILE", type=_path, dest="source", help=of_from)
    init.add_argument("--task", type=_task, choices=list(TRAIN), default="sft", help="what is trained")
    init.add_argument("--machine", type=_path, help="machine to plan for instead of this one: a name such as h100, or a file")
    init.add_argument("--output", type=_path, default="run.yaml", help="file to write (default: run.yaml)")
    new_model = _command(commands, "new-model", "begin the file of an architecture that is not known yet", reads_run=False)
    of_new = "folder with its config.json, name of a model on the Hub, or a name for it"
    new_model.add_argument("model", metavar="MODEL", type=_path, help=of_new)
    new_model.add_argument("--output", type=_path, help="file to write (default: its model type with .py)")
    generate = _command(commands, "generate", "continue prompts, or answer them", reads_run=False)
    generate.add_argument("model", metavar="MODEL", type=_path, help=OF_MODEL)
    generate.add_argument("--prompt", metavar="TEXT", help="text to continue")
    of_file = "file with one prompt per line; in .jsonl a string, or an object with prompt, messages or text"
    generate.add_argument("--prompts", metavar="FILE", type=_path, help=of_file)
    of_chat = "answer prompts as user messages, by the model's chat template"
    generate.add_argument("--chat", action="store_true", help=of_chat)
    generate.add_argument("--json", action="store_true", help="print one JSON object per prompt, as with --prompts")
    chat = _command(commands, "chat", "talk to a model, by its own chat template", reads_run=False)
    chat.add_argument("model", metavar="MODEL", type=_path, help=OF_MODEL)
    chat.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    for command, what in ((generate, "the prompt, with --chat"), (chat, "the first message")):
        of_image = f"image before {what}; may be repeated"
        command.add_argument("--image", metavar="FILE", action="append", default=[], type=_path, help=of_image)
        of_tools = "JSON file with a list of function definitions, which the chat template shows to the model"
        command.add_argument("--tools", metavar="FILE", help=of_tools)
        _place_flags(command)
        _generation_flags(command)
    _serve_flags(_command(commands, "serve", "serve a model over HTTP, with OpenAI's endpoints", reads_run=False))
    score = _command(commands, "score", "score answers with a reward model", reads_run=False)
    score.add_argument("model", metavar="MODEL", type=_path, help=OF_MODEL)
    of_rows = "JSONL file: texts, conversations, or objects with messages, or with prompt and completion"
    score.add_argument("--prompts", metavar="FILE", type=_path, required=True, help=of_rows)
    score.add_argument("--json", action="store_true", help="print a JSON object for each row")
    _place_flags(score)
    _evaluate_flags(_command(commands, "evaluate", "measure a model on tasks of lm-evaluation-harness", reads_run=False))
    extend = _command(commands, "extend", "add special tokens to a model", reads_run=False)
    _extend_flags(extend)
    merge = _command(commands, "merge", "merge an adapter into the weights of its model", reads_run=False)
    merge.add_argument("adapter", metavar="ADAPTER", type=_path, help="folder of a PEFT adapter, or output_dir of a run")
    merge.add_argument("--model", type=_path, help="folder or name of the model (default: the one that the adapter names)")
    merge.add_argument(
        "--base", metavar="DIR", type=_path, help="other weights to merge into, as they are: not the function that was trained"
    )
    merge.add_argument("--output", type=_path, help="folder to write (default: `merged` next to the adapter)")
    export = _command(commands, "export", "write the result of a run in another format", reads_run=False)
    export.add_argument("run", metavar="RUN", type=_path, help="output_dir of a run, a checkpoint, a model or an adapter")
    export.add_argument("--format", choices=["hf", "peft", "gguf"], required=True, help="format of the result")
    encodings = ["bf16", "f16", "f32", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "mxfp4"]
    export.add_argument("--encoding", choices=encodings, help="type of matrices in GGUF (default: f16 for a model in f16, else bf16)")
    export.add_argument("--text-only", action="store_true", help="with --format gguf, without the tower of a vision-language model")
    export.add_argument("--model", type=_path, help="model of an adapter (default: the one that the adapter names)")
    export.add_argument("--output", type=_path, help="folder or file to write (default: inside RUN, named after the format)")
    quantize = _command(commands, "quantize", "write a model with quantized weights, for engines that serve it", reads_run=False)
    _quantize_flags(quantize)
    prune = _command(commands, "prune", "write a smaller model with the channels, heads and layers that matter most", reads_run=False)
    _prune_flags(prune)
    push = _command(commands, "push", "upload the result of a run to the Hugging Face Hub", reads_run=False)
    push.add_argument("run", metavar="RUN", type=_path, help="output_dir of a run, a checkpoint, a model or an adapter")
    push.add_argument("name", metavar="OWNER/NAME", help="repository, created if it does not exist")
    push.add_argument("--public", action="store_true", help="make a new repository public")
    push.add_argument("--dry-run", action="store_true", help="print what would be uploaded, and upload nothing")
    report = _command(commands, "report", "write the report of a run, or a comparison of several", False)
    report.add_argument("run", metavar="RUN", type=_path, nargs="+", help="output_dir of a run, or its log")
    report.add_argument("--output", type=_path, help="file to write (default: report.html in RUN, or comparison.html for several)")
    status = _command(commands, "status", "print how far a run is, what it wrote and how it ended", False)
    status.add_argument("run", metavar="RUN", type=_path, help="output_dir of a run, or its log")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    for saying in (tokenize, init, new_model, report, extend, merge, export, push, quantize, prune):
        saying.add_argument("--json", action="store_true", help="print what was done as one JSON object, an error too")
    completion = _command(commands, "completion", "print the shell completion script", False)
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    _command(commands, "schema", "print the JSON schema of run.yaml, for editors", reads_run=False)
    doctor = _command(commands, "doctor", "report which libraries and devices were found, and what is missing", reads_run=False)
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.add_argument("--operations", action="store_true", help="compare every operation with its CPU reference")
    doctor.add_argument("--own-kernels", action="store_true", help="skip operations that call a library")
    doctor.add_argument("--only", metavar="NAME,…", help="only operations whose names begin with one of these")
    doctor.add_argument("--seconds", type=int, help="start no operation after this time, for tools that slow down a GPU")
    doctor.add_argument(
        "--report", metavar="FILE", type=_path, help="compare every operation, and write what was found to a file without private data"
    )
    doctor.add_argument(
        "--calibrate",
        nargs="?",
        const="full",
        choices=["full", "least"],
        help="measure this device for plans, in under four minutes; least: a test of a few seconds, not saved",
    )
    doctor.add_argument("--output", type=_path, help="with --calibrate: file for the measured values, for --machine on other computers")
    return root


OF_MODEL = "folder or name of a model, output_dir of a run, a checkpoint, or an adapter"


def _extend_flags(extend: argparse.ArgumentParser) -> None:
    extend.add_argument("model", metavar="MODEL", type=_path, help="folder or name of the model")
    extend.add_argument("--tokens", metavar="TOKEN", nargs="+", required=True, help="the new tokens, such as '<|note|>'")
    of_rows = "if embedding and LM head must grow, make their rows a multiple of this (default: 64)"
    extend.add_argument("--multiple", metavar="N", type=_count(1), default=64, help=of_rows)
    extend.add_argument("--output", metavar="DIR", type=_path, required=True, help="folder to write")


def _quantize_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", type=_path, help=OF_MODEL)
    command.add_argument("--scheme", choices=SCHEMES, required=True, help="number format of the weights")
    of_method = "choice of the codes: the nearest (rtn, the default), by what matrices are multiplied with (gptq), with their scales for the results of the model (refine), or the nearest once channels are scaled (awq, smoothquant)"
    command.add_argument("--method", choices=METHODS, default="rtn", help=of_method)
    of_strength = "share of the ranges of activations in the factors of smoothquant, 0 to 1 (default: 0.5)"
    command.add_argument("--smoothing-strength", metavar="X", type=float, help=of_strength)
    of_observer = "range of a scale: of all its numbers (minmax, the default), or the narrower one with the smallest error (mse)"
    command.add_argument("--observer", choices=["minmax", "mse"], default="minmax", help=of_observer)
    of_groups = "elements that share a scale, -1 for a whole row (default: the largest of 128, 64, … 8 that divides all rows)"
    command.add_argument("--group-size", metavar="N", type=int, help=of_groups)
    command.add_argument("--asymmetric", action="store_true", help="with a zero point for each group, of w4a16 and w8a16")
    of_parts = f"parts besides the layers' matrices, from {', '.join(PARTS)}"
    command.add_argument("--include", metavar="PART,…", type=_parts, default=[], help=of_parts)
    of_data = "run whose rows activations are measured on; the result is compared with the model on its validation data"
    command.add_argument("--calibration", metavar="run.yaml", type=_path, help=of_data)
    command.add_argument("--samples", metavar="N", type=_count(1), default=256, help="rows to measure activations on (default: 256)")
    command.add_argument("--base", metavar="MODEL", type=_path, help="model of an adapter (default: the one that the adapter names)")
    command.add_argument("--device", choices=["auto", "cuda", "rocm", "cpu"], default="auto", help="device of measurements (default: auto)")
    command.add_argument("--output", metavar="DIR", type=_path, required=True, help="folder to write")
    command.add_argument("--plan", action="store_true", help="report sizes, and the memory of measurements; write nothing")


def _prune_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", type=_path, help=OF_MODEL)
    command.add_argument("--layers", metavar="N", type=_count(1), help="layers that stay: see --layers-by")
    command.add_argument("--hidden-size", metavar="N", type=_count(1), help="channels of the residual stream that stay")
    command.add_argument("--intermediate-size", metavar="N", type=_count(1), help="channels of the feed-forward layers that stay")
    command.add_argument("--heads", metavar="N", type=_count(1), help="attention heads that stay, as many of each group")
    command.add_argument("--key-value-heads", metavar="N", type=_count(1), help="heads of keys and values that stay, with their group of heads")
    command.add_argument("--experts", metavar="N", type=_count(1), help="experts of each layer that stay, by their weights and what they make")
    of_layers = "order of layers: how much they change what they read (influence, the default), or the loss without them"
    command.add_argument("--layers-by", choices=["influence", "loss"], default="influence", help=of_layers)
    of_limit = "parameters of the result at most, below 1 a share of the model's: hidden and intermediate size shrink alike"
    command.add_argument("--parameters", metavar="N", type=_positive, help=of_limit)
    of_latency = "milliseconds of a request at most, as planned: hidden and intermediate size shrink alike"
    command.add_argument("--latency", metavar="MS", type=_positive, help=of_latency)
    command.add_argument("--request", metavar="PROMPT,ANSWER", type=_request, help="its tokens, for --latency (default: 512,128)")
    command.add_argument("--machine", type=_path, help="machine that answers, for --latency: a name such as h100, or a file (default: this one)")
    of_data = "run whose rows activations are measured on; the result is compared with the model on its validation data"
    command.add_argument("--calibration", metavar="run.yaml", type=_path, required=True, help=of_data)
    command.add_argument("--samples", metavar="N", type=_count(1), default=256, help="rows to measure activations on (default: 256)")
    of_tokens = "sum of scores over the tokens of a row: mean (the default), or l2, the root of the sum of squares"
    command.add_argument("--over-tokens", choices=["mean", "l2"], default="mean", help=of_tokens)
    command.add_argument("--over-rows", choices=["mean", "l2"], default="l2", help="the same over rows (default: l2)")
    command.add_argument("--scores", metavar="FILE", type=_path, help="write the scores to a new safetensors file")
    command.add_argument("--base", metavar="MODEL", type=_path, help="model of an adapter (default: the one that the adapter names)")
    command.add_argument("--device", choices=["auto", "cuda", "rocm", "cpu"], default="auto", help="device of measurements (default: auto)")
    command.add_argument("--output", metavar="DIR", type=_path, required=True, help="folder to write")


def _evaluate_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `evaluate`: tasks, settings of requests, the output file."""
    command.add_argument("model", metavar="MODEL", type=_path, help=OF_MODEL)
    of_tasks = "tasks or groups, patterns such as mmlu_*, YAML files of your own tasks, or a folder of them"
    command.add_argument("--tasks", metavar="NAME,…", required=True, help=of_tasks)
    command.add_argument("--include-path", metavar="DIR", type=_path, help="folder with your own tasks, which --tasks can then name")
    of_fewshot = "examples before each question (default: as the task says)"
    command.add_argument("--num-fewshot", metavar="N", type=_count(0), help=of_fewshot)
    of_limit = "maximum questions of each task, or below 1 a fraction of them: to test the setup, not for results"
    command.add_argument("--limit", metavar="N", type=_positive, help=of_limit)
    command.add_argument("--chat", action="store_true", help="ask with the model's chat template, examples as earlier turns")
    command.add_argument("--system", metavar="TEXT", help="system message before each question")
    of_length = "longest sequence in tokens (default: that of the model, else 2048)"
    command.add_argument("--max-length", metavar="N", type=_count(1), help=of_length)
    of_batch = "maximum answers generated at a time (default: 64)"
    command.add_argument("--batch-size", metavar="N", type=_count(1), default=64, help=of_batch)
    of_tokens = "tokens scored at a time (default: 8192)"
    command.add_argument("--batch-tokens", metavar="N", type=_count(1), help=of_tokens)
    command.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    command.add_argument("--output", metavar="FILE", type=_path, help="write everything that the harness reports to a new JSON file")
    command.add_argument("--samples", action="store_true", help="with --output: also every question with its answer")
    _place_flags(command)


def _serve_flags(command: argparse.ArgumentParser) -> None:
    """Models, address and limits of a server."""
    command.add_argument("model", metavar="MODEL", type=_path, help=OF_MODEL)
    of_address = "address to serve at; a port alone is one of 127.0.0.1 (default: 127.0.0.1:8000)"
    command.add_argument("--address", metavar="HOST:PORT", default="127.0.0.1:8000", help=of_address)
    of_adapters = "further adapter of the same model, which requests name as their model; may be repeated"
    command.add_argument("--adapters", metavar="NAME=DIR", action="append", default=[], help=of_adapters)
    of_slots = "adapters on the device at a time; 0 loads one model at a time (default: those of the command, and two checkpoints of a run)"
    command.add_argument("--max-adapters", metavar="N", type=_count(0), help=of_slots)
    of_token = "file (mode 0600) with a token that requests must have (default: the variable SUROGATE_SERVE_TOKEN)"
    command.add_argument("--token-file", metavar="FILE", type=_path, help=of_token)
    for flag, metavar, default, text in (
        ("--max-sequences", "N", 16, "answers at a time, and of one request"),
        ("--max-waiting", "N", 64, "requests that wait; further ones are refused"),
        ("--max-tokens", "N", 1024, "tokens of an answer, also where a request does not say"),
        ("--max-body", "BYTES", 1 << 20, "size of a request"),
        ("--timeout", "SECONDS", 600, "time from a request to the end of its answer"),
    ):
        command.add_argument(flag, metavar=metavar, type=_count(1), default=default, help=f"maximum {text} (default: {default})")
    _place_flags(command)


def _count(least: int) -> Callable[[str], int]:
    """A reader of whole numbers from `least` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
        return int(text)

    return read


def _path(text: str) -> str:
    """A path in which `~` is the user's own folder, also where a shell leaves it (`--output=~/x`)."""
    try:
        return _native.expand_path(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _parts(text: str) -> list[str]:
    """Parts of a model that are quantized besides the layers' matrices."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"{part!r}: expected some of {', '.join(PARTS)}, with commas between them")
    return list(dict.fromkeys(parts))


def _request(text: str) -> tuple[int, int]:
    """The tokens of a prompt and of its answer."""
    numbers = text.split(",")
    if len(numbers) != 2 or not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: expected tokens of a prompt and of an answer, such as 512,128")
    return int(numbers[0]), int(numbers[1])


def _place_flags(command: argparse.ArgumentParser) -> None:
    """Adapter, device and type of a model that is used."""
    command.add_argument("--adapter", metavar="DIR", type=_path, help="adapter for the model, or output_dir of the run that trained it")
    of_base = "model of an adapter (default: the one that the adapter names)"
    command.add_argument("--base", metavar="MODEL", type=_path, help=of_base)
    command.add_argument("--device", choices=["auto", "cuda", "rocm", "cpu"], default="auto", help="device (default: auto)")
    command.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
        help="type of weights and activations (default: auto, bfloat16 on a GPU for models saved in 16 bits)",
    )


def _generation_flags(command: argparse.ArgumentParser) -> None:
    """The options of generation, from the engine's table."""
    for row in _generation():
        text = f"{row['help']} (default: {json.dumps(row['default'])})".replace("%", "%%")
        if row["type"] == "bool":
            command.add_argument(_flag(row), action="store_const", const="true", help=text)
        elif row["type"].startswith("list"):
            command.add_argument(_flag(row), metavar="TEXT", action="append", help=text)
        else:
            command.add_argument(_flag(row), metavar="N", help=text)


#: Columns of a help page.
WIDTH = 80


class HelpFormatter(argparse.HelpFormatter):
    """Pages of the same width everywhere, with whole words."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=WIDTH)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


class CommandParser(argparse.ArgumentParser):
    """A parser whose help ends with options of the run, for commands that read a run.yaml: the usual ones, or all."""

    reads_run = False

    def format_help(self) -> str:
        """The help of the command, with the usual options of a run if the command reads one."""
        text = super().format_help()
        return f"{text}\n{options_help(USUAL)}\n{MORE}\n" if self.reads_run else text

    def whole_help(self) -> str:
        """The help with every option of the run."""
        return f"{super().format_help()}\n{options_help()}\n"


class _WholeHelp(argparse.Action):
    """Shows the help with every option, and ends."""

    def __call__(self, parser, *_: Any) -> None:
        parser._print_message(parser.whole_help(), sys.stdout)
        parser.exit()


#: Options that the short help shows.
USUAL = (
    "model", "datasets", "output_dir", "sequence_len", "num_epochs", "max_steps", "learning_rate",
    "per_device_train_batch_size", "gradient_accumulation_steps", "lora", "lora_rank", "qlora_bnb", "template", "gpus",
    "eval_steps", "save_steps", "resume_from_checkpoint", "apply_recommended_values", "report_to",
)  # fmt: skip

#: What the short help ends with.
MORE = """\
`surogate init MODEL DATASET` writes a first run.yaml. --help-all shows every
option, docs/config.md explains them."""


def _task(name: str) -> str:
    return ALIASES.get(name, name)


def _command(commands, name: str, text: str, reads_run: bool = True) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text, allow_abbrev=False, formatter_class=HelpFormatter)
    command.reads_run = reads_run
    if reads_run:
        command.add_argument("--help-all", action=_WholeHelp, nargs=0, help="show this help with every option, and exit")
    return command


def options_help(names: Sequence[str] = ()) -> str:
    """The run's options by section, from the engine's tables: those of these names, or all."""
    lines = [
        "Every option of run.yaml can be set here: --option value, option=value or --set",
        "option=value; --option and --no-option where it is true or false. Of an item of",
        "a list: --set datasets.0.path=FILE.",
    ]
    section = None
    for row in json.loads(_native.config_help()):
        if names and row["name"] not in names:
            continue
        if row["section"] != section:
            section = row["section"]
            lines += ["", f"{section}:"]
        lines += _wrapped(_head(row), "  ", "        ") + _wrapped(row["help"], "      ", "      ")
        lines += _wrapped(_choices(row), "      ", "        ")
    return "\n".join(lines)


def _head(row: dict[str, Any]) -> str:
    default = "required" if row["required"] else f"default {json.dumps(row['default'])}"
    note = "" if row["available"] else "; not available yet"
    name = row["name"] if row["of_item"] else f"--{row['name'].replace('_', '-')}"
    return f"{name} {row['type']} ({default}{note})"


def _choices(row: dict[str, Any]) -> str:
    names = [choice["name"] for choice in row["choices"] if choice["available"]]
    return f"One of: {', '.join(names)}." if names else ""


def _wrapped(text: str, first: str, other: str) -> list[str]:
    """Lines of at most `WIDTH` columns, broken between words."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=other, break_long_words=False, break_on_hyphens=False
    )
