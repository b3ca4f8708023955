"""Shell completion for bash, zsh and fish: a script for each, generated from the parser and the option tables.

No command or option is listed here. The scripts are plain lists: completion does not start Python.
"""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import dataclass, field

from .. import _native

SHELLS = ["bash", "zsh", "fish"]


@dataclass
class Word:
    """A word that can be typed, its meaning, and the values that it takes."""

    text: str
    about: str
    values: list[str] = field(default_factory=list)
    takes_value: bool = True


@dataclass
class Command:
    """A command with its flags and the values of its positional arguments."""

    name: str
    about: str
    flags: list[Word]
    arguments: list[str]


def script(shell: str, root: argparse.ArgumentParser) -> str:
    """The script for a shell."""
    commands = _commands(root)
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _commands(root: argparse.ArgumentParser) -> list[Command]:
    listed = next(action for action in root._actions if isinstance(action, argparse._SubParsersAction))
    about = {choice.dest: choice.help or "" for choice in listed._choices_actions}
    return [_command(name, about.get(name, ""), parser) for name, parser in listed.choices.items()]


def _command(name: str, about: str, parser: argparse.ArgumentParser) -> Command:
    flags, arguments = [], []
    for action in parser._actions:
        values = [str(choice) for choice in action.choices or []]
        if action.dest == "machine":
            values = _native.machine_names()
        if not action.option_strings:
            arguments += values
        elif action.option_strings[-1].startswith("--"):
            flags.append(Word(action.option_strings[-1], action.help or "", values, action.nargs != 0))
    if getattr(parser, "reads_run", False):
        flags += [_option(row) for row in json.loads(_native.config_help()) if row["available"] and not row["of_item"]]
    return Command(name, about, flags, arguments)


def _option(row: dict) -> Word:
    values = [choice["name"] if isinstance(choice, dict) else str(choice) for choice in row["choices"]]
    if row["type"] == "bool":
        values = ["true", "false"]
    first = row["help"].split(". ")[0].rstrip(".")
    return Word("--" + row["name"].replace("_", "-"), first, values)


def _bash(commands: list[Command]) -> str:
    cases, values = [], []
    for of in commands:
        flags = " ".join(flag.text for flag in of.flags)
        cases.append(f"    {of.name}) flags={shlex.quote(flags)} words={shlex.quote(' '.join(of.arguments))} ;;")
        values += [
            f"    {of.name}:{flag.text}) words={shlex.quote(' '.join(flag.values))} ;;"
            for flag in of.flags
            if flag.values
        ]
    names = " ".join(of.name for of in commands)
    return f"""# Completion of surogate for bash: source <(surogate completion bash)
_surogate() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
  local words="" flags=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {shlex.quote(names + " --help --version")} -- "$word"))
    return
  fi
  case "$command:$before" in
{chr(10).join(values)}
  esac
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    return
  fi
  case "$command" in
{chr(10).join(cases)}
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$flags" -- "$word")) ;;
    *) COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _surogate surogate
"""


def _zsh(commands: list[Command]) -> str:
    def quoted(text: str) -> str:
        plain = text.replace("\\", "").replace("'", "'\\''")
        for sign in "[]:":
            plain = plain.replace(sign, "\\" + sign)
        return plain

    def argument(word: Word) -> str:
        taken = f":value:({' '.join(word.values)})" if word.values else ":value:_files" if word.takes_value else ""
        return f"      '{word.text}[{quoted(word.about)}]{taken}' \\"

    names = "\n".join(f"    '{of.name}:{quoted(of.about)}'" for of in commands)
    cases = "\n".join(
        "\n".join(
            [
                f"    {of.name})",
                "      _arguments \\",
                *[argument(flag) for flag in of.flags],
                f"      '{_zsh_arguments(of)}' ;;",
            ]
        )
        for of in commands
    )
    return f"""#compdef surogate
# Completion of surogate for zsh: source <(surogate completion zsh), or save it as _surogate in a folder of $fpath
_surogate() {{
  local -a commands
  commands=(
{names}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  local command=$words[2]
  shift words
  (( CURRENT-- ))
  case $command in
{cases}
  esac
}}
if [ "$funcstack[1]" = "_surogate" ]; then _surogate "$@"; else compdef _surogate surogate; fi
"""


def _zsh_arguments(of: Command) -> str:
    words = f"1:what:({' '.join(of.arguments)})' '" if of.arguments else ""
    return f"{words}*:file:_files"


def _fish(commands: list[Command]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = ["# Completion of surogate for fish: surogate completion fish | source"]
    lines.append("complete -c surogate -f -n __fish_use_subcommand")
    for of in commands:
        lines.append(f"complete -c surogate -n __fish_use_subcommand -a {of.name} -d {quoted(of.about)}")
    for of in commands:
        seen = f"-n '__fish_seen_subcommand_from {of.name}'"
        if of.arguments:
            lines.append(f"complete -c surogate {seen} -a {quoted(' '.join(of.arguments))}")
        for flag in of.flags:
            taken = f" -x -a {quoted(' '.join(flag.values))}" if flag.values else " -r" if flag.takes_value else ""
            lines.append(f"complete -c surogate {seen} -l {flag.text[2:]} -d {quoted(flag.about)}{taken}")
    return "\n".join(lines) + "\n"
