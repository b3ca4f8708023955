"""A chart as HTML: lines as scalable SVG, labels as text. Needs no script.

Knows series and colours by number (`--c1` …, from the style sheet); nothing of runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from html import escape

from .series import Axis, Points, finite, short, smoothed, thinned


@dataclass
class Line:
    """One series of a chart."""

    name: str
    points: Points
    #: Number of the colour.
    colour: int = 1
    #: Thin and pale, for a line under another one.
    faint: bool = False
    #: Points with a mark on each.
    dots: bool = False


@dataclass
class Chart:
    """Series over the same steps."""

    title: str
    lines: list[Line]
    #: After the title.
    unit: str = ""
    log: bool = False
    #: A value that is marked by a level line, with its name.
    level: tuple[str, float] | None = None
    #: The lowest value that the axis shows at least.
    floor: float | None = None
    #: The highest one.
    top: float | None = None
    #: Steps of the whole run.
    until: float | None = None
    wide: bool = False
    note: str = ""
    marks: list[tuple[float, str]] = field(default_factory=list)

    def html(self) -> str:
        """The chart; empty where no series has a point."""
        lines = [replace(line, points=thinned(line.points)) for line in self.lines if line.points]
        if not lines:
            return ""
        x, y = self._axes(lines)
        rows = "".join(
            f'<i style="bottom:{100 * y.place(mark):.3f}%"><b>{escape(short(mark))}</b></i>'
            for mark in y.marks
            if -0.001 <= y.place(mark) <= 1.001
        )
        columns = "".join(
            f'<u style="left:{100 * x.place(mark):.3f}%">{escape(short(mark))}</u>'
            for mark in x.marks
            if -0.001 <= x.place(mark) <= 1.001
        )
        marks = "".join(
            f'<s style="left:{100 * x.place(at):.3f}%" title="{escape(text)}"></s>' for at, text in self.marks
        )
        shapes = "".join(_shape(line, x, y) for line in lines)
        legend = "".join(
            f'<span class="k c{line.colour}{" faint" if line.faint else ""}{" dots" if line.dots else ""}">'
            f"{escape(line.name)}</span>"
            for line in lines
            if len(lines) > 1
        )
        level = ""
        if self.level and y.low <= self.level[1] <= y.high:
            level = f'<em style="bottom:{100 * y.place(self.level[1]):.3f}%"></em>'
            # Next to the plot: on a narrow screen a label in it would lie over the curve.
            legend += f'<span class="k level">{escape(self.level[0])}</span>'
        values = [
            {"n": line.name, "c": line.colour, "p": [[round(px, 3), float(f"{py:.5g}")] for px, py in line.points]}
            for line in lines
        ]
        data = json.dumps({"x": [x.low, x.high], "lines": values}, separators=(",", ":")).replace("<", "\\u003c")
        unit = f" <small>{escape(self.unit)}</small>" if self.unit else ""
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return (
            f'<figure class="card chart{" wide" if self.wide else ""}"><figcaption><h3>{escape(self.title)}{unit}</h3>'
            f'<div class="legend">{legend}</div></figcaption><div class="plot">{rows}{columns}{marks}{level}'
            f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg></div>{note}'
            f'<script type="application/json">{data}</script></figure>'
        )

    def _axes(self, lines: list[Line]) -> tuple[Axis, Axis]:
        xs = [px for line in lines for px, _ in line.points]
        ys = [py for line in lines for _, py in line.points]
        low, high = min(ys), max(ys)
        if self.floor is not None:
            low = min(low, self.floor)
        if self.top is not None:
            high = max(high, self.top)
        end = max(xs) if self.until is None else max(max(xs), self.until)
        horizontal = Axis(min(xs), end, marks=6)
        # The axis of steps ends with the run.
        horizontal.low, horizontal.high = (min(xs), end) if end > min(xs) else (horizontal.low, horizontal.high)
        return horizontal, Axis(low, high, self.log)


def _shape(line: Line, x: Axis, y: Axis) -> str:
    places = [(1000 * x.place(px), 1000 - 1000 * y.place(py)) for px, py in line.points]
    if line.dots or len(places) == 1:
        drawn = "".join(f"M{px:.1f} {py:.1f}h0" for px, py in places)
        dots = f'<path class="dots c{line.colour}" d="{drawn}"/>'
        return dots if len(places) == 1 else dots + _shape(replace(line, dots=False), x, y)
    drawn = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
    return f'<path class="c{line.colour}{" faint" if line.faint else ""}" d="{drawn}"/>'


def course(name: str, points: list[tuple[float, float | None]], colour: int = 1) -> list[Line]:
    """A series that jumps: the values, with their mean drawn over them; only the values where they are few."""
    values = finite(points)
    if len(values) < 30:
        return [Line(name, values, colour)]
    return [
        Line(name, values, colour, faint=True),
        Line("smoothed", smoothed(values), colour),
    ]
