"""The command line: argv to the three calls load, build, run.

Does not know what any option means. Exit codes: 0 success, 1 the run failed, 2 wrong
configuration or usage, 3 does not fit in memory, 4 the data check failed, 5 the loss diverged,
6 another node was lost, 130, 143, 138 and 140 for SIGINT, SIGTERM, SIGUSR1 and SIGUSR2.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import textwrap
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from .. import _native, errors
from ..convert import export, extend, merge, prune, quantize
from ..environment import extras
from ..environment.cuda_libraries import site_packages
from ..logs.processes import LogReaders
from ..models import gguf
from ..run import load_config, open_source, run_names, with_teacher
from ..storage import files, hub, outputs
from ..storage.uploads import AGAIN, left_behind, unsent
from ..terminal import collecting, show, show_coloured, state, waiting, warn
from . import machine_report, push, watch
from .arguments import TRAIN, UsageError, parser, split_overrides

Overrides = list[tuple[str, str]]

EXIT_CODES: list[tuple[type[Exception], int]] = [
    (errors.ConfigError, 2),
    (errors.ModelConfigError, 2),
    (errors.MemoryPlanError, 3),
    (errors.DataError, 4),
    (errors.DivergedError, 5),
    (errors.NodeLostError, 6),
    (errors.SurogateError, 1),
]


#: Commands that write, and whose engine asks for signals: what is unfinished is removed at SIGTERM. The others, but
#: runs, which have a way of their own, end at once.
UNDONE = {"tokenize", "extend", "merge", "export", "quantize", "prune"}


#: Commands whose words are one JSON object with `--json`.
SAYING = {"tokenize", "init", "new-model", "extend", "merge", "export", "push", "quantize", "prune", "report"}


class _Terminated(BaseException):
    """SIGTERM."""


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code."""
    warnings.showwarning = lambda message, *_: warn(f"surogate: {message}")
    if arguments is None:
        # Texts of servers and of files may be in an exception that is not caught.
        sys.excepthook = lambda *raised: warn("".join(traceback.format_exception(*raised)).rstrip("\n"))
    try:
        rest, overrides = split_overrides(sys.argv[1:] if arguments is None else arguments)
        options = parser().parse_args(rest)
        if arguments is None:
            # The first process of a container gets no signal for which it has no handler.
            terminates = options.command in UNDONE or os.getpid() == 1
            watch.answer_in_time({signal.SIGINT: signal.default_int_handler} | ({signal.SIGTERM: _terminate} if terminates else {}))
        if options.command in SAYING and options.json:
            return _say_json(options, overrides)
        return COMMANDS[options.command](options, overrides)
    except UsageError as error:
        return _fail(str(error), 2)
    except errors.SurogateError as error:
        return _fail(str(error), _code(error))
    except KeyboardInterrupt:
        return 130
    except _Terminated:
        return 143
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _code(error: errors.SurogateError) -> int:
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def _say_json(options: Namespace, overrides: Overrides) -> int:
    """Runs a command that says what it did, and prints that as one JSON object, an error too."""
    said: dict[str, object] = {"command": options.command}
    with collecting() as collected:
        try:
            code = COMMANDS[options.command](options, overrides)
        except UsageError as error:
            code, said["error"] = 2, {"kind": "UsageError", "message": str(error)}
        except errors.SurogateError as error:
            code, said["error"] = _code(error), {"kind": type(error).__name__, "message": str(error)}
    show(json.dumps({**said, "exit_code": code, **collected.facts, "lines": collected.lines}, ensure_ascii=False))
    return code


def _fail(message: str, code: int) -> int:
    text = f"surogate: {message}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size((80, 24)).columns
        text = "\n".join(_wrapped(line, width) for line in text.splitlines())
    warn(text)
    return code


def _wrapped(line: str, width: int) -> str:
    """A line broken between words, further in than it begins. The lines of a file stay as they are."""
    if len(line) <= width or re.match(r"\s*\d* \|", line):
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _train(options: Namespace, overrides: Overrides) -> int:
    path = Path(options.config)
    names = [] if options.run else run_names(path)
    # What is wrong with any of several runs is said before the first begins.
    configs = [load_config(path, options.command, overrides, run=name) for name in names or [options.run]]
    for number, (name, config) in enumerate(zip(names, configs, strict=False), 1):
        if not options.quiet and not options.json and not config.logs_json:
            show(f"{'' if number == 1 else chr(10)}Run {number} of {len(names)}: {name}")
        if code := _train_on_nodes(config, options, overrides, name):
            return code
    return 0 if names else _train_on_nodes(configs[0], options, overrides, options.run)


def _train_on_nodes(config: _native.Config, options: Namespace, overrides: Overrides, run: str | None) -> int:
    """A run, where Ray starts its nodes or this process is one of them; as often as the options say it goes on with
    the others after one was lost."""
    nodes = json.loads(config.nodes)
    if nodes["on_ray"]:
        from ..launch import job

        return job.of(options, overrides, run, config).lead()
    restarts = 0
    while True:
        try:
            return _train_one(config, options)
        except errors.NodeLostError as error:
            if restarts == nodes["max_restarts"]:
                raise
            restarts += 1
            warn(f"surogate: {error}")
            warn(f"surogate: restart {restarts} of {nodes['max_restarts']}: waiting for all nodes, then continuing from the last checkpoint")
        resumed = [*overrides, ("resume_from_checkpoint", "true")]
        config = load_config(Path(options.config), options.command, resumed, run=run)


def _train_one(config: _native.Config, options: Namespace) -> int:
    address = config.output_dir
    config, upload = outputs.prepare(config)
    folder, ir = open_source(config)
    config = hub.with_data(with_teacher(config))
    if config.push_to_hub:
        push.prepare(*config.push_to_hub)
    shown = "nothing" if options.quiet else "events" if options.json or config.logs_json else "lines"
    readers = LogReaders(json.loads(config.trackers), upload=upload)

    def late(reason: str) -> None:
        readers.abandon()
        if upload and (missing := unsent(Path(config.output_dir))):
            warn(f"surogate: {reason}: {missing} not in {address}, but in {config.output_dir}; {AGAIN}")

    with watch.signals(config.save_grace_seconds, late) as watched:
        if upload and config.save_grace_seconds:
            _native.say(f"`save_grace_seconds` is for the upload to {address}, too; times of checkpoints are those of the disk")
        try:
            code = _native.run(config, folder, ir, site_packages(), shown, readers.pipes)
        finally:
            watched.engine_is_done()
            readers.finish(watched.is_late)
    if upload and code is not None:
        if why := left_behind(Path(config.output_dir)):
            if watched.is_late():
                late(watched.reason())
                return code or 128 + (watched.number or 0)
            if code and not readers.has_failed("upload"):
                # The run ended before it wrote anything.
                return code
            raise errors.RunError(f"`output_dir: {address}`: {why}")
        if shown == "lines":
            show(f"Uploaded: {address}")
    if code == 0:
        _end(config, json.loads(ir)["architecture"], shown == "lines")
    # What was made is where node 0 is.
    return code or 0


def _end(config: _native.Config, architecture: str, is_shown: bool) -> None:
    """Uploads the result if that is requested, and says what can be done with it."""
    output = Path(config.output_dir)
    is_adapter = (output / "adapter" / "adapter_config.json").is_file()
    if config.push_to_hub:
        name, private = config.push_to_hub
        result = output / ("merged" if config.merge_adapter else "adapter" if is_adapter else "model")
        address = push.upload(result, name, private, quiet=not is_shown)
        if is_shown:
            show(f"Uploaded: {address}")
    if not is_shown:
        return
    if (output / "report.html").is_file():
        show(f"Report: {output / 'report.html'}")
    place = shlex.quote(str(output))
    scores = "reward" in json.loads(config.recorded_tasks)
    lines = [f"surogate score {place} --prompts FILE" if scores else f"surogate generate {place} --prompt TEXT"]
    lines += [f"surogate merge {place}"] if is_adapter and not config.merge_adapter else []
    lines += [] if scores or architecture not in gguf.FORMS else [f"surogate export {place} --format gguf"]
    lines += [] if config.push_to_hub else [f"surogate push {place} OWNER/NAME"]
    show("Next: " + "\n      ".join(lines))


def _tokenize(options: Namespace, overrides: Overrides) -> int:
    config = load_config(Path(options.config), options.task, overrides, run=options.run)
    folder, ir = open_source(config, weights=False)
    config = hub.with_data(config)
    if options.debug:
        return _show_rows(config, folder, ir)
    table, counts = _native.check_data(config, folder, ir)
    state(data=json.loads(counts))
    show(table, end="")
    return 0


def _show_rows(config: _native.Config, folder: Path, ir: str) -> int:
    """Some rows on the terminal, more of them as a page in the output folder."""
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = min(shutil.get_terminal_size((80, 24)).columns, 120)
    table, rows, page = _native.show_data(config, folder, ir, rows=8, shown=2, tokens=600, color=color, width=width)
    place = outputs.local(config) / "data.html"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        files.replace_page(place, page)
    except OSError as error:
        return _fail(f"{place}: the page cannot be written: {error}", 1)
    show(table)
    show_coloured(rows)
    state(output=str(place))
    show(f"The first rows as a page: {place}")
    return 0


def _preview(what: str, options: Namespace, overrides: Overrides) -> int:
    config = load_config(Path(options.config), options.task, overrides, reads_data=False, run=options.run)
    folder, ir = open_source(config, weights=False)
    config, unavailable = hub.with_local_data(with_teacher(config, weights=False))
    with waiting("planning"):
        text = _native.preview(what, config, folder, ir, options.machine, site_packages(), unavailable)
    show(text, end="")
    return 0


def _schema(_options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    show(_native.config_schema())
    return 0


def _refuse(overrides: Overrides) -> None:
    if overrides:
        raise UsageError(f"--{overrides[0][0]} is not a flag of this command")


def _show(options: Namespace, overrides: Overrides) -> int:
    names = [] if options.run or options.what != "config" else run_names(Path(options.config))
    for number, name in enumerate(names):
        show(f"{chr(10) if number else ''}# Run {number + 1} of {len(names)}: {name}")
        options.run = name
        _preview(options.what, options, overrides)
    return 0 if names else _preview(options.what, options, overrides)


def _plan(options: Namespace, overrides: Overrides) -> int:
    return _preview("plan.json" if options.json else "plan", options, overrides)


def _doctor(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    of_operations = {"--own-kernels": options.own_kernels, "--only": options.only, "--seconds": options.seconds}
    written = [flag for flag, value in of_operations.items() if value not in (None, False)]
    if options.report and (options.operations or options.calibrate or options.own_kernels):
        raise UsageError("--report compares all operations itself, and measures nothing")
    if written and not (options.operations or options.report):
        raise UsageError(f"{written[0]} needs --operations")
    if options.calibrate:
        output = Path(options.output) if options.output else None
        show(_native.calibrate(site_packages(), output, options.calibrate == "least"))
        return 0
    if options.output:
        raise UsageError("--output needs --calibrate")
    text, findings = _native.examine_machine(site_packages())
    found = extras.find()
    if options.report:
        names = options.only.split(",") if options.only else []
        report = machine_report.write(Path(options.report), json.loads(findings), names, options.seconds)
        of_operations = report["operations"]
        show(f"written: {options.report}\n{of_operations.get('verdict') or 'operations failed: ' + of_operations['failed']}")
        return 1 if of_operations.get("differing", 1) else 0
    if options.json:
        show(json.dumps({**json.loads(findings), "extras": extras.facts(found)}))
    else:
        show(f"surogate {_native.__version__}, Python {platform.python_version()}\n{text}\n{extras.text(found)}")
    if options.operations:
        names = options.only.split(",") if options.only else []
        verdict, differing = _native.check_operations(site_packages(), options.own_kernels, names, options.seconds)
        (warn if options.json else show)(verdict)
        return 1 if differing else 0
    return 0


def _merge(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    return merge.run(options)


def _extend(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    return extend.run(options)


def _export(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    return export.run(options)


def _prune(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    return prune.run(options)


def _quantize(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    return quantize.run(options)


def _generate(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    from . import generate

    return generate.run(options)


def _evaluate(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    from . import evaluate

    return evaluate.run(options)


def _score(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    from ..rewards.scores import read
    from .generate import open_model

    if not Path(options.prompts).is_file():
        raise errors.ConfigError(f"--prompts {options.prompts}: there is no such file")
    rows = read(Path(options.prompts))
    for number, reward in enumerate(open_model(options).rewards(rows.values(), list(rows))):
        show(json.dumps({"row": number, "reward": reward}) if options.json else f"{reward:.6f}")
    return 0


def _chat(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    from . import chat

    return chat.run(options)


def _serve(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    from .. import serve

    return serve.run(options)


def _push(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    return push.run(options)


def _init(options: Namespace, overrides: Overrides) -> int:
    from . import init

    return init.run(options, overrides)


def _new_model(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    from . import new_model

    return new_model.run(options)


def _completion(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    from . import completion

    show(completion.script(options.shell, parser()), end="")
    return 0


def _status(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    from . import status

    found = status.of(Path(options.run))
    show(json.dumps(found, ensure_ascii=False) if options.json else status.text(found))
    return 0


def _report(options: Namespace, overrides: Overrides) -> int:
    _refuse(overrides)
    from .. import report

    page = report.write([Path(run) for run in options.run], Path(options.output) if options.output else None)
    state(output=str(page))
    show(str(page))
    return 0


COMMANDS: dict[str, Callable[[Namespace, Overrides], int]] = {
    **dict.fromkeys(TRAIN, _train),
    "tokenize": _tokenize,
    "show": _show,
    "plan": _plan,
    "init": _init,
    "new-model": _new_model,
    "extend": _extend,
    "export": _export,
    "quantize": _quantize,
    "prune": _prune,
    "generate": _generate,
    "chat": _chat,
    "serve": _serve,
    "score": _score,
    "evaluate": _evaluate,
    "merge": _merge,
    "push": _push,
    "report": _report,
    "status": _status,
    "completion": _completion,
    "schema": _schema,
    "doctor": _doctor,
}
