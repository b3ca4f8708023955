"""Files that are written from the engine's declarations: `python -m MODULE [--check]`. Does not know what is in them."""

from __future__ import annotations

import sys
from pathlib import Path


def main(path: Path, text: str, module: str) -> int:
    """Writes `text` to `path`; with --check only says whether it is there already. Returns the exit code."""
    if "--check" not in sys.argv[1:]:
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        print(f"{path.name} is stale: run python -m {module}", file=sys.stderr)
        return 1
    return 0
