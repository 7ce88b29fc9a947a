"""Versions of the libraries that compute: recorded with every artifact, told where they differ, part of no key."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from typing import Any

RECORDED = ("torch", "transformers", "tokenizers", "peft", "pyarrow", "numpy", "safetensors")


def versions() -> dict[str, str]:
    """Those that are installed, by name."""
    return dict(_installed())


@functools.cache  # 15 ms, which a process that runs ten stages spends once
def _installed() -> Mapping[str, str]:
    from importlib import metadata  # 20 ms that a cached pipeline need not spend

    found = {}
    for name in RECORDED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def notes(manifest: Mapping[str, Any], here: Mapping[str, str]) -> list[str]:
    """What an artifact was made with that is another here, `here` being `versions()`: one line, or none."""
    provenance = manifest.get("provenance", {})
    made = {**provenance.get("libraries", {}), "Python": provenance.get("python")}
    present = {**here, "Python": platform.python_version()}
    changed = [name for name in made if made[name] and name in present and made[name] != present[name]]
    if not changed:
        return []
    pairs = (", ".join(f"{name} {found[name]}" for name in changed) for found in (made, present))
    return ["made with {}, here is {}".format(*pairs)]
