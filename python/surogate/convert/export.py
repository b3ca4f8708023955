"""`surogate export`: the result of a run in another format: Hugging Face model, PEFT adapter, GGUF file.

Knows the folders of a run; the engine handles file contents.
"""

from __future__ import annotations

import os
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from .. import _native
from ..cli.arguments import UsageError
from ..errors import ConfigError, ModelConfigError
from ..models import build, gguf
from ..models.gguf import vision
from ..report.words import bytes_text
from ..rewards.scores import is_reward_model
from ..storage import files, hub
from ..terminal import show, state
from . import extend, merge, vocabulary

#: What a checkpoint holds besides the model or adapter.
OF_CHECKPOINTS = ("optimizer.safetensors", "state.json")


def run(options: Namespace) -> int:
    """Exports and says where to."""
    place = Path(options.run)
    source = result(place)
    is_adapter = (source / "adapter_config.json").is_file()
    if options.encoding and options.format != "gguf":
        raise UsageError("--encoding needs --format gguf")
    if options.text_only and options.format != "gguf":
        raise UsageError("--text-only needs --format gguf")
    if options.format == "peft":
        if not is_adapter:
            raise ConfigError(f"{source} is a model; only an adapter can be exported as `peft`")
        output = Path(options.output or place / "peft")
        _copy(source, output)
        state(output=str(output))
        show(str(output))
    elif options.format == "hf":
        output = Path(options.output or place / "hf")
        if is_adapter:
            _merge(_base(source, options.model), source, output)
        else:
            _copy(source, output)
        state(output=str(output))
        show(str(output))
    elif is_adapter:
        base = _base(source, options.model)
        encoding = options.encoding or _native.default_encoding(base)
        output, tower = _gguf_files(options, place, encoding)
        with files.folder_beside(output) as folder:
            merged = folder / "merged"
            _merge(base, source, merged)
            _gguf(merged, encoding, output, tower, place.resolve().name)
    else:
        encoding = options.encoding or _native.default_encoding(source)
        _gguf(source, encoding, *_gguf_files(options, place, encoding), place.resolve().name)
    return 0


def result(place: Path) -> Path:
    """The folder with the weights or the adapter: the place itself, a run's result, or its last checkpoint."""
    numbered = [(int(number[1]), path) for path in place.glob("checkpoint-*") if (number := _number(path.name))]
    checkpoints = [path for _, path in sorted(numbered, reverse=True)]
    for folder in (place, place / "model", place / "adapter", *checkpoints):
        if any((folder / name).is_file() for name in ("adapter_config.json", "config.json")):
            return folder
    raise ConfigError(f"{place}: there is no model, adapter or checkpoint of a run")


def _number(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"checkpoint-(\d+)", name)


def _base(adapter: Path, model: str | None) -> Path:
    model = model or _native.adapter_base(adapter)
    if not model:
        raise UsageError(f"{adapter} does not say which model it belongs to: give --model")
    return extend.for_adapter(hub.folder(model), adapter)


def _merge(base: Path, adapter: Path, output: Path) -> None:
    """The model with the adapter, and what should be known of it."""
    *_, notes = _native.merge(base, adapter, output, merge.names(base))
    for note in notes:
        show(f"Note: {note}")


def _copy(source: Path, output: Path) -> None:
    """A copy of a folder, which appears whole."""
    if os.path.lexists(output):
        raise ConfigError(f"{output} already exists: nothing is overwritten")
    for link in (path for path in source.rglob("*") if path.is_symlink()):
        if _native.leads_out(source, link):
            where = f"{link} is a link to {os.path.realpath(link)}, outside of {source}"
            raise ConfigError(f"{where}: a copy would carry what is there (put a copy in its place)")
    output.parent.mkdir(parents=True, exist_ok=True)
    with files.folder_beside(output) as folder:
        copy = folder / "copy"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(*OF_CHECKPOINTS))
        copy.rename(output)


def _listed(names: list[str], most: int = 6) -> str:
    """Names, of many the first."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _tower_encoding(encoding: str) -> str:
    """The type of the tower's matrices: llama.cpp computes it in f16."""
    return encoding if encoding == "f32" else "f16"


def _gguf_files(options: Namespace, place: Path, encoding: str) -> tuple[Path, Path | None]:
    """The file of the text, and that of the tower of a vision-language model, named as llama.cpp's users know it; none for
    the text alone. Raises UsageError for a name that is taken or none."""
    name = place.resolve().name
    output = Path(options.output or place / f"{name}-{encoding}.gguf")
    if not output.name or output.is_dir():
        raise UsageError(f"--output {options.output}: expected the name of a file, such as {name}-{encoding}.gguf")
    tower = output.with_name(f"mmproj-{output.name if options.output else f'{name}-{_tower_encoding(encoding)}.gguf'}")
    for path in [output] if options.text_only else [output, tower]:
        if os.path.lexists(path):
            alone = "--text-only writes the text next to it, or " if path == tower else ""
            raise ConfigError(
                f"{path} already exists: nothing is overwritten\n  hint: {alone}--output names another file"
            )
    return output, None if options.text_only else tower


def _gguf(model: Path, encoding: str, output: Path, tower: Path | None, name: str) -> None:
    """Writes the file of the text, and that of the tower where the model has one: both are described first."""
    fields = hub.model_config(model)
    if is_reward_model(fields):
        raise ConfigError("this is a reward model, for whose head GGUF has no form: serve the folder itself")
    words = vocabulary.read(model, gguf.vocabulary_size(fields))
    description = gguf.describe(fields, words, name)
    left = _native.carried_tensors(model, build(fields))
    has_tower = left > 0 and _has_tower(fields, model, left)
    of_tower, notes = _describe_tower(fields, model, name) if tower and has_tower else ("", [])
    said = _write(model, description, encoding, output)
    if of_tower and tower:
        try:
            what, where = "the tower, for `--mmproj`: ", "in the tower, "
            said += _write(model, of_tower, _tower_encoding(encoding), tower, what, where)
        except BaseException:
            output.unlink(missing_ok=True)
            raise
        state(mmproj=str(tower))
        if left := _native.carried_tensors(model, build(fields, images=True)):
            said.append(f"Note: {left} tensors of other parts, as of audio or of further predictions, are in no file")
    elif has_tower:
        said.append(f"Note: this is the text alone: {left} tensors of other parts are in no file (--text-only)")
    elif left:
        which = "parts that are not the text's (images, further predictions)"
        said.append(f"Note: {left} tensors of {which} are not in the file")
    state(output=str(output))
    said += [f"Note: {note}" for note in (*gguf.notes(fields), *notes, *vocabulary.notes(model))]
    for line in said:
        show(line)


def _has_tower(fields: dict[str, Any], model: Path, left: int) -> bool:
    """True if weights of a tower are among the `left` tensors that are not those of the text."""
    if not vision.has_tower(fields):
        return False
    try:
        return left > _native.carried_tensors(model, build(fields, images=True))
    except ModelConfigError:
        return True  # with settings that the description of the tower names


def _describe_tower(fields: dict[str, Any], model: Path, name: str) -> tuple[str, list[str]]:
    try:
        return vision.describe(fields, model, name)
    except ModelConfigError as error:
        raise ConfigError(f"{error}\n  hint: --text-only writes the text without the tower for images") from None


def _write(model: Path, description: str, encoding: str, output: Path, what: str = "", where: str = "") -> list[str]:
    """Writes a file, and gives the lines on it."""
    tensors, size, otherwise, rounded = _native.write_gguf(model, description, encoding, output)
    if not what:
        state(tensors=tensors, bytes=size)
    said = [f"{output}: {what}{tensors} tensors, {bytes_text(size)} (read back and compared with the weights)"]
    for kind in sorted({kind for _, kind in otherwise}):
        names = [name for name, of in otherwise if of == kind]
        which = f"{where}rows that are not whole blocks of this encoding"
        said.append(f"Note: {which} are stored in {kind}: {_listed(names)}")
    return [*said, f"Note: {where}{rounded}"] if rounded else said
