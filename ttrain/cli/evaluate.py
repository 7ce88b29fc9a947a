"""The `ttrain eval` command: arguments and output."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson

from ttrain.cli.chat import LoadingOptions, before_torch
from ttrain.cli.options import AsJson, Output, Table, app, argument, check_output_file, command, option
from ttrain.core.files import JsonDict, JsonObject, output_file, user_path
from ttrain.core.terminal import bar, print_escaped
from ttrain.errors import UsageError
from ttrain.store import layout
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.integrity import heldout_shards
from ttrain.store.model_files import Reference

if TYPE_CHECKING:
    from ttrain.evaluate import suites
    from ttrain.evaluate.results import Results
    from ttrain.evaluate.suites import LoadedSuite
    from ttrain.evaluate.task_result import TaskResult


MODELS_HELP = (
    "runs, stages such as sft, registered NAME@ALIAS, directories, or owner/name on the Hub; the others are "
    "compared with the first"
)


def _file(name: str, shape: str) -> Any:
    return option(f"JSON Lines, {shape}; repeatable", name, metavar="FILE")


@dataclass(frozen=True)
class TaskFiles:
    """The options that name files of items, one for each kind of task."""

    text: Annotated[list[Path] | None, _file("--text", "{text}: bits per byte")] = None
    chats: Annotated[list[Path] | None, _file("--chats", "{messages}: loss on the answers, and what they look like")] = None
    pairs: Annotated[list[Path] | None, _file("--pairs", "{prompt, chosen, rejected}: which answer is likelier")] = None
    choices: Annotated[list[Path] | None, _file("--choices", "{question, choices, answer}: multiple choice")] = None
    last_word: Annotated[list[Path] | None, _file("--last-word", "{context, target}")] = None
    generation: Annotated[list[Path] | None, _file("--generation", "{question, answer}: answers in its own words")] = None


@command(
    app,
    "Examples:  ttrain eval sft\n\nttrain eval pretrain sft --choices poems.jsonl --last-word passages.jsonl\n\n"
    "ttrain eval sft mine-sft@champion --suite mine.yaml --json\n\n"
    "ttrain eval owner/name ./model --suite english --limit 200",
    "Use",
    name="eval",
)
def evaluate(
    models: Annotated[list[str], argument(MODELS_HELP, metavar="MODEL")],
    suite: Annotated[
        list[str] | None,
        option("tasks: a name, or a YAML file; repeatable", "--suite", "-s", metavar="SUITE"),
    ] = None,
    *,
    files: TaskFiles,
    limit: Annotated[int | None, option("items of each task, drawn by its seed", min=1)] = None,
    items: Annotated[Path | None, option("write every item here, as JSON Lines", metavar="FILE")] = None,
    track: Annotated[bool, option("keep the results in MLflow, below the run of the model", "--track")] = False,
    as_json: AsJson = False,
    loading_options: LoadingOptions,
) -> None:
    """Evaluate models with confidence intervals, and compare them on the same items.

    Without a task, they are evaluated on the data that their own runs held out.
    """
    from ttrain.evaluate import suites
    from ttrain.pipeline import lineage_names
    from ttrain.pipeline import names as references

    loading_options.check_device()
    loaded_suites = _load_suites(suite or (), asdict(files))
    if items is not None:
        check_output_file(items)
        if items.exists():
            raise UsageError(f"--items is {items}, which exists; name a new file")
    resolved_models = references.resolve_all(models, base=loading_options.base, from_hub=True, run=loading_options.run)
    home = ArtifactStore(layout.home())
    heldout = heldout_of(resolved_models, home)
    notes: list[str] = []
    if not loaded_suites:
        default, notes = default_suite(heldout, resolved_models)
        loaded_suites = [default]
    if limit is not None:
        loaded_suites = [suites.changed(loaded, limit=limit) for loaded in loaded_suites]
    parents = [_tracked(reference, home) for reference in resolved_models] if track else []
    for line in lineage_names.lines_of(resolved_models, home):
        print_escaped(line, stderr=as_json)
    before_torch()
    results = _evaluate(resolved_models, loaded_suites, heldout, loading_options)
    notes += results.notes()
    by_name = dict(zip(names_of(resolved_models), map(lineage_names.to_json, resolved_models), strict=True))
    comparison = Table(*results.comparison_table())
    tables = [Table(*results.table()), comparison][: 1 + bool(comparison.rows)]
    value = {**results.to_json(), "identities": by_name, "notes": notes}
    Output(value, [*tables, *notes]).print(as_json=as_json)
    if items is not None:  # after the results, which are valid even if what follows fails
        with output_file(items) as file:
            file.writelines(orjson.dumps(row) + b"\n" for row in results.rows())
        print_escaped(f"every item is in {items}", stderr=as_json)
    if track:
        run_names = track_results(resolved_models, parents, results, home)
        print_escaped(f"in MLflow: {', '.join(run_names)}; `ttrain up --open` shows it", stderr=as_json)


def _load_suites(names: Sequence[str], files: dict[str, list[Path] | None]) -> list[LoadedSuite]:
    """Load the named suites, and make one suite of the files. Raises UsageError for a file that is missing."""
    from ttrain.evaluate import suites

    tasks: dict[str, JsonDict] = {}
    option_by_task: dict[str, str] = {}
    for kind, paths in files.items():
        option = f"--{kind.replace('_', '-')}"
        for path in paths or ():
            file = user_path(path)
            if not file.is_file():
                raise UsageError(f"{option} is {path}, which is not a file; name a JSON Lines file")
            stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.name.partition(".")[0]).lstrip("-_.") or "task"
            task = stem if stem not in tasks else f"{stem}-{len(tasks) + 1}"
            tasks[task], option_by_task[task] = {"kind": kind, "file": str(file.absolute())}, option
    return [*map(suites.load, names), *([suites.of_tasks(tasks, "the command line", option_by_task)] if tasks else [])]


def _evaluate(
    references: Sequence[Reference],
    loaded_suites: Sequence[LoadedSuite],
    heldout: Records,
    options: LoadingOptions,
) -> Results:
    """Run every task on every model; the others are compared with the first.

    Raises UsageError and DataError for tasks that cannot be run, before a model is loaded.
    """
    from ttrain.evaluate import run as running
    from ttrain.evaluate import suites
    from ttrain.evaluate.results import Results
    from ttrain.evaluate.statistics import Rule
    from ttrain.inference import loading
    from ttrain.inference.evaluated_model import as_evaluated_model

    suites.check_distinct_tasks(loaded_suites)
    items = running.read(loaded_suites, heldout)
    names = names_of(references)
    outcomes: list[TaskResult] = []
    with bar("evaluating", "% of all tasks", 100) as progress:
        for number, (name, reference) in enumerate(zip(names, references, strict=True)):

            def report(task: str, done: float, total: int, number: int = number) -> None:
                progress(int(100 * (number + done / total) / len(names)))

            loaded_model = replace(loading.load(reference, device=options.device, dtype=options.dtype), name=name)
            evaluated_model = as_evaluated_model(loaded_model)
            outcomes += running.ask(items, evaluated_model, report)
            del loaded_model, evaluated_model
            gc.collect()  # the next model needs the memory
    return Results(outcomes, Rule(), items)


COMPARISON_TABLE = "comparison_table.json"


Records = Mapping[str, Sequence[JsonObject]]


def default_suite(heldout: Records, references: Sequence[Reference]) -> tuple[suites.LoadedSuite, list[str]]:
    """(the suite without options: all held-out data of the models' runs that every model can be evaluated on; a line
    for each part left out). Raises UsageError if nothing remains."""
    from ttrain.config.training import BITS_PER_BYTE
    from ttrain.data import existing
    from ttrain.evaluate import suites

    names = ", ".join(reference.text for reference in references)
    advice = (
        "so name tasks: --text, --choices, --last-word, --generation, --chats or --pairs with a file, or --suite with "
        f"{', '.join(suites.names())} or a file of your own"
    )
    if not heldout:
        raise UsageError(f"there is no held-out data of {names} in this store, {advice}")
    without_template = [reference.text for reference in references if not existing.brings_template(reference.tokenizer)]
    parts = [part for part in heldout if part == BITS_PER_BYTE.records or not without_template]
    why = f"the tokenizer of {' and '.join(without_template)} has no chat template"
    if not parts:
        raise UsageError(f"all held-out data of {names} are {' and '.join(heldout)}, but {why}, {advice}")
    whole, loaded = (suites.with_parts(suites.load_heldout(), some) for some in (heldout, parts))
    left_out = ", ".join(name for name in whole.suite.tasks if name not in loaded.suite.tasks)
    return loaded, [f"not asked: {left_out}, for {why}"] if left_out else []


def heldout_of(references: Sequence[Reference], store: ArtifactStore) -> dict[str, list[JsonDict]]:
    """Held-out records by part, each from the first model that has them in this store: a base model has no chats, but a
    model trained on top of it has."""
    from ttrain.evaluate.items import comparable
    from ttrain.stages.shards import heldout_records

    records_by_part: dict[str, list[JsonDict]] = {}
    for reference in references:
        for part_name, artifact in heldout_shards(reference.artifact, store).items():
            if part_name not in records_by_part and (records := comparable(heldout_records(artifact.path))):
                records_by_part[part_name] = records
    return records_by_part


def names_of(references: Sequence[Reference]) -> list[str]:
    """Names of the models in tables: as the user wrote them, numbered where two are the same."""
    texts = [reference.text for reference in references]
    return [text if texts.count(text) == 1 else f"{text} ({number})" for number, text in enumerate(texts, 1)]


def track_results(references: Sequence[Reference], runs: Sequence[str], results: Results, store: ArtifactStore) -> list[str]:
    """Keep each model's results with the run that made it, and push that to MLflow; returns their names there."""
    from ttrain.evaluate.results import Results
    from ttrain.pipeline import pusher
    from ttrain.pipeline.registration import EVALUATION_TABLE
    from ttrain.store.run_evaluations import RunEvaluation

    names = []
    for reference, name, run in zip(references, names_of(references), runs, strict=True):
        own = Results([outcome for outcome in results.outcomes if outcome.subject == name], results.rule, results.read)
        tables = {EVALUATION_TABLE: own.table()}
        if len(references) > 1:
            tables |= {COMPARISON_TABLE: results.comparison_table()}
        artifact = reference.artifact
        evaluation = RunEvaluation(
            run=run,
            name=f"eval {name}",
            model=reference.text,
            evaluated=f"{artifact.stage} {artifact.key}" if artifact else "",
            metrics={f"eval/{key}": value for key, value in own.metrics().items()},
            results=own.to_json(),
            items=list(own.rows()),
            tables={file: {"columns": header, "data": rows} for file, (header, rows) in tables.items()},
        )
        evaluation.write(store.root)
        pusher.push_noted(store.root, run)
        names.append(evaluation.name)
    return names


def _tracked(reference: Reference, store: ArtifactStore) -> str:
    """The run that made the model. Raises UsageError if there is none, or if it was not tracked."""
    from ttrain.store import runs

    name = reference.artifact.provenance.get("run") if reference.artifact else None
    record = (runs.read(store.root, name) if name else None) or {}
    if not record.get("settings", {}).get("tracking", {}).get("enabled", bool(record)):
        raise UsageError(
            f"--track keeps results with the run that made the model, but '{reference.text}' is not from a tracked run"
        )
    return str(name)
