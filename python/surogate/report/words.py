"""Formatting of numbers, bytes and times, and HTML building blocks of the pages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def bytes_text(size: float) -> str:
    """In the unit that suits it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.{0 if size >= 100 * unit else 1}f} {name}"
    return f"{size:.0f} B"


def duration(seconds: float) -> str:
    """`42 s`, `3:07 min`, `2:05 h`, `3 d 4 h`."""
    whole = int(round(seconds))
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    if whole < 86400:
        return f"{whole // 3600}:{whole % 3600 // 60:02} h"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def count(number: float) -> str:
    """With thin spaces between groups of three digits."""
    return f"{number:,.0f}".replace(",", "\u202f")


def amount(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count(number)} {what}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """One digit after the point."""
    return f"{100 * share:.1f} %"


def value_text(value: Any) -> str:
    """A value of an option; of groups without what is null."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "\n".join(value_text(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{name}: {value_text(item)}" for name, item in value.items() if item is not None)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """A table in a card. Cells are HTML; `classes` belong to the columns. On a narrow screen the cells of a row stand below
    the first one, of many columns each with its title, unless the first column has none."""
    style = [*classes, *[""] * len(head)]
    labels = [f' data-l="{escape(title)}"' if title and len(head) > 3 and i else "" for i, title in enumerate(head)]
    cells = [
        "<tr>" + "".join(f'<td class="{style[i]}"{labels[i]}>{cell}</td>' for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    ]
    titles = zip(head, style, strict=False)
    top = "".join(f'<th class="{"n" if of == "n" else ""}">{escape(title)}</th>' for title, of in titles)
    top = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    kind = ' class="stacked"' if head[0] else ""
    return f'<div class="card scroll"><table{kind}>{top}<tbody>{"".join(cells)}</tbody></table></div>'


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values."""
    return table(["", ""], [(escape(name), escape(value)) for name, value in rows], ["s", "v"])
