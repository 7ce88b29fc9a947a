"""Reads runs back: what a command calls them, what they were told, what their stages measured and wrote.

Asked are MLflow (the home's own database without importing MLflow), the run's record in the home and its artifacts in
the store. Where MLflow does not answer, or never heard of the run, the others serve, and the view's notes say so.
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
from ttrain.errors import UsageError
from ttrain.store import runs
from ttrain.store.artifacts import Store
from ttrain.tracking import links
from ttrain.tracking.calls import first_line
from ttrain.tracking.database import database_of
from ttrain.tracking.mlflow_setup import tracking_uri
from ttrain.tracking.model_sets import KIND, SET
from ttrain.tracking.reading_database import Database
from ttrain.tracking.reading_files import Files, Source
from ttrain.tracking.registry import find_version
from ttrain.tracking.views import RunView, StageView, Tracked

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

    A name is that of `ttrain pipeline status` or a beginning of it that no other run has, `latest`, MLflow's id of the
    run or of a stage's, or a registered model (NAME@alias, NAME/VERSION): the run that made it. Raises UsageError that
    lists what there is.
    """
    return _Reading(home.resolve()).read(texts)


def read_local(home: Path, name: str) -> RunView:
    """The run of that name from its record and its artifacts in this home alone: nobody is asked, nothing is waited for."""
    return _Reading(home.resolve(), asks=False).read([name])[0]


@final
class _Reading:
    """One question: all runs of it are read together, since each look into MLflow costs the same for one and for many."""

    def __init__(self, home: Path, *, asks: bool = True) -> None:
        self._home, self._store = home, Store(home)
        self._names = _recorded(home)
        self._notes: list[str] = []
        self._files = Files(self._store)  # which shares what it has read, and asks who is asked here
        if asks:
            self._open()

    def read(self, texts: Sequence[str]) -> list[RunView]:
        found = [self._find(text) for text in texts]  # (record, id of the tracked run)
        parents = self._ask("runs", [run_id for _, run_id in found if run_id]) or {}
        records = [record or self._record_of(parents.get(run_id or "")) for record, run_id in found]
        stages = self._stages_of(records, parents)
        return [
            self._view(record, parents.get(run_id or ""), run_id, stages)
            for record, (_, run_id) in zip(records, found, strict=True)
        ]

    @property
    def _source(self) -> Source | None:
        return self._files.source

    @_source.setter
    def _source(self, source: Source | None) -> None:
        self._files.source = source

    def _open(self) -> None:
        """MLflow as far as it can be had; the home's own database is read without it."""
        uri = tracking_uri(self._home)
        if uri == f"sqlite:///{database_of(self._home)}":
            if database_of(self._home).exists():
                self._source = Database(self._home)
            else:
                self._notes.append("nothing is in MLflow yet: taken from the home's records and artifacts")
            return
        try:
            from ttrain.tracking.reading_client import Client

            self._source = Client(self._home)
        except Exception as error:
            self._lost(error)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """What MLflow says; None where it says nothing, from then on for all questions."""
        if self._source is None:
            return None
        try:
            return getattr(self._source, method)(*arguments)
        except sqlite3.Error as error:  # a schema of another version, which MLflow itself upgrades or refuses
            if not isinstance(self._source, Database):
                self._lost(error)
                return None
            try:
                from ttrain.tracking.reading_client import Client

                self._source = Client(self._home)
            except Exception as second:
                self._lost(second)
                return None
            return self._ask(method, *arguments)
        except Exception as error:  # nothing settles what MLflow may raise
            self._lost(error)
            return None

    def _lost(self, error: Exception) -> None:
        self._source = None
        uri = without_user(tracking_uri(self._home))
        self._notes.append(
            f"MLflow at {uri} cannot be asked ({first_line(error)}): taken from the home's records and artifacts"
        )

    def _find(self, text: str) -> tuple[dict[str, Any] | None, str | None]:
        """(record, id of the tracked run) of a name; one of them is there."""
        if text == LATEST:
            if not self._names:
                raise UsageError(f"there is no run in {self._home} yet; begin with `ttrain pipeline run full`")
            text = max(self._names, key=_time_in_name)
        if text not in self._names and (alike := [name for name in self._names if text and name.startswith(text)]):
            if len(alike) > 1:
                raise UsageError(f"'{text}' is the beginning of {len(alike)} runs: {_few(alike)}; write more of the name")
            text = alike[0]
        if text in self._names:
            record = self._record(text)
            if record is not None:
                return record, (record.get("tracking") or {}).get("run_id")
        if re.fullmatch(r"[0-9a-f]{32}", text) and (found := self._of_id(text)):
            return found
        if matched := REGISTERED.fullmatch(text):
            return self._of_model(text, **matched.groupdict())
        if named := self._ask("with_tags", "mlflow.runName", [text]):
            return self._of_id(named[0]) or (None, named[0])
        raise UsageError(f"there is no run '{text}' in {self._home}; {self._listed()}")

    def _of_id(self, run_id: str) -> tuple[dict[str, Any] | None, str | None] | None:
        """The run with this id in MLflow, or the one whose stage has it."""
        known = self._ask("runs", [run_id]) or {}
        if run_id in known:
            return None, known[run_id].tags.get("mlflow.parentRunId", run_id)
        records = (self._record(name) for name in self._names)
        told = (record for record in records if record and (record.get("tracking") or {}).get("run_id") == run_id)
        return next(((record, run_id) for record in told), None)

    def _of_model(
        self, text: str, *, name: str, alias: str | None, version: str | None
    ) -> tuple[dict[str, Any] | None, str | None]:
        """The run that made a registered model, or a set of them."""
        found = find_version(self._home, name, version=version, alias=alias)
        if found.tags.get(KIND) == SET:
            return self._find(found.tags["ttrain.run"])
        made = self._ask("with_tags", "ttrain.key", [found.tags.get("ttrain.key", "")]) or []
        for child in (self._ask("runs", made) or {}).values():
            if child.tags.get("ttrain.stage") == found.tags.get("ttrain.stage") and child.tags.get("ttrain.run"):
                return self._find(child.tags["ttrain.run"])
        raise UsageError(f"'{text}' is registered, but the run that made it is neither in MLflow nor in {self._home}")

    def _record(self, name: str) -> dict[str, Any] | None:
        """What is on record of a run, with its end, where its process is gone without a word."""
        return runs.read(self._home, name)

    def _record_of(self, parent: Tracked | None) -> dict[str, Any] | None:
        return self._record(parent.name) if parent and parent.name in self._names else None

    def _listed(self) -> str:
        newest = sorted(self._names, key=_time_in_name, reverse=True)[:LISTED_RUNS]
        return (
            f"the newest are {', '.join(newest)}" if newest else "there is none yet, begin with `ttrain pipeline run full`"
        )

    def _stages_of(
        self, records: Sequence[dict[str, Any] | None], parents: Mapping[str, Tracked]
    ) -> dict[tuple[str, str], list[Tracked]]:
        """Tracked runs of stages by ("parent", its id) and by (stage, key), the newest first."""
        keys = {stage.get("key") for record in records if record for stage in record["stages"]} - {None, ""}
        ids = list(self._ask("with_tags", "mlflow.parentRunId", parents) or []) if parents else []
        for parent in parents.values():
            keys |= {about["key"] for about in links.stages_of(parent.tags).values() if "key" in about}
        ids += (self._ask("with_tags", "ttrain.key", keys) or []) if keys else []
        children = self._ask("runs", dict.fromkeys(ids)) or {}
        found: dict[tuple[str, str], list[Tracked]] = {}
        for child in sorted(children.values(), key=lambda one: (one.status == "FINISHED", one.started), reverse=True):
            tags = child.tags
            found.setdefault(("parent", tags.get("mlflow.parentRunId", "")), []).append(child)
            found.setdefault((tags.get("ttrain.stage", ""), tags.get("ttrain.key", "")), []).append(child)
        return found

    def _view(
        self,
        record: dict[str, Any] | None,
        parent: Tracked | None,
        run_id: str | None,
        children: Mapping[tuple[str, str], list[Tracked]],
    ) -> RunView:
        own = {child.tags.get("ttrain.stage", ""): child for child in reversed(children.get(("parent", run_id or ""), []))}
        noted = record["stages"] if record else _stages_noted(parent, own)
        stages = {one["name"]: self._stage(one, own.get(one["name"]), children) for one in noted}
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
            params={name: str(value) for name, value in masked(settings).items()},  # as MLflow has them
            metrics={**(record.get("metrics") or {} if record else {}), **(parent.metrics if parent else {})},
            stages=stages,
            inputs=parent.inputs if parent else (),
            notes=tuple(dict.fromkeys(notes)),
            noted=record or {},
            reader=self._files,
        )

    def _stage(
        self, noted: Mapping[str, Any], own: Tracked | None, children: Mapping[tuple[str, str], list[Tracked]]
    ) -> StageView:
        name, key = noted["name"], noted.get("key")
        made = own or next(iter(children.get((name, key or ""), ())), None)
        manifest = read_json(self._store.path(name, key) / "manifest.json") if key else None
        manifest = manifest if isinstance(manifest, dict) else {}
        figures = made.metrics if made else self._files.last_values(name, key)
        return StageView(
            stage=name,
            key=key,
            status=noted["outcome"],
            cached=noted["outcome"] == "cached",
            made_by=made.tags.get("ttrain.run") if made else manifest.get("provenance", {}).get("run"),
            run_id=made.run_id if made else None,
            seconds=noted.get("seconds") if noted["outcome"] != "cached" else manifest.get("seconds") or _seconds(made),
            ended=None if noted["outcome"] == "cached" else manifest.get("published") or (own.ended if own else None),
            params=made.params if made else {},
            metrics=figures,
            tags=made.tags if made else {},
            inputs=made.inputs if made else (),
            artifact_uri=made.artifact_uri if made else None,
            noted=noted,
            manifest=manifest,
        )


def _recorded(home: Path) -> list[str]:
    return [path.stem for path in (home / "runs").glob("*.json") if not path.name.startswith(".")]


def _time_in_name(name: str) -> tuple[str, ...]:
    """("20261121", "160222", "1a2b4") of "full-20261121-160222-1a2b4"."""
    return tuple(name.rsplit("-", 3)[1:])


def _few(names: Sequence[str]) -> str:
    newest = sorted(names, key=_time_in_name, reverse=True)
    return ", ".join(newest[:LISTED_RUNS]) + (", ..." if len(names) > LISTED_RUNS else "")


def _stages_noted(parent: Tracked | None, own: Mapping[str, Tracked]) -> list[dict[str, Any]]:
    """The stages of a run of which nothing is on record here: those that it built, and those that its tags name."""
    found: dict[str, dict[str, Any]] = {}
    for name, child in own.items():
        key, seconds = child.tags.get("ttrain.key"), _seconds(child)
        found[name] = {"name": name, "outcome": _outcome(child), "key": key, "seconds": seconds}
    for name, about in links.stages_of(parent.tags).items() if parent else ():
        if name not in found and "key" in about:
            found[name] = {"name": name, "outcome": "cached", "key": about["key"]}
    return sorted(found.values(), key=lambda stage: own[stage["name"]].started if stage["name"] in own else 0.0)


def _outcome(run: Tracked | None) -> str:
    return run.tags.get("ttrain.outcome") or OUTCOMES.get(run.status, run.status.lower()) if run else ""


def _seconds(run: Tracked | None) -> float | None:
    return run.ended - run.started if run and run.ended else None
