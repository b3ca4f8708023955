"""The source line of the model that is being recorded.

Frames of the DSL and of the shared layers are skipped, so the line is in the architecture's file. An operation that a
shared layer records for another shared layer has no line there; it belongs to where the module was made (`trace.py`).
"""

from __future__ import annotations

import os
import sys
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: Where the recording begins: frames around it belong to whoever builds a model, not to the model.
_BUILD = os.path.join(_PACKAGE, "dsl", "model.py")
_PASSED_OVER = tuple(os.path.join(_PACKAGE, folder) + os.sep for folder in ("dsl", "layers"))


def here() -> str | None:
    """`file:line` of the innermost frame that belongs to a model; None when there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _BUILD and frame.f_code.co_name == "build":
            return None
        if not file.startswith(_PASSED_OVER) and os.sep + "contextlib.py" not in file:
            return f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _short(file: str) -> str:
    """Files of this package as `surogate/…`, others relative to the working directory if below it."""
    for root in (os.path.dirname(_PACKAGE), os.getcwd()):
        if file.startswith(root + os.sep):
            return file[len(root) + 1 :].replace(os.sep, "/")
    return file
