"""`surogate evaluate`: tasks of lm-evaluation-harness on a model, an adapter or a run.

Knows the harness's tasks and its table; how questions are answered is `harness.py`'s.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..environment import working_directory
from ..errors import ConfigError, RunError, SurogateError
from ..storage import files
from ..terminal import show, warn
from . import generate
from .arguments import UsageError

#: Where the harness looks for tasks that come with it, and where their data is.
HINT = "the data of tasks is fetched from the Hub once, and kept; for tasks with files of your own see docs/evaluating.md"


def run(options: Namespace) -> int:
    """Evaluates, and shows or writes what came of it."""
    if options.samples and not options.output:
        raise UsageError("--samples needs --output")
    output = Path(options.output) if options.output else None
    if output is not None and os.path.lexists(output):
        raise ConfigError(f"{output} already exists: nothing is overwritten")
    _check_extra()
    model, adapter = generate.places(options.model, options.adapter, options.base)
    options.model, options.adapter, options.base = model, str(adapter) if adapter else None, None
    _check_files(options)
    folders = working_directory.make_absolute(options)
    output = Path(options.output) if options.output else None
    # Metrics and data are loaded by name, and the libraries look into the working directory first.
    with _quiet(), working_directory.empty_directory():
        from lm_eval.utils import handle_non_serializable, make_table

        results = _evaluated(options, folders)
    if output is not None:
        text = json.dumps(results, indent=2, ensure_ascii=False, default=handle_non_serializable)
        _write(output, text + "\n")
    if options.json:
        show(json.dumps(results["results"], default=handle_non_serializable))
        return 0
    show(make_table(results).rstrip("\n"))
    if results.get("groups"):
        show("\n" + make_table(results, "groups").rstrip("\n"))
    if options.limit:
        warn("Note: --limit skips questions, so these are not results of the tasks")
    if output is not None:
        show(f"Written: {output}")
    return 0


def _check_extra() -> None:
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise ConfigError("evaluate needs lm-evaluation-harness, which is not installed: pip install 'surogate[eval]'")


def _evaluated(options: Namespace, folders: list[Path]) -> dict[str, Any]:
    """The harness's report. Data files of tasks are searched in the folders."""
    from lm_eval import evaluator
    from lm_eval.api.task import ConfigurableTask

    # It asks git for the commit of the working directory, and git complains where that is none.
    evaluator.get_git_commit_hash = lambda: None
    download = ConfigurableTask.download

    def download_from_folders(task: Any, dataset_kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        download(task, working_directory.with_files(dataset_kwargs, folders), **more)

    ConfigurableTask.download = download_from_folders
    tasks, manager = _tasks(options, folders[-1])
    from ..harness import Surogate

    model = Surogate(
        options.model,
        adapter=options.adapter,
        base=options.base,
        device=options.device,
        dtype=options.dtype,
        batch_size=options.batch_size,
        batch_tokens=options.batch_tokens,
        max_length=options.max_length,
    )
    if options.chat and model.tokenizer.chat_template is None:
        raise ConfigError(f"--chat: {options.model} has no chat template; without --chat, texts are continued")
    limit = options.limit if options.limit is None or options.limit < 1 else int(options.limit)
    with _reported("the evaluation failed"):
        results: dict[str, Any] = evaluator.simple_evaluate(
            model=model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=options.num_fewshot,
            limit=limit,
            apply_chat_template=options.chat,
            fewshot_as_multiturn=options.chat,
            system_instruction=options.system,
            log_samples=options.samples,
        )
    return results


def _check_files(options: Namespace) -> None:
    """Raises ConfigError for a file or folder of tasks that is not there."""
    if options.include_path and not Path(options.include_path).is_dir():
        raise ConfigError(f"--include-path: {options.include_path} is not a folder")
    for name in options.tasks.split(","):
        if working_directory.is_file(name) and "*" not in name and not Path(name).is_file():
            raise ConfigError(f"--tasks: there is no file {name}")


def _tasks(options: Namespace, start: Path) -> tuple[list[Any], Any]:
    """Returns the tasks that are meant, by name or as the contents of their files, and the harness's manager of tasks.
    Folders are named from where the user started.
    """
    import lm_eval.tasks
    from lm_eval.config.evaluate_config import EvaluatorConfig

    names = [name for name in options.tasks.split(",") if name]
    if not names:
        raise UsageError("--tasks names no task")
    # The manager reads the files of all tasks of the harness, some seconds: only where a name may mean one of them.
    by_name = options.include_path is not None or not all(_is_whole(name) for name in names)
    known = lm_eval.tasks.TaskManager(include_path=options.include_path, include_defaults=by_name, metadata={})
    for index, name in enumerate(names):
        if working_directory.is_file(name) or known.match_tasks([name]):
            continue
        names[index] = str(start / name)
        if not (start / name).is_dir():
            near = difflib.get_close_matches(name, known.all_tasks, 3)
            meant = f" (did you mean {' or '.join(near)}?)" if near else " (`lm_eval ls tasks` prints all of them)"
            raise ConfigError(f"--tasks: {name} is neither a task nor the file of one{meant}")
    config = EvaluatorConfig(tasks=names, include_path=options.include_path)
    another, lm_eval.tasks.TaskManager = lm_eval.tasks.TaskManager, lambda **_: known
    try:
        with _reported("--tasks"):
            config.process_tasks({})
    finally:
        lm_eval.tasks.TaskManager = another
    return config.tasks, known


def _is_whole(name: str) -> bool:
    """True for the file of one task, which names no others as files of groups do."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if not working_directory.is_file(name) or "*" in name:
        return False
    with _reported("--tasks"):
        fields = load_yaml(name, resolve_func=False)
    return isinstance(fields.get("task"), str) and "group" not in fields


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turns exceptions of the harness and the libraries below it into messages."""
    try:
        yield
    except (SurogateError, UsageError):
        raise
    except (ConnectionError, OSError) as error:
        raise RunError(f"{what}: {error}\n  hint: {HINT}") from error
    except Exception as error:
        name = type(error).__name__
        raise RunError(f"{what}: {name}: {error}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness's own words are errors alone, its bars are for terminals."""
    if not sys.stderr.isatty():
        # Read when the libraries are imported.
        os.environ.update(TQDM_DISABLE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "httpx", "huggingface_hub")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_new(path, text)
    except OSError as error:
        raise RunError(f"{path}: the results cannot be written: {error}") from error
