"""A picture of rates over numbers of GPUs, as SVG: ideal, measured and planned. Knows the records of `scaling.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 360, 56, 44, 16
RIGHT = 190
COLOURS = ["#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#475569"]


def place(gpus: float, times: float, most: int) -> tuple[float, float]:
    """The position of a number of GPUs and of a multiple of the rate of one: both axes are logarithmic."""
    x = LEFT + math.log2(gpus) / math.log2(most) * (WIDTH - LEFT - RIGHT)
    y = HEIGHT - BOTTOM - math.log2(times) / math.log2(most) * (HEIGHT - BOTTOM - TOP)
    return round(x, 1), round(y, 1)


def line(points: list[tuple[float, float]], style: str) -> str:
    """A line through points."""
    return f'<polyline fill="none" {style} points="{" ".join(f"{x},{y}" for x, y in points)}"/>'


def drawn(found: list[dict[str, Any]], baseline: Callable[[str], str]) -> str:
    """The whole picture: a line for each run, dots where it was measured, a ring where the plan saw it."""
    ones = {of["name"]: of["tokens_per_second"] for of in found if of["gpus"] == 1}
    several = [of for of in found if of["gpus"] > 1 and baseline(of["name"]) in ones]
    most = max((of["gpus"] for of in several), default=2)
    ticks = [1 << power for power in range(int(math.log2(most)) + 1)]
    parts = [line([place(1, 1, most), place(most, most, most)], 'stroke="#9ca3af" stroke-dasharray="4 4"')]
    for tick in ticks:
        (x, _), (_, y) = place(tick, 1, most), place(1, tick, most)
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick}</text>')
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{tick} ×</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">GPUs</text>')
    for index, name in enumerate(sorted({of["name"] for of in several})):
        colour, points = COLOURS[index % len(COLOURS)], [place(1, 1, most)]
        for of in sorted((of for of in several if of["name"] == name), key=lambda of: of["gpus"]):
            one = ones[baseline(name)]
            x, y = place(of["gpus"], of["tokens_per_second"] / one, most)
            points.append((x, y))
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
            if of["planned_seconds_per_step"]:
                planned = of["tokens_per_step"] / of["planned_seconds_per_step"]
                _, expected = place(of["gpus"], planned / one, most)
                parts.append(f'<circle cx="{x}" cy="{expected}" r="5" fill="none" stroke="{colour}"/>')
        parts.append(line(points, f'stroke="{colour}" stroke-width="2"'))
        y = TOP + 16 * (index + 1)
        parts.append(f'<text x="{WIDTH - RIGHT + 24}" y="{y}" fill="{colour}">{name}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
    back = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, back, *parts, "</svg>"]) + "\n"
