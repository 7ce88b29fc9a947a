"""What MLflow shows of a run of the home: its record, artifacts, curves, decision, and stages.

Everything is read from the home, so a run can be pushed at any time, also to an empty MLflow.
"""

import json
import logging
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

import yaml

from ttrain.config import flatten
from ttrain.core.files import JsonDict, JsonObject, read_object
from ttrain.core.hashing import digest_of
from ttrain.core.redact import HIDDEN, masked
from ttrain.engine import resume
from ttrain.engine.execution import REGISTERED
from ttrain.reports import facts
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import TRACKED, Artifact
from ttrain.store.registry import ModelSet, Registry, Version
from ttrain.store.results import TrainingResult
from ttrain.store.run_views import CURVES, decision_metrics, read_run
from ttrain.tasks import STAGES
from ttrain.tracking import datasets, run_summary
from ttrain.tracking.mlflow_mirror import (
    FAILED,
    FINISHED,
    KILLED,
    NAME,
    RUN,
    RUNNING,
    Files,
    TrackedRun,
)

log = logging.getLogger("ttrain")

MODEL = "model"  # directories: of a model, an adapter, its base
ADAPTER = "adapter"
BASE = "base"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TEXT = json.dumps([{"type": "string", "required": True}])
STATUS = {
    "running": RUNNING,
    "failed": FAILED,
    **dict.fromkeys((*runs.BUILT, runs.NOTHING_NEW), FINISHED),
}
BEGUN = ("running", "crashed", "failed", "interrupted", runs.NOTHING_NEW, *runs.BUILT)
FIT = ("bytes_per_token", "unk_rate")  # metrics by which tokenizers are compared
ERROR_CHARACTERS = 1000
NOTE = "mlflow.note.content"  # tag: the description on MLflow's pages
REPORT = "report.html"  # the run's page among the files of the tracked run
EVALUATION_TABLE = "evaluation_table.json"  # which `mlflow.load_table` reads
LOGGED_TABLES = "mlflow.loggedArtifacts"  # tag by which MLflow's pages show a JSON file as a table


def status_of(outcome: str) -> str:
    """MLflow's status of a run or stage with this outcome."""
    return STATUS.get(outcome, KILLED)


def id_of(record: JsonObject, stage: str | None = None) -> str:
    """MLflow's id of a stage, or of a run, or of the interrupted run that it continues."""
    if stage is None:
        return str(record.get("continues") or record["run"])
    entry = next(entry for entry in record["stages"] if entry["name"] == stage)
    return str(entry.get("tracked") or f"{record['run']}/{stage}")


def is_tracked(record: JsonObject | None) -> bool:
    """Whether a run is tracked: not if everything was cached, or tracking is disabled."""
    tracking = (record or {}).get("settings", {}).get("tracking", {})
    return bool(record and record["outcome"] != "cached" and tracking.get("enabled", True))


def setting_id(sweep: str, change: int) -> str:
    """MLflow's id of a setting of a sweep, by the number of its change."""
    return f"{sweep}/{change}"


@dataclass
class RunContent:
    home: Path
    record: JsonDict
    is_local: bool = (
        True  # whether the tracker's files are on this disk, where weights can be links
    )

    @cached_property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.home)

    @cached_property
    def artifacts(self) -> dict[str, Artifact]:
        """The artifacts of the run's finished stages, without those that a later run finished."""
        found = {}
        for entry in self.record["stages"]:
            artifact = self.store.find(entry["name"], entry["key"]) if entry.get("key") else None
            is_done = entry["outcome"] in ("cached", *runs.BUILT)
            # of its own also if it was killed before it noted so
            if artifact and (is_done or artifact.provenance.get("run") == self.record["run"]):
                found[entry["name"]] = artifact
        return found

    @cached_property
    def made(self) -> dict[str, Artifact]:
        cached = {entry["name"] for entry in self.record["stages"] if entry["outcome"] == "cached"}
        return {name: one for name, one in self.artifacts.items() if name not in cached}

    @cached_property
    def sets(self) -> list[ModelSet]:
        """The sets of models that this run registered, or that its decision is about."""
        sets = Registry(self.home).sets(str(self.record["settings"].get("name")))
        name = self.record["run"]
        return [one for one in sets if name in (one.run, one.decided.get("run"))]

    def versions(self) -> list[Version | ModelSet]:
        """The versions that this run registered: of its models, and the set of them."""
        sets = [one for one in self.sets if one.run == self.record["run"]]
        models = [*Registry(self.home).models_of(self.record["run"])]
        models += [
            one for model_set in sets for one in model_set.members.values() if one not in models
        ]
        return [*(model for model in models if model.stage in self.artifacts), *sets]

    def tracked(self) -> TrackedRun:
        """The run, with the stages that it began itself."""
        record = self.record
        settings = dict(flatten(self.record["settings"]))
        sweep = record.get("sweep")
        decided = decision_metrics(record["decision"]) if record.get("decision") else {}
        run = TrackedRun(
            id_of(record),
            str(record.get("night") or record["run"]),
            str(record["settings"]["tracking"]["experiment"]),
            float(record["started_unix"]),
            status_of(record["outcome"]),
            tags=self._tags(settings),
            params=facts.parameters(settings),  # nothing that differs in every run
            summary={**record["metrics"], **decided},
            inputs=[
                data for artifact in self.artifacts.values() for data in datasets.data_of(artifact)
            ],
            parent=setting_id(sweep["name"], sweep["change"])
            if sweep and "change" in sweep
            else "",
        )
        if run.status != RUNNING:
            run.ended = run.started + (record.get("seconds") or 0.0)
            self._add_end(run)
        run.stages = [self._stage(entry) for entry in record["stages"] if entry["outcome"] in BEGUN]
        return run

    def model_files(self, stage: str) -> Files:
        """The files of an artifact, and those by which MLflow opens it."""
        artifact = self.artifacts[stage]
        paths = (path for path in sorted(artifact.path.rglob("*")) if path.is_file())
        files: Files = {
            f"{stage}/{path.relative_to(artifact.path).as_posix()}": path for path in paths
        }
        directory = REGISTERED.get(stage, ("", ""))[1]
        if not directory or (
            directory == ADAPTER and not self.is_local
        ):  # no second copy of its base
            return files
        return files | {
            f"{stage}/{directory}/{name}": source
            for name, source in loadable(artifact, directory, self.store).items()
        }

    def _tags(self, settings: JsonObject) -> dict[str, str]:
        record = self.record
        sweep = self.record.get("sweep") or {}
        flow_run = record.get("prefect") or {}
        tags = {
            **{f"rule.{name}": value for name, value in facts.set_by_rule(settings).items()},
            **{
                f"ttrain.{name}": record.get(name)
                for name in ("run", "commit", "pipeline", "night")
            },
            **{f"ttrain.prefect.{name}": flow_run.get(name) for name in ("flow_run_id", "url")},
            "ttrain.host": record["process"].get("host"),
            NAME: record["settings"].get("name", ""),
            "ttrain.sweep": sweep.get("name"),
            "ttrain.setting": sweep.get("setting"),
            "ttrain.seed": sweep.get("seed"),
            "mlflow.source.name": f"ttrain pipeline run {record['pipeline']}",  # MLflow's columns
            "mlflow.source.type": "LOCAL",
            "mlflow.user": record.get("user"),
            NOTE: run_summary.note(record["note"]) if record.get("note") else None,
            **(record.get("tags") or {}),
        }
        return {name: str(value) for name, value in tags.items() if value is not None}

    def _add_end(self, run: TrackedRun) -> None:
        from ttrain.reports.report import report_of

        record = self.record
        rows = self.record.get("evaluation") or []
        run.files["settings.yaml"] = yaml.safe_dump(
            _without_masks(masked(record["settings"])), sort_keys=False
        )
        try:
            run.files[REPORT] = report_of(read_run(self.home, record["run"]))
        except Exception:  # the rest of the run is pushed
            log.warning("`ttrain report %s` cannot make a page", record["run"], exc_info=True)
        run.tags |= {
            NOTE: run_summary.description(self.home, record, record["metrics"], rows),
            "ttrain.cached": " ".join(
                one["name"] for one in record["stages"] if one["outcome"] == "cached"
            ),
            "ttrain.outcome": record["outcome"],
        }
        if rows:
            run.files[EVALUATION_TABLE] = json.dumps(
                {"columns": ["what", "value", "remark"], "data": rows}, ensure_ascii=False
            )
            run.tags[LOGGED_TABLES] = json.dumps([{"path": EVALUATION_TABLE, "type": "table"}])
        if decision := record.get("decision"):
            run.tags["ttrain.decision"] = "promoted" if decision["promote"] else "kept"
            run.tags["ttrain.decision.reason"] = str(decision["reason"])
        for name, artifact in self.artifacts.items():
            curve = artifact.path / "run" / "metrics.jsonl"
            if curve.is_file():
                run.rows += run_summary.curves(name, runs.read_rows(curve))
        log_file = self.home / "runs" / f"{record['run']}.log"
        if log_file.is_file():
            run.files[log_file.name] = log_file

    def _stage(self, entry: JsonObject) -> TrackedRun:
        record = self.record
        name = entry["name"]
        artifact = self.made.get(entry["name"])
        work = self.store.work(name, entry.get("key") or "")
        output = artifact.path if artifact else work / "output"
        manifest: JsonObject = artifact.manifest if artifact else {}
        run = TrackedRun(
            id_of(record, name),
            f"{name} {record['run'].rpartition('-')[2]}",  # to differ in the legends of two runs
            str(record["settings"]["tracking"]["experiment"]),
            float(entry.get("started_unix") or record["started_unix"]),
            FINISHED if artifact else status_of(entry["outcome"]),
            ended=manifest.get("published"),
        )
        ingredients = manifest.get("ingredients") or read_object(work / resume.INGREDIENTS)
        run.params = dict(flatten(ingredients.get("settings") or {}))
        roles = {role: self.store.input_of(artifact, role) for role in manifest.get("inputs", ())}
        inputs = {role: source for role, source in roles.items() if source}
        tags = {
            RUN: record["run"],
            "ttrain.stage": name,
            "ttrain.key": entry.get("key") or "",
            **{
                f"ttrain.parent.{role}": f"{one.stage} {one.content}"
                for role, one in inputs.items()
            },
            "ttrain.code": ingredients.get("code") and digest_of(ingredients["code"]),
            "ttrain.error": str(entry.get("error") or "")[:ERROR_CHARACTERS],
        }
        run.tags = {tag: value for tag, value in tags.items() if value}
        run.inputs = datasets.read_by(inputs, trains=name in STAGES and STAGES[name].uses_ranks)
        if artifact or read_object(work / TRACKED).get("run") == record["run"]:
            run.curves = [path for name in CURVES for path in sorted((output / "run").glob(name))]
            run.files = {
                f"{name}/run/samples/{path.name}": path
                for path in sorted((output / "run" / "samples").glob("step-*.txt"))
            }
        if artifact:
            run.params |= _result_params(artifact)
            run.inputs += datasets.data_of(artifact)
            if name == "tokenizer":
                run.summary = {
                    f"tok/{one}": artifact.result[one] for one in FIT if one in artifact.result
                }
        if artifact and "sweep" not in record:  # of whose trials no models are kept
            run.files = self.model_files(name)
        elif (
            entry["outcome"] != "running" and run.curves and (output / "run" / "log.txt").is_file()
        ):
            run.files["log.txt"] = output / "run" / "log.txt"
        return run


def _without_masks(settings: JsonObject) -> JsonDict:
    shown = {name: value for name, value in settings.items() if value != HIDDEN}
    return {
        name: _without_masks(value) if isinstance(value, dict) else value
        for name, value in shown.items()
    }


def _result_params(artifact: Artifact) -> dict[str, object]:
    # As parameters, such as {"result.rows.fill": 0.98}: as a metric, each number of a result would
    # be a chart of one point before the curves
    params = {
        f"optim.groups.{number}.{name}": value
        for number, group in enumerate(TrainingResult.of(artifact.result).optimizer_groups)
        for name, value in group.items()
    }
    result = {name: value for name, value in artifact.result.items() if name != "samples"}
    return params | {
        f"result.{name}": value for name, value in flatten(result) if isinstance(value, int | float)
    }


def loadable(artifact: Artifact, directory: str, store: ArtifactStore) -> Files:
    """The files to add to an artifact's model or adapter in its `directory`.

    An adapter gets the files of its base; without them MLflow cannot open it, and gets nothing.
    """
    place = whole = artifact.path / directory
    is_adapter = directory == ADAPTER
    files = Files()
    if is_adapter:
        below = artifact.manifest["inputs"].get("base", {})
        whole = store.path(below.get("stage", ""), below.get("key", "")) / MODEL
        files = {f"{BASE}/{path.name}": path for path in whole.glob("*") if path.is_file()}
    config = read_object(whole / "config.json")
    if not config:
        return {}
    components = (place / name for name in TOKENIZER)
    files |= {f"components/tokenizer/{path.name}": path for path in components if path.is_file()}
    flavor = {  # as mlflow/transformers/flavor_config.py names them
        "task": "text-generation",
        "instance_type": "TextGenerationPipeline",
        # an architecture of ttrain's own is loaded from the Python files in the directory
        "pipeline_model_type": config["architectures"][0]
        if config.get("auto_map")
        else "AutoModelForCausalLM",
        "source_model_name": "ttrain",
        "model_binary": BASE if is_adapter else ".",
        **({"peft_adaptor": "."} if is_adapter else {}),
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
    }
    described = {
        "flavors": {"transformers": flavor},
        "mlflow_version": metadata.version("mlflow"),
        "model_uuid": artifact.content[:32],
        "signature": {"inputs": TEXT, "outputs": TEXT, "params": None},
        "metadata": {"ttrain.stage": artifact.stage, "ttrain.key": artifact.key},
    }
    return {"MLmodel": yaml.safe_dump(described, sort_keys=False), **files}
