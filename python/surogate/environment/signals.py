"""Signals that batch systems send to every process of a run, and that are for the run alone.

Knows no run.
"""

from __future__ import annotations

import signal

#: Signals that end a run, or save it.
OF_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def leave_to_the_run() -> None:
    """Takes no notice of them: this process ends when its input does. Handlers and not SIG_IGN, which its own children would
    inherit."""
    for number in OF_THE_RUN:
        signal.signal(number, lambda *_: None)
