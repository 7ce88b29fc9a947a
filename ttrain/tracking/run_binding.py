"""Makes MLflow have a run once, also where the answer to its making was lost, and finds its parent."""

from __future__ import annotations

import time
from typing import Any, Final

from ttrain.core.files import read_json
from ttrain.tracking import outbox
from ttrain.tracking.calls import RefusedError, code_of, is_refusal
from ttrain.tracking.runs import Run, TrackingStore

ID: Final = "ttrain.id"  # tag: the run's outbox, by which the run is found where the answer to its making was lost
PARENT: Final = "mlflow.parentRunId"  # tag by which MLflow's pages nest


def bind(store: TrackingStore, run: Run) -> None:
    """The run as MLflow has it, made where it has none. Raises what MLflow does."""
    with run.turn:
        if run.is_bound:
            return
        parent = parent_id(store, run)
        with store.turn:
            entity = _known(store, run)
            if entity is None and run.box.about.get("is_made"):
                raise RefusedError(f"MLflow has no run {run.id} any more")
            if entity is None:
                entity = _made(store, run, parent)
        run.bind(entity)
        if run.box.about.get("run_id") != run.id:
            run.box.note(run_id=run.id)


def parent_id(store: TrackingStore, run: Run) -> str | None:
    """MLflow's id of the run's parent, which is made before where it waits, too. Raises what MLflow does."""
    if run.parent is not None:
        bind(store, run.parent)
        return run.parent.id
    about = run.box.about
    identity = str(about.get("parent"))
    if about.get("parent_run_id") or not outbox.ID.fullmatch(identity):
        return about.get("parent_run_id")
    waiting = read_json(store.home / outbox.FOLDER / identity / "run.json")
    if isinstance(waiting, dict) and waiting.get("run_id"):
        return str(waiting["run_id"])
    with store.turn:
        found = _same(store, run, identity)
    if not found and isinstance(waiting, dict):
        raise ConnectionError(f"the parent of {about['name']} waits to be made")
    return found[0].info.run_id if found else None


def remove_twins(store: TrackingStore, run: Run) -> None:
    """Of runs that were made twice, since the answer to the first making was lost, all but this one are deleted."""
    with store.turn:
        for twin in _same(store, run, run.identity):
            if twin.info.run_id != run.id:
                store.client.delete_run(twin.info.run_id)
    run.box.note(doubtful=False)


def _known(store: TrackingStore, run: Run) -> Any:
    """The run, if MLflow has it; None where it has none, or where the user deleted it."""
    if run.id is None:
        found = _same(store, run, run.identity) if run.is_again or run.box.about.get("doubtful") else []
        return found[0] if found else None
    try:
        entity = store.client.get_run(run.id)
    except Exception as error:
        if code_of(error) == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return entity if entity.info.lifecycle_stage == "active" else None


def _made(store: TrackingStore, run: Run, parent: str | None) -> Any:
    about = run.box.about
    tags = {**about["tags"], ID: run.identity, **({PARENT: parent} if parent else {})}
    began = int(1000 * float(about.get("started", time.time())))
    try:
        return store.client.create_run(store.experiment_id(run.box.about.get("experiment")), began, tags, about["name"])
    except Exception as error:
        if is_refusal(error):
            store.forget_experiments()  # the one that was known is gone
        elif store.is_http:
            run.box.note(doubtful=True)
        raise


def _same(store: TrackingStore, run: Run, identity: str) -> list[Any]:
    """The runs of this outbox, the one that stays first."""
    found = store.client.search_runs([store.experiment_id(run.box.about.get("experiment"))], f"tags.`{ID}` = '{identity}'")
    return sorted(found, key=lambda run: str(run.info.run_id))
