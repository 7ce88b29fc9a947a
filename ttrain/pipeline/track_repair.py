"""`ttrain track repair`: set a damaged MLflow database aside, and log all runs of the home to a new one.

A run is logged again from its record (`runs/`), the manifests and curves of its artifacts, and its log. It keeps its
identity, so that what waits in its outbox joins it. What only the database knew is lost: see `NOT_RESTORED`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain import tracking
from ttrain.config import flatten
from ttrain.config.training import TRAINING_STAGES
from ttrain.core.hashing import digest_of
from ttrain.errors import UsageError
from ttrain.pipeline import names, run_summary, system_metrics
from ttrain.pipeline.run_models import EXAMPLES, RunModels
from ttrain.reports import summary
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

log = logging.getLogger("ttrain")

NOT_RESTORED = (
    "champions (choose one: ttrain models promote), version numbers, descriptions, tags and deletions that were made in "
    "MLflow, runs of models that were evaluated or registered by hand, pages of sweeps"
)
ENDED = (*runs.BUILT, runs.NOTHING_NEW, "failed", "interrupted")


@dataclass(frozen=True)
class Repair:
    """The result of a repair."""

    damage: str | None  # in SQLite's words
    aside: Path | None  # the damaged file
    runs: tuple[str, ...]  # logged again
    without_files: tuple[str, ...]  # RUN:STAGE whose artifact is no longer in the store
    unreadable: tuple[str, ...]  # runs whose records, of another version or damaged, cannot be logged
    waiting: int  # tracked runs with undelivered entries
    by_servers: tuple[str, ...] = ()  # logged to a server over HTTP, which may have used this database


def repair(home: Path, say: Callable[[str], object]) -> Repair:
    """Set the home's own database aside if it is damaged, and log every run that the current one lacks.

    After a kill, the same command continues. Raises UsageError while a run is in progress, TrackingError.
    """
    if at_work := [run["run"] for run in runs.in_progress(home)]:
        raise UsageError(
            f"{', '.join(at_work)} is in progress and writes to MLflow; wait for its end, or stop it with Ctrl-C"
        )
    damage, aside = tracking.set_damaged_aside(home) or (None, None)
    if aside is not None:
        say(f"the database is damaged ({damage}); it is kept as {aside}")
    tracked_identities = tracking.delivered_identities(home)
    missing = [
        run for run in reversed(runs.history(home)) if (identity := _identity(run)) and identity not in tracked_identities
    ]
    done, absent, unreadable = list[str](), list[str](), list[str]()
    store, trackers = ArtifactStore(home), dict[str, tracking.MlflowStore]()
    for number, record in enumerate(missing, 1):
        say(f"{record['run']}: {number} of {len(missing)}")
        try:
            experiment = str(record["settings"]["tracking"]["experiment"])
            # One for each run: until it is closed it holds a lock for every stage, and systems allow some 1,000 open files
            tracker = trackers[experiment] = tracking.open_own_store(home, experiment)
            with contextlib.closing(tracker):
                absent += _RunReplay(record, store, tracker).replay()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            log.warning("the record of %s cannot be logged: %s: %s", record["run"], type(error).__name__, error)
            unreadable.append(record["run"])
        else:
            done.append(record["run"])
    for tracker in trackers.values():
        tracking.refresh_views(tracker)
    waiting = [report for report in tracking.sync(home) if report.things]
    by_servers = tuple(run["run"] for run in runs.history(home) if aside is not None and _by_server(run))
    return Repair(damage, aside, tuple(done), tuple(absent), tuple(unreadable), len(waiting), by_servers)


def _by_server(record: runs.RecordedRun) -> bool:
    return bool((record.get("tracking") or {}).get("url"))


def _identity(record: runs.RecordedRun) -> str | None:
    """The run's identity in the home's own database; None if it was not tracked, or tracked by a server."""
    tracked = record.get("tracking") or {}
    return None if _by_server(record) else tracked.get("identity")


class _RunReplay:
    """Logs one run of the home to MLflow again, with its stages."""

    def __init__(self, record: runs.RecordedRun, store: ArtifactStore, tracker: tracking.MlflowStore) -> None:
        self.record, self._store, self._tracker = record, store, tracker
        prompts = record["settings"]["runtime"].get("sample_prompts") or EXAMPLES
        self._models = RunModels(str(record["settings"]["name"]), prompts, store, tracker)
        self._began = float(record["started_unix"])
        flow_run = (record.get("prefect") or {}).get("flow_run_id")
        self._tags = {"ttrain.run": record["run"], "ttrain.host": record["process"]["host"], "ttrain.repaired": "true"}
        self._tags |= {"ttrain.prefect.flow_run_id": flow_run} if flow_run else {}
        self._artifacts = {
            entry["name"]: artifact
            for entry in record["stages"]
            if entry.get("key") and (artifact := store.find(entry["name"], entry["key"]))
        }

    def replay(self) -> list[str]:
        """Log the run; return the stages that it built and whose artifacts are gone, as RUN:STAGE."""
        record = self.record
        changed = tracking.masked({setting.key: setting.value for setting in names.settings_of(record)})
        everything = dict(flatten(record["settings"]))
        night = record.get("night")
        identity = _identity(record)
        run = run_summary.start_run(
            self._tracker,
            night or record["run"],
            record["pipeline"],
            everything,
            changed,
            {**self._tags, **({"ttrain.night": night} if night else {})},
            identity=identity,
            started=self._began,
        )
        absent = [f"{record['run']}:{entry['name']}" for entry in record["stages"] if not self._stage(entry, run)]
        run.log_inputs(data for artifact in self._artifacts.values() for data in tracking.data_of(artifact))
        of_set = self._with_inputs()
        if record.get("model_set") and {"tokenizer", "evaluate"} <= of_set.keys():
            self._models.register_set(of_set, record["run"], record["metrics"], run)
        table = list[summary.EvaluationRow]()
        if "evaluate" in self._artifacts:
            results = {name: artifact.result for name, artifact in self._artifacts.items()}
            table = summary.rows(record["metrics"], results)
        ended = self._began + (record["seconds"] or 0.0)
        run_summary.log_end(run, record, self._store.root, self._artifacts, changed, table, ended=ended)
        tracking.note_run_id(self._store.root, run)
        return absent

    def _with_inputs(self) -> dict[str, Artifact]:
        """The run's artifacts with the tokenizer and the models that a night took from its champion: these are no stages of
        its record, but inputs of what it built."""
        artifacts = dict(self._artifacts)
        models = [row.model for row in TRAINING_STAGES.values()]
        for stage, roles in (("evaluate", models), ("pretrain", ["tokenizer"])):
            inputs = (self._store.input_of(artifacts.get(stage), name) for name in roles)
            artifacts |= {artifact.stage: artifact for artifact in inputs if artifact and artifact.stage not in artifacts}
        return artifacts

    def _stage(self, entry: Mapping[str, Any], parent: tracking.AnyRun) -> bool:
        """Log one stage; return False if its artifact is missing."""
        artifact = self._artifacts.get(entry["name"])
        if entry["outcome"] == "cached" and artifact:
            parent.link_made_by(artifact.stage, artifact.key)
        if entry["outcome"] not in ENDED:
            return True
        identity = hashlib.sha256(f"{parent.identity} {entry['name']}".encode()).hexdigest()[:32]
        ingredients = artifact.manifest["ingredients"] if artifact else {}
        inputs, tags = dict[str, Artifact](), dict(self._tags)
        if artifact:
            of_store = {name: self._store.input_of(artifact, name) for name in artifact.manifest["inputs"]}
            inputs = {name: source for name, source in of_store.items() if source}
            tags["ttrain.code"] = digest_of(ingredients.get("code", {}))
            tags["ttrain.commit"] = str(artifact.provenance.get("commit") or "")
        ended = artifact.manifest["published"] if artifact else self._began + (self.record["seconds"] or 0.0)
        run = run_summary.start_stage_run(
            self._tracker,
            parent,
            self.record["run"],
            entry["name"],
            entry.get("key"),
            ingredients.get("settings") or {},
            inputs,
            tags,
            identity=identity,
            started=max(self._began, ended - (entry.get("seconds") or 0.0)),
        )
        if entry.get("error"):
            run.set_tags({"ttrain.error": str(entry["error"])[:1000]})
        if artifact:
            tracking.log_result(run, artifact)
            nodes = int(self.record["settings"]["runtime"]["nodes"])
            for name in ("metrics.jsonl", *system_metrics.files(nodes)):
                with contextlib.suppress(FileNotFoundError):  # many stages write none
                    run.log_metrics(runs.read_rows(artifact.path / "run" / name))
            if "sweep" not in self.record:  # whose trials keep no models in MLflow
                self._models.register(artifact, run)
        run.finish(tracking.status_of(entry["outcome"]), at=ended)
        return artifact is not None or entry["outcome"] not in runs.BUILT
