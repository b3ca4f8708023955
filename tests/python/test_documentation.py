"""What the pages and the examples show is what the engine takes: every YAML parses, every link leads somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from golden import FAMILIES, MIXTURES, WITH_IMAGES
from surogate import _native
from surogate.dsl.model import ARCHITECTURES
from surogate.models import page
from surogate.models.published import PUBLISHED

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))
PAGES = [REPOSITORY / "README.md", REPOSITORY / "ARCHITECTURE.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
BLOCKS = [
    pytest.param(text, id=f"{page.name}-{i}")
    for page in PAGES
    for i, text in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_parse_and_their_local_files_exist(path):
    config = _native.Config.from_yaml(path.read_text(), path.name, "sft", [])
    for local in re.findall(r"examples/\S+", config.resolved_yaml()):
        assert (REPOSITORY / local.strip("\"'")).exists(), local


@pytest.mark.parametrize("text", BLOCKS)
def test_runs_on_pages_parse(text):
    for run in _native.Config.run_names(text, "page") or [None]:
        _native.Config.from_yaml(text, "page", "sft", [], run=run)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_pages_lead_to_files(page):
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not broken


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    shown = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in shown}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_pages_lead_to_headings(page):
    links = re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", page.read_text())
    assert [(to, part) for to, part in links if part not in anchors(page.parent / to if to else page)] == []


#: Pages about the tree itself: each path that they name exists.
MAPS = [
    REPOSITORY / "ARCHITECTURE.md",
    REPOSITORY / "docs" / "glossary.md",
    *sorted((REPOSITORY / "docs" / "design").glob("*.md")),
]
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
SOURCE = re.compile(r"[\w*-]+\.(?:rs|py|cu|cuh|sh)")


def named_paths(text: str) -> set[str]:
    """Returns the paths in the code of a page: words with a slash in inline code, names of source files everywhere."""
    found = set()
    for code in CODE.findall(text):
        words = [word.strip("`,;:()").rstrip(".").removeprefix("./") for word in code.split()]
        inline = not code.startswith("```")
        found |= {word for word in words if (inline and "/" in word) or SOURCE.fullmatch(word.rpartition("/")[2])}
    return found


def is_in_the_tree(path: str) -> bool:
    """Returns whether a path exists: from the root, as `train/trainer/step.rs` for `crates/train/src/trainer/step.rs`, or as a name."""
    if "/" not in path:
        tops = ("crates", "python", "tests", "xtask")
        return (REPOSITORY / path).exists() or any(next((REPOSITORY / top).rglob(path), None) for top in tops)
    crate, _, rest = path.partition("/")
    return any(next(REPOSITORY.glob(form.rstrip("/")), None) for form in (path, f"crates/{crate}/src/{rest}"))


@pytest.mark.parametrize("page", MAPS, ids=lambda page: page.name)
def test_paths_on_pages_about_the_tree_exist(page):
    paths = named_paths(page.read_text())
    assert paths, "the page names no path"
    assert sorted(path for path in paths if not is_in_the_tree(path)) == []


def test_a_missing_path_is_found():
    page = "`train/trainer/step.rs`, `train/no_step.rs`; `crates/*/tests`, `docs/none/`.\n```text\n step.rs ──▶ (away.rs)\n```"
    missing = {path for path in named_paths(page) if not is_in_the_tree(path)}
    assert missing == {"train/no_step.rs", "docs/none/", "away.rs"}


def test_the_map_is_short():
    assert len((REPOSITORY / "ARCHITECTURE.md").read_bytes()) <= 14 * 1024
    glossary = (REPOSITORY / "docs" / "glossary.md").read_text()
    headings = re.findall(r"^\| Term \|", glossary, re.MULTILINE)
    rows = re.findall(r"^\| (?!Term \|)\w", glossary, re.MULTILINE)
    assert headings and len(rows) <= 40


QUOTED = re.compile(r"^```python\n# (surogate/\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUOTED_RUST = re.compile(r"^```rust\n// (crates/\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_quoted_code_is_the_code():
    quotes = [quote for page in PAGES for quote in QUOTED.findall(page.read_text())]
    assert len(quotes) >= 5
    for file, text in quotes:
        assert text in (REPOSITORY / "python" / file).read_text(), f"{file} has no\n{text}"
    of_engine = [quote for page in PAGES for quote in QUOTED_RUST.findall(page.read_text())]
    assert of_engine
    for file, text in of_engine:
        assert text in (REPOSITORY / file).read_text(), f"{file} has no\n{text}"


def test_the_inputs_of_a_batch_are_those_of_the_engine():
    page = (REPOSITORY / "docs" / "ir.md").read_text()
    rows = [
        f"| `{row['name']}` | {row['dtype']} [{', '.join(map(str, row['shape']))}] | {row['doc']} |"
        for row in json.loads(_native.batch_inputs())
    ]
    assert "\n".join(rows) + "\n\n" in page


def test_published_models_are_of_known_architectures_and_listed_once():
    listed = [name for names in PUBLISHED.values() for name in names]
    examples = {name for of in ARCHITECTURES.values() for name in of.examples}
    assert set(PUBLISHED) <= set(ARCHITECTURES)
    assert len(set(listed)) == len(listed) and not examples & set(listed)


def test_the_page_of_models_is_what_is_registered_and_compared():
    assert page.PATH.read_text(encoding="utf-8") == page.text(), "run python -m surogate.models.page"
    assert list(page.RECORDED) == [*FAMILIES, *MIXTURES]
    assert list(page.RECORDED_IMAGES) == WITH_IMAGES


def test_the_page_of_measurements_shows_the_rows_of_bench():
    command = [sys.executable, str(REPOSITORY / "bench" / "page.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_the_reading_path_says_how_long_it_is():
    text = (REPOSITORY / "docs" / "index.md").read_text()
    rows = re.findall(r"^\| \[[^\]]+\]\(([\w-]+\.md)\) \| .* \| ([\d,]+) \|$", text, re.MULTILINE)
    said = {page: int(words.replace(",", "")) for page, words in rows}
    counted = {page: len((REPOSITORY / "docs" / page).read_text().split()) for page in said}
    assert said == pytest.approx(counted, rel=0.1) and 8 <= len(said) <= 10
    whole = re.search(r"^Together about ([\d,]+) words", text, re.MULTILINE)
    assert whole and int(whole[1].replace(",", "")) == pytest.approx(sum(counted.values()), rel=0.05)
    assert sum(counted.values()) < 13_500


def test_there_are_examples_and_pages():
    assert EXAMPLES and len(PAGES) > 5
