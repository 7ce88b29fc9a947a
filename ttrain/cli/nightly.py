"""What `ttrain pipeline run nightly` and `plan nightly` do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ttrain.core.terminal import console, escaped, print_json, table

if TYPE_CHECKING:
    from ttrain.config.loading import Loaded
    from ttrain.pipeline.labels import Labels
    from ttrain.store.artifacts import Store

NIGHTLY = "nightly"


def run(loaded: Loaded, *, engine: str, labels: Labels) -> None:
    """One night, now."""
    from flows.nightly import run_night
    from ttrain.pipeline.absolute_paths import absolute
    from ttrain.store.layout import usable_home

    usable_home()
    result = run_night(absolute(loaded.settings), _store(loaded), console(), engine=engine, labels=labels)
    print(escaped(f"{result.night or 'no night'}: {result.outcome}"))


def plan(loaded: Loaded, *, as_json: bool) -> None:
    """What a night would do now."""
    from flows.night_plan import plan_night
    from ttrain.core import redact
    from ttrain.nightly.inputs import DATASETS
    from ttrain.pipeline import plan_table
    from ttrain.pipeline.absolute_paths import absolute

    planned = plan_night(absolute(loaded.settings), _store(loaded))
    frozen = planned.frozen
    if as_json:
        stages = plan_table.plan_json(NIGHTLY, planned.stages)["stages"]
        files = (
            {name: [redact.url(file["location"]) for file in found] for name, found in frozen.files.items()}
            if frozen
            else {}
        )
        champion = frozen.champion.version if frozen and frozen.champion else None
        print_json({
            "pipeline": NIGHTLY, "reason": planned.reason, "champion": champion, "files": files, "stages": stages,
        })  # fmt: skip
        return
    print(escaped(planned.reason))
    if frozen is None:
        return
    for dataset in DATASETS:
        for file in frozen.files.get(dataset, ()):
            print(escaped(f"  data.{dataset}: {redact.url(file['location'])}"))
    table(("stage", "state", "key", "why"), plan_table.plan_rows(planned.stages))


def refuse(**options: object) -> None:
    """Raise UsageError where an option is given that chooses among stages: a night is one whole."""
    from ttrain.errors import UsageError

    given = [f"--{name}" for name, value in options.items() if value]
    if given:
        raise UsageError(
            f"{', '.join(given)}: a night chooses what to run by itself; leave it out, or use `ttrain pipeline run full`"
        )


def _store(loaded: Loaded) -> Store:
    from ttrain.pipeline.stores import store_of
    from ttrain.store.layout import home

    return store_of(home(), loaded.settings)
