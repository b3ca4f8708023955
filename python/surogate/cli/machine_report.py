"""The file of `surogate doctor --report`: what a machine has and how its operations compare, without private data.

Paths become names of files; no name of a user, host, folder, model or data set is written.
"""

from __future__ import annotations

import json
import platform
import re
from datetime import date
from pathlib import Path
from typing import Any

from .. import _native
from ..environment.cuda_libraries import site_packages
from ..errors import SurogateError

# A path of at least two parts: only its last part is about the machine.
_PATH = re.compile(r"(?:~|\.{1,2})?(?:/[^\s/:,;'\"()]+)+/?")


def without_paths(value: object) -> object:
    """Returns a JSON value whose texts have names of files in place of paths."""
    if isinstance(value, dict):
        return {key: without_paths(of) for key, of in value.items()}
    if isinstance(value, list):
        return [without_paths(of) for of in value]
    if isinstance(value, str):
        return _PATH.sub(lambda found: found[0].rstrip("/").rsplit("/", 1)[-1], value)
    return value


def _operations(names: list[str], seconds: int | None) -> dict[str, object]:
    try:
        verdict, differing = _native.check_operations(site_packages(), False, names, seconds)
    except (SurogateError, RuntimeError, OSError) as error:
        return {"failed": str(error)}
    return {"verdict": verdict.splitlines()[0], "differing": differing, "rows": verdict.splitlines()[1:]}


def write(path: Path, findings: dict[str, Any], names: list[str], seconds: int | None) -> dict[str, Any]:
    """Runs the operations on the default device, writes the report and returns it."""
    kept = {key: of for key, of in findings.items() if key != "cache"}
    for row in kept.get("libraries", []):
        for private in ("looked_for", "mend"):
            row.pop(private, None)
    report: Any = {
        "report": 1,
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        **kept,
        "operations": _operations(names, seconds),
    }
    report = without_paths(report)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return report
