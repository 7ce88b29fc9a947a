"""The resources that this machine offers a process."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any, Final


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


VERSION: Final = "0.1.0"  # of ttrain
RECORDED = ("torch", "transformers", "tokenizers", "peft", "pyarrow", "numpy", "safetensors")


def versions() -> dict[str, str]:
    """Versions of the libraries that are installed, by name."""
    return dict(_installed())


@functools.cache  # 15 ms, which a process that runs ten stages spends once
def _installed() -> Mapping[str, str]:
    from importlib import metadata  # 20 ms that a cached pipeline need not spend

    versions_by_name = {}
    for name in RECORDED:
        try:
            versions_by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions_by_name


def notes(manifest: Mapping[str, Any], installed: Mapping[str, str]) -> list[str]:
    """How libraries differ from those that an artifact was made with (`installed`: `versions()`): one line, or none."""
    provenance = manifest.get("provenance", {})
    recorded = {**provenance.get("libraries", {}), "Python": provenance.get("python")}
    present = {**installed, "Python": platform.python_version()}
    changed = [name for name in recorded if recorded[name] and name in present and recorded[name] != present[name]]
    if not changed:
        return []
    pairs = (", ".join(f"{name} {libraries[name]}" for name in changed) for libraries in (recorded, present))
    return ["made with {}, here is {}".format(*pairs)]
