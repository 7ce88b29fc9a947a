"""The work of `ttrain eval`: models, tasks and held-out records, scored and kept."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ttrain.cli.chat import LoadingOptions
from ttrain.config.training import BITS_PER_BYTE
from ttrain.core.files import JsonDict, JsonObject, user_path
from ttrain.core.terminal import bar
from ttrain.data import existing
from ttrain.errors import UsageError
from ttrain.evaluate import run, suites
from ttrain.evaluate.items import comparable
from ttrain.evaluate.results import Results
from ttrain.evaluate.statistics import Rule
from ttrain.evaluate.suites import LoadedSuite
from ttrain.evaluate.task_result import TaskResult
from ttrain.inference import loading
from ttrain.inference.evaluated_model import as_evaluated_model
from ttrain.lineage import names as references
from ttrain.store import layout, runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.model_files import Reference
from ttrain.store.run_evaluations import RunEvaluation, heldout_shards
from ttrain.tasks.shards import heldout_records
from ttrain.tracking import pusher
from ttrain.tracking.registration import EVALUATION_TABLE

COMPARISON_TABLE = "comparison_table.json"
Records = Mapping[str, Sequence[JsonObject]]


def load_suites(names: Sequence[str], files: dict[str, list[Path] | None]) -> list[LoadedSuite]:
    """Load the named suites, and make one suite of the files. Raises UsageError for a file that is missing."""
    tasks: dict[str, JsonDict] = {}
    for kind, paths in files.items():
        option = f"--{kind.replace('_', '-')}"
        for path in paths or ():
            file = user_path(path)
            if not file.is_file():
                raise UsageError(f"{option} is {path}, which is not a file; name a JSON Lines file")
            stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.name.partition(".")[0]).lstrip("-_.") or "task"
            task = stem if stem not in tasks else f"{stem}-{len(tasks) + 1}"
            tasks[task] = {"kind": kind, "file": str(file.absolute())}
    return [*map(suites.load, names), *([suites.of_tasks(tasks, "the command line")] if tasks else [])]


@dataclass(frozen=True)
class Evaluation:
    """The models and the tasks of one command; the others are compared with the first model."""

    references: Sequence[Reference]
    suites: Sequence[LoadedSuite]
    heldout: Records
    notes: Sequence[str]
    options: LoadingOptions
    store: ArtifactStore

    @classmethod
    def of(cls, models: Sequence[str], loaded: list[LoadedSuite], options: LoadingOptions, limit: int | None) -> Evaluation:
        """Resolve the models; without a suite they are evaluated on the data that their own runs held out."""
        resolved_models = references.resolve_all(models, base=options.base, from_hub=True, run=options.run)
        store = ArtifactStore(layout.home())
        heldout, notes = heldout_of(resolved_models, store), list[str]()
        if not loaded:
            default, notes = default_suite(heldout, resolved_models)
            loaded = [default]
        if limit is not None:
            loaded = [suites.at_most(each, limit=limit) for each in loaded]
        return cls(resolved_models, loaded, heldout, notes, options, store)

    @property
    def names(self) -> list[str]:
        """Names of the models in tables: as the user wrote them, numbered where two are the same."""
        texts = [reference.text for reference in self.references]
        return [text if texts.count(text) == 1 else f"{text} ({number})" for number, text in enumerate(texts, 1)]

    def identified(self) -> list[str]:
        """A line on what each model is."""
        return [*map(references.line_of, self.references)]

    def identities(self) -> JsonDict:
        """What each model is, by name, for scripts."""
        return dict(zip(self.names, map(references.to_json, self.references), strict=True))

    def run(self) -> Results:
        """Run every task on every model.

        Raises UsageError and DataError for tasks that cannot be run, before a model is loaded.
        """
        suites.check_distinct_tasks(self.suites)
        items = run.read(self.suites, self.heldout)
        outcomes: list[TaskResult] = []
        with bar("evaluating", "% of all tasks", 100) as progress:
            for number, (name, reference) in enumerate(zip(self.names, self.references, strict=True)):

                def report(task: str, done: float, total: int, number: int = number) -> None:
                    progress(int(100 * (number + done / total) / len(self.references)))

                loaded_model = loading.load(reference, device=self.options.device, dtype=self.options.dtype)
                evaluated_model = as_evaluated_model(replace(loaded_model, name=name))
                outcomes += run.ask(items, evaluated_model, report)
                del loaded_model, evaluated_model
                gc.collect()  # the next model needs the memory
        return Results(outcomes, Rule(), items)

    def tracked_run(self, reference: Reference) -> str:
        """The run that made the model. Raises UsageError if there is none, or if it was not tracked."""
        name = reference.artifact.provenance.get("run") if reference.artifact else None
        record = (runs.read(self.store.root, name) if name else None) or {}
        if not record.get("settings", {}).get("tracking", {}).get("enabled", bool(record)):
            raise UsageError(
                f"--track keeps results with the run that made the model, but '{reference.text}' is not from a tracked run"
            )
        return str(name)

    def track(self, results: Results, run_names: Sequence[str]) -> list[str]:
        """Keep each model's results with the run that made it, and push that to MLflow; returns their names there."""
        kept = []
        for reference, name, run_name in zip(self.references, self.names, run_names, strict=True):
            own = Results([outcome for outcome in results.outcomes if outcome.subject == name], results.rule, results.read)
            tables = {EVALUATION_TABLE: own.table()}
            if len(self.references) > 1:
                tables |= {COMPARISON_TABLE: results.comparison_table()}
            artifact = reference.artifact
            evaluation = RunEvaluation(
                run=run_name,
                name=f"eval {name}",
                model=reference.text,
                evaluated=f"{artifact.stage} {artifact.key}" if artifact else "",
                metrics={f"eval/{key}": value for key, value in own.metrics().items()},
                results=own.to_json(),
                items=list(own.rows()),
                tables={file: {"columns": header, "data": rows} for file, (header, rows) in tables.items()},
            )
            evaluation.write(self.store.root)
            pusher.push_noted(self.store.root, run_name)
            kept.append(evaluation.name)
        return kept


def default_suite(heldout: Records, models: Sequence[Reference]) -> tuple[LoadedSuite, list[str]]:
    """(the suite without options: all held-out data of the models' runs that every model can be evaluated on; a line
    for each part left out). Raises UsageError if nothing remains."""
    names = ", ".join(reference.text for reference in models)
    advice = (
        "so name tasks: --text, --choices, --last-word, --generation, --chats or --pairs with a file, or --suite with "
        f"{', '.join(suites.names())} or a file of your own"
    )
    if not heldout:
        raise UsageError(f"there is no held-out data of {names} in this store, {advice}")
    without_template = [reference.text for reference in models if not existing.brings_template(reference.tokenizer)]
    parts = [part for part in heldout if part == BITS_PER_BYTE.records or not without_template]
    why = f"the tokenizer of {' and '.join(without_template)} has no chat template"
    if not parts:
        raise UsageError(f"all held-out data of {names} are {' and '.join(heldout)}, but {why}, {advice}")
    whole, loaded = (suites.with_parts(suites.load_heldout(), some) for some in (heldout, parts))
    left_out = ", ".join(name for name in whole.suite.tasks if name not in loaded.suite.tasks)
    return loaded, [f"not asked: {left_out}, for {why}"] if left_out else []


def heldout_of(models: Sequence[Reference], store: ArtifactStore) -> dict[str, list[JsonDict]]:
    """Held-out records by part, each from the first model that has them in this store: a base model has no chats, but a
    model trained on top of it has."""
    records_by_part: dict[str, list[JsonDict]] = {}
    for reference in models:
        for part_name, artifact in heldout_shards(reference.artifact, store).items():
            if part_name not in records_by_part and (records := comparable(heldout_records(artifact.path))):
                records_by_part[part_name] = records
    return records_by_part
