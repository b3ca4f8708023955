"""The trusted import path: modules are never loaded from the working directory.

Imports only modules that every interpreter has already loaded: any other import could come from the folder that is to
be excluded.
"""

from __future__ import annotations

import os
import sys


def trusted() -> list[str]:
    """The import path without the working directory and the folder of the script, which Python adds by itself.

    A folder that PYTHONPATH names in full stays, and so does the one that this package lies in: as the last.
    """
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]
    started = {_working_directory(), _of_script()}
    kept = [entry for entry in sys.path if entry and (entry in named or os.path.realpath(entry) not in started)]
    return list(dict.fromkeys([*map(os.path.abspath, kept), _packages()]))


def _packages() -> str:
    """The folder that this package is installed in."""
    return os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def _working_directory() -> str | None:
    try:
        return os.path.realpath(os.getcwd())
    except OSError:
        return None  # It was removed meanwhile.


def _of_script() -> str | None:
    """The folder of a script that was started by its path."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    return os.path.dirname(os.path.realpath(file)) if file and getattr(main, "__spec__", None) is None else None
