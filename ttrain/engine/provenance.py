"""Provenance of an artifact in its manifest: recorded besides the ingredients, not part of any key."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ttrain.config import DATASETS, PYTHON_DOCS, Settings, Weighted
from ttrain.config.training import MODELS
from ttrain.core import machine as libraries
from ttrain.core.files import JsonDict, read_object, user_path
from ttrain.core.machine import VERSION, processor_model
from ttrain.core.redact import masked, url
from ttrain.data import locations
from ttrain.store.layout import JOB, TRACKED


def of(settings: Settings, work: Path) -> JsonDict:
    """Collect versions, machine, settings, run and locations of the files read; without secrets.

    `work` is the work directory of the stage, whose job has run. The settings are kept whole, since `ttrain reproduce` may
    have nothing but this manifest, and those of one stage must agree with those of the others.
    """
    run, job = read_object(work / TRACKED), read_object(work / JOB)
    settings_of_run = with_absolute_paths(settings).model_dump(mode="json")
    return {
        "ttrain": VERSION,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": dict(machine()),
        "libraries": libraries.versions(),
        "runtime": settings_of_run.pop("runtime"),
        "settings": masked(settings_of_run),
        "run": run.get("run"),
        "run_id": run.get("run_id"),
        "files": {
            role: [url(location) if locations.is_remote(location) else _absolute(location) for location in locations_of_role]
            for role, locations_of_role in job.get("files", {}).items()
        },
    }


DIRTY_SUFFIX = "+changes"  # of the commit if the checkout has uncommitted changes


@functools.cache
def machine() -> Mapping[str, Any]:
    """Processor and number of cores: sums of floats may depend on both."""
    return {"processor": processor_model(), "cores": os.cpu_count() or 1}


def with_absolute_paths(settings: Settings) -> Settings:
    """Return the same settings with the local paths, globs and folders made absolute."""
    changes: dict[str, JsonDict] = {
        "data": {name: _absolute_sources(getattr(settings.data, name)) for name in DATASETS},
        "tokenizer": {"existing": _folder(settings.tokenizer.existing)},
        "shards": {"decontaminate": _files(settings.shards.decontaminate)},
        "evaluate": {"suites": {model: _files(settings.evaluate.suites.of(model)) for model in MODELS}},
        "runtime": {"eval_suite": settings.runtime.eval_suite and _file(settings.runtime.eval_suite)},
        "notify": {"webhook_file": settings.notify.webhook_file and _absolute(settings.notify.webhook_file)},
    }
    for stage, start in settings.starts.items():
        if start == settings.existing_model:
            changes[stage] = {"start_from": _folder(start)}
    if settings.notify.command and "/" in settings.notify.command[0]:
        program, *arguments = settings.notify.command
        changes["notify"]["command"] = (_absolute(program), *arguments)
    return settings.replaced(changes)


def _absolute_sources(sources: Iterable[str | Weighted]) -> tuple[str | Weighted, ...]:
    return tuple(
        source.model_copy(update={"path": _absolute(source.path)}) if isinstance(source, Weighted) else _absolute(source)
        for source in sources
    )


def _absolute(location: str) -> str:
    """Make a path or glob absolute; leave a URL, a name on the Hub and `python-docs` as they are."""
    if locations.is_remote(location) or location == PYTHON_DOCS:
        return location
    return str(locations.local_path(location).absolute())


def _folder(name: str | None) -> str | None:
    """The absolute path of an existing folder; any other text is a name on the Hub and stays."""
    return str(user_path(name).absolute()) if name and user_path(name).is_dir() else name


def _files(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(_file, names))


def _file(name: str) -> str:
    """The absolute path of an existing file; any other text is the name of a suite of ttrain's and stays."""
    return str(user_path(name).absolute()) if user_path(name).is_file() else name


@functools.cache  # two processes of git, 5 ms each, for all stages of a run
def commit() -> str | None:
    """Return the commit in hex, with `+changes` for uncommitted changes; None if ttrain does not run from a checkout."""
    package = Path(__file__).parents[1]
    if not (package.parent / ".git").exists() or not shutil.which("git"):
        return None  # it is another repository that contains this Python's packages, or none
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=package, env=environment, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    head = git("rev-parse", "HEAD")
    changes = git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no", "--", ".")
    return f"{head}{DIRTY_SUFFIX if changes else ''}" or None
