"""Where on this machine the CUDA libraries of installed Python packages lie."""

from __future__ import annotations

import site
import sys
import sysconfig
from pathlib import Path


def site_packages() -> list[Path]:
    """Folders of installed packages that exist, in the order of the import path."""
    named = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        named.append(site.getusersitepackages())
    named += [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    return [Path(entry) for entry in dict.fromkeys(named) if entry and Path(entry).is_dir()]
