"""Read runs back: find them by name, with their settings, metrics, stages and files.

The sources are MLflow (the home's own database without importing MLflow), the run's record in the home and its artifacts
in the store. If MLflow does not answer, or does not know the run, the others are used, and the view's notes say so.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from ttrain.config.base import flatten
from ttrain.core.files import read_json
from ttrain.core.redact import masked, without_user
from ttrain.core.text import first_of
from ttrain.errors import UsageError
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.tracking import delivery
from ttrain.tracking.calls import first_line
from ttrain.tracking.client import tracking_uri
from ttrain.tracking.database import database_of
from ttrain.tracking.model_sets import KIND, SET
from ttrain.tracking.reading_sources import DatabaseSource
from ttrain.tracking.registry import find_version
from ttrain.tracking.views import RunSource, RunView, StageFiles, StageView, StoredRun

log = logging.getLogger("ttrain")

LATEST = "latest"
LISTED_RUNS = 5
REGISTERED = re.compile(r"(?:models:/)?(?P<name>[^@/:]+)(?:@(?P<alias>[^@/:]+)|/(?P<version>\d+))")
OUTCOMES: Mapping[str, str] = {"FINISHED": "completed", "FAILED": "failed", "KILLED": "interrupted", "RUNNING": "running"}


def read_run(home: Path, text: str) -> RunView:
    """The run that `text` names, as `read_runs` does."""
    return read_runs(home, [text])[0]


def read_runs(home: Path, texts: Sequence[str]) -> list[RunView]:
    """The runs with these names, in this order.

    A name is that of `ttrain pipeline status` or an unambiguous prefix of it, `latest`, MLflow's id of the run or of a
    stage's run, or a registered model (NAME@alias, NAME/VERSION), for the run that made it. Raises UsageError that lists
    the newest runs.
    """
    return _RunReader(home.resolve()).read(texts)


def read_local(home: Path, name: str) -> RunView:
    """The run of that name from its record and artifacts in this home alone, without querying MLflow."""
    return _RunReader(home.resolve(), asks=False).read([name])[0]


@final
class _RunReader:
    """Reads several runs together, since each query to MLflow costs the same for one run and for many."""

    def __init__(self, home: Path, *, asks: bool = True) -> None:
        self._home, self._store = home, ArtifactStore(home)
        self._names = _recorded_names(home)
        self._notes: list[str] = []
        self._files = StageFiles(self._store)  # shares its cache and its source with this reader
        if asks:
            self._open()

    def read(self, texts: Sequence[str]) -> list[RunView]:
        matches = [self._find(text) for text in texts]  # (record, id of the tracked run)
        parents = self._ask("runs", [run_id for _, run_id in matches if run_id]) or {}
        records = [record or self._record_of(parents.get(run_id or "")) for record, run_id in matches]
        stages = self._stages_of(records, parents)
        return [
            self._view(record, parents.get(run_id or ""), run_id, stages)
            for record, (_, run_id) in zip(records, matches, strict=True)
        ]

    @property
    def _source(self) -> RunSource | None:
        return self._files.source

    @_source.setter
    def _source(self, source: RunSource | None) -> None:
        self._files.source = source

    def _open(self) -> None:
        """Open MLflow if possible; the home's own database is read without it."""
        uri = tracking_uri(self._home)
        if uri == f"sqlite:///{database_of(self._home)}":
            if database_of(self._home).exists():
                self._source = DatabaseSource(self._home)
            else:
                self._notes.append("nothing is in MLflow yet: taken from the home's records and artifacts")
            return
        try:
            from ttrain.tracking.reading_sources import ApiSource

            self._source = ApiSource(self._home)
        except Exception as error:
            self._lost(error)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Query MLflow; None if it fails, and for all queries after that."""
        if self._source is None:
            return None
        try:
            return getattr(self._source, method)(*arguments)
        except sqlite3.Error as error:  # a schema of another version, which MLflow itself upgrades or refuses
            if not isinstance(self._source, DatabaseSource):
                self._lost(error)
                return None
            try:
                from ttrain.tracking.reading_sources import ApiSource

                self._source = ApiSource(self._home)
            except Exception as second:
                self._lost(second)
                return None
            return self._ask(method, *arguments)
        except Exception as error:  # MLflow may raise anything
            self._lost(error)
            return None

    def _lost(self, error: Exception) -> None:
        self._source = None
        uri = without_user(tracking_uri(self._home))
        self._notes.append(
            f"MLflow at {uri} cannot be queried ({first_line(error)}): taken from the home's records and artifacts"
        )

    def _find(self, text: str) -> tuple[dict[str, Any] | None, str | None]:
        """(record, id of the tracked run) of a name; at least one is not None."""
        if text == LATEST:
            if not self._names:
                raise UsageError(f"there is no run in {self._home} yet; begin with `ttrain pipeline run full`")
            text = max(self._names, key=_time_in_name)
        if text not in self._names and (alike := [name for name in self._names if text and name.startswith(text)]):
            if len(alike) > 1:
                raise UsageError(
                    f"'{text}' is the beginning of {len(alike)} runs: {_newest_names(alike)}; write more of the name"
                )
            text = alike[0]
        if text in self._names:
            record = self._record(text)
            if record is not None:
                return record, (record.get("tracking") or {}).get("run_id")
        if re.fullmatch(r"[0-9a-f]{32}", text) and (match := self._of_id(text)):
            return match
        if matched := REGISTERED.fullmatch(text):
            return self._of_model(text, **matched.groupdict())
        if run_ids := self._ask("with_tags", "mlflow.runName", [text]):
            return self._of_id(run_ids[0]) or (None, run_ids[0])
        raise UsageError(f"there is no run '{text}' in {self._home}; {self._listed()}")

    def _of_id(self, run_id: str) -> tuple[dict[str, Any] | None, str | None] | None:
        """The run with this id in MLflow, or the run of the stage that has it."""
        tracked_runs = self._ask("runs", [run_id]) or {}
        if run_id in tracked_runs:
            return None, tracked_runs[run_id].tags.get("mlflow.parentRunId", run_id)
        records = (self._record(name) for name in self._names)
        matches = (record for record in records if record and (record.get("tracking") or {}).get("run_id") == run_id)
        return next(((record, run_id) for record in matches), None)

    def _of_model(
        self, text: str, *, name: str, alias: str | None, version: str | None
    ) -> tuple[dict[str, Any] | None, str | None]:
        """The run that made a registered model, or a set of them."""
        model_version = find_version(self._home, name, version=version, alias=alias)
        if model_version.tags.get(KIND) == SET:
            return self._find(model_version.tags["ttrain.run"])
        run_ids = self._ask("with_tags", "ttrain.key", [model_version.tags.get("ttrain.key", "")]) or []
        for child in (self._ask("runs", run_ids) or {}).values():
            if child.tags.get("ttrain.stage") == model_version.tags.get("ttrain.stage") and child.tags.get("ttrain.run"):
                return self._find(child.tags["ttrain.run"])
        raise UsageError(f"'{text}' is registered, but the run that made it is neither in MLflow nor in {self._home}")

    def _record(self, name: str) -> dict[str, Any] | None:
        """The record of a run, marked as ended if its process was killed."""
        return runs.read(self._home, name)

    def _record_of(self, parent: StoredRun | None) -> dict[str, Any] | None:
        return self._record(parent.name) if parent and parent.name in self._names else None

    def _listed(self) -> str:
        newest = sorted(self._names, key=_time_in_name, reverse=True)[:LISTED_RUNS]
        return (
            f"the newest are {', '.join(newest)}" if newest else "there is none yet, begin with `ttrain pipeline run full`"
        )

    def _stages_of(
        self, records: Sequence[dict[str, Any] | None], parents: Mapping[str, StoredRun]
    ) -> dict[tuple[str, str], list[StoredRun]]:
        """Tracked runs of stages by ("parent", parent id) and by (stage, key), newest first."""
        keys = {stage.get("key") for record in records if record for stage in record["stages"]} - {None, ""}
        ids = list(self._ask("with_tags", "mlflow.parentRunId", parents) or []) if parents else []
        for parent in parents.values():
            keys |= {link["key"] for link in delivery.stages_of(parent.tags).values() if "key" in link}
        ids += (self._ask("with_tags", "ttrain.key", keys) or []) if keys else []
        children = self._ask("runs", dict.fromkeys(ids)) or {}
        stage_runs: dict[tuple[str, str], list[StoredRun]] = {}
        for child in sorted(children.values(), key=lambda run: (run.status == "FINISHED", run.started), reverse=True):
            tags = child.tags
            stage_runs.setdefault(("parent", tags.get("mlflow.parentRunId", "")), []).append(child)
            stage_runs.setdefault((tags.get("ttrain.stage", ""), tags.get("ttrain.key", "")), []).append(child)
        return stage_runs

    def _view(
        self,
        record: dict[str, Any] | None,
        parent: StoredRun | None,
        run_id: str | None,
        children: Mapping[tuple[str, str], list[StoredRun]],
    ) -> RunView:
        own_stages = {
            child.tags.get("ttrain.stage", ""): child for child in reversed(children.get(("parent", run_id or ""), []))
        }
        stage_records = record["stages"] if record else _stages_from_tags(parent, own_stages)
        stages = {
            stage_record["name"]: self._stage(stage_record, own_stages.get(stage_record["name"]), children)
            for stage_record in stage_records
        }
        tags = dict(parent.tags) if parent else {}
        settings = dict(flatten(record["settings"])) if record else dict(parent.params) if parent else {}
        seconds = record["seconds"] if record else _seconds(parent)
        notes = list(self._notes)
        if record and run_id and parent is None and self._source is not None:
            notes.append(f"MLflow has no run {run_id}: taken from the home's records and artifacts")
        return RunView(
            name=record["run"] if record else parent.name if parent else "",
            run_id=run_id,
            pipeline=record["pipeline"] if record else tags.get("ttrain.pipeline", ""),
            status=record["outcome"] if record else _outcome(parent),
            started=record["started_unix"] if record else parent.started if parent else 0.0,
            seconds=seconds,
            tags=tags,
            params={name: str(value) for name, value in masked(settings).items()},  # in the form that MLflow stores
            metrics={**(record.get("metrics") or {} if record else {}), **(parent.metrics if parent else {})},
            stages=stages,
            inputs=parent.inputs if parent else (),
            notes=tuple(dict.fromkeys(notes)),
            record=record or {},
            reader=self._files,
        )

    def _stage(
        self, stage_record: Mapping[str, Any], own_run: StoredRun | None, children: Mapping[tuple[str, str], list[StoredRun]]
    ) -> StageView:
        name, key = stage_record["name"], stage_record.get("key")
        stage_run = own_run or next(iter(children.get((name, key or ""), ())), None)
        manifest = read_json(self._store.path(name, key) / "manifest.json") if key else None
        manifest = manifest if isinstance(manifest, dict) else {}
        figures = stage_run.metrics if stage_run else self._files.last_values(name, key)
        return StageView(
            stage=name,
            key=key,
            status=stage_record["outcome"],
            cached=stage_record["outcome"] == "cached",
            made_by=stage_run.tags.get("ttrain.run") if stage_run else manifest.get("provenance", {}).get("run"),
            run_id=stage_run.run_id if stage_run else None,
            seconds=stage_record.get("seconds")
            if stage_record["outcome"] != "cached"
            else manifest.get("seconds") or _seconds(stage_run),
            ended=None
            if stage_record["outcome"] == "cached"
            else manifest.get("published") or (own_run.ended if own_run else None),
            params=stage_run.params if stage_run else {},
            metrics=figures,
            tags=stage_run.tags if stage_run else {},
            inputs=stage_run.inputs if stage_run else (),
            artifact_uri=stage_run.artifact_uri if stage_run else None,
            record=stage_record,
            manifest=manifest,
        )


def _recorded_names(home: Path) -> list[str]:
    return [path.stem for path in (home / "runs").glob("*.json") if not path.name.startswith(".")]


def _time_in_name(name: str) -> tuple[str, ...]:
    """("20261121", "160222", "1a2b4") of "full-20261121-160222-1a2b4"."""
    return tuple(name.rsplit("-", 3)[1:])


def _newest_names(names: Sequence[str]) -> str:
    newest = sorted(names, key=_time_in_name, reverse=True)
    return first_of(newest, LISTED_RUNS)


def _stages_from_tags(parent: StoredRun | None, own_stages: Mapping[str, StoredRun]) -> list[dict[str, Any]]:
    """The stages of a run without a record here: those that it built, and those in its tags."""
    stages: dict[str, dict[str, Any]] = {}
    for name, child in own_stages.items():
        key, seconds = child.tags.get("ttrain.key"), _seconds(child)
        stages[name] = {"name": name, "outcome": _outcome(child), "key": key, "seconds": seconds}
    for name, link in delivery.stages_of(parent.tags).items() if parent else ():
        if name not in stages and "key" in link:
            stages[name] = {"name": name, "outcome": "cached", "key": link["key"]}
    return sorted(
        stages.values(), key=lambda stage: own_stages[stage["name"]].started if stage["name"] in own_stages else 0.0
    )


def _outcome(run: StoredRun | None) -> str:
    return run.tags.get("ttrain.outcome") or OUTCOMES.get(run.status, run.status.lower()) if run else ""


def _seconds(run: StoredRun | None) -> float | None:
    return run.ended - run.started if run and run.ended else None
