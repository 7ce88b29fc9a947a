"""What a tracker shows of a run of the home: its record, artifacts, curves and decision as a `TrackedRun` with its stages.

Everything is read from the home, so that a run can be pushed while it goes on, after it, and again to an empty MLflow.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ttrain.config import flatten
from ttrain.core.files import JsonDict, JsonObject, read_object
from ttrain.core.hashing import digest_of
from ttrain.core.redact import masked
from ttrain.engine import resume, system_metrics
from ttrain.engine.execution import REGISTERED
from ttrain.engine.labels import NIGHT, trained_at_night
from ttrain.reports import facts
from ttrain.reports import summary as report
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import JOB, TRACKED, Artifact
from ttrain.store.registry import ModelSet, Registry, Version
from ttrain.store.results import TrainingResult
from ttrain.store.run_views import decision_metrics
from ttrain.tasks import STAGES
from ttrain.tracking import datasets, registration, run_summary
from ttrain.tracking.mirror import FAILED, FINISHED, KILLED, RUN, RUNNING, TrackedRun
from ttrain.tracking.registered_model import EXAMPLES, Registered
from ttrain.tracking.views import NAME

log = logging.getLogger("ttrain")

STATUS = {"running": RUNNING, "failed": FAILED, **dict.fromkeys((*runs.BUILT, runs.NOTHING_NEW), FINISHED)}
BEGUN = ("running", "crashed", "failed", "interrupted", runs.NOTHING_NEW, *runs.BUILT)
FIT = ("bytes_per_token", "unk_rate")  # metrics of a tokenizer, by which tokenizers are compared
ERROR_CHARACTERS = 1000


def status_of(outcome: str) -> str:
    """MLflow's status of a run or a stage that ended with this outcome, or runs."""
    return STATUS.get(outcome, KILLED)


def id_of(record: JsonObject) -> str:
    """The id of a run in trackers: of its own, or of an interrupted one that it goes on with."""
    return str(record.get("continues") or record["run"])


@dataclass
class RunContent:
    """A run of the home as a tracker shows it. `without`: stages that are left out, which have ended and were pushed."""

    home: Path
    record: JsonDict
    is_local: bool = True  # whether the tracker's files are on this disk, where weights can be links
    without: frozenset[str] = frozenset()
    store: ArtifactStore = field(init=False)

    def __post_init__(self) -> None:
        self.store = ArtifactStore(self.home)

    @property
    def has_ended(self) -> bool:
        return bool(self.record["outcome"] != "running")

    @property
    def keeps_models(self) -> bool:
        """Whether its files go to the tracker: those of a sweep's trials do not."""
        return "sweep" not in self.record

    @cached_property
    def artifacts(self) -> dict[str, Artifact]:
        """The artifacts of the run's finished stages: not one that a later run finished."""
        keyed = ((entry["name"], entry["key"]) for entry in self.record["stages"] if entry.get("key"))
        artifacts = {name: artifact for name, key in keyed if (artifact := self.store.find(name, key))}
        return {name: artifact for name, artifact in artifacts.items() if self._made(artifact) or self._reused(name)}

    @cached_property
    def made(self) -> dict[str, Artifact]:
        """Those that this run made itself."""
        return {name: artifact for name, artifact in self.artifacts.items() if self._made(artifact)}

    @cached_property
    def sets(self) -> list[ModelSet]:
        """The sets of models that this run registered, or that its decision is about."""
        sets = Registry(self.home).sets(str(self.record["settings"].get("name")))
        name = self.record["run"]
        return [one for one in sets if name in (one.run, one.decided.get("run"))]

    def tracked(self) -> TrackedRun:
        """The run, with the stages that it began itself."""
        record, flat = self.record, dict(flatten(self.record["settings"]))
        run = TrackedRun(
            id_of(record),
            record["run"],
            str(record.get("night") or record["run"]),
            str(record["settings"]["tracking"]["experiment"]),
            float(record["started_unix"]),
            status_of(record["outcome"]),
            ended=float(record["started_unix"]) + record["seconds"] if record.get("seconds") is not None else None,
            tags=self._tags(flat),
            params=facts.parameters(flat),  # nothing that differs in every run: runs are compared
            summary={**record["metrics"], **(decision_metrics(record["decision"]) if record.get("decision") else {})},
            inputs=[data for artifact in self.artifacts.values() for data in datasets.data_of(artifact)],
            parent=str((record.get("sweep") or {}).get("name", "")),
        )
        if self.has_ended or not self.without:  # once at the beginning: it costs 30 ms
            run.texts = {"settings.yaml": run_summary.as_yaml(self._changed, masked(flat))}
        if self.has_ended:
            self._add_end(run)
        for entry in record["stages"]:
            if entry["outcome"] in BEGUN and entry["name"] not in self.without:
                run.stages.append(self._stage(entry))
        return run

    def model_files(self, stage: str) -> tuple[dict[str, str], dict[str, Path]]:
        """(texts, files) by path among the run's files: those of an artifact, and what makes its model loadable."""
        artifact = self.artifacts[stage]
        paths = (path for path in sorted(artifact.path.rglob("*")) if path.is_file())
        files = {f"{stage}/{path.relative_to(artifact.path).as_posix()}": path for path in paths}
        if stage not in REGISTERED:
            return {}, files
        model = self.registered(artifact)
        extra = model.extra_files(self._examples, is_local=self.is_local)
        texts = {f"{model.path}/{name}": text for name, text in extra.texts.items()}
        return texts, files | {f"{model.path}/{name}": path for name, path in extra.files.items()}

    def registered(self, artifact: Artifact) -> Registered:
        """A model of this run as it is registered."""
        return Registered(artifact, str(self.record["settings"]["name"]), self.store)

    def stage_id(self, stage: str) -> str:
        """The id of a stage in trackers: of this run, or of the one that began its training."""
        entry = next(entry for entry in self.record["stages"] if entry["name"] == stage)
        return str(entry.get("tracked") or f"{self.record['run']}/{stage}")

    @property
    def _examples(self) -> Any:
        return self.record["settings"]["runtime"].get("sample_prompts") or EXAMPLES

    @cached_property
    def _changed(self) -> JsonDict:
        """The settings that are not the defaults, without secrets."""
        changed = facts.changed_settings(dict(flatten(self.record["settings"])))
        return masked({name: value for name, (value, _) in changed.items()})

    def _reused(self, stage: str) -> bool:
        return any(entry["name"] == stage and entry["outcome"] == "cached" for entry in self.record["stages"])

    def _made(self, artifact: Artifact) -> bool:
        entry = next(entry for entry in self.record["stages"] if entry["name"] == artifact.stage)
        is_own = artifact.provenance.get("run") == self.record["run"]  # also if it was killed before it noted so
        return entry["outcome"] in runs.BUILT or (is_own and entry["outcome"] != "cached")

    def _common_tags(self) -> dict[str, str]:
        record = self.record
        tags = {RUN: record["run"], "ttrain.host": record["process"].get("host", ""), "ttrain.commit": record.get("commit")}
        flow_run = record.get("prefect") or {}
        tags |= {"ttrain.prefect.flow_run_id": flow_run.get("flow_run_id"), "ttrain.prefect.url": flow_run.get("url")}
        return {name: str(value) for name, value in tags.items() if value}

    def _tags(self, settings: JsonObject) -> dict[str, str]:
        record, sweep = self.record, self.record.get("sweep") or {}
        by_rule = {f"rule.{name}": str(value) for name, value in facts.set_by_rule(settings).items()}
        named = {"ttrain.night": record.get("night"), "ttrain.sweep": sweep.get("name"), "ttrain.trial": sweep.get("trial")}
        tags = {
            **self._common_tags(),
            **by_rule,
            "ttrain.pipeline": record["pipeline"],
            NAME: str(record["settings"].get("name", "")),
            **source_tags(record["pipeline"], record.get("user")),
            **{name: str(value) for name, value in named.items() if value is not None},
            **(record.get("tags") or {}),
        }
        if record.get("note"):  # at the end of the run the rest of the description stands below it
            tags[NOTE] = run_summary.note(record["note"])
        if any(self._trained_at_night(entry) for entry in record["stages"]):
            tags[NIGHT] = "1"
        return tags

    def _add_end(self, run: TrackedRun) -> None:
        """Add what is known only at the end: description, evaluation, curves by tokens, page, log, decision."""
        record, rows = self.record, [tuple(row) for row in self.record.get("evaluation") or ()]
        versions = {version.name: version.version for version in self.versions()}
        cached = " ".join(entry["name"] for entry in record["stages"] if entry["outcome"] == "cached")
        text = run_summary.description(self.home, record, record["metrics"], rows, versions)
        run.tags = {**run.tags, NOTE: text, "ttrain.cached": cached, "ttrain.outcome": record["outcome"]}
        texts, files = dict(run.texts), dict[str, Path]()
        if evaluation := self.artifacts.get("evaluate"):
            tables = registration.evaluation_tables(rows, evaluation.result.get("samples", {}))
            texts |= {"evaluation.md": report.markdown(rows, ("metric", "value", "")), **tables}
            run.tags = {**run.tags, **registration.tag_of_tables(tables)}
            if "samples.json" not in evaluation.absent and (evaluation.path / "samples.json").is_file():
                files["samples.json"] = evaluation.path / "samples.json"
        for name, artifact in self.artifacts.items():
            curve = artifact.path / "run" / "metrics.jsonl"
            if curve.is_file():
                run.rows = [*run.rows, *run_summary.curves(name, runs.read_rows(curve))]
        if (log_file := self.home / "runs" / f"{record['run']}.log").is_file():
            files[log_file.name] = log_file
        if page := run_summary.page_of(self.home, record["run"]):
            texts[run_summary.REPORT] = page
        if decision := record.get("decision"):
            word = "promoted" if decision["promote"] else "kept"
            run.tags = {**run.tags, "ttrain.decision": word, "ttrain.decision.reason": str(decision["reason"])}
            texts["decision.json"] = json.dumps(decision, indent=1, sort_keys=True)
        for decided in (one.decided for one in self.sets if one.decided.get("run") == record["run"]):
            texts["decision.md"] = "\n\n".join(filter(None, (decided.get("table"), decided.get("figures"))))
        run.texts, run.files = texts, files

    def versions(self) -> list[Version | ModelSet]:
        """The versions that this run registered: of its models, and the set of them."""
        sets = [one for one in self.sets if one.run == self.record["run"]]
        models = [*Registry(self.home).models_of(self.record["run"])]
        models += [member for one in sets for member in one.members.values() if member not in models]
        return [*(model for model in models if model.stage in self.artifacts), *sets]

    def _stage(self, entry: JsonObject) -> TrackedRun:
        """One stage that the run began."""
        record, name = self.record, entry["name"]
        artifact = self.made.get(name)
        work = self.store.work(name, entry.get("key") or "")
        output = artifact.path if artifact else work / "output"
        is_mine = artifact is not None or read_object(work / TRACKED).get("run") == record["run"]
        ended = artifact.manifest["published"] if artifact else None
        seconds = entry.get("seconds") or (artifact.manifest.get("seconds") if artifact else None) or 0.0
        started = float(entry.get("started_unix") or (ended - seconds if ended else record["started_unix"]))
        run = TrackedRun(
            self.stage_id(name),
            record["run"],
            f"{name} {record['run'].rpartition('-')[2]}",  # so that stages of two runs differ in MLflow's legends
            str(record["settings"]["tracking"]["experiment"]),
            started,
            FINISHED if artifact else status_of(entry["outcome"]),
            ended=ended,
        )
        ingredients = artifact.manifest["ingredients"] if artifact else read_object(work / resume.INGREDIENTS)
        inputs = self._inputs(artifact, work)
        run.params = {**dict(flatten(ingredients.get("settings") or {})), **_result_params(artifact)}
        run.tags = {
            **self._common_tags(),
            "ttrain.stage": name,
            "ttrain.key": entry.get("key") or "",
            **{f"ttrain.parent.{role}": f"{source.stage} {source.content}" for role, source in inputs.items()},
            **({"ttrain.code": digest_of(ingredients["code"])} if ingredients.get("code") else {}),
            **({"ttrain.error": str(entry["error"])[:ERROR_CHARACTERS]} if entry.get("error") else {}),
            **({NIGHT: "1"} if self._trained_at_night(entry) else {}),
        }
        trains = name in STAGES and STAGES[name].uses_ranks
        run.inputs = [*datasets.read_by(inputs, trains=trains), *(datasets.data_of(artifact) if artifact else ())]
        if is_mine:
            nodes = int(record["settings"]["runtime"].get("nodes", 1))
            run.curves = [output / "run" / file for file in ("metrics.jsonl", *system_metrics.files(nodes))]
        if artifact:
            fit = {f"tok/{metric}": float(artifact.result[metric]) for metric in FIT if metric in artifact.result}
            run.summary = fit if name == "tokenizer" else {}
            if self.keeps_models:
                run.texts, run.files = self.model_files(name)
        elif is_mine:
            samples = sorted((output / "run" / "samples").glob("step-*.txt"))
            run.files = {f"{name}/run/samples/{path.name}": path for path in samples}
            if entry["outcome"] != "running" and (output / "run" / "log.txt").is_file():
                run.texts = {"log.txt": (output / "run" / "log.txt").read_text(encoding="utf-8", errors="replace")}
        return run

    def _inputs(self, artifact: Artifact | None, work: Path) -> dict[str, Artifact]:
        if artifact:
            inputs = {role: self.store.input_of(artifact, role) for role in artifact.manifest["inputs"]}
        else:
            paths: Mapping[str, str] = read_object(work / JOB).get("inputs", {})
            inputs = {role: self.store.read(Path(path)) for role, path in paths.items()}
        return {role: source for role, source in inputs.items() if source}

    def _trained_at_night(self, entry: JsonObject) -> bool:
        may_be = self.record["settings"]["runtime"].get("night") and entry["outcome"] in BEGUN and entry.get("key")
        if not may_be or entry["outcome"] == "running":  # its curve is long, and is read as a whole
            return False
        artifact = self.made.get(entry["name"])
        output = artifact.path if artifact else self.store.work(entry["name"], entry["key"]) / "output"
        return trained_at_night(output / "run" / "metrics.jsonl")


def _result_params(artifact: Artifact | None) -> dict[str, object]:
    """What each optimizer group holds, and the figures of a result, as parameters: {"result.rows.fill": 0.98}. As metrics
    each would be a chart of one point, and MLflow would show these charts before the curves."""
    if artifact is None:
        return {}
    groups = enumerate(TrainingResult.of(artifact.result).optimizer_groups)
    params = {f"optim.groups.{number}.{name}": value for number, group in groups for name, value in group.items()}
    result = {name: value for name, value in artifact.result.items() if name != "samples"}
    figures = {f"result.{name}": value for name, value in flatten(result) if isinstance(value, int | float)}
    return params | figures


NOTE = "mlflow.note.content"  # tag: the description on MLflow's pages


def source_tags(pipeline: str, user: str | None) -> dict[str, str]:
    """Tags for MLflow's own columns that say who started a run and how."""
    tags = {"mlflow.source.name": f"ttrain pipeline run {pipeline}", "mlflow.source.type": "LOCAL"}
    return {**tags, "mlflow.user": user} if user else tags


def is_tracked(record: JsonObject | None) -> bool:
    """Whether trackers show a run: not one that found everything cached, or that is not to be tracked."""
    if record is None or record["outcome"] == "cached":
        return False
    return bool(record.get("settings", {}).get("tracking", {}).get("enabled", True))
