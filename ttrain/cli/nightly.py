"""The nightly pipeline in `ttrain pipeline run` and `ttrain pipeline plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ttrain.cli.options import Output, Table
from ttrain.core import redact
from ttrain.core.terminal import console, print_escaped
from ttrain.errors import UsageError
from ttrain.store.layout import home, usable_home

if TYPE_CHECKING:
    from ttrain.config.loading import LoadedSettings
    from ttrain.engine.labels import Labels

NIGHTLY = "nightly"


def run(loaded: LoadedSettings, *, engine: str, labels: Labels) -> None:
    """Run one night now."""
    from ttrain.engine.provenance import with_absolute_paths
    from ttrain.flows.nightly import run_night
    from ttrain.tracking.artifact_source import store_of

    settings = with_absolute_paths(loaded.settings)
    store = store_of(usable_home(), settings)
    result = run_night(settings, store, console(), engine=engine, labels=labels)
    print_escaped(f"{result.night or 'no night'}: {result.outcome}")
    if result.night:
        print("next:\n  all champions and challengers: ttrain models list")


def plan(loaded: LoadedSettings) -> Output:
    """What a night would do now."""
    from ttrain.config import LEARNT
    from ttrain.engine.provenance import with_absolute_paths
    from ttrain.flows.night_plan import plan_night
    from ttrain.tracking.artifact_source import store_of

    settings = with_absolute_paths(loaded.settings)
    planned = plan_night(settings, store_of(home(), settings))
    snapshot = planned.frozen
    frozen_files = snapshot.files.items() if snapshot else ()
    files = {name: [redact.url(file["location"]) for file in entries] for name, entries in frozen_files}
    value = {
        "pipeline": NIGHTLY,
        "reason": planned.reason,
        "champion": snapshot.champion.version if snapshot and snapshot.champion else None,
        "files": files,
        "near_duplicates": {"similarity": planned.near_duplicates, "earlier_sets": planned.earlier_sets},
        "stages": [stage.to_json() for stage in planned.stages],
    }
    if snapshot is None:
        return Output(value, [planned.reason])
    lines = [f"  data.{dataset}: {location}" for dataset in LEARNT for location in files.get(dataset, ())]
    stages = Table(("stage", "state", "key", "why"), [stage.row for stage in planned.stages])
    return Output(value, [planned.reason, *lines, stages])


def refuse(chooses_stages: bool) -> None:
    """Raise UsageError if an option that selects stages is given: a night always runs as a whole."""
    if chooses_stages:
        raise UsageError(
            "an option chooses stages or begins them again, but a night chooses its stages by itself; "
            "leave it out, or use `ttrain pipeline run full`"
        )
