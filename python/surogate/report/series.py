"""Series over steps: thinning, smoothing, and axis ticks.

Knows numbers only; nothing of runs or pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

Points = list[tuple[float, float]]

#: Parts into which a long series is divided; of each the lowest and the highest value are drawn.
PARTS = 400


def finite(points: Sequence[tuple[float, float | None]]) -> Points:
    """The points that have a value."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def thinned(points: Points, parts: int = PARTS) -> Points:
    """A series that looks the same with at most two points for each part."""
    if len(points) <= 2 * parts:
        return points
    kept: Points = []
    for i in range(parts):
        part = points[i * len(points) // parts : (i + 1) * len(points) // parts]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def smoothed(points: Points, parts: int = PARTS) -> Points:
    """The mean over the neighbours of each point, about a thirtieth of the series in all and fewer at its ends; at most
    one point for each part, and the last.
    """
    reach = len(points) // 60
    sums = list(accumulate((y for _, y in points), initial=0.0))
    stride = max(1, -(-len(points) // parts))
    chosen = [*range(0, len(points) - 1, stride), len(points) - 1] if points else []

    def mean(i: int) -> float:
        near = min(reach, i, len(points) - 1 - i)
        # At an end the neighbours of the other side count too: a single value says little.
        low, high = max(0, i - max(near, reach // 2)), min(len(points), i + max(near, reach // 2) + 1)
        return (sums[high] - sums[low]) / (high - low)

    return [(points[i][0], mean(i)) for i in chosen]


def tail(points: Points) -> tuple[float, int] | None:
    """The mean of the last values, a twentieth of them and at least five, and of how many it is."""
    last = [y for _, y in points[-max(5, len(points) // 20) :]]
    return (sum(last) / len(last), len(last)) if last else None


def median(values: Sequence[float]) -> float | None:
    """The middle value."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None


class Axis:
    """From values to places between 0 and 1, and the values of its labels."""

    def __init__(self, low: float, high: float, log: bool = False, marks: int = 5) -> None:
        self.log = log and low > 0
        if low == high:
            low, high = (low / 2, high * 2) if self.log else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
        if self.log:
            # Round ends: no line runs along an edge, and there is a label below and above it.
            low, high = _round_below(low), _round_above(high)
            self.marks = _powers(low, high)
        else:
            step = _round_step((high - low) / marks)
            first = math.floor(low / step + 1e-9)
            last = math.ceil(high / step - 1e-9)
            self.marks = [i * step for i in range(first, last + 1)]
            low, high = min(low, self.marks[0]), max(high, self.marks[-1])
        self.low, self.high = low, high

    def place(self, value: float) -> float:
        """0 at the lower end, 1 at the upper one."""
        if self.log:
            ends = math.log(self.low), math.log(self.high)
            return (math.log(max(value, self.low)) - ends[0]) / (ends[1] - ends[0])
        return (value - self.low) / (self.high - self.low)


def _round_step(raw: float) -> float:
    power = 10 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)


def _round_below(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten that is smaller."""
    power = 10.0 ** math.floor(math.log10(value))
    return max(m * power for m in (0.5, 1, 2, 5) if m * power < value * 0.999)


def _round_above(value: float) -> float:
    """The next one that is larger."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power > value * 1.001)


def _powers(low: float, high: float) -> list[float]:
    """1, 2, 5 or 1, 3 or 1 of each power of ten, so that there are a few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        found = [d * 10.0**e for e in exponents for d in digits if low * 0.999 <= d * 10.0**e <= high * 1.001]
        if len(found) <= 6:
            break
    return found


def short(value: float) -> str:
    """A number in few characters: 0.0003, 2.5, 12k, 3.4M."""
    if value == 0:
        return "0"
    size = abs(value)
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit * 0.9999:
            unit = 1e3 if suffix == "k" else unit
            return f"{value / unit:.3g}{suffix}"
    if size >= 1000:
        return f"{value:.0f}"
    if size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"
