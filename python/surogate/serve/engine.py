"""Models and answers of `surogate serve`: one thread that steps through the answers of all requests for a model together. A
request begins as soon as there is room for its sequences. One model is on the device at a time.
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

from .._native import Generation
from ..cli import generate
from ..cli.arguments import UsageError
from ..convert import export
from ..errors import SurogateError
from ..model import Model, load
from .protocol import BadRequest, Request

#: Checkpoints of a run, which are models of their own.
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


#: Tokens of a prompt for which there is room next to the answer; longer ones wait for a generation of their own.
PROMPT = 1024


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
    """Answers requests, which begin in the order in which they came."""

    def __init__(self, options: Namespace, adapters: dict[str, str], most: int, waiting: int, tokens: int) -> None:
        self._options, self._most, self._room, self._tokens = options, most, waiting, tokens
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
        while job := self._next(wait=True):
            answers = _Answers(self._most)
            try:
                self._answer(job, answers)
            except BaseException as error:  # noqa: BLE001
                # A failure is of those that run: the next one may be answered.
                is_known = isinstance(error, SurogateError)
                failure = BadRequest(f"{error}" if is_known else f"{type(error).__name__}: {error}", status=400 if is_known else 500)
                for failed in answers.jobs() or [job]:
                    failed.events.put(failure)

    def _next(self, wait: bool = False, model: str | None = None, room: int | None = None) -> Job | None:
        """The request that has waited for longest: for this model, and of a largest number of prompts, where these are given. None
        if it is another or there is none, and at the end."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
            if self._is_over or not self._waiting:
                return None
            first = self._waiting[0]
            if model is not None and first.request.model != model or room is not None and len(first.request.prompts) > room:
                return None
            return self._waiting.popleft()

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

    def _answer(self, job: Job, answers: _Answers) -> None:
        """Answers a request, and those for the same model that come meanwhile: each begins as soon as there is room."""
        if job.is_cancelled.is_set():
            return
        request = job.request
        model = self._model(request.model)
        room = self._tokens + PROMPT
        generation = model.start(request.prompts, True, batch_size=self._most, room=room, **request.options)
        answers.begin(job, 0)
        late: Job | None = None
        while not self._is_over and (answers.running or not generation.done):
            while late is None and (more := self._next(model=request.model, room=answers.room)):
                try:
                    first = model.add(generation, more.request.prompts, True, batch_size=self._most, **more.request.options)
                except SurogateError as error:
                    more.events.put(BadRequest(f"{error}"))
                    continue
                if first is None:
                    # It is longer than the caches: it comes when those that run are answered.
                    late = more
                else:
                    answers.begin(more, first)
            for number, text, end in generation.step():
                answers.take(generation, number, text, end)
            answers.end_cancelled(generation)
        if self._is_over:
            for job in [*answers.jobs(), *([late] if late else [])]:
                job.events.put(BadRequest("the server is ending", status=503))
        elif late:
            with self._changed:
                self._waiting.appendleft(late)


class _Answers:
    """The requests that a generation answers, by the numbers of their prompts in it."""

    def __init__(self, most: int) -> None:
        self._most = most
        #: By number of a prompt: its request, and its place there.
        self._owners: dict[int, tuple[Job, int]] = {}
        #: By request: the numbers of its prompts, and how many of them are not answered.
        self._left: dict[int, tuple[Job, range, int]] = {}

    @property
    def running(self) -> int:
        return len(self._owners)

    @property
    def room(self) -> int:
        return self._most - self.running

    def jobs(self) -> list[Job]:
        return [job for job, _, _ in self._left.values()]

    def begin(self, job: Job, first: int) -> None:
        numbers = range(first, first + len(job.request.prompts))
        self._left[id(job)] = job, numbers, len(numbers)
        self._owners |= {number: (job, index) for index, number in enumerate(numbers)}

    def take(self, generation: Generation, number: int, text: str, end: str | None) -> None:
        """Hands what a step added to an answer to its request."""
        if number not in self._owners:
            return
        job, index = self._owners[number]
        if end == "error" or end == "context" and generation.refusal(number):
            job.events.put(BadRequest(generation.refusal(number) or "the prompt cannot be answered", "messages"))
            self._drop(generation, job)
            return
        job.events.put((index, text, end))
        if end is None:
            return
        del self._owners[number]
        _, numbers, left = self._left[id(job)]
        self._left[id(job)] = job, numbers, left - 1
        if left == 1:
            tokens = sum(generation.prompt_tokens(of) for of in numbers)
            job.events.put(Done(tokens, sum(len(generation.answer(of)) for of in numbers)))
            self._drop(generation, job)

    def end_cancelled(self, generation: Generation) -> None:
        """Ends the answers of requests whose clients have gone."""
        for job in self.jobs():
            if job.is_cancelled.is_set():
                self._drop(generation, job)

    def _drop(self, generation: Generation, job: Job) -> None:
        _, numbers, _ = self._left.pop(id(job))
        for number in numbers:
            generation.forget(number)
            self._owners.pop(number, None)
