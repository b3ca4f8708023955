"""Signals that batch systems send to every process of a run, and that are for the run alone.

Knows no run.
"""

from __future__ import annotations

import os
import signal

#: Signals that end a run, or save it.
OF_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def leave_to_the_run() -> None:
    """Takes no notice of them: this process ends when its input does. Its own children end by them as usual: handlers are lost when
    another program begins, as SIG_IGN is not, and are taken back where this one goes on in a forked child."""
    for number in OF_THE_RUN:
        signal.signal(number, lambda *_: None)
    # None is lost in between: it waits until the child takes it as usual.
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_as_usual)


def _hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_RUN)


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_RUN)


def _as_usual() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in OF_THE_RUN[1:]:
        signal.signal(number, signal.SIG_DFL)
    _let_go()
