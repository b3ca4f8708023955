"""Training step by step from Python: the same program, optimizer and schedule as the command line."""

from __future__ import annotations

import json
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from . import _native, notebook
from .arrays import Arrays, Integers, Rows, depth, for_rows, for_tokens, row_lengths
from .arrays import batch as arrays
from .callbacks import Callback, ends, prepared
from .environment.cuda_libraries import site_packages
from .errors import ConfigError
from .logs.processes import LogReaders
from .metrics import EvaluationMetrics, StepMetrics
from .model import Model
from .run import load_config, open_source, with_teacher
from .storage import buckets, hub

#: What a batch may hold.
BATCH = ("input_ids", "labels", "position_ids", "weights")

#: The columns of a batch by the task, where they are more than ids and labels, and those that only it has.
OF_TASKS = {
    **dict.fromkeys(("dpo", "orpo", "cpo", "reward"), ("`chosen` and `rejected`", {"chosen", "rejected"})),
    "kto": ("`input_ids`, `labels` and `desirable`", {"desirable"}),
    "grpo": ("`input_ids`, `labels` and `advantages`", {"advantages"}),
}


class Trainer:
    """A run that is driven by its caller.

    `config` is a path to a YAML file, YAML text, or a dict of the same options. Datasets are only
    needed when a step is not given a batch.

    With `report_to` or `log_file` in the options it writes a log to `output_dir` and feeds the trackers, as a run
    of the command line does. The log ends with :meth:`close`, with the end of a `with`
    block, or with the process.
    """

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any], task: str = "sft") -> None:
        loaded = load_config(config, task)
        if buckets.is_address(loaded.output_dir):
            raise ConfigError(f"`output_dir: {loaded.output_dir}`: a Trainer writes to a local folder alone (surogate {task} uploads)")
        folder, ir = open_source(loaded)
        loaded = hub.with_data(with_teacher(loaded))
        self._folder, self._padding = folder, _padding(hub.model_config(folder))
        self._reads_images = json.loads(ir).get("images") is not None
        self._gives_scores = "reward" in json.loads(loaded.recorded_tasks)
        self._task = loaded.task
        trackers = json.loads(loaded.trackers)
        readers = LogReaders(trackers, report=False) if trackers else None
        try:
            self._native = _native.Trainer(loaded, folder, ir, site_packages(), readers.pipes if readers else [])
        except BaseException:
            if readers:
                readers.finish()
            raise
        self._end = weakref.finalize(self, _end, self._native, readers, None)
        for note in self._native.warnings():
            _warn(note)

    def __repr__(self) -> str:
        return f"<surogate.Trainer {self._native.summary()}>"

    @property
    def model(self) -> Model:
        """The model in training, in evaluation mode: logits, gradients, likelihoods and text with the weights as they are
        at each call. A step ends text that is being streamed. Only one of the two is compiled into the device's memory, so
        changing between steps and calls takes a moment."""
        native = self._native.model()
        return Model(native, self._folder, self._gives_scores, (lambda: native) if self._reads_images else None)

    def close(self) -> None:
        """Ends the log, and waits until the trackers have received it. The trainer continues without a log."""
        self._end()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and (left := self._end.detach()):
            native, readers, _ = left[2]
            _end(native, readers, f"{type(error).__name__}: {error}")
        self.close()

    def train(self, callbacks: Iterable[Callback | Callable[[StepMetrics], object]] = ()) -> None:
        """Runs the steps that are left on the configured data, and the evaluations of `eval_strategy`, `eval_steps`,
        `early_stopping_patience`. Writes nothing but the log: :meth:`save` and :meth:`export` do.

        A callback is a :class:`Callback`, or a function that is called with the metrics of each step; one that returns
        False ends the training. In a notebook progress and the loss curve are displayed.
        """
        calls = prepared(callbacks)
        if notebook.is_running():
            calls.append(notebook.Display())
        # All of them are called, also after one that ends the training.
        over = [ends(call.on_start(self)) for call in calls]
        try:
            steps = iter(self)
            while not any(over) and (metrics := next(steps, None)) is not None:
                over = [ends(call.on_step(self, metrics)) for call in calls]
                if self._native.is_evaluation_due() and (evaluation := self.evaluate()) is not None:
                    over += [ends(call.on_evaluation(self, evaluation)) for call in calls]
                    over.append(self._native.stalled() is not None)
        finally:
            for call in calls:
                call.on_end(self)

    def __iter__(self) -> Iterator[StepMetrics]:
        """Runs the steps that are left on the configured data, each when its metrics are requested."""
        while self.total_steps is None or self.steps_done < self.total_steps:
            metrics = self.step()
            if metrics is None:
                return
            yield metrics

    def step(self, batch: Mapping[str, Any] | None = None, learning_rate: float | None = None) -> StepMetrics | None:
        """One optimizer step; returns None at the end of the configured data.

        `batch` holds `input_ids` and `labels`, and optionally `position_ids` and `weights`, each
        [accumulation, B, T]; a document starts where `position_ids` does not continue. Rows of unequal lengths are padded
        on the right with tokens that are not trained. The default is
        the next batch of the configured data. `learning_rate` overrides the schedule.

        With `task: dpo`, `orpo` and `cpo` it holds `chosen` and `rejected`, each a mapping with `input_ids` and `labels`,
        [B, T] or [accumulation, B, T]; labels are -100 outside of the answer. With `task: kto` it holds `input_ids`,
        `labels` and `desirable`, [B] or [accumulation, B]: true for the answers that are good. What follows an answer is
        padding. With `task: reward` pairs have no labels, and optionally `margin`, [B] or [accumulation, B]; the model's padding
        tokens at the end of a row do not count. With `task: grpo` it holds `input_ids`, `labels` and `advantages`, [B] or
        [accumulation, B], and optionally `old_logps`, `reference_logps` and `sampling_logps`, log-probabilities in the shape of
        the labels and in their places; without old ones they are those before the step. With `task: distil` it holds `input_ids`
        and `labels`, also [B, T], and may hold a teacher's likeliest tokens of each label, `teacher_topk_ids`, -1 for none,
        and `teacher_topk_logps`, both [B, T, K] or [accumulation, B, T, K] with K as `loss_top_k`; without, `teacher` computes
        them. The metrics of the task are returned together with the others.

        Returns `step` (from 0), `loss` (before the update), `grad_norm` (before clipping),
        `learning_rate`, `tokens`, `tokens_per_second`, `seconds`, `data_wait_seconds` (None without data), `applied` (False if the norm was
        not finite and the update was suppressed), `epoch` (None for batches that you pass), `mfu`
        (None if the device's peak is not known) and `memory` (bytes in use). For mixtures of experts also
        `expert_load` (the share of each expert in all choices), `busiest_expert` (the largest of these, as a
        multiple of an even load), `router_entropy` and `router_loss` (before its coefficient); padding does
        not count. With `recipe: fp8_hybrid` also `fp8_clipped` (tensors whose largest magnitude did not fit
        their scale), and in the first step `fp8_flushed`: the `tensor` of which the largest share of values
        became 0 in 8 bits, and this `share`.
        """
        if batch is not None and self._task in OF_TASKS:
            columns, own = OF_TASKS[self._task]
            if not own & set(batch):
                given = ", ".join(map(str, batch)) or "nothing"
                raise ConfigError(f"`task: {self._task}` trains on batches of {columns}, and this one has {given}")
        if batch is not None and ("chosen" in batch or "rejected" in batch):
            pairs, margins = _pairs(batch, self._padding)
            return self._native.step(pairs, learning_rate, {"pairs": margins})
        if batch is not None and "advantages" in batch:
            rows, samples = _samples(batch)
            return self._native.step(rows, learning_rate, {"samples": samples})
        if batch is not None and "teacher_topk_ids" in batch:
            rows, taught = _taught(batch)
            return self._native.step(rows, learning_rate, {"taught": taught})
        if batch is not None and "desirable" in batch:
            answers, desirable = _answers(batch)
            return self._native.step(answers, learning_rate, {"desirable": desirable})
        if batch is not None and self._task == "distil" and set(batch) == {"input_ids", "labels"}:
            return self._native.step((*_rows(batch), None, None, None), learning_rate)
        return self._native.step(None if batch is None else _arrays(batch), learning_rate)

    @property
    def total_steps(self) -> int | None:
        """Steps of the run; None if neither options nor data determine them."""
        return self._native.total_steps

    @property
    def steps_done(self) -> int:
        """Steps that are done, those before a checkpoint included."""
        return self._native.steps_done

    def evaluate(self) -> EvaluationMetrics | None:
        """The loss over the configured validation data: `step`, `loss`, `tokens`, `seconds`; None
        without such data."""
        return self._native.evaluate()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a checkpoint: weights or adapter in loadable form, optimizer, position in the data."""
        self._native.save(Path(path))

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes the result: an adapter in PEFT format, or a model in Hugging Face format. It is read
        back and compared with the model in memory before this returns. Warns where it is rounded."""
        _warn(self._native.export(Path(path)))

    def export_merged(self, path: str | os.PathLike[str]) -> None:
        """Writes the model with the adapter added to its weights (in float32, rounded once), read
        back and compared like :meth:`export`. Without an adapter this is :meth:`export`."""
        _warn(self._native.export_merged(Path(path)))


def _warn(note: str | None) -> None:
    """Warns the caller of a method of this file."""
    if note:
        warnings.warn(note, stacklevel=3)


def _padding(fields: Mapping[str, Any]) -> int | None:
    """The token that pads the rows of an array; None where it also ends answers, and says nothing."""
    ends = fields.get("eos_token_id")
    padding = fields.get("pad_token_id")
    return None if padding in (ends if isinstance(ends, list) else [ends]) else padding


def _end(native: _native.Trainer, readers: LogReaders | None, error: str | None) -> None:
    try:
        native.close(error)
    finally:
        if readers:
            readers.finish()


def _arrays(batch: Mapping[str, Rows]) -> Arrays:
    unknown = [name for name in batch if name not in BATCH]
    missing = [name for name in BATCH[:2] if name not in batch]
    if unknown or missing:
        wrong = [f"has `{name}`" for name in unknown] + [f"lacks `{name}`" for name in missing]
        raise ValueError(f"batch: {', '.join(wrong)}; expected {', '.join(BATCH)}, the last two optional")
    return arrays(**batch, axes=3)


def _rows(of: Mapping[str, Any], place: str = "") -> tuple[Integers, Integers]:
    """The ids and labels of answers, [accumulation, B, T], given like that or as [B, T]."""
    axes = 2 if depth(of["input_ids"]) == 2 else 3
    try:
        ids, labels, *_ = arrays(of["input_ids"], of["labels"], axes=axes)
    except ValueError as error:
        raise ValueError(f"{place}{error}") from None
    return (ids, labels) if axes == 3 else (ids[None], labels[None])


def _pairs(batch: Mapping[str, Any], padding: int | None) -> tuple[Arrays, list[list[float | None]]]:
    """The sides of pairs as alternating rows, padded on the right: chosen, rejected, …, and their margins, if there are any."""
    if not {"chosen", "rejected"} <= set(batch) <= {"chosen", "rejected", "margin"}:
        raise ValueError(f"batch: has {', '.join(batch)}; expected chosen and rejected, and with `task: reward` margin")
    for side in ("chosen", "rejected"):
        if not isinstance(batch[side], Mapping):
            raise ValueError(f"batch: `{side}` is of type {type(batch[side]).__name__}, expected input_ids and labels by name")
        if not {"input_ids"} <= set(batch[side]) <= {"input_ids", "labels"}:
            raise ValueError(f"batch: `{side}` has {', '.join(batch[side])}; expected input_ids and labels")
    chosen, rejected = (_side(batch[side], f"{side}.", padding) for side in ("chosen", "rejected"))
    if chosen[0].shape[:2] != rejected[0].shape[:2]:
        raise ValueError(f"batch: {list(chosen[0].shape)} chosen and {list(rejected[0].shape)} rejected answers")
    length = max(chosen[0].shape[2], rejected[0].shape[2])

    def rows(index: int, fill: int) -> Integers:
        wide = [
            np.pad(of[index], [(0, 0), (0, 0), (0, length - of[index].shape[2])], constant_values=fill)
            for of in (chosen, rejected)
        ]
        return np.ascontiguousarray(np.stack(wide, 2).reshape(len(wide[0]), -1, length))

    margins: list[list[float | None]] = [[None] * chosen[0].shape[1] for _ in range(chosen[0].shape[0])]
    if batch.get("margin") is not None:
        margins = for_rows("margin", batch["margin"], chosen[0].shape[:2]).astype(np.float32).tolist()
    return (rows(0, 0), rows(1, -100), None, None, None), margins


def _side(of: Mapping[str, Any], place: str, padding: int | None) -> tuple[Integers, Integers]:
    """The ids and labels of one side. Without labels all is labelled but padding."""
    if "labels" in of:
        return _rows(of, place)
    ids, labels = _rows({"input_ids": of["input_ids"], "labels": of["input_ids"]}, place)
    if padding is not None:
        after = np.flip(np.cumprod(np.flip(ids == padding, -1), -1), -1).astype(bool)
        labels = np.where(after, np.int32(-100), labels)
    return ids, labels


def _answers(batch: Mapping[str, Any]) -> tuple[Arrays, list[list[bool]]]:
    """Answers with their verdicts, a list for each micro-batch."""
    if set(batch) != {"input_ids", "labels", "desirable"}:
        raise ValueError(f"batch: has {', '.join(batch)}; expected input_ids, labels and desirable")
    ids, labels = _rows(batch)
    desirable = for_rows("desirable", batch["desirable"], ids.shape[:2])
    if desirable.dtype.kind == "f" or not np.isin(desirable, (0, 1)).all():
        raise ValueError(f"batch: desirable is of type {desirable.dtype}, expected true and false, or 1 and 0")
    return (ids, labels, None, None, None), desirable.astype(bool).tolist()


#: Log-probabilities that a batch of samples may hold.
LOGPS = ("old_logps", "reference_logps", "sampling_logps")

#: Of a micro-batch the advantages of its rows, and its log-probabilities, row after row.
Sampled = tuple[list[float], list[float] | None, list[float] | None, list[float] | None]


def _samples(batch: Mapping[str, Any]) -> tuple[Arrays, list[Sampled]]:
    """Sampled answers with what is known of them, a tuple for each micro-batch."""
    known = ("input_ids", "labels", "advantages")
    if not set(known) <= set(batch) <= {*known, *LOGPS}:
        optional = ", ".join(LOGPS)
        raise ValueError(f"batch: has {', '.join(batch)}; expected {', '.join(known)}, and optionally {optional}")
    ids, labels = _rows(batch)
    advantages = for_rows("advantages", batch["advantages"], ids.shape[:2]).astype(np.float32)
    logps = [None if (of := batch.get(name)) is None else _values(of, name, batch, ids.shape) for name in LOGPS]
    parts = [[None] * len(ids) if of is None else [row.ravel().tolist() for row in of] for of in logps]
    return (ids, labels, None, None, None), list(zip(advantages.tolist(), *parts, strict=True))


def _values(rows: Any, name: str, batch: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities in the shape of the labels, [accumulation, B, T], with 0 in padding."""
    values = for_tokens(name, rows, batch["input_ids"], shape)
    if not np.isfinite(values).all():
        raise ValueError(f"batch: {name} holds numbers that are not finite")
    return values


#: Of a micro-batch the tokens of a teacher, and their log-probabilities, row after row.
Taught = tuple[list[int], list[float]]


def _taught(batch: Mapping[str, Any]) -> tuple[Arrays, list[Taught]]:
    """Rows with the likeliest tokens of a teacher, a tuple for each micro-batch."""
    known = ("input_ids", "labels", "teacher_topk_ids", "teacher_topk_logps")
    if set(batch) != set(known):
        raise ValueError(f"batch: has {', '.join(batch)}; expected {', '.join(known)}")
    ids, labels = _rows(batch)
    lengths = row_lengths(batch["input_ids"], ids.shape)
    tokens = _each_label(batch["teacher_topk_ids"], "teacher_topk_ids", ids.shape, lengths, np.int32, -1)
    logps = _each_label(batch["teacher_topk_logps"], "teacher_topk_logps", ids.shape, lengths, np.float32, 0)
    if tokens.shape != logps.shape:
        raise ValueError(f"batch: teacher_topk_logps is {list(logps.shape)}, expected {list(tokens.shape)} as the tokens")
    ordered = np.sort(tokens, -1)
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
        raise ValueError("batch: teacher_topk_ids names a token twice for one label")
    if not np.isfinite(logps).all() or (logps > 1e-3).any():
        raise ValueError("batch: teacher_topk_logps holds numbers that are no log-probabilities")
    parts = [(of.ravel().tolist(), log.ravel().tolist()) for of, log in zip(tokens, logps, strict=True)]
    return (ids, labels, None, None, None), parts


def _each_label(rows: Any, name: str, shape: tuple[int, ...], lengths: list[int], dtype: type, fill: int) -> np.ndarray:
    """Numbers of each label, [accumulation, B, T, K]; rows have these lengths or more, and are padded on the right."""
    given = [rows] if depth(rows) == 3 else rows
    try:
        lines: list[list[np.ndarray]] = [[np.asarray(of, dtype) for of in batch] for batch in given]
    except (TypeError, ValueError):
        raise ValueError(f"batch: {name} has not the same count of numbers for each label") from None
    fits = [len(batch) for batch in lines] == [shape[1]] * shape[0] and all(line.ndim == 2 for of in lines for line in of)
    if not fits or len({line.shape[1] for batch in lines for line in batch}) != 1:
        raise ValueError(f"batch: {name} is not in the shape of labels, {list(shape)}, with as many numbers for each")
    found = [len(line) for batch in lines for line in batch]
    if max(found) > shape[2] or any(count < length for count, length in zip(found, lengths, strict=True)):
        raise ValueError(f"{name}: its rows have {found} tokens, expected {lengths} like input_ids")
    values = np.full((*shape, lines[0][0].shape[1]), fill, dtype)
    for index, batch in enumerate(lines):
        for row, line in enumerate(batch):
            values[index, row, : len(line)] = line
    return values
