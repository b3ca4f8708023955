"""The same work by a training loop in plain PyTorch outside the project: `lean.py`, with `peers.py` next to it.

Runs one setting in a process of its own and gives the best rate that it reported. Deliberately unknown here: our side.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from rows import Row

# Asks the peer's own harness for one case; what it reports lies in `$OUT/peers.jsonl`.
CASE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import peers
mode, model, settings, limit = sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), float(sys.argv[5])
settings = [[tuple(one) for one in settings]]
peers.case_lean(peers.C(0, "lean", mode, model, settings, limit), peers.Clock(limit))
"""


def run(lean: pathlib.Path, row: Row, folder: pathlib.Path, limit: float) -> dict[str, Any]:
    """The peer's fastest variant of the row's work: tokens per second, batch, how it was run; `error` if it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    reports = folder / "peers.jsonl"
    reports.unlink(missing_ok=True)
    settings = json.dumps(row.peer_settings)
    words = [sys.executable, "-c", CASE, str(lean.resolve().parent), row.work, row.model, settings, str(limit)]
    own = {"OUT": str(folder), "HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    environment = os.environ | own | {"TRITON_CACHE_DIR": str(folder / "triton")}
    with (folder / "peer.txt").open("wb") as printed:
        process = subprocess.Popen(words, stdout=printed, stderr=subprocess.STDOUT, env=environment)
        try:
            code: int | None = process.wait(limit + 15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    lines = reports.read_text().splitlines() if reports.is_file() else []
    rates = [report for report in map(json.loads, lines) if "tok_s" in report]
    if not rates:
        tail = (folder / "peer.txt").read_text(errors="replace")[-800:]
        return {"error": f"exit code {code}: {tail}"}
    best = max(rates, key=lambda report: report["tok_s"])
    return {"tokens_per_second": best["tok_s"], "batch": best["bs"], "accumulation": best["ga"], "how": best["variant"]}
