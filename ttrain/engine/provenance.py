"""Collect the provenance for an artifact's manifest; it is not part of the artifact's key."""

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.config import DATASETS, PYTHON_DOCS, Settings, Weighted
from ttrain.config.training import MODELS
from ttrain.core.files import JsonDict, read_object, user_path
from ttrain.core.machine import VERSION, processor_model, versions
from ttrain.core.redact import masked, url
from ttrain.data import locations
from ttrain.store.layout import JOB, TRACKED


def of(settings: Settings, work: Path) -> JsonDict:
    """Versions, machine, settings, run and locations of the files read; without secrets.

    `work`: the work directory of the finished stage. The settings are complete, since `ttrain
    reproduce` may have only this manifest.
    """
    settings_of_run = with_absolute_paths(settings).model_dump(mode="json")
    return {
        "ttrain": VERSION,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": dict(machine()),
        "libraries": versions(),
        "runtime": settings_of_run.pop("runtime"),
        "settings": masked(settings_of_run),
        "run": read_object(work / TRACKED).get("run"),
        "files": {
            role: list(map(url, map(_absolute, names)))
            for role, names in read_object(work / JOB).get("files", {}).items()
        },
    }


@functools.cache
def machine() -> Mapping[str, Any]:
    """Processor and number of cores: sums of floats may depend on both."""
    return {"processor": processor_model(), "cores": os.cpu_count() or 1}


def with_absolute_paths(settings: Settings) -> Settings:
    """The same settings with absolute local paths, globs and folders."""
    webhook = settings.notify.webhook_file
    changes: dict[str, JsonDict] = {
        "data": {
            name: tuple(map(_absolute_source, getattr(settings.data, name))) for name in DATASETS
        },
        "tokenizer": {"existing": _if_there(settings.tokenizer.existing)},
        "shards": {"decontaminate": tuple(map(_if_file, settings.shards.decontaminate))},
        "evaluate": {
            "suites": {
                model: tuple(map(_if_file, settings.evaluate.suites.of(model))) for model in MODELS
            }
        },
        "runtime": {"eval_suite": _if_file(settings.runtime.eval_suite)},
        "notify": {"webhook_file": webhook and _absolute(webhook)},
    }
    for stage, start in settings.starts.items():
        if start == settings.existing_model:
            changes[stage] = {"start_from": _if_there(start)}
    command = settings.notify.command
    if command and "/" in command[0]:
        changes["notify"]["command"] = (_absolute(command[0]), *command[1:])
    return settings.replaced(changes)


def _absolute_source(source: str | Weighted) -> str | Weighted:
    return (
        source.model_copy(update={"path": _absolute(source.path)})
        if isinstance(source, Weighted)
        else _absolute(source)
    )


def _absolute(location: str) -> str:
    # URLs, names on the Hub and `python-docs` stay.
    return (
        location
        if locations.is_remote(location) or location == PYTHON_DOCS
        else str(locations.local_path(location).absolute())
    )


def _if_there(name: str | None) -> str | None:
    # Any other text is a name on the Hub.
    return str(user_path(name).absolute()) if name and user_path(name).exists() else name


def _if_file(name: str | None) -> str | None:
    # Any other text names a suite; a folder may have the same name.
    return _if_there(name) if name and user_path(name).is_file() else name


@functools.cache  # 5 ms, for all stages of a run
def commit() -> str | None:
    """The commit in hex, with `+changes` for uncommitted ones; None outside a checkout."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists() or not shutil.which("git"):
        return None  # ttrain is installed as a package; any repository around it is not its own
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    described = subprocess.run(
        [
            "git",
            "--no-optional-locks",
            "describe",
            "--always",
            "--abbrev=40",
            "--exclude=*",
            "--dirty=+changes",
        ],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None
