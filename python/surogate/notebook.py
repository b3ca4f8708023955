"""The progress of a training and its loss curve in a notebook.

Knows metrics and HTML; draws with what IPython has.
"""

from __future__ import annotations

import sys
import time
from html import escape
from typing import TYPE_CHECKING, Any

from .callbacks import Callback
from .metrics import EvaluationMetrics, StepMetrics
from .report.series import Axis, Points, finite, short, smoothed, thinned

if TYPE_CHECKING:
    from .trainer import Trainer

#: Seconds between two drawings, at least.
PAUSE = 0.5

#: Extents of the curve in pixels, and of what its numbers take on the left and below.
WIDTH, HEIGHT, LEFT, BELOW = 640, 220, 48, 20


def is_running() -> bool:
    """True if the caller is a cell of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    # A shell on a terminal has no kernel.
    return getattr(shell, "kernel", None) is not None


class Display(Callback):
    """An output cell that follows a training."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._show = display
        self._cell: Any = None
        self._losses: list[tuple[float, float | None]] = []
        self._evaluations: list[tuple[float, float | None]] = []
        self._begin = self._drawn = time.monotonic()
        self._first = 0
        self._text = ""

    def on_start(self, trainer: Trainer) -> None:
        """Shows the display in a new output cell."""
        self._first = trainer.steps_done
        self._cell = self._show(self._html(self._page(trainer)), display_id=True)

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Adds the loss to the curve; draws it at most once in `PAUSE` seconds."""
        self._losses.append((metrics["step"] + 1, metrics["loss"]))
        self._text = f"loss {metrics['loss']:.4f} · {metrics['tokens_per_second']:,.0f} tokens/s"
        if time.monotonic() - self._drawn >= PAUSE:
            self._draw(trainer)

    def on_evaluation(self, trainer: Trainer, metrics: EvaluationMetrics) -> None:
        """Adds the evaluation loss to the curve and draws it."""
        self._evaluations.append((metrics["step"], metrics["loss"]))
        self._draw(trainer)

    def on_end(self, trainer: Trainer) -> None:
        """Draws the curve with its last points."""
        self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        self._drawn = time.monotonic()
        self._cell.update(self._html(self._page(trainer)))

    def _page(self, trainer: Trainer) -> str:
        done, total = trainer.steps_done, trainer.total_steps
        bar = f'<progress value="{done}" max="{total}" style="width:{WIDTH}px"></progress><br>' if total else ""
        words = [f"{done} of {total} steps" if total else f"{done} steps", self._text, self._left(done, total)]
        line = " · ".join(escape(word) for word in words if word)
        return f"<div>{bar}{line}<br>{curve(finite(self._losses), finite(self._evaluations), total)}</div>"

    def _left(self, done: int, total: int | None) -> str:
        if not total or done == self._first or done >= total:
            return ""
        seconds = int((time.monotonic() - self._begin) * (total - done) / (done - self._first))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


def curve(losses: Points, evaluations: Points, total: int | None) -> str:
    """The losses of steps, their mean in front, and those of evaluations as dots, as SVG; empty without a point."""
    points = losses + evaluations
    if not points:
        return ""
    heights = [y for _, y in points]
    x, y = Axis(0, total or max(step for step, _ in points), marks=6), Axis(min(heights), max(heights))
    (x.low, x.high) = (0, max(total or 0, max(step for step, _ in points)))

    def place(step: float, loss: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT) * x.place(step), (HEIGHT - BELOW) * (1 - y.place(loss))

    def line(of: Points, look: str) -> str:
        places = " ".join(f"{px:.1f},{py:.1f}" for px, py in (place(*point) for point in of))
        return f'<polyline points="{places}" fill="none" {look}/>'

    levels = [mark for mark in y.marks if 0 <= y.place(mark) <= 1]
    rows = "".join(
        f'<path d="M{LEFT} {place(0, mark)[1]:.1f}H{WIDTH}" stroke="currentColor" opacity=".15"/>'
        f'<text x="{LEFT - 6}" y="{place(0, mark)[1] + 4:.1f}" text-anchor="end">{escape(short(mark))}</text>'
        for mark in levels
    )
    columns = "".join(
        f'<text x="{place(mark, y.low)[0]:.1f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(short(mark))}</text>'
        for mark in x.marks
        if 0 <= x.place(mark) <= 1
    )
    lines = line(thinned(losses), 'stroke="#4269d0" opacity=".35"') + line(
        smoothed(losses), 'stroke="#4269d0" stroke-width="2"'
    )
    dots = "".join(
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="#ff725c"/>'
        for px, py in (place(*point) for point in evaluations)
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" font-size="11" fill="currentColor" role="img" '
        f'aria-label="loss by step; dots are evaluations">{rows}{columns}{lines}{dots}</svg>'
    )
