"""The signals that end a run in order, while the engine works: Python's own handlers would answer when it returns.

Knows signals and a pipe; the engine decides what a signal ends.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .. import _native
from ..terminal import warn

#: Signals after which a run saves and ends.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def signals(grace: int | None = None) -> Iterator[None]:
    """Passes signals to the engine until the end of the block, which gives the process its handlers back. A second SIGINT
    ends the process at once, and so does the end of `grace`, in seconds from the first signal. Outside of the main thread,
    where Python takes no handlers, nothing is watched."""
    _native.signalled(0)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Python writes the number of each signal into the pipe at once, whatever its main thread does.
    end, begin = os.pipe()
    os.set_blocking(begin, False)
    pipe = signal.set_wakeup_fd(begin, warn_on_full_buffer=False)
    handlers = [signal.signal(number, _ignore) for number in ENDING]
    listener = threading.Thread(target=_listen, args=(end, grace), name="signals", daemon=True)
    listener.start()
    try:
        yield
    finally:
        for number, handler in zip(ENDING, handlers, strict=True):
            # A handler that was not installed by Python is not known to it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(pipe)
        os.write(begin, b"\0")
        listener.join()
        os.close(end)
        os.close(begin)


def _ignore(_number: int, _frame: object) -> None:
    """The pipe has the number already."""


def _listen(end: int, grace: int | None) -> None:
    interrupted = False
    limit: threading.Timer | None = None
    while (number := os.read(end, 1)[0]) != 0:
        if interrupted and number == signal.SIGINT:
            os._exit(128 + number)
        interrupted = interrupted or number == signal.SIGINT
        if number in ENDING:
            _native.signalled(number)
            if grace is not None and limit is None:
                limit = threading.Timer(grace, _give_up, (number, grace))
                limit.daemon = True
                limit.start()
    if limit is not None:
        limit.cancel()


def _give_up(number: int, grace: int) -> None:
    """Ends the process before the system does. What was being written has no name yet, so nothing unfinished is left that
    could be taken for a checkpoint."""
    warn(f"surogate: `save_grace_seconds: {grace}` have passed since {signal.Signals(number).name}: the run ends without another")
    warn("surogate:   checkpoint, and --resume-from-checkpoint true goes on from the newest one")
    os._exit(128 + number)
