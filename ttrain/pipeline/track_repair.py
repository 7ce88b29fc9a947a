"""`ttrain track repair`: a damaged MLflow database set aside, and a new one told of all runs of the home.

A run is told again from its record (`runs/`), the manifests and curves of its artifacts, and its log. It keeps its identity,
so that what waits in its outbox joins it. What only the database knew is not told: `LOST` names it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ttrain import tracking
from ttrain.config import flatten
from ttrain.core.hashing import digest_of
from ttrain.errors import UsageError
from ttrain.pipeline import earlier_settings, model_description, registration, run_summary, system_metrics
from ttrain.pipeline.execution import REGISTERED, REPORT, tracked_path
from ttrain.reports import evaluation_table, summary
from ttrain.stages import STAGES
from ttrain.store import runs
from ttrain.store.artifacts import Store
from ttrain.store.layout import Artifact

log = logging.getLogger("ttrain")

LOST: Final = (
    "champions (choose one: ttrain models promote), version numbers, descriptions, tags and deletions that were made in "
    "MLflow, runs of models that were evaluated or registered by hand, pages of sweeps"
)
STATUS: Final = {"completed": "FINISHED", "failed": "FAILED"}  # else KILLED
BUILT: Final = ("completed", "equal", "different")
ENDED: Final = (*BUILT, "failed", "interrupted")


@dataclass(frozen=True)
class Repair:
    """What a repair did."""

    damage: str | None  # in SQLite's words
    aside: Path | None  # the damaged file
    runs: tuple[str, ...]  # told again
    without_files: tuple[str, ...]  # RUN:STAGE whose artifact is no longer in the store
    unreadable: tuple[str, ...]  # runs whose records, of another version or damaged, cannot be told
    waiting: int  # tracked runs that have something left to tell
    by_servers: tuple[str, ...] = ()  # told to a server over HTTP, which may have had this database

    def to_json(self) -> dict[str, Any]:
        """What `track repair --json` prints."""
        return {**self.__dict__, "aside": str(self.aside) if self.aside else None}


def repair(home: Path, say: Callable[[str], object]) -> Repair:
    """Set the home's own database aside where it is damaged, and tell the one that is there of every run that it lacks.

    Killed in between, the same command continues. Raises UsageError while a run is in progress, TrackingError.
    """
    if at_work := [run["run"] for run in runs.in_progress(home)]:
        raise UsageError(f"{', '.join(at_work)} is in progress and tells MLflow; wait for its end, or stop it with Ctrl-C")
    damage, aside = tracking.set_damaged_database_aside(home) or (None, None)
    if aside is not None:
        say(f"the database is damaged ({damage}); it is kept as {aside}")
    told = tracking.told_identities(home)
    missing = [run for run in reversed(runs.history(home)) if (identity := _identity(run)) and identity not in told]
    done, absent, unreadable = list[str](), list[str](), list[str]()
    store, trackers = Store(home), dict[str, tracking.Store]()
    for number, record in enumerate(missing, 1):
        say(f"{record['run']}: {number} of {len(missing)}")
        try:
            experiment = str(record["settings"]["tracking"]["experiment"])
            if experiment not in trackers:
                trackers[experiment] = tracking.open_own_store(home, experiment)
            absent += _Again(record, store, trackers[experiment]).tell()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            log.warning("the record of %s cannot be told: %s: %s", record["run"], type(error).__name__, error)
            unreadable.append(record["run"])
        else:
            done.append(record["run"])
    for tracker in trackers.values():
        tracker.close()
        tracking.refresh_views(tracker)
    waiting = [one for one in tracking.sync(home) if one.things]
    by_servers = tuple(run["run"] for run in runs.history(home) if aside is not None and _by_server(run))
    return Repair(damage, aside, tuple(done), tuple(absent), tuple(unreadable), len(waiting), by_servers)


def _by_server(record: Mapping[str, Any]) -> bool:
    return bool((record.get("tracking") or {}).get("url"))


def _identity(record: Mapping[str, Any]) -> str | None:
    """By which the home's own database knew the run; None where it was not tracked, or by a server."""
    about = record.get("tracking") or {}
    return None if _by_server(record) else about.get("identity")


class _Again:
    """One run of the home that is told to MLflow again, with its stages."""

    def __init__(self, record: Mapping[str, Any], store: Store, tracker: tracking.Store) -> None:
        self.record, self._store, self._tracker = record, store, tracker
        self._name = str(record["settings"]["name"])
        self._began = float(record["started_unix"])
        flow_run = (record.get("prefect") or {}).get("flow_run_id")
        self._tags = {"ttrain.run": record["run"], "ttrain.host": record["process"]["host"], "ttrain.repaired": "true"}
        self._tags |= {"ttrain.prefect.flow_run_id": flow_run} if flow_run else {}
        self._artifacts = {
            entry["name"]: artifact
            for entry in record["stages"]
            if entry.get("key") and (artifact := store.find(entry["name"], entry["key"]))
        }

    def tell(self) -> list[str]:
        """Tell it; returns the stages that it built and whose artifacts are gone, as RUN:STAGE."""
        record = self.record
        changed = tracking.masked({given.key: given.value for given in earlier_settings.settings_of(record)})
        run = self._tracker.start_run(
            record["run"],
            identity=_identity(record),
            started=self._began,
            tags={"ttrain.pipeline": record["pipeline"], **tracking.source_tags(record["pipeline"]), **self._tags},
            params={} if tracking.is_waiting(self._store.root, _identity(record)) else dict(flatten(record["settings"])),
        )
        run.log_text(run_summary.as_yaml(changed), "settings.yaml")
        absent = [f"{record['run']}:{entry['name']}" for entry in record["stages"] if not self._stage(entry, run)]
        run.log_inputs(data for artifact in self._artifacts.values() for data in tracking.data_of(artifact))
        if record.get("model_set"):
            self._register_set(run)
        run.log_summary(record["metrics"])
        self._curves(run)
        results = {name: artifact.result for name, artifact in self._artifacts.items()}
        rows = evaluation_table.rows(record["metrics"], results) if "evaluate" in results else []
        if rows:
            run.log_text(summary.markdown(rows, ("what", "value", "")), "evaluation.md")
            tables = registration.tables(rows, results["evaluate"].get("samples", {}))
            for name, text in tables.items():
                run.log_text(text, name)
            run.set_tags(registration.tag_of_tables(tables))
        run.note_stages({name: artifact.key for name, artifact in self._artifacts.items()})
        self._page(run)
        log_file = self._store.root / "runs" / f"{record['run']}.log"
        if log_file.is_file():
            run.log_file(log_file)
        cached = " ".join(entry["name"] for entry in record["stages"] if entry["outcome"] == "cached")
        note = run_summary.description(record, changed, record["metrics"], rows)
        run.set_tags({tracking.NOTE: note, "ttrain.cached": cached})
        run.set_tags({"ttrain.outcome": record["outcome"]})  # last: without it, a repair tells the run again
        run.finish(STATUS.get(record["outcome"], "KILLED"), at=self._began + (record["seconds"] or 0.0))
        tracking.note_tracked(self._store.root, run)
        return absent

    def _stage(self, entry: Mapping[str, Any], parent: tracking.Run | tracking.NullRun) -> bool:
        """Tell of one stage; False where its artifact should be there and is not."""
        artifact = self._artifacts.get(entry["name"])
        if entry["outcome"] == "cached" and artifact:
            parent.link_made_by(artifact.stage, artifact.key)
        if entry["outcome"] not in ENDED:
            return True
        identity = hashlib.sha256(f"{parent.identity} {entry['name']}".encode()).hexdigest()[:32]
        ingredients = artifact.manifest["ingredients"] if artifact else {}
        inputs = self._inputs(artifact) if artifact else {}
        tags = {"ttrain.stage": entry["name"], "ttrain.key": entry.get("key") or "", **self._tags}
        tags |= {f"ttrain.parent.{name}": f"{one.stage} {one.content}" for name, one in inputs.items()}
        if artifact:
            tags["ttrain.code"] = digest_of(ingredients["code"])
            tags["ttrain.commit"] = str(artifact.manifest.get("provenance", {}).get("commit") or "")
        ended = artifact.manifest["published"] if artifact else self._began + (self.record["seconds"] or 0.0)
        run = self._tracker.start_run(
            f"{entry['name']} {str(self.record['run']).rpartition('-')[2]}",
            identity=identity,
            started=max(self._began, ended - (entry.get("seconds") or 0.0)),
            parent=parent,
            tags=tags,
            params=dict(flatten(ingredients.get("settings") or {})),
        )
        run.link_to_parent(entry["name"])
        if entry.get("error"):
            run.set_tags({"ttrain.error": str(entry["error"])[:1000]})
        run.log_inputs(tracking.read_by(inputs, trains=entry["name"] in STAGES and STAGES[entry["name"]].uses_ranks))
        if artifact:
            tracking.log_result(run, artifact)
            for rows in self._rows(artifact):
                run.keep_rows(rows)
            if "sweep" not in self.record:  # whose trials keep no models in MLflow
                self._register(artifact, run)
        run.finish("FINISHED" if entry["outcome"] in BUILT else STATUS.get(entry["outcome"], "KILLED"), at=ended)
        return artifact is not None or entry["outcome"] not in BUILT

    def _inputs(self, artifact: Artifact) -> dict[str, Artifact]:
        """The artifacts that this one was made from, as far as they are here."""
        listed = artifact.manifest["inputs"].items()
        return {name: there for name, one in listed if (there := self._store.find(one["stage"], one["key"]))}

    def _rows(self, artifact: Artifact) -> Iterator[list[bytes]]:
        """The lines of the artifact's curves, a file at a time."""
        nodes = int(self.record["settings"]["runtime"]["nodes"])
        for name in ("metrics.jsonl", *system_metrics.files(nodes)):
            path = artifact.path / "run" / name
            if path.is_file():
                yield path.read_bytes().splitlines(keepends=True)

    def _curves(self, run: tracking.Run | tracking.NullRun) -> None:
        """The losses of all trainings on the pipeline's run."""
        for artifact in self._artifacts.values():
            path = artifact.path / "run" / "metrics.jsonl"
            if path.is_file():
                rows = run_summary.curves(artifact.stage, path.read_text(encoding="utf-8", errors="replace").splitlines())
                run.keep_rows([f"{json.dumps(row)}\n".encode() for row in rows])

    def _register(self, artifact: Artifact, run: tracking.Run | tracking.NullRun) -> None:
        """The artifact's files, and for a model or the tokenizer a registered version."""
        run.log_directory(artifact.path, artifact.stage)
        if artifact.stage not in REGISTERED:
            return
        model = self._described(artifact, run)
        for file, text in model["texts"].items():
            run.log_text(text, f"{model['artifact_path']}/{file}")
        for file, source in model["files"].items():
            run.log_file(Path(source), str(Path(model["artifact_path"], file).parent))
        words = {name: model[name] for name in ("description", "about") if name in model}
        self._tracker.register_model(
            model["name"], run=run, artifact_path=model["artifact_path"], tags=model["tags"], **words
        )

    def _register_set(self, run: tracking.Run | tracking.NullRun) -> None:
        """The run's models as a set, where all of them are here."""
        if not {"tokenizer", "evaluate"} <= set(self._artifacts):
            return
        self._tracker.finish_uploads()
        models = [self._described(model, run) for model in self._artifacts.values() if model.stage in REGISTERED]
        members = {f"{self._name}-{REGISTERED[a.stage][0]}": a for a in self._artifacts.values() if a.stage in REGISTERED}
        self._tracker.register_models(
            self._name,
            run=run,
            run_name=self.record["run"],
            models=models,
            keys={name: artifact.key for name, artifact in self._artifacts.items()},
            metrics=dict(self._artifacts["evaluate"].result["metrics"]),
            description=model_description.of_set(self._name, self.record["run"], members, self.record["metrics"]),
            about=model_description.of_all_sets(self._name),
        )

    def _described(self, model: Artifact, run: tracking.Run | tracking.NullRun) -> dict[str, Any]:
        """A registered model: its name, tags, description, and what its directory gets beside its own files."""
        suffix, directory = REGISTERED[model.stage]
        name = f"{self._name}-{suffix}"
        prompts = self.record["settings"]["runtime"].get("sample_prompts") or ()
        beside = registration.beside(model, directory, name, self._store, run, prompts)
        return {
            "name": name,
            "stage": model.stage,
            "artifact_path": tracked_path(model),
            "tags": {**registration.tags_of(model), **beside.tags},
            "texts": dict(beside.texts),
            "files": {file: str(path) for file, path in beside.files.items()},
            "path": None if model.absent else str(model.path),
            **registration.words_of(model, directory, name, self._name, self._store, opens=beside.is_whole),
        }

    def _page(self, run: tracking.Run | tracking.NullRun) -> None:
        """The run's page among its files; without it, the run is told all the same."""
        from ttrain.reports.report import report_of

        try:
            page = report_of(self._store.root, tracking.read_local(self._store.root, self.record["run"]))
        except Exception:
            log.warning("the page of %s could not be made", self.record["run"], exc_info=True)
            return
        run.log_text(page, REPORT)
