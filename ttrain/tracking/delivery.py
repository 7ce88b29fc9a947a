"""What can be told to MLflow of a run, one function each: `entry.data` in, calls out. All can be done twice.

Each raises what MLflow does, or RefusedError where it will never come to anything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Final

from ttrain.store.metric_rows import read_rows
from ttrain.tracking import datasets, uploads
from ttrain.tracking.atomic_files import local_path, place, place_tree, with_parent, write_text
from ttrain.tracking.calls import RefusedError, plain
from ttrain.tracking.journal import Entry
from ttrain.tracking.runs import METRICS_PER_BATCH, Run
from ttrain.tracking.safe_names import below

log = logging.getLogger("ttrain")

PARENT: Final = "mlflow.parentRunId"  # by which MLflow's pages nest
PARAMS_PER_BATCH: Final = 100  # MLflow refuses more
BEGUN: Final = "begun"  # noted of a curve that is followed, once it has a row


def params(run: Run, entry: Entry) -> int:
    """Parameters; those that the run has with another value keep it."""
    given: Mapping[str, str] = entry.data["values"]
    for key, value in given.items():
        if run.params.get(key, value) != value:
            log.warning("MLflow run %s keeps %s = %s, now %s", run.id, key, run.params[key], value)
    fresh = [(key, value) for key, value in given.items() if key not in run.params]
    kind = import_module("mlflow.entities").Param
    for first in range(0, len(fresh), PARAMS_PER_BATCH):
        batch = fresh[first : first + PARAMS_PER_BATCH]
        run.call("log_batch", run.id, params=[kind(*one) for one in batch])
        run.params.update(batch)
    return len(fresh)


def tags(run: Run, entry: Entry) -> int:
    """Tags, over old values."""
    kind = import_module("mlflow.entities").RunTag
    run.call("log_batch", run.id, tags=[kind(*one) for one in entry.data["values"].items()])
    return len(entry.data["values"])


def continued(run: Run, entry: Entry) -> None:
    """A run that had ended goes on, perhaps for another parent."""
    run.call("update_run", run.id, status="RUNNING")
    parent = run.store.parent_id(run)
    run_tags = {**entry.data["values"], **({PARENT: parent} if parent else {})}
    tags(run, Entry(entry.number, "tags", {"values": run_tags}))


def summary(run: Run, entry: Entry) -> int:
    """Figures of the whole run; one that it has already is not logged again."""
    fresh = {key: value for key, value in entry.data["values"].items() if run.values.get(key) != value}
    points = [(key, value, entry.data["time"], 0) for key, value in fresh.items()]
    for first in range(0, len(points), METRICS_PER_BATCH):
        run.log_batch(points[first : first + METRICS_PER_BATCH])
    run.values |= fresh
    return len(fresh)


def rows(run: Run, entry: Entry) -> int:
    """Lines of a `metrics.jsonl` that an outage left over."""
    return run.send(read_rows(run.box.kept(entry.data["kept"])))


def follow(run: Run, entry: Entry) -> int:
    """The `metrics.jsonl` that a process followed until it was killed; nothing where it had not been begun.

    Many stages write none, and the first sample of the machine comes after ten seconds.
    """
    places = [run.store.absolute(place) for place in entry.data["places"]]
    for path in places:
        if path.is_file():
            return run.send(read_rows(path))
    if BEGUN not in entry.parts:
        return 0
    raise RefusedError(f"the curve is gone: neither of {', '.join(map(str, places))} is there")


def end(run: Run, entry: Entry) -> str:
    """The run's end, at the time when it was."""
    run.call("set_terminated", run.id, entry.data["status"], entry.data["time"])
    if run.box.about.get("doubtful"):
        run.store.remove_twins(run)
    return str(entry.data["status"])


def log_inputs(run: Run, entry: Entry) -> int:
    """The data sets that the run reads."""
    given = [datasets.DataInput(**{**one, "files": tuple(one["files"])}) for one in entry.data["inputs"]]
    with run.store.turn:
        datasets.log(run.store.client, str(run.id), given)
    return len(given)


def text(run: Run, entry: Entry) -> None:
    """A text as a file of the run."""
    kept = entry.data.get("kept")
    content = run.box.kept(kept).read_text(encoding="utf-8") if kept else plain(entry.data["text"])
    if root := _root(run):
        write_text(with_parent(below(root, entry.data["to"])), content)
    else:
        with uploads.patience():
            run.store.client.log_text(run.id, content, entry.data["to"])


def file(run: Run, entry: Entry) -> None:
    """A file of the run."""
    kept, to, name = entry.data.get("kept"), entry.data["to"], entry.data["name"]
    source = run.box.kept(kept) if kept else _there(run.store.absolute(entry.data["path"]))
    if root := _root(run):
        place(source, below(root, f"{to}/{name}".lstrip("/")))
    else:
        uploads.send(run, entry, [(source, to, name)])


def directory(run: Run, entry: Entry) -> None:
    """The files of a directory, which does not change any more."""
    source, to = _there(run.store.absolute(entry.data["path"])), entry.data["to"]
    if root := _root(run):
        place_tree(source, below(root, to), root)
    else:
        uploads.send(run, entry, uploads.listed(source, to))


def _root(run: Run) -> Path | None:
    """The run's directory, where it is on a disk of this machine."""
    assert run.artifact_uri is not None, "the run is bound before anything is told of it"
    return local_path(run.artifact_uri)


def _there(path: Path) -> Path:
    if not path.exists():
        raise RefusedError(f"{path} is gone")
    return path
