"""Models and batches of `surogate serve`: one thread that answers requests, those that wait together in one batch.

A generation that has begun takes no others: what comes meanwhile is in the next batch. One model is on the device at a time.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from argparse import Namespace
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import export, generate
from ..arguments import UsageError
from ..errors import SurogateError
from ..model import Model, load
from .protocol import BadRequest, Request

#: Checkpoints of a run, which are models of their own.
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass
class Job:
    """A request in the queue, and what comes of it."""

    request: Request
    #: Pieces (number of the prompt, text, end), then the tokens of prompts and answers; or an exception.
    events: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    #: Set where the client has gone, or its time is over.
    is_cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Done:
    """The end of a request: tokens of its prompts and of its answers."""

    prompt_tokens: int
    answer_tokens: int


class Engine:
    """Answers requests in the order in which they came, batch by batch."""

    def __init__(self, options: Namespace, adapters: dict[str, str], most: int, waiting: int) -> None:
        self._options, self._most, self._room = options, most, waiting
        self._run = Path(options.model).expanduser()
        base, adapter = generate.places(options.model, options.adapter, options.base)
        self._base = base
        #: Names with the model and the adapter that they mean.
        self._places: dict[str, tuple[str, Path | None]] = {self._run.name or options.model: (base, adapter)}
        for name, place in adapters.items():
            if name in self._places:
                raise UsageError(f"--adapters {name}: this is the name of the model")
            self._places[name] = generate.places(base, place, None)
        self._loaded: tuple[str, Model] | None = None
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self.started = int(time.time())
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def names(self) -> list[str]:
        """The models that a request may name: that of the command, adapters, and checkpoints that a run has by now."""
        return [*self._places, *sorted(self._checkpoints(), key=lambda name: int(name.rpartition("-")[2]))]

    def _checkpoints(self) -> dict[str, Path]:
        folders = self._run.glob("checkpoint-*") if (self._run / "manifest.json").is_file() else []
        return {path.name: path for path in folders if CHECKPOINT.fullmatch(path.name) and path.is_dir()}

    def load_first(self) -> None:
        """Loads the model of the command, and begins to answer."""
        self._model(next(iter(self._places)))
        self._thread.start()

    def submit(self, request: Request) -> Job:
        """Puts a request into the queue. Raises BadRequest where the model is not known or too many wait."""
        request.model = request.model or next(iter(self._places))
        if request.model not in self._places and request.model not in self._checkpoints():
            known = ", ".join(self.names())
            raise BadRequest(f"the model `{request.model}` does not exist; there are: {known}", "model", 404, "model_not_found")
        job = Job(request)
        with self._changed:
            if self._is_over:
                raise BadRequest("the server is ending", status=503)
            if len(self._waiting) >= self._room:
                raise BadRequest(f"{self._room} requests are waiting: try again later", status=429, code="rate_limit_exceeded")
            self._waiting.append(job)
            self._changed.notify()
        return job

    def close(self) -> None:
        """Ends the work after the current step; requests without an answer get an error."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        for job in self._waiting:
            job.events.put(BadRequest("the server is ending", status=503))

    def _work(self) -> None:
        while jobs := self._next():
            try:
                self._answer(jobs)
            except BaseException as error:  # noqa: BLE001
                # A failure is of this batch alone: the next one may be answered.
                is_known = isinstance(error, SurogateError)
                failure = BadRequest(f"{error}" if is_known else f"{type(error).__name__}: {error}", status=400 if is_known else 500)
                for job in jobs:
                    job.events.put(failure)

    def _next(self) -> list[Job]:
        """The first request that waits, with all that can be answered together with it; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            if self._is_over:
                return []
            first = self._waiting.popleft()
            jobs, room = [first], self._most - len(first.request.prompts)
            for job in list(self._waiting):
                if job.request.group == first.request.group and len(job.request.prompts) <= room:
                    self._waiting.remove(job)
                    jobs.append(job)
                    room -= len(job.request.prompts)
            return jobs

    def _model(self, name: str) -> Model:
        if self._loaded is None or self._loaded[0] != name:
            if self._loaded is not None:
                self._loaded[1].unload()
                self._loaded = None
            if name in self._places:
                model, adapter = self._places[name]
            else:
                model, adapter = generate.places(str(export.result(self._checkpoints()[name])), None, self._options.base)
            self._loaded = name, load(model, adapter, device=self._options.device, dtype=self._options.dtype)
        return self._loaded[1]

    def _answer(self, jobs: list[Job]) -> None:
        jobs = [job for job in jobs if not job.is_cancelled.is_set()]
        if not jobs:
            return
        model = self._model(jobs[0].request.model)
        owners = [(job, index) for job in jobs for index in range(len(job.request.prompts))]
        prompts = [prompt for job in jobs for prompt in job.request.prompts]
        generation = model.start(prompts, True, batch_size=self._most, **jobs[0].request.options)
        left = {id(job): len(job.request.prompts) for job in jobs}
        starts = {id(job): number for number, (job, index) in enumerate(owners) if index == 0}
        while not generation.done and not self._is_over and not all(job.is_cancelled.is_set() for job in jobs):
            for number, text, end in generation.step():
                job, index = owners[number]
                if end == "error" or end == "context" and generation.refusal(number):
                    job.events.put(BadRequest(generation.refusal(number) or "the prompt cannot be answered", "messages"))
                    continue
                job.events.put((index, text, end))
                left[id(job)] -= end is not None
                if left[id(job)] == 0 and end is not None:
                    numbers = range(starts[id(job)], starts[id(job)] + len(job.request.prompts))
                    tokens = sum(generation.prompt_tokens(of) for of in numbers)
                    job.events.put(Done(tokens, sum(len(generation.answer(of)) for of in numbers)))
        if self._is_over:
            for job in jobs:
                job.events.put(BadRequest("the server is ending", status=503))
