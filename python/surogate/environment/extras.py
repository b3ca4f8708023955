"""The optional dependencies: which are installed, and what they are for.

Reads package metadata and imports none of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Extra:
    """A package with the extra that brings it."""

    extra: str
    package: str
    needed_for: str
    #: As the package says it; None where it is not installed.
    version: str | None


KNOWN = [
    ("wandb", "wandb", "report_to: [wandb]"),
    ("aim", "aim", "report_to: [aim]"),
    ("tensorboard", "tensorboard", "report_to: [tensorboard]"),
    ("eval", "lm_eval", "surogate evaluate"),
    ("cloud", "obstore", "data and output_dir in s3:// and gs://"),
    ("distributed", "ray", "nodes that a Ray cluster starts"),
]


def find() -> list[Extra]:
    """Every extra except CUDA's, whose libraries are searched for one by one."""
    return [Extra(extra, package, needed_for, _version(package)) for extra, package, needed_for in KNOWN]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def text(found: list[Extra]) -> str:
    """For people."""
    lines = ["Extras:"]
    for of in found:
        state = of.version or f"not installed: pip install 'surogate[{of.extra}]'"
        lines.append(f"  {of.package:<12} {state} (for {of.needed_for})")
    return "\n".join(lines)


def facts(found: list[Extra]) -> list[dict[str, object]]:
    """For programs."""
    return [asdict(of) for of in found]
