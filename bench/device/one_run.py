"""One run of `surogate sft` under a stopwatch: started as a user starts it, watched through its log, stopped when it
has gone on long enough.

Deliberately unknown here: the table, the peer, what a row means. Rates come from the times at which the run wrote the
lines of its log: wall clock, the loader included.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

GIB = float(1 << 30)


class Failed(Exception):
    """The run ended by itself or did not begin: with the end of what it printed."""


def nvml(field: str) -> str | None:
    """A field of `nvidia-smi --query-gpu` for the first GPU; none where there is none."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.strip().splitlines()[0].strip() if shown.strip() else None


def used_bytes() -> int | None:
    """Bytes in use by everybody on the GPU where most are; none where there is no GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return max((int(float(of)) << 20 for of in shown.split()), default=None)


def resident_bytes(pid: int) -> int | None:
    """Host memory of a process; none where it has ended."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), None)


def events(folder: pathlib.Path) -> list[dict[str, Any]]:
    """What the run logged so far; a line that is being written is left for later."""
    found: list[dict[str, Any]] = []
    for log in sorted(folder.glob("log-*.json")):
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def when(event: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(event["time"].replace("Z", "+00:00")).timestamp()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Twice interrupted a run ends at once, without a checkpoint."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def write_run(folder: pathlib.Path, device: str, options: dict[str, Any]) -> pathlib.Path:
    """The file of a run that goes on until it is stopped: `folder` has the model and `data.jsonl`; `options` win. Micro-steps are
    those that they write."""
    values = {
        "model": str(folder / "model"),
        "init": "random",
        "torch_dtype": "bfloat16",
        "device": device,
        "datasets": [{"path": str(folder / "data.jsonl"), "type": "tokens"}],
        "output_dir": str(folder / "output"),
        "max_steps": 1_000_000,
        "save_steps": 1_000_000,
        "eval_steps": 1_000_000,
        "learning_rate": 1e-4,
        "optimizer": "adamw_8bit",
        "debug_time_breakdown": True,
    }
    if "per_device_train_batch_size" in options:
        values["micro_batch_size"] = options["per_device_train_batch_size"]
    run = folder / "run.yaml"
    run.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in (values | options).items()))
    return run


def watch(run: pathlib.Path, folder: pathlib.Path, warm_up: float, seconds: float, limit: float) -> dict[str, Any]:
    """Runs the file; what was seen of `seconds` after the first `warm_up` seconds of steps.

    The run must get there within `limit` seconds. Rates in tokens per second, memory in bytes.
    """
    printed = folder.parent / f"{folder.name}.txt"
    printed.parent.mkdir(parents=True, exist_ok=True)
    began, before = time.time(), used_bytes()
    words = [sys.executable, "-m", "surogate", "sft", str(run), "--quiet"]
    most = 0
    resident: list[int] = []
    with printed.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=os.environ.copy())
        try:
            while True:
                time.sleep(min(2.0, seconds / 4 + 0.1))
                most = max(most, used_bytes() or 0)
                steps = [event for event in events(folder) if event["event"] == "step"]
                if steps and when(steps[-1]) - when(steps[0]) >= warm_up:
                    resident.append(resident_bytes(process.pid) or 0)
                long_enough = steps and when(steps[-1]) - when(steps[0]) >= warm_up + seconds
                # Between three steps after the warm-up is a time in which nothing else was done.
                if long_enough and len([step for step in steps if when(step) - when(steps[0]) >= warm_up]) >= 3:
                    break
                if process.poll() is not None or time.time() - began > limit:
                    tail = printed.read_text(errors="replace")[-2000:]
                    why = "took too long" if process.returncode is None else f"ended with {process.returncode}"
                    raise Failed(f"the run {why} after {len(steps)} steps: {tail}")
        finally:
            stop(process)
    return measured(events(folder), began, warm_up) | {
        "used": most or None,
        "used_before": before,
        "resident": resident,
    }


def measured(logged: list[dict[str, Any]], began: float, warm_up: float) -> dict[str, Any]:
    """The figures of a log: the median step after the warm-up, and what the plan said."""
    steps = [event for event in logged if event["event"] == "step"]
    start = next(event for event in logged if event["event"] == "start")
    first = when(steps[0])
    timed = next((event for event in logged if event["event"] == "time_breakdown"), None)
    # Times of instructions are taken between two steps.
    between = when(timed) if timed else first
    pairs = [(a, b) for a, b in zip(steps, steps[1:]) if when(a) - first >= warm_up and not when(a) < between < when(b)]
    rates = [b["tokens"] / max(when(b) - when(a), 1e-9) for a, b in pairs]
    seconds = sum(when(b) - when(a) for a, b in pairs)
    whole = sum(b["tokens"] for _, b in pairs) / max(seconds, 1e-9)
    manifest = start["manifest"]
    startup = next((event for event in logged if event["event"] == "startup"), None)
    median = statistics.median(rates)
    mfu = (
        statistics.median(b["mfu"] * rate / b["tokens_per_second"] for (_, b), rate in zip(pairs, rates))
        if steps[-1]["mfu"] is not None
        else None
    )
    planned = manifest.get("planned_seconds_per_step")
    return {
        "tokens_per_second": median,
        "mean_tokens_per_second": whole,
        "mfu": mfu,
        # The last step of an epoch may be shorter.
        "tokens_per_step": statistics.median(b["tokens"] for _, b in pairs),
        "steps": len(pairs),
        "seconds": seconds,
        "planned_seconds_per_step": planned,
        "planned_memory": manifest["memory_bytes"],
        "memory_in_log": max(event["memory"] or 0 for event in steps),
        "to_step_1": first - began,
        "startup": startup and startup["phases"],
        "classes": timed and timed["classes"],
        "loss": steps[-1]["loss"],
    }
