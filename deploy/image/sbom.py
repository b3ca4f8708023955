"""The software bill of materials of an environment, in CycloneDX's form: the Python packages that are installed, and the crates of
the lock file given, of which the native module is built. Prints JSON.

Needs nothing but Python, so that it runs in the image that it describes.
"""

from __future__ import annotations

import json
import sys
import tomllib
import uuid
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote


def python_packages() -> list[dict[str, Any]]:
    found = {of.metadata["Name"].lower().replace("_", "-"): of for of in distributions()}
    return [_component(f"pkg:pypi/{name}", name, of.version, _licenses(of.metadata)) for name, of in sorted(found.items())]


def _licenses(metadata: Any) -> list[dict[str, Any]]:
    """The expression of a package, else its classifiers. Texts of licenses are left out: some packages have whole ones here."""
    if expression := metadata.get("License-Expression"):
        return [{"expression": expression}]
    names = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or [] if line.startswith("License :: ")]
    return [{"license": {"name": name}} for name in names]


def crates(lock: Path) -> list[dict[str, Any]]:
    """Crates of a registry, with their checksums; those of the repository itself are part of the wheel."""
    found = []
    for of in tomllib.loads(lock.read_text(encoding="utf-8"))["package"]:
        if "source" in of:
            component = _component(f"pkg:cargo/{of['name']}", of["name"], of["version"], [])
            found.append({**component, "hashes": [{"alg": "SHA-256", "content": of["checksum"]}]})
    return found


def _component(place: str, name: str, version: str, licenses: list[dict[str, Any]]) -> dict[str, Any]:
    purl = f"{place}@{quote(version, safe='')}"
    component: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return component | ({"licenses": licenses} if licenses else {})


def bill(lock: Path) -> dict[str, Any]:
    """The whole bill. Its serial number follows from its content."""
    components = python_packages() + crates(lock)
    own = next((of["version"] for of in components if of["purl"].startswith("pkg:pypi/surogate@")), "0")
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(components, sort_keys=True))
    subject = {"type": "application", "bom-ref": "surogate", "name": "surogate", "version": own}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
    }


if __name__ == "__main__":
    print(json.dumps(bill(Path(sys.argv[1])), indent=1))
