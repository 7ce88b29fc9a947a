"""What can be told to MLflow of a run, one function each: `entry.data` in, calls out. All can be done twice.

Each raises what MLflow does, or RefusedError where it will never come to anything.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ttrain.store import exclusive
from ttrain.tracking import inputs, sets, uploads
from ttrain.tracking.calls import RefusedError
from ttrain.tracking.files import local_path, place, place_tree, with_parent, write_text
from ttrain.tracking.outbox import Entry
from ttrain.tracking.runs import METRICS_PER_BATCH, Row, Run
from ttrain.tracking.safety import below

log = logging.getLogger("ttrain")

CHILD: Final = "ttrain.child."  # tag of a pipeline's run, followed by a stage: the run that holds its curves
PARENT: Final = "mlflow.parentRunId"  # by which MLflow's pages nest
PARAMS_PER_BATCH: Final = 100  # MLflow refuses more


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
        _call(run, "log_batch", run.id, params=[kind(*one) for one in batch])
        run.params.update(batch)
    return len(fresh)


def tags(run: Run, entry: Entry) -> int:
    """Tags, over old values."""
    kind = import_module("mlflow.entities").RunTag
    _call(run, "log_batch", run.id, tags=[kind(*one) for one in entry.data["values"].items()])
    return len(entry.data["values"])


def continued(run: Run, entry: Entry) -> None:
    """A run that had ended goes on, perhaps for another parent."""
    _call(run, "update_run", run.id, status="RUNNING")
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
    """The `metrics.jsonl` that a process followed until it was killed."""
    places = [run.store.absolute(place) for place in entry.data["places"]]
    for path in places:
        if path.is_file():
            return run.send(read_rows(path))
    raise RefusedError(f"the curve is gone: neither of {', '.join(map(str, places))} is there")


def end(run: Run, entry: Entry) -> str:
    """The run's end, at the time when it was."""
    _call(run, "set_terminated", run.id, entry.data["status"], entry.data["time"])
    if run.box.about.get("doubtful"):
        run.store.remove_twins(run)
    return str(entry.data["status"])


def to_parent(run: Run, entry: Entry) -> None:
    """The pipeline's run names the one that holds this stage's curves."""
    if parent := run.store.parent_id(run):
        _call(run, "set_tag", parent, CHILD + entry.data["stage"], run.id)


def made_by(run: Run, entry: Entry) -> str | None:
    """The pipeline's run names the run that made a stage which it took from the cache."""
    stage, key = entry.data["stage"], entry.data["key"]
    experiment = run.store.experiment_id(run.box.about.get("experiment"))
    wanted = f"tags.`ttrain.key` = '{key}' AND tags.`ttrain.stage` = '{stage}' AND attributes.status = 'FINISHED'"
    order = ["attributes.end_time DESC"]
    found = _call(run, "search_runs", [experiment], wanted, max_results=1, order_by=order)
    if not found:
        return None
    _call(run, "set_tag", run.id, CHILD + stage, found[0].info.run_id)
    return str(found[0].info.run_id)


def log_inputs(run: Run, entry: Entry) -> int:
    """The data sets that the run reads."""
    given = [inputs.DataInput(**{**one, "files": tuple(one["files"])}) for one in entry.data["inputs"]]
    with run.store.turn:
        inputs.log(run.store.client, str(run.id), given)
    return len(given)


def text(run: Run, entry: Entry) -> None:
    """A text as a file of the run."""
    kept = entry.data.get("kept")
    content = run.box.kept(kept).read_text(encoding="utf-8") if kept else entry.data["text"]
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


def register(run: Run, entry: Entry) -> str:
    """A version of a registered model, whose files the run holds."""
    with run.store.turn:
        return run.store.versions.register(entry.data["name"], run, entry.data["path"], entry.data["tags"])


def register_set(run: Run, entry: Entry) -> str:
    """Registered models as one set, which can become champion."""
    with run.store.turn:
        return _registered_set(run, entry.data["name"], entry.data["tags"])


def register_models(run: Run, entry: Entry) -> str:
    """The models of a run as one set, which can become champion; a model that is not registered yet is, from this run."""
    data, members = entry.data, []
    with exclusive(sets.lock_of(run.store.home)):
        for model in data["models"]:
            with run.store.turn:
                version = run.store.versions.find(model["name"], model["tags"])
            if version is None:
                if not model["path"]:
                    raise RefusedError(f"{model['name']} is registered nowhere, and its files are not here")
                directory(run, Entry(entry.number, "directory", {"path": model["path"], "to": model["stage"]}, entry.parts))
                _beside(run, entry, model)
                with run.store.turn:
                    version = run.store.versions.register(model["name"], run, model["artifact_path"], model["tags"])
            members.append(sets.Member(model["name"], version, model["stage"], model["tags"]["ttrain.key"]))
        contents = {model["stage"]: model["tags"]["ttrain.content"] for model in data["models"]}
        told = sets.tags_of(data["run_name"], members, contents=contents, keys=data["keys"], metrics=data["metrics"])
        with run.store.turn:
            return _registered_set(run, data["name"], told)


def _beside(run: Run, entry: Entry, model: Mapping[str, Any]) -> None:
    """What opens a registered model elsewhere, in its directory."""
    place = PurePosixPath(model["artifact_path"])
    for name, content in model.get("texts", {}).items():
        text(run, Entry(entry.number, "text", {"to": str(place / name), "text": content}, entry.parts))
    for name, source in model.get("files", {}).items():
        told = {"path": source, "to": str((place / name).parent), "name": PurePosixPath(name).name}
        file(run, Entry(entry.number, "file", told, entry.parts))


@dataclass(frozen=True)
class Kind:
    """What is done with an entry, and what a warning calls it."""

    tell: Callable[[Run, Entry], Any]
    words: str
    uploads: bool = False  # it may take long: told in a thread of its own where files go over the network, in their order


SENDING: Final = "sending metrics (they wait on disk)"
KINDS: Final[Mapping[str, Kind]] = {
    "params": Kind(params, "logging parameters"),
    "tags": Kind(tags, "setting tags"),
    "continued": Kind(continued, "continuing a run"),
    "summary": Kind(summary, "logging a summary"),
    "rows": Kind(rows, SENDING),
    "follow": Kind(follow, SENDING),
    "end": Kind(end, "ending a run"),
    "to_parent": Kind(to_parent, "linking a stage's run"),
    "made_by": Kind(made_by, "linking a stage's run"),
    "inputs": Kind(log_inputs, "noting data sets"),
    "text": Kind(text, "keeping a text", uploads=True),
    "file": Kind(file, "keeping a file", uploads=True),
    "directory": Kind(directory, "keeping files", uploads=True),
    "register": Kind(register, "registering a model", uploads=True),
    "register_set": Kind(register_set, "registering a set of models", uploads=True),
    "register_models": Kind(register_models, "registering a set of models", uploads=True),
}


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a `metrics.jsonl`, without lines that are none."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n") and (row := parse_row(line)) is not None:
                yield row


def parse_row(line: bytes) -> Row | None:
    """The row of a line; None for a line that is none, which a crash of the machine can leave."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    kinds = {"step": int, "metrics": dict, "time": int | float | None}
    good = isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items())
    return row if good else None


def _registered_set(run: Run, name: str, tags: Mapping[str, str]) -> str:
    try:
        return sets.register(run.store.client, name, run, tags)
    except ValueError as error:
        if type(error) is ValueError:
            raise RefusedError(str(error)) from None
        raise


def _call(run: Run, method: str, *arguments: Any, **named: Any) -> Any:
    with run.store.turn:
        return partial(getattr(run.store.client, method), *arguments, **named)()


def _root(run: Run) -> Path | None:
    """The run's directory, where it is on a disk of this machine."""
    assert run.artifact_uri is not None, "the run is bound before anything is told of it"
    return local_path(run.artifact_uri)


def _there(path: Path) -> Path:
    if not path.exists():
        raise RefusedError(f"{path} is gone")
    return path
