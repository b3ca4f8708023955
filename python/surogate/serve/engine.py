"""Answers of `surogate serve`: one thread that steps through the answers of all requests together, whichever of the adapters on
the device they name. A request begins as soon as there is room for its sequences.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .._native import Generation
from ..errors import SurogateError
from ..model import Model
from .models import Models
from .protocol import OPTIONS, BadRequest, Request

#: Tokens of a prompt for which there is room next to the answer; longer ones wait for a generation of their own.
PROMPT = 1024


@dataclass(eq=False)
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

    def __init__(self, models: Models, most: int, waiting: int, tokens: int) -> None:
        self._models, self._most, self._room, self._tokens = models, most, waiting, tokens
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self.started = int(time.time())
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def names(self) -> list[str]:
        """The models that a request may name."""
        return self._models.names()

    def load_first(self) -> None:
        """Loads the model of the command, and begins to answer."""
        self._models.load_first()
        self._thread.start()

    def submit(self, request: Request) -> Job:
        """Puts a request into the queue. Raises BadRequest where the model is not known or too many wait."""
        request.model = request.model or self._models.first
        if request.model not in self._models:
            known = ", ".join(self.names())
            raise BadRequest(f"the model `{request.model}` does not exist; there are: {known}", "model", 404, "model_not_found")
        job = Job(request)
        with self._changed:
            if self._is_over:
                raise BadRequest("the server is ending", status=503)
            if len(self._waiting) >= self._room:
                # A request whose client has gone takes no one's place.
                self._waiting = deque(job for job in self._waiting if not job.is_cancelled.is_set())
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
        while job := self._next():
            answers = _Answers(self._most)
            try:
                self._answer(job, answers)
            except BaseException as error:  # noqa: BLE001
                # A failure is of those that run: the next one may be answered.
                for failed in answers.jobs() or [job]:
                    failed.events.put(_failure(error))

    def _next(self) -> Job | None:
        """Waits for a request, and takes the one that has waited for longest. None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            return None if self._is_over else self._waiting.popleft()

    def _first_that_waits(self) -> Job | None:
        with self._changed:
            return self._waiting[0] if self._waiting and not self._is_over else None

    def _answer(self, job: Job, answers: _Answers) -> None:
        """Answers a request, and those that come meanwhile: each begins as soon as there is room for it, and for its adapter."""
        if job.is_cancelled.is_set():
            return
        request = job.request
        found = self._models.use(request.model, ())
        assert found is not None, "nothing runs that a model would have to wait for"
        model, slot = found
        options: dict[str, Any] = {"batch_size": self._most, "adapter": slot, **request.options}
        generation = model.start(request.prompts, True, room=self._tokens + PROMPT, **options)
        answers.begin(job, 0, slot)
        is_late = False
        while not self._is_over and (answers.running or not generation.done):
            while not is_late and (more := self._first_that_waits()):
                began = self._begin(more, model, generation, answers)
                if began is None:
                    break
                is_late = not began
                if began:
                    with self._changed, contextlib.suppress(ValueError):
                        self._waiting.remove(more)
            for number, text, end in generation.step():
                answers.take(generation, number, text, end)
            answers.end_cancelled(generation)
        if self._is_over:
            for each in answers.jobs():
                each.events.put(BadRequest("the server is ending", status=503))

    def _begin(self, job: Job, model: Model, generation: Generation, answers: _Answers) -> bool | None:
        """Begins to answer a request with those that run, or fails it: True. None where it waits for one of them to end, False
        where it waits for all: it needs another model, or is longer than the caches."""
        request = job.request
        if job.is_cancelled.is_set():
            return True
        if len(request.prompts) > answers.room:
            return None
        try:
            found = self._models.use(request.model, answers.busy)
            if found is None:
                return None
            options: dict[str, Any] = {"batch_size": self._most, "adapter": found[1], **request.options}
            first = model.add(generation, request.prompts, True, **options)
        except Exception as error:  # noqa: BLE001
            # A failure is of the request that begins: those that run go on.
            job.events.put(_failure(error))
            return True
        if first is None:
            return False
        answers.begin(job, first, found[1])
        return True


def _failure(error: BaseException) -> BadRequest:
    """The answer to a request that failed."""
    if problems := json.loads(getattr(error, "problems", None) or "[]"):
        # The text of an option names `auto`, which no field is.
        text = "; ".join(problem["message"].removesuffix(", or `auto`") for problem in problems)
        return BadRequest(text, problems[0]["path"] if problems[0]["path"] in OPTIONS else None)
    is_known = isinstance(error, SurogateError)
    return BadRequest(f"{error}" if is_known else f"{type(error).__name__}: {error}", status=400 if is_known else 500)


class _Answers:
    """The requests that a generation answers, by the numbers of their prompts in it."""

    def __init__(self, most: int) -> None:
        self._most = most
        #: By number of a prompt: its request, and its place there.
        self._owners: dict[int, tuple[Job, int]] = {}
        #: By request: the numbers of its prompts, and how many of them are not answered.
        self._left: dict[int, tuple[Job, range, int]] = {}
        #: By request: the slot of its adapter.
        self._slots: dict[int, int] = {}

    @property
    def running(self) -> int:
        return len(self._owners)

    @property
    def room(self) -> int:
        return self._most - self.running

    @property
    def busy(self) -> set[int]:
        """The slots of adapters whose answers run; 0 for none."""
        return set(self._slots.values())

    def jobs(self) -> list[Job]:
        return [job for job, _, _ in self._left.values()]

    def begin(self, job: Job, first: int, slot: int) -> None:
        self._slots[id(job)] = slot
        numbers = range(first, first + len(job.request.prompts))
        self._left[id(job)] = job, numbers, len(numbers)
        self._owners |= {number: (job, index) for index, number in enumerate(numbers)}

    def take(self, generation: Generation, number: int, text: str, end: str | None) -> None:
        """Hands what a step added to an answer to its request."""
        if number not in self._owners:
            return
        job, index = self._owners[number]
        if end == "error" or end == "context" and generation.refusal(number):
            field_of = "messages" if job.request.is_chat else "prompt"
            job.events.put(BadRequest(generation.refusal(number) or "the prompt cannot be answered", field_of))
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
        del self._slots[id(job)]
        for number in numbers:
            generation.forget(number)
            self._owners.pop(number, None)
