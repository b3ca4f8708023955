"""Locations of the CUDA libraries in installed Python packages."""

from __future__ import annotations

import site
import sysconfig
from pathlib import Path

from .import_path import trusted


def site_packages() -> list[Path]:
    """Folders of installed packages that exist, in the order of the import path."""
    named = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        named.append(site.getusersitepackages())
    named += [entry for entry in trusted() if entry.endswith(("site-packages", "dist-packages"))]
    found = [Path(entry) for entry in dict.fromkeys(named) if entry]
    return [path for path in found if path.is_absolute() and path.is_dir()]
