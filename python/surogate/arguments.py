"""The command line's grammar: commands and flags by argparse, options of the run as overrides.

Which options there are, their types and defaults, is known to the engine alone: `--key value` is
handed on as text, and the help page is made from the engine's tables.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence

from . import _native

#: Flags of the commands themselves, with the number of words that follow.
FLAGS = {
    "--help": 0,
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

#: Flags of single commands, which are options of the run elsewhere.
COMMAND_FLAGS = {
    "init": {"--output": 1},
    "merge": {"--model": 1, "--output": 1},
    "report": {"--output": 1},
    "tokenize": {"--debug": 0},
    "doctor": {"--output": 1},
    "export": {"--format": 1, "--encoding": 1, "--model": 1, "--output": 1},
}


class UsageError(Exception):
    """The command line cannot be read."""


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separates `--key value`, `--key=value` and `--set key=value` from what argparse reads."""
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    flags = FLAGS | COMMAND_FLAGS.get(arguments[0] if arguments else "", {})
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name in flags and name != "--set":
            rest.append(word)
            if flags.get(name) and not equals:
                rest.append(_next(words, name))
        elif name == "--set":
            key, equals, value = (value if equals else _next(words, name)).partition("=")
            if not equals:
                raise UsageError(f"--set {key}: expected key=value")
            overrides.append((key, value))
        else:
            overrides.append((name[2:].replace("-", "_"), value if equals else _next(words, name)))
    return rest, overrides


def _next(words, name: str) -> str:
    value = next(words, None)
    if value is None or value.startswith("--"):
        raise UsageError(f"{name} needs a value")
    return value


def parser() -> argparse.ArgumentParser:
    """Commands, their positional arguments and their own flags."""
    root = CommandParser(prog="surogate", description="Trains and fine-tunes large language models.")
    root.add_argument("--version", action="version", version=f"surogate {_native.__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in {"sft": "fine-tune a model", "pt": "train a model further, or from scratch, on text"}.items():
        command = _command(commands, name, f"{text}: {name} run.yaml")
        command.add_argument("config", metavar="run.yaml")
        shown = command.add_mutually_exclusive_group()
        shown.add_argument("--quiet", action="store_true", help="print errors only; the log holds the rest")
        shown.add_argument("--json", action="store_true", help="print the events of the log, a JSON object on a line")
    tokenize = _command(commands, "tokenize", "read, encode and check the data of a run, without training")
    tokenize.add_argument("config", metavar="run.yaml")
    tokenize.add_argument("--debug", action="store_true", help="show the first rows, here and as a page in output_dir")
    tokenize.add_argument("--task", choices=["sft", "pt"], default="sft", help="whose defaults apply")
    show = _command(commands, "show", "print one stage of a run: show graph run.yaml")
    show.add_argument("what", choices=["config", "graph", "program", "memory"])
    show.add_argument("config", metavar="run.yaml")
    plan = _command(commands, "plan", "memory and time of a run, without running it")
    plan.add_argument("config", metavar="run.yaml")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    for command in (show, plan):
        command.add_argument("--machine", help="plan for this machine, not the present: a name such as h100, or a file")
        command.add_argument("--task", choices=["sft", "pt"], default="sft", help="whose defaults apply")
    init = _command(commands, "init", "write a run.yaml for a model and data, with what the plan says of this machine")
    init.add_argument("model", metavar="MODEL", help="folder or name of the model")
    init.add_argument("dataset", metavar="DATASET", help="file, folder or name of the data")
    init.add_argument("--task", choices=["sft", "pt"], default="sft", help="fine-tune, or train on text")
    init.add_argument("--machine", help="plan for this machine, not the present: a name such as h100, or a file")
    init.add_argument("--output", default="run.yaml", help="file to write; left out: run.yaml")
    merge = _command(commands, "merge", "add an adapter to the weights of its model", reads_run=False)
    merge.add_argument("adapter", metavar="ADAPTER", help="folder of a PEFT adapter")
    merge.add_argument("--model", help="folder or name of the model; left out: the one that the adapter names")
    merge.add_argument("--output", help="folder to write; left out: `merged` beside the adapter")
    export = _command(commands, "export", "write the result of a run in another form", reads_run=False)
    export.add_argument("run", metavar="RUN", help="output_dir of a run, a checkpoint, a model or an adapter")
    export.add_argument("--format", choices=["hf", "peft", "gguf"], required=True, help="form of the result")
    export.add_argument("--encoding", choices=["bf16", "f16", "q8_0", "f32"], help="matrices of gguf; bf16 if left out")
    export.add_argument("--model", help="the model of an adapter; left out: the one that the adapter names")
    export.add_argument("--output", help="folder or file to write; left out: inside RUN, named after the form")
    report = _command(commands, "report", "show a run as a page, or several beside each other", False)
    report.add_argument("run", metavar="RUN", nargs="+", help="output_dir of a run, or its log")
    report.add_argument("--output", help="file to write; left out: report.html in RUN, comparison.html for several")
    completion = _command(commands, "completion", "print the script that completes commands and options", False)
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    _command(commands, "schema", "print the JSON schema of run.yaml, for editors", reads_run=False)
    doctor = _command(commands, "doctor", "say what this machine has and what is missing", reads_run=False)
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.add_argument("--operations", action="store_true", help="compare every operation with its CPU reference")
    doctor.add_argument("--own-kernels", action="store_true", help="of the operations only those that call no library")
    doctor.add_argument(
        "--calibrate",
        nargs="?",
        const="full",
        choices=["full", "least"],
        help="measure this device for plans, in under four minutes; least: a trial of a few seconds that is not kept",
    )
    doctor.add_argument("--output", help="file to write the measured values to, for --machine on other computers")
    return root


class CommandParser(argparse.ArgumentParser):
    """A parser whose help ends with the options of the run, for commands that read a run.yaml."""

    reads_run = False

    def format_help(self) -> str:
        text = super().format_help()
        return f"{text}\n{options_help()}\n" if self.reads_run else text


def _command(commands, name: str, text: str, reads_run: bool = True) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    command.reads_run = reads_run
    return command


def options_help() -> str:
    """The run's options by section, from the engine's tables."""
    lines = ["Every option of run.yaml can be set here: --option value, or --set option=value."]
    section = None
    for row in json.loads(_native.config_help()):
        if row["section"] != section:
            section = row["section"]
            lines += ["", f"{section}:"]
        default = "required" if row["required"] else f"default {json.dumps(row['default'])}"
        note = "" if row["available"] else "; not available yet"
        head = f"  --{row['name'].replace('_', '-')} {row['type']}  ({default}{note})"
        lines += [head, *textwrap.wrap(row["help"], 92, initial_indent="      ", subsequent_indent="      ")]
    return "\n".join(lines)
