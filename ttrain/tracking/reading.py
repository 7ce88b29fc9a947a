"""Read runs back: find them by name, with their settings, metrics, stages and files.

A run of this home is read from its record and from the files of its stages: in the store, in the work directory, or in
the copies that MLflow keeps on this disk. MLflow itself is asked, through its client, only for what is not here: runs of
other homes, and stages without files, or whose artifact another run built anew. If it does not answer, a note says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ttrain.config import Settings, flatten
from ttrain.core.files import JsonDict, JsonObject, parse_object, read_object
from ttrain.core.redact import masked, without_user
from ttrain.errors import UsageError
from ttrain.store import references, runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import MANIFEST, Manifest
from ttrain.tracking import delivery
from ttrain.tracking.artifact_source import LocalCopies, MlflowSource, StoredRun
from ttrain.tracking.calls import MADE, Result, attempt, clean, first_line
from ttrain.tracking.champions import decision_metrics
from ttrain.tracking.client import tracking_uri
from ttrain.tracking.database import is_missing
from ttrain.tracking.model_sets import KIND, SET, find_version
from ttrain.tracking.runs import PARENT
from ttrain.tracking.views import RunView, StageView

OUTCOMES: Mapping[str, str] = {"FINISHED": "completed", "FAILED": "failed", "KILLED": "interrupted", "RUNNING": "running"}
NO_RUN = StoredRun("", "", "", 0.0, None, "", {}, {}, defaultdict(str), {})  # in place of one that MLflow has no more
RUN_ID = re.compile(r"[0-9a-f]{32}")
EVALUATION = "evaluate"  # the stage


def read_run(home: Path, text: str, *, tracked: bool = False) -> RunView:
    """The run that `text` names, as `read_runs` does. `tracked`: with MLflow's ids of its stages."""
    return _RunReader(home.resolve()).read([text], tracked=tracked)[0]


def read_runs(home: Path, texts: Sequence[str]) -> list[RunView]:
    """The runs with these names, in this order.

    A name is that of `ttrain pipeline status` or a part of it (`store.references`), MLflow's id of the run or of a stage's
    run, or a registered model, for the run that made it. Raises UsageError that lists the nearest and newest runs.
    """
    return _RunReader(home.resolve()).read(texts)


def read_local(home: Path, name: str) -> RunView:
    """The run of that name from its record and files in this home alone, without querying MLflow."""
    return _RunReader(home.resolve(), asks=False).read([name])[0]


@dataclass
class _Match:
    """A run that a name led to: its record in the home, MLflow's id of it, or both; then what MLflow says of it."""

    record: JsonDict | None
    run_id: str | None
    parent: StoredRun | None = None
    children: Mapping[str, StoredRun] = field(default_factory=dict)  # runs of the stages that it built itself
    by_key: Mapping[tuple[str, str], StoredRun] = field(default_factory=dict)  # of any run, by stage and key
    notes: tuple[str, ...] = ()


class _RunReader:
    """Reads several runs together, since each query to MLflow costs the same for one run and for many."""

    def __init__(self, home: Path, *, asks: bool = True) -> None:
        self._home, self._store, self._asks = home, ArtifactStore(home), asks
        self._names = runs.names(home)
        self._notes: list[str] = []
        self._copies = LocalCopies(home)
        self._cache: dict[tuple[str | None, ...], Any] = {}

    def read(self, texts: Sequence[str], *, tracked: bool = False) -> list[RunView]:
        matches = [self._find(text) for text in texts]
        if incomplete := [match for match in matches if tracked or not self._is_whole(match.record)]:
            self._ask_about(incomplete)
        return [self._view(match) for match in matches]

    @cached_property
    def _source(self) -> MlflowSource | None:
        """MLflow, opened at the first question; None if it is not to be asked, or cannot be."""
        if self._asks and is_missing(tracking_uri(self._home), self._home):
            self._notes.append("nothing is in MLflow yet: taken from the home's records and artifacts")
        elif self._asks:
            try:
                return MlflowSource(self._home)
            except Exception as error:  # MLflow may raise anything
                self._note_silent(error)
        return None

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Query MLflow; None if it fails, and for all queries after that."""
        if self._source is None:
            return None
        try:
            return getattr(self._source, method)(*arguments)
        except Exception as error:
            self._source = None
            self._note_silent(error)
            return None

    def _ask_source(self, question: Callable[..., Result], *arguments: str) -> Result | None:
        """What MLflow answers, if it was opened to find the runs; None also if it fails."""
        source = self.__dict__.get("_source")
        return attempt(lambda: question(source, *arguments))[0] if source else None

    def _note_silent(self, error: Exception) -> None:
        self._notes.append(
            f"MLflow at {without_user(tracking_uri(self._home))} cannot be queried ({first_line(error)}): "
            f"taken from the home's records and artifacts"
        )

    def _find(self, text: str) -> _Match:
        if (name := references.matching(text, self._names)) and (record := runs.read(self._home, name)):
            return _Match(record, _tracked_id(record))
        if RUN_ID.fullmatch(text) and (match := self._with_id(text)):
            return match
        if model := references.registered(text):
            return self._with_model(model)
        for tag in (
            ("mlflow.runName", "ttrain.run") if text != references.LATEST else ()
        ):  # a night's run has the night's name
            if tracked_runs := self._ask("with_tags", tag, [text]):
                return self._tracked(tracked_runs[0])
        raise references.unknown_run(self._home, text, self._names)

    def _with_id(self, run_id: str) -> _Match | None:
        """The run with this id in MLflow, or the run of the stage that has it."""
        records = (record for name in self._names if (record := runs.read(self._home, name)))
        if record := next((record for record in records if _tracked_id(record) == run_id), None):
            return _Match(record, run_id)
        tracked_run = (self._ask("runs", [run_id]) or {}).get(run_id)
        return self._tracked(tracked_run) if tracked_run else None

    def _tracked(self, run: StoredRun) -> _Match:
        """The run of the pipeline that MLflow's run is, or is a stage of."""
        name = run.tags["ttrain.run"] or run.name
        record = runs.read(self._home, name) if name in self._names else None
        return _Match(record, run.tags[PARENT] or run.run_id)

    def _with_model(self, model: references.Registered) -> _Match:
        """The run that made a registered model, or a set of them."""
        version = find_version(self._home, model)
        if version.tags.get(KIND) == SET:
            return self._find(version.tags["ttrain.run"])
        for child in self._ask("with_tags", "ttrain.key", [version.tags.get("ttrain.key", "")]) or ():
            if child.tags["ttrain.stage"] == version.tags.get("ttrain.stage") and child.tags["ttrain.run"]:
                return self._find(child.tags["ttrain.run"])
        raise UsageError(f"'{model}' is registered, but the run that made it is neither in MLflow nor in {self._home}")

    def _is_whole(self, record: runs.RecordedRun | None) -> bool:
        """Whether all stages that began are here."""
        return record is not None and all(self._is_here(record, entry) for entry in record["stages"] if entry.get("key"))

    def _is_here(self, record: runs.RecordedRun, entry: JsonObject) -> bool:
        """Whether the files of a stage are on this disk, and are those of the run itself."""
        if manifest := self._manifest(entry):
            return entry["outcome"] not in runs.BUILT or _maker_in(manifest) in (None, record["run"])
        has_ended = entry["outcome"] in (*runs.BUILT, "cached")
        return not has_ended and self._store.work(entry["name"], entry["key"]).exists()

    def _manifest(self, entry: JsonObject) -> JsonObject:
        """The manifest of a stage's artifact, from the store, else from MLflow's copy on this disk; else empty."""
        stage, key = entry["name"], entry.get("key")
        if not key:
            return {}
        manifest = read_object(self._store.path(stage, key) / MANIFEST)
        copies = iter(()) if manifest else map(read_object, (path / MANIFEST for path in self._copies.find(stage, key)))
        return manifest or next(filter(None, copies), {})

    def _ask_about(self, matches: Sequence[_Match]) -> None:
        """Let MLflow tell about these runs and their stages."""
        parents = self._ask("runs", [match.run_id for match in matches if match.run_id]) or {}
        links = {run_id: delivery.stages_of(parent.tags).values() for run_id, parent in parents.items()}
        linked = [link["run"] for stages in links.values() for link in stages if "run" in link]
        children = [*(self._ask("runs", linked) or {}).values()]
        unlinked = [run_id for run_id, stages in links.items() if not any("run" in link for link in stages)]
        children += self._ask("with_tags", PARENT, unlinked) or []
        keys = {link["key"] for stages in links.values() for link in stages if "key" in link}
        keys |= {entry["key"] for match in matches if match.record for entry in match.record["stages"] if entry.get("key")}
        keys -= {child.tags["ttrain.key"] for child in children}
        children += self._ask("with_tags", "ttrain.key", sorted(keys)) or []
        children.sort(key=lambda run: (run.status == "FINISHED", run.started))  # of several, the last one is taken
        by_key = {(child.tags["ttrain.stage"], child.tags["ttrain.key"]): child for child in children}
        for match in matches:
            match.parent, match.by_key = parents.get(match.run_id or ""), by_key
            own = (child for child in reversed(children) if match.run_id and child.tags[PARENT] == match.run_id)
            match.children = {child.tags["ttrain.stage"]: child for child in own}
            if match.record and match.run_id and self._source and not match.parent:
                match.notes = (f"MLflow has no run {match.run_id}: taken from the home's records and artifacts",)

    def _view(self, match: _Match) -> RunView:
        parent = match.parent or NO_RUN
        record = match.record or _record_of(parent, match.children)
        settings = masked(dict(flatten(record["settings"])))
        name, decision = self._decisions.get(record["run"], ("", {}))
        decided = tuple(parent.tags[tag] for tag in ("ttrain.night", "ttrain.decision", "ttrain.decision.reason"))
        if decision:
            decided = (name, "promoted" if decision["promote"] else "kept", str(decision["reason"]))
        own = {**(record.get("metrics") or {}), **(decision_metrics(decision) if decision else {})}
        view = RunView(
            name=record["run"],
            run_id=match.run_id,
            pipeline=record["pipeline"],
            status=record["outcome"],
            started=record["started_unix"],
            seconds=record["seconds"],
            params={name: str(value) for name, value in settings.items()},  # in the form that MLflow stores
            metrics=own,
            stages={entry["name"]: self._stage(entry, match) for entry in record["stages"]},
            notes=tuple(dict.fromkeys([*self._notes, *match.notes])),
            decision=decided if all(decided) else (),
            record=match.record or {},
            store=self._store,
            ask=self._ask_source,
            cache=self._cache,
        )
        return replace(view, metrics={**own, **_with_own_names(parent.metrics, own, view)})

    def _stage(self, entry: JsonObject, match: _Match) -> StageView:
        name, key, is_cached = entry["name"], entry.get("key"), entry["outcome"] == "cached"
        own_run = match.children.get(name)
        stage_run = own_run or match.by_key.get((name, key or ""))
        manifest = self._manifest(entry)
        copies = () if stage_run or not key or self._store.path(name, key).exists() else self._copies.find(name, key)
        seconds = manifest.get("seconds") or _seconds(stage_run) if is_cached else entry.get("seconds")
        ended = manifest.get("published") or (own_run.ended if own_run else None)
        return StageView(
            stage=name,
            key=key,
            status=entry["outcome"],
            cached=is_cached,
            made_by=self._maker(entry, match, stage_run, manifest),
            run_id=stage_run.run_id if stage_run else None,
            seconds=seconds,
            ended=None if is_cached else ended,
            data=stage_run.data if stage_run else {},
            artifact_uri=stage_run.artifact_uri if stage_run else next((path.parent.as_uri() for path in copies), None),
            record=entry,
            manifest=manifest,
        )

    def _maker(self, entry: JsonObject, match: _Match, stage_run: StoredRun | None, manifest: Manifest) -> str | None:
        """The name of the run that made a stage's artifact."""
        if match.record and entry["outcome"] in runs.BUILT:
            return str(match.record["run"])
        return stage_run.tags["ttrain.run"] if stage_run else _maker_in(manifest)

    @cached_property
    def _decisions(self) -> Mapping[str, tuple[str, JsonObject]]:
        """The name and the decision of each night that decided, by its run."""
        nights = ((path.stem, read_object(path)) for path in (self._home / "nightly").glob("*/night-*.json"))
        decided = ((name, night) for name, night in nights if night.get("run") and isinstance(night.get("decision"), dict))
        return {night["run"]: (name, night["decision"]) for name, night in decided}


def _record_of(parent: StoredRun, children: Mapping[str, StoredRun]) -> JsonDict:
    """What a run without a record here would have in one: its stages are those that it built, and those in its tags."""
    stages: dict[str, JsonDict] = {}
    for name, child in children.items():
        key, seconds = child.tags["ttrain.key"] or None, _seconds(child)
        stages[name] = {"name": name, "outcome": _outcome(child), "key": key, "seconds": seconds}
    for name, link in delivery.stages_of(parent.tags).items():
        if name not in stages and "key" in link:
            stages[name] = {"name": name, "outcome": "cached", "key": link["key"]}
    # MLflow has the settings that are not the default; of a sweep's run its own alone.
    defaults = dict(flatten(Settings().model_dump(mode="json"))) if "pretrain.tokens" in parent.params else {}
    return {
        "run": parent.name,
        "pipeline": parent.tags["ttrain.pipeline"],
        "outcome": _outcome(parent),
        "started_unix": parent.started,
        "seconds": _seconds(parent),
        "settings": {**defaults, **parent.params},
        "stages": sorted(stages.values(), key=lambda stage: children.get(stage["name"], NO_RUN).started),
    }


def _with_own_names(tracked: Mapping[str, float], own: Iterable[str], view: RunView) -> dict[str, float]:
    """MLflow's metrics of a run under the names that they had before MLflow's rules for names changed them.

    A run without a record here has these names in its evaluation.
    """
    names = set(own)
    if not names and any(MADE.search(name) for name in tracked):
        evaluation = parse_object(view.text(EVALUATION, "evaluation.json") or "")
        names = {f"eval/{name}" for name in evaluation.get("metrics", {})}
    originals = {clean(name): name for name in names}
    return {originals.get(name, name): value for name, value in tracked.items()}


def _tracked_id(record: runs.RecordedRun) -> Any:
    return (record.get("tracking") or {}).get("run_id")


def _maker_in(manifest: Manifest) -> str | None:
    maker: str | None = manifest.get("provenance", {}).get("run")
    return maker


def _outcome(run: StoredRun) -> str:
    return run.tags["ttrain.outcome"] or OUTCOMES.get(run.status, run.status.lower())


def _seconds(run: StoredRun | None) -> float | None:
    return run.ended - run.started if run and run.ended else None
