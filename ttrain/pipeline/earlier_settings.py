"""The settings of an earlier run, as the weakest layer of those of a new one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.config import Settings, flatten
from ttrain.config.loading import Given, load
from ttrain.core import redact
from ttrain.errors import UsageError
from ttrain.stages import OF_NIGHTS, STAGES
from ttrain.store import runs

SHOWN_RUNS = 5
NIGHTLY = "nightly"


def run_named(home: Path, name: str) -> dict[str, Any]:
    """The run of this name, or the only one whose name begins or ends so. Raises UsageError."""
    found = [run for run in runs.newest_first(home) if run["run"].startswith(name) or run["run"].endswith(name)]
    for run in found:
        if len(found) == 1 or run["run"] == name:
            return run
    names = [run["run"] for run in found or runs.newest_first(home)]
    listed = f"{', '.join(names[:SHOWN_RUNS])}{', ...' if len(names) > SHOWN_RUNS else ''}" or "none yet"
    rule = "means several runs" if found else "is no run"
    raise UsageError(f"--run {name} {rule}: {listed}; `ttrain pipeline status` lists them")


def newest_with(home: Path, stage: str) -> dict[str, Any]:
    """The newest run that has the stage, whatever became of it. Raises UsageError where there is none.

    Nights are passed over: their settings start from the champion of that night, and name the few files that were new. So
    are the trials of sweeps, the newest of which is any of them, not the best.
    """
    if stage in OF_NIGHTS:
        raise UsageError(f"stage {stage} belongs to nights; try `ttrain pipeline run nightly`")
    if stage not in STAGES:
        raise UsageError(f"there is no stage {stage}; the stages are {', '.join(STAGES)}")
    for run in runs.newest_first(home):
        if run["pipeline"] != NIGHTLY and "sweep" not in run and any(entry["name"] == stage for entry in run["stages"]):
            return run
    raise UsageError(f"no run has a stage {stage} yet whose settings could be taken; try `ttrain pipeline run full`")


def with_secrets(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The run with the secrets of its sources, as far as the environment names these in full: TTRAIN__DATA__SFT and such."""
    if not redact.has_hidden(run["settings"]):
        return run
    return {**run, "settings": redact.restored(run["settings"], load().settings.model_dump())}


def settings_of(run: Mapping[str, Any]) -> list[Given]:
    """What the run's settings have that is not a default now, so that the rest may be left out of sight."""
    usual = dict(flatten(Settings().model_dump(mode="json")))
    told = flatten(run["settings"])
    return [Given(f"run {run['run']}", key, value) for key, value in told if key not in usual or usual[key] != value]
