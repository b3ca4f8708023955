"""All pages as one Markdown file, for tools that read the documentation whole: `python docs/collect.py > surogate.md`; with
`--index`, the file `llms.txt`.

The order is that of index.md. Links between pages become links in the file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)]+)\) \| (.*?) \|(?: [\d,]+ \|)?$")
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")

SUMMARY = (
    "Surogate trains and fine-tunes large language models: one YAML file in, a trained model out. An engine in Rust with a "
    "command line and a Python API; it plans memory and time before a run, and runs on NVIDIA GPUs and on CPUs."
)

#: What a program needs to know to use the command line without a terminal.
FOR_PROGRAMS = """\
Without a terminal: `surogate init MODEL DATASET` writes run.yaml, `surogate schema` prints its JSON schema, `surogate plan run.yaml --json` \
says what a run takes, `surogate sft run.yaml --json` prints the log as JSON lines, `surogate status OUTPUT_DIR --json` says how far a \
run is. Exit codes: 0 success, 1 the run failed, 2 options, 3 memory, 4 data, 5 the loss diverged, 6 another node was lost, 130, 138, \
140 and 143 after a signal. `--resume-from-checkpoint true` continues a run with the same command.
"""


def sections() -> list[tuple[str, list[tuple[str, str, str]]]]:
    """The sections of index.md: pages as (title, path from here, contents)."""
    found: list[tuple[str, list[tuple[str, str, str]]]] = []
    for line in (DOCS / "index.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            found.append((line[3:], []))
        elif match := ROW.match(line):
            found[-1][1].append((match[1], match[2], match[3]))
        elif line.startswith("| Decisions |"):
            found[-1][1].extend((f"Decisions: {name}", path, "reasons") for name, path in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", line))
    return found


def index() -> str:
    """The text of llms.txt: a summary, and the pages by section."""
    lines = ["# Surogate", "", f"> {SUMMARY}", "", FOR_PROGRAMS]
    for title, pages in sections():
        lines += [f"## {title}", ""]
        for name, path, contents in pages:
            place = (DOCS / path).resolve().relative_to(ROOT)
            lines.append(f"- [{name}]({place}): {LINK.sub(']', contents)}")
        lines.append("")
    return "\n".join(lines)


def whole() -> str:
    """All pages, one after the other; the anchor of a page is its path."""
    parts = [f"# Surogate documentation\n\n{SUMMARY}\n\n{FOR_PROGRAMS}"]
    paths = [(DOCS / path).resolve() for _, pages in sections() for _, path, _ in pages]
    for path in paths:
        text = path.read_text(encoding="utf-8")

        def inside(match: re.Match[str], page: Path = path) -> str:
            target = (page.parent / match[1]).resolve() if match[1] else page
            if target not in paths:
                return match[0]
            return f"]({match[2] if match[2] else '#' + _anchor(target)})"

        parts.append(f'<a id="{_anchor(path)}"></a>\n\n{LINK.sub(inside, text)}')
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _anchor(path: Path) -> str:
    return "page-" + str(path.relative_to(ROOT)).removesuffix(".md").replace("/", "-").lower()


if __name__ == "__main__":
    print(index() if sys.argv[1:] == ["--index"] else whole(), end="")
