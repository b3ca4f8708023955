"""The signals that end a run in order, while the engine works: Python's own handlers would answer when it returns.

Knows signals and a pipe; the engine decides what a signal ends.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from .. import _native
from ..terminal import warn

#: Signals after which a run saves and ends.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

#: The signal after which a run ends at its next checkpoint.
AT_CHECKPOINT = signal.SIGUSR2

#: Seconds in which the engine is to answer a signal by itself.
PATIENCE = 1.0


class Watch:
    """The signals of a run, and the time that they leave."""

    def __init__(self, grace: int | None, late: Callable[[str], None]) -> None:
        """`grace` is in seconds from the first signal. If it is over while the engine works, `late` gets the reason, and the
        process ends."""
        self._grace = grace
        self._late = late
        self._until: float | None = None
        self._limit: threading.Timer | None = None
        self._interrupted = False
        self._is_engine_done = False
        #: The first signal that ends the run.
        self.number: int | None = None

    def is_late(self) -> bool:
        """True if the grace period of a signal is over."""
        return self._until is not None and time.monotonic() >= self._until

    def reason(self) -> str:
        """The reason for an end at once."""
        return f"`save_grace_seconds: {self._grace}` have passed since {signal.Signals(self.number or 0).name}"

    def engine_is_done(self) -> None:
        """From here on no signal ends the process at once, and SIGINT is Python's."""
        self._is_engine_done = True
        if self._limit is not None:
            self._limit.cancel()

    def take(self, number: int) -> None:
        """Passes a signal to the engine, and begins the grace period with the first."""
        if self._interrupted and number == signal.SIGINT and not self._is_engine_done:
            os._exit(128 + number)
        self._interrupted = self._interrupted or number == signal.SIGINT
        _native.signalled(number)
        if number in ENDING and self.number is None:
            self.number = number
            _later(PATIENCE, self._answer_for_engine)
            if self._grace is not None:
                self._until = time.monotonic() + self._grace
                self._limit = _later(self._grace, self._give_up)

    def answer(self, number: int, _frame: object) -> None:
        """Python's handler. The pipe has the number already."""
        if number == signal.SIGINT and self._is_engine_done:
            raise KeyboardInterrupt

    def _answer_for_engine(self) -> None:
        """Ends a run that has written nothing yet, whatever its engine is in the middle of; of others says when they end."""
        if self._is_engine_done:
            return
        name = signal.Signals(self.number or 0).name
        if _native.leave():
            warn(f"surogate: {name}: no step was started, nothing was saved")
            _native.abandon()
            os._exit(128 + (self.number or 0))
        warn(f"surogate: {name}: the run ends after what it is doing, with a checkpoint")

    def _give_up(self) -> None:
        """Ends the process before the system does. What was being written has no name yet, so nothing unfinished is left that
        could be taken for a checkpoint."""
        if self._is_engine_done:
            return
        warn(f"surogate: {self.reason()}: the run ends without another")
        warn("surogate:   checkpoint, and --resume-from-checkpoint true goes on from the newest one")
        self._late(self.reason())
        os._exit(128 + (self.number or 0))


@contextmanager
def signals(grace: int | None = None, late: Callable[[str], None] = lambda reason: None) -> Iterator[Watch]:
    """Passes signals to the engine until the end of the block, which gives the process its handlers back. A second SIGINT
    ends the process at once, and so does the end of `grace`, in seconds from the first signal, as long as the engine works.
    Outside of the main thread, where Python takes no handlers, nothing is watched."""
    _native.signalled(0)
    watch = Watch(grace, late)
    if threading.current_thread() is not threading.main_thread():
        yield watch
        return
    # Python writes the number of each signal into the pipe at once, whatever its main thread does.
    end, begin = os.pipe()
    os.set_blocking(begin, False)
    pipe = signal.set_wakeup_fd(begin, warn_on_full_buffer=False)
    taken = (*ENDING, AT_CHECKPOINT)
    handlers = [signal.signal(number, watch.answer) for number in taken]
    listener = threading.Thread(target=_listen, args=(end, watch), name="signals", daemon=True)
    listener.start()
    try:
        yield watch
    finally:
        watch.engine_is_done()
        for number, handler in zip(taken, handlers, strict=True):
            # A handler that was not installed by Python is not known to it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(pipe)
        os.write(begin, b"\0")
        listener.join()
        os.close(end)
        os.close(begin)


def _listen(end: int, watch: Watch) -> None:
    while (number := os.read(end, 1)[0]) != 0:
        if number in (*ENDING, AT_CHECKPOINT):
            watch.take(number)


def _later(seconds: float, call: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer


def answer_in_time(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], object]]) -> None:
    """Sets handlers of the process, for commands that are no runs. Python calls them between two of its instructions; where
    that takes too long, since the engine is at work and does not look, what it is writing is removed and the process ends."""
    answered: set[int] = set()

    def answer(number: int, frame: FrameType | None) -> None:
        answered.add(number)
        handlers[signal.Signals(number)](number, frame)

    def end(number: int) -> None:
        # Others may have set handlers of their own meanwhile.
        if number not in answered and signal.getsignal(number) is answer:
            _native.abandon()
            os._exit(128 + number)

    def listen() -> None:
        while number := os.read(reading, 1)[0]:
            if number in handlers:
                _later(PATIENCE, functools.partial(end, number))

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in handlers:
        signal.signal(number, answer)
    threading.Thread(target=listen, name="signals", daemon=True).start()
