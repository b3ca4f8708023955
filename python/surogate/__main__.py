"""`surogate`, and `python -m surogate`: the command line, which answers Ctrl-C from its first moment.

Imports nothing before it does but what that takes.
"""

import sys

if __name__ == "__main__":
    from .environment.import_path import trusted

    # `-m` puts the working directory first: a `signal.py` that lies there is not ours.
    sys.path[:] = trusted()

import os  # noqa: E402
import signal  # noqa: E402


def start() -> int:
    """Runs the command line and gives its exit code."""
    # While modules are imported there is nothing to undo, and a traceback is no help.
    signal.signal(signal.SIGINT, _leave)
    from .cli.commands import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


def _leave(_number: int, _frame: object) -> None:
    os._exit(130)


if __name__ == "__main__":
    raise SystemExit(start())
