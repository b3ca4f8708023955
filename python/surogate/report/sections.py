"""The sections of a report below the curves: the memory plan, the data check, options, environment.

Each takes the first event of the log and returns HTML; a section without data is empty.
"""

from __future__ import annotations

import platform
import re
from html import escape
from typing import Any

from ..logs.stream import Event, History
from .words import amount, bytes_text, count, pairs, percent, table, value_text

#: Colours of the plan's classes by their names; others take what is left.
COLOURS = {"weights": 1, "adapters": 4, "gradients": 2, "optimizer": 5, "activations": 3, "workspace": 7}


#: An image that an event of the log brings with it: of nothing else a page makes one.
COPY = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]+=*")

#: An image of a prompt: number of the prompt, position in it, name, width and height.
Place = tuple[int, int, str, int, int]


def samples(history: History) -> str:
    """The answers to `sample_prompts`: the last ones, and the earlier ones folded."""
    found = sorted(history.samples.items(), reverse=True)
    if not found:
        return ""

    copies: dict[Place, str] = {}
    shown: dict[tuple[int, int], str] = {}
    for at, event in reversed(found):
        for number, sample in enumerate(event["samples"]):
            shown[at, number] = _images(sample, number, copies)

    def rows(events: list[tuple[int, Event]]) -> list[list[str]]:
        return [
            [count(at), shown[at, number] + escape(of["prompt"]), escape(of["text"]), escape(of["finish"])]
            for at, event in events
            for number, of in enumerate(event["samples"])
        ]

    head, classes = ["steps done", "prompt", "answer", "ended by"], ["n", "v", "v", "s"]
    last = table(head, rows(found[:1]), classes)
    earlier = _folded(f"Earlier ({len(found) - 1})", table(head, rows(found[1:]), classes)) if found[1:] else ""
    return _section("Samples", last + earlier)


def _images(sample: Event, number: int, copies: dict[Place, str]) -> str:
    """The images of a prompt. Their copies are in the first event of each process, which may ask for others than the one before:
    `copies` has those of the events up to this one."""
    shown = []
    for position, of in enumerate(sample.get("images") or []):
        title = escape(f"{of['name']}, {of['width']} × {of['height']} pixels, {amount(of['tokens'], 'token')}")
        place = (number, position, of["name"], of["width"], of["height"])
        if COPY.fullmatch(of.get("copy") or ""):
            copies[place] = of["copy"]
        copy = copies.get(place)
        shown.append(f'<img src="{copy}" alt="{title}" title="{title}">' if copy else f"<small>{title}</small>")
    return f"<div>{' '.join(shown)}</div>" if shown else ""


def memory(history: History) -> str:
    """Bars to scale: what the plan holds, and what its activations consist of at their peak."""
    plan = history.opening.get("plan") or {}
    classes = [line for line in plan.get("memory") or [] if line["bytes"] > 0]
    if not classes:
        return ""
    total = sum(line["bytes"] for line in classes)
    coloured = [(line, COLOURS.get(line["class"], 8)) for line in sorted(classes, key=lambda line: -line["bytes"])]
    machine = plan.get("machine_memory") or 0
    measured = history.steps.memory
    head = bytes_text(total)
    if machine:
        head += f" of {bytes_text(machine)} ({percent(total / machine)})"
    bars = _bar("Planned", head, coloured, total)
    rows = [_row(line["class"], line["bytes"], total, line["note"], colour) for line, colour in coloured]
    parts = [line for line in plan.get("activations") or [] if line["bytes"] > 0]
    if parts:
        inside = [(line, 1 + (i + 2) % 7) for i, line in enumerate(parts)]
        size = sum(line["bytes"] for line in parts)
        bars += _bar("Activations at their peak", bytes_text(size), inside, size)
        rows += [_row("activations: " + line["class"], line["bytes"], total, line["note"], c) for line, c in inside]
    if measured:
        whose = '<small class="note">GPU: all processes; CPU: this process</small>'
        rows.append([f"peak in use, measured{whose}", bytes_text(measured), ""])
    phases = ", ".join(f"{line['class']} {bytes_text(line['bytes'])}" for line in plan.get("phases") or [])
    note = f"<p class='s'>Activations by phase: {escape(phases)}</p>" if phases else ""
    picture = f'<div class="card bars">{bars}{note}</div>'
    listed = table(["", "bytes", "share"], rows, ["", "n", "n"])
    return _section("Memory", f'{picture}<div class="below">{listed}</div>')


def _bar(name: str, text: str, lines: list[tuple[Event, int]], total: int) -> str:
    parts = "".join(
        f'<div class="c{colour}" style="flex:{line["bytes"] / total:.5f}" '
        f'title="{escape(line["class"])}: {bytes_text(line["bytes"])}"></div>'
        for line, colour in lines
    )
    head = f"<span>{escape(name)}</span><span>{escape(text)}</span>"
    return f'<div class="bar-head">{head}</div><div class="bar">{parts}</div>'


def _row(name: str, size: int, total: int, note: str, colour: int) -> list[str]:
    named = f'<span class="dot c{colour}"></span>{escape(name)}<small class="note">{escape(note)}</small>'
    return [named, bytes_text(size), percent(size / total)]


def decisions(history: History) -> str:
    """The table of tensors that are saved, recomputed, chunked or offloaded, in the words of the log. Logs before them
    have no table."""
    lines = (history.opening.get("plan") or {}).get("decisions") or []
    rows = [
        [
            escape(words["subject"]),
            escape(words["layers"]),
            escape(words["decision"]),
            bytes_text(line["bytes"]),
            f"{1e3 * line['seconds']:.3f} ms" if line["seconds"] else "",
            escape(words["reason"]),
        ]
        for line in lines
        if (words := line.get("words"))
    ]
    head = ["part", "layers", "decision", "bytes", "cost", "reason"]
    return _folded("Plan decisions", table(head, rows, ["", "", "", "n", "n", "s"])) if rows else ""


def data(history: History) -> str:
    """The table of the data check."""
    check = history.opening.get("data") or {}
    if not check:
        return ""
    rows = []
    for of in check["datasets"]:
        dropped = "; ".join(f"{drop['rows']} × {drop['reason']} ({drop['example']})" for drop in of["dropped"])
        numbers = [of["rows_read"], of["rows_kept"], of["documents"], of["tokens"]]
        share = percent(of["trained_tokens"] / of["tokens"]) if of["tokens"] else "–"
        rows.append(
            [_breaking(of["name"], "/"), *map(count, numbers), share, count(of["longest"]), escape(dropped) or "none"]
        )
    head = ["dataset", "rows read", "kept", "documents", "tokens", "trained", "longest", "dropped"]
    fill = (
        f"{count(check['documents'])} documents for training, {count(check['held_out'])} for evaluation; "
        f"{count(check['rows'])} rows of up to {count(check['row_tokens'])} tokens in {count(check['micro_batches'])} "
        f"micro-batches, {check['layout']}, {percent(check['fill'])} full"
    )
    body = table(head, rows, ["v", "n", "n", "n", "n", "n", "n", "v"])
    return _section("Data", f"{body}<p class='s'>{escape(fill)}.</p>")


def options(history: History) -> str:
    """Explicit options first, then automatic ones with their reasons; defaults are folded."""
    values, given = history.options, set(history.opening.get("given") or [])
    because = history.opening.get("because") or {}
    if not values:
        return ""

    def row(name: str, remark: str) -> list[str]:
        return [
            f'<code class="name">{_breaking(name, "_")}</code>',
            f"<code>{escape(value_text(values[name]))}</code>",
            escape(remark),
        ]

    said = [row(name, "") for name in values if name in given]
    chosen = [row(name, because[name]) for name in values if name in because]
    rest = [row(name, "")[:2] for name in values if name not in given and name not in because]
    head, classes = ["option", "value", ""], ["", "v", "s"]
    short = [cells[:2] for cells in said]
    return _section(
        "Options",
        table(["set by you", "value"], short, classes)
        + _folded(f"Chosen automatically ({len(chosen)})", table(head, chosen, classes))
        + _folded(f"Defaults ({len(rest)})", table(head[:2], rest, classes)),
    )


def environment(history: History) -> str:
    """Model, data, versions and machine of the run."""
    manifest = history.manifest
    machine: dict[str, Any] = manifest.get("machine") or {}
    digests = manifest.get("digests") or {}
    parameters = manifest.get("parameters") or {}
    rows = [
        ("machine", f"{machine.get('name')} ({machine.get('arch')}), {bytes_text(machine.get('memory') or 0)}"),
        ("backend", f"{machine.get('backend')}: {machine.get('because')}"),
        ("surogate", str(manifest.get("surogate"))),
        ("model", str(manifest.get("folder") or manifest.get("model"))),
        ("architecture", str(manifest.get("architecture"))),
        ("parameters", f"{count(parameters.get('total') or 0)}, {count(parameters.get('trained') or 0)} trained"),
        ("output", str(manifest.get("output"))),
        ("log", str(manifest.get("log"))),
    ]
    versions = manifest.get("versions")
    if isinstance(versions, dict):
        rows += [(name, value_text(value)) for name, value in versions.items()]
    rows += [(f"digest of the {name}", _digest(value)) for name, value in digests.items() if value]
    rows.append(("report by", f"Python {platform.python_version()}"))
    return _section("Environment", pairs(rows))


def _digest(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {str(part)[:16]}" for name, part in value.items())
    return str(value)[:16]


def marks(history: History) -> str:
    """The times at which the run was opened, saved, ended."""
    rows = []
    for event in history.marks:
        text = {
            "start": "started",
            "resume": f"resumed after {amount(event.get('step') or 0, 'step')}",
            "checkpoint": f"saved {event.get('path')}",
            "finished": f"finished: {event.get('result')}",
            "interrupted": f"interrupted: {event.get('checkpoint')}",
            "failed": f"failed: {event.get('error')}",
        }[event["event"]]
        rows.append((event["time"][:19].replace("T", " "), text))
    return _section("Events", pairs(rows)) if rows else ""


def _breaking(text: str, after: str) -> str:
    """A name that may wrap after each of these characters."""
    return escape(text).replace(after, f"{after}<wbr>")


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _folded(title: str, body: str) -> str:
    inside = body.replace("card scroll", "scroll", 1)
    return f'<details class="card"><summary>{escape(title)}</summary>{inside}</details>'
