"""The ends of a run's nodes: exit codes, last words, and the cause among several. Knows no cluster."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from .. import errors
from .cluster import Machine

#: Exit code of a process where another node is gone: the run is worth starting again.
LOST = 6

#: Exit code of a process where the loss has diverged: other nodes would not help.
DIVERGED = 5

#: The exit code of a process that was ended at a checkpoint.
AT_CHECKPOINT = 128 + signal.SIGUSR2

EXCEPTIONS = {
    2: errors.ConfigError,
    3: errors.MemoryPlanError,
    4: errors.DataError,
    DIVERGED: errors.DivergedError,
    LOST: errors.NodeLostError,
}

#: The beginning of the words of a node that ended because of another one.
CONSEQUENCE = re.compile(r"the run was ended by node (\d+): ")


@dataclass
class End:
    """The end of a node: its exit code, and its last words."""

    code: int
    words: str


def ending(code: int, words: list[str]) -> End:
    """The end of a process. One that a signal killed is lost."""
    begins = [at for at, line in enumerate(words) if line.startswith("surogate: ")]
    text = "\n".join(words[begins[-1] if begins else 0 :]).strip().removeprefix("surogate: ")
    if code < 0:
        return End(LOST, f"its process was killed by signal {-code}" + (f"\n{text}" if text else ""))
    return End(code, text or f"its process ended with exit code {code}")


def cause(ends: dict[int, End]) -> tuple[int, End]:
    """The node that failed first and its end, among ends of which one is a failure: not those that followed from it."""
    ended = sorted(ends.items())
    # One that a signal ended is no failure next to one that is.
    failed = {number: end for number, end in ended if 0 < end.code <= 128} or {number: end for number, end in ended if end.code}
    roots = [number for number, end in failed.items() if not CONSEQUENCE.match(end.words)]
    # One that failed by itself, before one that was found missing.
    roots.sort(key=lambda number: failed[number].code == LOST)
    number = roots[0] if roots else min(failed)
    end = failed[number]
    if match := CONSEQUENCE.match(end.words):
        return int(match[1]), End(end.code, end.words[match.end() :])
    return number, end


def verdict(ends: dict[int, End], machines: list[Machine]) -> tuple[int, str]:
    """The exit code of all and the cause of the end: the root cause with its node, not its consequences elsewhere."""
    if 0 in ends and (ends[0].code == 0 or ends[0].code > 128):
        return ends[0].code, ""
    number, end = cause(ends)
    return end.code, f"node {number}, {machines[number]}: {end.words}"
