"""Deliver outbox entries to MLflow, one function for each kind; all are idempotent.

Each raises what MLflow does, or RefusedError if the entry can never be delivered.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from ttrain.config import flatten
from ttrain.core.files import JsonObject, exclusive, parse_object
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.runs import BUILT, NOTHING_NEW
from ttrain.tracking import datasets, model_sets, uploads
from ttrain.tracking.calls import RefusedError, Tags, below, code_of, plain
from ttrain.tracking.outbox import Entry
from ttrain.tracking.runs import PARENT, AnyRun, MetricPoint, TrackedRun, delete_duplicates, parent_id
from ttrain.tracking.uploads import local_path, place_file, write_text

log = logging.getLogger("ttrain")

PARAMS_PER_BATCH = 100  # MLflow refuses more

POINTS_PER_BATCH = 1000  # and more of these


def params(run: TrackedRun, entry: Entry) -> None:
    """Log parameters; one that the run already has keeps its value."""
    values: Mapping[str, str] = entry.data["values"]
    for key, value in values.items():
        if run.params.get(key, value) != value:
            log.warning("MLflow run %s keeps %s = %s, now %s", run.id, key, run.params[key], value)
    fresh = [(key, value) for key, value in values.items() if key not in run.params]
    kind = import_module("mlflow.entities").Param
    for first in range(0, len(fresh), PARAMS_PER_BATCH):
        batch = fresh[first : first + PARAMS_PER_BATCH]
        run.call("log_batch", run.id, params=[kind(*pair) for pair in batch])
        run.params.update(batch)


def tags(run: TrackedRun, entry: Entry) -> None:
    """Set tags, replacing old values."""
    kind = import_module("mlflow.entities").RunTag
    run.call("log_batch", run.id, tags=[kind(*pair) for pair in entry.data["values"].items()])


def continued(run: TrackedRun, entry: Entry) -> None:
    """Reopen an ended run, perhaps under another parent."""
    run.call("update_run", run.id, status="RUNNING")
    parent = parent_id(run)
    run_tags = {**entry.data["values"], **({PARENT: parent} if parent else {})}
    tags(run, Entry(entry.number, "tags", {"values": run_tags}))


def summary(run: TrackedRun, entry: Entry) -> None:
    """Log metrics of the whole run, without those that it has already."""
    fresh = {key: value for key, value in entry.data["values"].items() if run.values.get(key) != value}
    _send(run, [(key, value, entry.data["time"], 0) for key, value in fresh.items()])
    run.values |= fresh


def rows(run: TrackedRun, entry: Entry) -> None:
    """Send points of curves, without those whose step the metric has already passed in MLflow.

    What was sent but not answered is sent again unchanged: MLflow's key of a point is its step, time and value, so it is
    stored once.
    """
    fresh = [(key, value, time, step) for key, value, time, step in entry.data["points"] if step > run.steps.get(key, -1)]
    _send(run, fresh)


def _send(run: TrackedRun, points: Sequence[MetricPoint]) -> None:
    """Send points in batches, and note the last step of each metric after each batch."""
    for first in range(0, len(points), POINTS_PER_BATCH):
        batch = points[first : first + POINTS_PER_BATCH]
        _send_batch(run, batch)
        for key, _, _, step in batch:
            run.steps[key] = max(step, run.steps.get(key, -1))


def _send_batch(run: TrackedRun, batch: Sequence[MetricPoint], *, whole: bool = True) -> None:
    """Send one batch. If MLflow refuses it, send its halves, until the refused point is alone and is dropped."""
    kind = import_module("mlflow.entities").Metric
    try:
        run.call("log_batch", run.id, metrics=[kind(*point) for point in batch])
    except Exception as error:
        if code_of(error) != "INVALID_PARAMETER_VALUE":
            raise
        if whole and run.call("get_run", run.id).info.lifecycle_stage != "active":
            raise RefusedError("the run was deleted in MLflow; restore it there to log what follows") from None
        if len(batch) == 1:
            run.store.caller.warn(f"logging {batch[0][0]}", error)
            return
        half = len(batch) // 2
        _send_batch(run, batch[:half], whole=False)
        _send_batch(run, batch[half:], whole=False)


def end(run: TrackedRun, entry: Entry) -> None:
    """Set the run's status and end time."""
    run.call("set_terminated", run.id, entry.data["status"], entry.data["time"])
    if run.outbox.run_info.get("doubtful"):
        delete_duplicates(run)


def log_inputs(run: TrackedRun, entry: Entry) -> None:
    """Log the data sets that the run reads."""
    inputs = [datasets.DataInput(**{**fields, "files": tuple(fields["files"])}) for fields in entry.data["inputs"]]
    with run.store.lock:
        datasets.log(run.store.client, str(run.id), inputs)


def text(run: TrackedRun, entry: Entry) -> None:
    """Log a text as a file of the run."""
    content = plain(entry.data["text"])
    if root := _root(run):
        write_text(below(root, entry.data["to"]), content)
    else:
        with uploads.patient_uploads():
            run.store.client.log_text(run.id, content, entry.data["to"])


def files(run: TrackedRun, entry: Entry) -> None:
    """Log a file of the run, or those of a finished directory."""
    source, to = run.store.home / entry.data["path"], entry.data["to"]
    if not source.exists():
        raise RefusedError(f"{source} is gone")
    listed = uploads.list_files(source, to) if entry.kind == "directory" else [(source, to)]
    if root := _root(run):
        for path, target in listed:
            place_file(path, below(root, target))
    else:
        uploads.send(run, entry, listed)


def _root(run: TrackedRun) -> Path | None:
    """The run's directory; None if it is not on a disk of this machine."""
    assert run.artifact_uri is not None, "the run is created in MLflow before anything is delivered"
    return local_path(run.artifact_uri)


STAGES = "ttrain.stages"

LOCK = Path("mlflow", "links.lock")  # in the home: stages, also of other processes, add to the same tag


def stages_of(tags: Tags) -> dict[str, dict[str, str]]:
    """Artifact key and run id of each stage, from the tags of a pipeline run."""
    links = parse_object(tags.get(STAGES, "")).items()
    return {stage: {name: str(value) for name, value in link.items()} for stage, link in links if isinstance(link, dict)}


def stages(run: TrackedRun, entry: Entry) -> None:
    """Note the artifacts of the run's stages in its tag."""
    _add(run, str(run.id), entry.data["values"])


def to_parent(run: TrackedRun, entry: Entry) -> None:
    """Note this run in the pipeline run's tag, as the one with this stage's curves."""
    if parent := parent_id(run):
        _add(run, parent, {entry.data["stage"]: {"run": str(run.id)}})


def made_by(run: TrackedRun, entry: Entry) -> None:
    """Note in the pipeline run's tag which run built a stage that came from the cache."""
    stage, key = entry.data["stage"], entry.data["key"]
    experiment = run.store.experiment_id(run.outbox.run_info.get("experiment"))
    query = f"tags.`ttrain.key` = '{key}' AND tags.`ttrain.stage` = '{stage}' AND attributes.status = 'FINISHED'"
    runs = run.call("search_runs", [experiment], query, max_results=1, order_by=["attributes.end_time DESC"])
    runs = runs or _killed_after_publishing(run, experiment, query)
    if runs:
        _add(run, str(run.id), {stage: {"run": runs[0].info.run_id}})


def _killed_after_publishing(run: TrackedRun, experiment: str, query: str) -> list[Any]:
    """The run that made a whole artifact but was marked as killed before it could report so; mark it as finished."""
    killed = run.call("search_runs", [experiment], query.replace(FINISHED, "KILLED"))
    runs = [candidate for candidate in killed if artifact_of(run.store.home, candidate.data.tags)][:1]
    for candidate in runs:
        run.call("set_terminated", candidate.info.run_id, FINISHED, candidate.info.end_time)
    return runs


def _add(run: TrackedRun, parent: str, new_links: Mapping[str, Mapping[str, str]]) -> None:
    """Add links to the tag of `parent`, under a lock: parallel stages would overwrite each other's links."""
    with exclusive(run.store.home / LOCK):
        stage_links = stages_of(run.call("get_run", parent).data.tags)
        for stage, link in new_links.items():
            stage_links[stage] = {**stage_links.get(stage, {}), **link}
        run.call("set_tag", parent, STAGES, json.dumps(stage_links))


def register(run: TrackedRun, entry: Entry) -> str:
    """Register a version of a model whose files the run holds."""
    with run.store.lock:
        return model_sets.register_model(run, {**entry.data, "artifact_path": entry.data["path"]})


def register_models(run: TrackedRun, entry: Entry) -> str:
    """Register the models of a run as one set, which can become champion; models not registered yet first, from this run."""
    data, members = entry.data, []
    with exclusive(model_sets.lock_of(run.store.home)):
        for model in data["models"]:
            with run.store.lock:
                version = model_sets.first_version(run.store.client, model["name"], model["tags"], model_sets.ARTIFACT)
            if version is None:
                if not model["path"]:
                    raise RefusedError(f"{model['name']} is not registered, and its files are not on this machine")
                files(run, Entry(entry.number, "directory", {"path": model["path"], "to": model["stage"]}, entry.parts))
                _log_extra_files(run, entry, model)
            with run.store.lock:
                number = model_sets.register_model(run, model)  # or describe it anew: there is an evaluation now
            members.append(model_sets.Member(model["name"], number, model["stage"], model["tags"]["ttrain.key"]))
        contents = {model["stage"]: model["tags"]["ttrain.content"] for model in data["models"]}
        set_tags = model_sets.tags_of(
            data["run_name"], members, contents=contents, keys=data["keys"], metrics=data["metrics"]
        )
        with run.store.lock:
            return model_sets.register_set(
                run.store.client, data["name"], run, set_tags, data.get("description", ""), data.get("about", "")
            )


def _log_extra_files(run: TrackedRun, entry: Entry, model: JsonObject) -> None:
    """Log the files that make a registered model loadable elsewhere, into its directory."""
    target = PurePosixPath(model["artifact_path"])
    for name, content in model.get("texts", {}).items():
        text(run, Entry(entry.number, "text", {"to": str(target / name), "text": content}, entry.parts))
    for name, source in model.get("files", {}).items():
        files(run, Entry(entry.number, "file", {"path": source, "to": str(target / name)}, entry.parts))


RUN, STAGE, KEY = "ttrain.run", "ttrain.stage", "ttrain.key"  # tags of a stage's run
FINISHED = "FINISHED"


def status_of(outcome: str) -> str:
    """MLflow's status of a run or a stage that ended with this outcome."""
    return FINISHED if outcome in (*BUILT, NOTHING_NEW) else "FAILED" if outcome == "failed" else "KILLED"


FIT = ("bytes_per_token", "unk_rate")  # metrics of a tokenizer, by which tokenizers are compared


def log_result(run: AnyRun, artifact: Artifact) -> None:
    """Log the figures of a finished stage, and its data sets."""
    run.log_params({**group_params(artifact.result), **_figures(artifact.result)})
    fit = {f"tok/{name}": float(artifact.result[name]) for name in FIT if name in artifact.result}
    run.log_summary(fit)
    run.log_inputs(datasets.data_of(artifact))


def artifact_of(home: Path, tags: Tags) -> Artifact | None:
    """The whole artifact that the run with these tags published; None if another run made it, or there is none."""
    stage, key, name = (str(tags.get(tag, "")) for tag in (STAGE, KEY, RUN))
    artifact = ArtifactStore(home).find(stage, key) if stage and key else None
    made_by = artifact.provenance.get("run") if artifact else None
    return artifact if name and made_by == name else None


def group_params(result: JsonObject) -> dict[str, object]:
    """What each optimizer group holds, as parameters: {"optim.groups.0.weight_decay": 0.1}."""
    groups = enumerate(result.get("optimizer_groups", ()))
    return {f"optim.groups.{number}.{name}": value for number, group in groups for name, value in group.items()}


def _figures(result: JsonObject) -> dict[str, object]:
    """The figures of a result as parameters: {"result.rows.fill": 0.98}. As metrics each would be a chart of one point, and
    MLflow would show these charts before the curves."""
    return {
        f"result.{name}": value
        for name, value in flatten({key: value for key, value in result.items() if key != "samples"})
        if isinstance(value, int | float)
    }


@dataclass(frozen=True)
class DeliveryType:
    """How entries of one kind are delivered, and what a warning calls it."""

    deliver: Callable[[TrackedRun, Entry], Any]
    label: str
    uploads: bool = False  # may take long: delivered in order by a thread of its own if files go over the network


DELIVERY_TYPES: Mapping[str, DeliveryType] = {
    "params": DeliveryType(params, "logging parameters"),
    "tags": DeliveryType(tags, "setting tags"),
    "continued": DeliveryType(continued, "continuing a run"),
    "summary": DeliveryType(summary, "logging a summary"),
    "rows": DeliveryType(rows, "sending metrics (they wait on disk)"),
    "end": DeliveryType(end, "ending a run"),
    "stages": DeliveryType(stages, "linking a stage's run"),
    "to_parent": DeliveryType(to_parent, "linking a stage's run"),
    "made_by": DeliveryType(made_by, "linking a stage's run"),
    "inputs": DeliveryType(log_inputs, "logging data sets"),
    "text": DeliveryType(text, "logging a text", uploads=True),
    "file": DeliveryType(files, "logging a file", uploads=True),
    "directory": DeliveryType(files, "logging files", uploads=True),
    "register": DeliveryType(register, "registering a model", uploads=True),
    "register_models": DeliveryType(register_models, "registering a set of models", uploads=True),
}
