"""The picture of README: what the first two commands print, and the loss curve of their report.

    python bench/first_run.py docs/first-run.svg

Runs `surogate sft examples/stories.yaml` and `surogate generate` with the installed package. Lines of steps are
thinned, and nothing is changed in the others but the folder of the run. Knows no format of the log: the curve is that
of the report.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PROMPT = "Once upon a time"
SAMPLING = "--temperature 0.7 --top-p 0.9 --seed 1 --max-new-tokens 100"
#: Characters of a line and its height; width of the picture and height of the curve.
COLUMNS, LINE = 104, 17
WIDTH, CURVE = 780, 190
COLOURS = {"c1": "#2563eb", "c2": "#e0622a"}


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "surogate", *arguments]
    environment = {**os.environ, "SUROGATE_DATA_CACHE": "off"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True).stdout


def thinned(lines: list[str]) -> list[str]:
    """Lines of a run without those that repeat: the first steps, then one at each evaluation."""
    kept: list[str] = []
    for line in lines:
        step = re.match(r"Step (\d+)/", line)
        if step and int(step[1]) > 1 and int(step[1]) % 20 != 19:
            if kept[-1] != "…":
                kept.append("…")
        elif not line.startswith(("Saved", "      surogate", "Next:")):
            kept.append(line)
    return kept


def cut(line: str) -> list[str]:
    """A line in the width of the picture, which is wider than no table."""
    return textwrap.wrap(line, COLUMNS) if len(line) > COLUMNS else [line]


def text_of(lines: list[tuple[str, bool]], top: float) -> str:
    """SVG of lines, those that were typed in another weight."""
    rows = []
    for number, (line, typed) in enumerate(lines):
        weight = ' font-weight="bold"' if typed else ""
        rows.append(f'<text x="14" y="{top + number * LINE:.0f}"{weight} xml:space="preserve">{escape(line)}</text>')
    return "\n".join(rows)


def curve_of(report: str, top: float) -> str:
    """The first chart of a report: its marks of the loss, and its lines."""
    plot = report[report.index('<div class="plot">') : report.index("</svg>", report.index('<div class="plot">'))]
    left, width, bottom = 46, WIDTH - 66, top + CURVE
    marks = [
        f'<text x="{left - 8}" y="{bottom - float(at) / 100 * CURVE + 4:.1f}" text-anchor="end">{value}</text>'
        f'<path d="M{left} {bottom - float(at) / 100 * CURVE:.1f}h{width}" stroke="#8884"/>'
        for at, value in re.findall(r'<i style="bottom:([\d.]+)%"><b>([^<]+)</b>', plot)
    ]
    marks += [
        f'<text x="{left + float(at) / 100 * width:.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{value}</text>'
        for at, value in re.findall(r'<u style="left:([\d.]+)%">([^<]+)</u>', plot)
    ]
    lines = []
    for classes, path in re.findall(r'<path class="([^"]+)" d="([^"]+)"', plot):
        names = classes.split()
        colour = next(COLOURS[name] for name in names if name in COLOURS)
        look = 'stroke-width="6" stroke-linecap="round"' if "dots" in names else 'stroke-width="1.6"'
        faint = ' opacity="0.4"' if "faint" in names else ""
        look += ' vector-effect="non-scaling-stroke"'
        lines.append(f'<path d="{path}" fill="none" stroke="{colour}" {look}{faint}/>')
    place = f'x="{left}" y="{top:.0f}" width="{width}" height="{CURVE}"'
    inner = f'<svg {place} viewBox="0 0 1000 1000" preserveAspectRatio="none">'
    return "\n".join([*marks, inner, *lines, "</svg>"])


def picture() -> str:
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "stories"
        trained = run("sft", "examples/stories.yaml", "--output-dir", str(output))
        trained = trained.replace(str(output), "output/stories")
        generated = PROMPT + run("generate", str(output), "--prompt", PROMPT, *SAMPLING.split())
        report = (output / "report.html").read_text()
    lines = [("$ surogate sft examples/stories.yaml", True)]
    lines += [(part, False) for line in thinned(trained.splitlines()) for part in cut(line)]
    lines += [(f'$ surogate generate output/stories --prompt "{PROMPT}" {SAMPLING}', True)]
    lines += [(part, False) for line in generated.splitlines() for part in cut(line)]
    top = 24 + len(lines) * LINE + 30
    height = top + CURVE + 36
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-size="12" fill="#1b2330"',
            ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace">',
            f'<rect width="{WIDTH}" height="{height:.0f}" rx="8" fill="#f6f7f9"/>',
            text_of(lines, 24),
            f'<text x="14" y="{top - 14:.0f}" font-weight="bold">report.html: loss by step, and evaluations</text>',
            curve_of(report, top),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.parse_args().output.write_text(picture())
