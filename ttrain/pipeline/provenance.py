"""What a manifest records of how an artifact came about, beside what its key is made of: part of no key."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain import __version__
from ttrain.config import Settings
from ttrain.core import libraries
from ttrain.core.files import read_object
from ttrain.core.redact import masked, url
from ttrain.data import locations
from ttrain.pipeline.absolute_paths import absolute
from ttrain.pipeline.commit import commit
from ttrain.pipeline.stage_worker import JOB, TRACKED


def of(settings: Settings, work: Path) -> dict[str, Any]:
    """Versions, machine, all settings, the run that made it, and where the files were that it read; nothing secret.

    `work` is the work directory of the stage, whose job has run. The settings are kept whole, since `ttrain reproduce` may
    have nothing but this manifest, and those of one stage must agree with those of the others.
    """
    run, job = read_object(work / TRACKED), read_object(work / JOB)
    settings_of_run = absolute(settings).model_dump(mode="json")
    return {
        "ttrain": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": dict(machine()),
        "libraries": libraries.versions(),
        "runtime": settings_of_run.pop("runtime"),
        "settings": masked(settings_of_run),
        "run": run.get("run"),
        "run_id": run.get("run_id"),
        "files": {role: [_place(location) for location in found] for role, found in job.get("files", {}).items()},
    }


def _place(location: str) -> str:
    """A path in full; a URL without what would let its reader in."""
    if locations.is_remote(location):
        return url(location)
    return str(locations.local_path(location).absolute())


@functools.cache
def machine() -> Mapping[str, Any]:
    """Its processor and how many of its cores are there: sums of floats may differ by both."""
    return {"processor": _processor(), "cores": os.cpu_count() or 1}


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()
