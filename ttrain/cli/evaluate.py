"""The `ttrain eval` command: arguments and output."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ttrain.cli.chat import LoadingOptions, before_torch
from ttrain.cli.options import AsJson, app, argument, command, option, suite_words
from ttrain.core.files import JsonDict, JsonObject, output_file, user_path
from ttrain.core.terminal import bar, print_escaped, print_json, table
from ttrain.errors import UsageError
from ttrain.store import layout
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.integrity import verify_artifact
from ttrain.store.layout import Artifact
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
        option("tasks: a name, or a YAML file; repeatable", "--suite", "-s", metavar="SUITE", autocompletion=suite_words),
    ] = None,
    *,
    files: TaskFiles,
    match: Annotated[
        Literal["auto", "exact", "numeric"] | None,
        option("how answers of --generation are compared; auto: as numbers where all are"),
    ] = None,
    shots: Annotated[int | None, option("worked examples before each item", min=0, max=64)] = None,
    limit: Annotated[int | None, option("items of each task, drawn by its seed", min=1)] = None,
    items: Annotated[Path | None, option("write every item and answer there, as JSON Lines", metavar="FILE")] = None,
    track: Annotated[bool, option("keep the results in MLflow, below the run of the model", "--track")] = False,
    batch_tokens: Annotated[int | None, option("padded tokens of a forward pass: bounds the memory", min=1)] = None,
    as_json: AsJson = False,
    loading_options: LoadingOptions,
) -> None:
    """Evaluate models with confidence intervals, and compare them on the same items.

    Without a task, they are evaluated on the data that their own runs held out.
    """
    from ttrain.pipeline import lineage_names
    from ttrain.pipeline import names as references

    loading_options.check_device()
    named = _load_suites(suite or (), asdict(files))
    loaded_suites = [_changed(loaded, shots=shots, limit=limit, match=match) for loaded in named]
    resolved_models = references.resolve_all(models, base=loading_options.base, from_hub=True, run=loading_options.run)
    home = ArtifactStore(layout.home())
    heldout = heldout_of(resolved_models, home)
    identified, notes = lineage_names.lines_of(resolved_models, home), list[str]()
    if not loaded_suites:
        default, left_out = default_suite(heldout, resolved_models)
        loaded_suites, notes = [_changed(default, limit=limit)], left_out
    _check_used(loaded_suites, shots=shots, match=match)
    parents = [_tracked(reference, home) for reference in resolved_models] if track else []
    if items is not None:
        check_writable(items, loaded_suites)
    for line in identified:
        print_escaped(line, stderr=as_json)
    before_torch()
    results = _evaluate(resolved_models, loaded_suites, heldout, loading_options, batch_tokens)
    notes += results.notes()
    if as_json:
        by_name = dict(zip(names_of(resolved_models), map(lineage_names.to_json, resolved_models), strict=True))
        print_json({**results.to_json(), "identities": by_name, "notes": notes})
    else:
        _show(results, notes)
    final_lines = []  # printed after the results, which are valid even if what follows fails
    if items is not None:
        write_items(items, results)
        final_lines.append(f"every item is in {items}")
    if track:
        run_names = track_results(resolved_models, parents, results, home)
        final_lines.append(f"in MLflow: {', '.join(run_names)}; `ttrain up --open` shows it")
    for line in () if as_json else final_lines:
        print(line)


def _load_suites(names: Sequence[str], files: dict[str, list[Path] | None]) -> list[LoadedSuite]:
    """Load the named suites, and make one suite of the files. Raises UsageError for a file that is missing or named
    twice."""
    from ttrain.evaluate import suites

    tasks: dict[str, JsonDict] = {}
    option_by_task: dict[str, str] = {}
    for kind, paths in files.items():
        option, resolved_paths = f"--{kind.replace('_', '-')}", set[Path]()
        for path in paths or ():
            file = user_path(path)
            if not file.is_file():
                problem = (
                    f"a directory; name each file in it with {option}"
                    if file.is_dir()
                    else "not a file; name a JSON Lines file"
                )
                raise UsageError(f"{option} is {path}, which is {problem}")
            if file.resolve() in resolved_paths:
                raise UsageError(f"{option} names {path} twice, so that its items would count twice; remove one")
            resolved_paths.add(file.resolve())
            task = _task_name(path, tasks)
            tasks[task], option_by_task[task] = {"kind": kind, "file": str(file.absolute())}, option
    return [*map(suites.load, names), *([suites.of_tasks(tasks, "the command line", option_by_task)] if tasks else [])]


def _task_name(path: Path, tasks: JsonDict) -> str:
    """The task name of a file: its name without suffixes; a second file of the same name gets a number."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.name.partition(".")[0]).lstrip("-_.") or "task"
    return next(name for name in (stem, *(f"{stem}-{number}" for number in range(2, 10**6))) if name not in tasks)


def _changed(loaded: LoadedSuite, **settings: Any) -> LoadedSuite:
    from ttrain.evaluate import suites

    return suites.changed(loaded, **{name: value for name, value in settings.items() if value is not None})


def _check_used(loaded_suites: Sequence[LoadedSuite], **settings: Any) -> None:
    """Raise UsageError for an option that no task has: it would have no effect."""
    for name, value in settings.items():
        if value is not None and not any(
            hasattr(task, name) for loaded in loaded_suites for task in loaded.suite.tasks.values()
        ):
            kinds = sorted({task.kind for loaded in loaded_suites for task in loaded.suite.tasks.values()})
            raise UsageError(f"--{name} is {value}, but no task has that setting; the tasks are of kind {', '.join(kinds)}")


def _evaluate(
    references: Sequence[Reference],
    loaded_suites: Sequence[LoadedSuite],
    heldout: Records,
    options: LoadingOptions,
    batch_tokens: int | None,
) -> Results:
    """Run every task on every model; the others are compared with the first.

    Raises UsageError and DataError for tasks that cannot be run, before a model is loaded.
    """
    from ttrain.evaluate import suites
    from ttrain.evaluate.results import Results
    from ttrain.evaluate.statistics import Rule

    suites.check_distinct_tasks(loaded_suites)
    from ttrain.evaluate import run as running
    from ttrain.inference import loading
    from ttrain.inference.evaluated_model import as_evaluated_model

    items = running.read(loaded_suites, heldout)
    names = names_of(references)
    outcomes: list[TaskResult] = []
    with bar("evaluating", "% of all tasks", 100) as progress:
        for number, (name, reference) in enumerate(zip(names, references, strict=True)):

            def report(task: str, done: float, total: int, number: int = number) -> None:
                progress(int(100 * (number + done / total) / len(names)))

            loaded_model = replace(loading.load(reference, device=options.device, dtype=options.dtype), name=name)
            evaluated_model = as_evaluated_model(loaded_model, batch_tokens=batch_tokens)
            outcomes += running.ask(items, evaluated_model, report)
            del loaded_model, evaluated_model
            gc.collect()  # the next model needs the memory
    return Results(outcomes, Rule(), items)


def _show(results: Results, notes: Sequence[str]) -> None:

    table(*results.table())
    header, rows = results.comparison_table()
    if rows:
        print()
        table(header, rows)
    for line in notes:
        print_escaped(line)


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
        for part_name, artifact in _held_out(reference.artifact, store).items():
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


def check_writable(path: Path, loaded_suites: Sequence[suites.LoadedSuite]) -> None:
    """Raise UsageError, before the work, if the items cannot be written or would overwrite an input file."""
    from ttrain.evaluate import suites

    with _write_errors_as_usage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()  # changes nothing of a file that exists
        if is_new:
            path.unlink()
    for loaded in loaded_suites:
        read = [] if loaded.file is None else [(f"the suite is {loaded.name}", loaded.file)]
        for usage, file in (*read, *suites.task_files(loaded)):
            if file.exists() and not is_new and path.samefile(file):
                raise UsageError(f"--items is {path}, but {usage}, which would be overwritten; name another file")


def write_items(path: Path, results: Results) -> None:
    """Write every item of every model as a line of JSON. Raises UsageError if that fails."""
    import orjson

    with _write_errors_as_usage_errors(path), output_file(path) as file:
        file.writelines(orjson.dumps(row) + b"\n" for row in results.rows())


@contextlib.contextmanager
def _write_errors_as_usage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--items is {path}, which cannot be written: {error.strerror}; name another file") from None


def _held_out(artifact: Artifact | None, store: ArtifactStore) -> dict[str, Artifact]:
    """The shards that a model and its base models were trained on, by part."""
    from ttrain.config.training import TRAINING_STAGES

    parts = {f"shards-{row.dataset}": row.part for row in TRAINING_STAGES.values()}
    shard_artifacts: dict[str, Artifact] = {}
    visited: set[tuple[str, str]] = set()  # the paths through the inputs of nights double every night
    waiting = [artifact] if artifact else []
    while waiting:
        for used in waiting.pop().manifest["inputs"].values():
            name = (used["stage"], used["key"])
            ancestor = None if name in visited else store.find(*name)
            visited.add(name)
            if ancestor is None:
                continue
            waiting.append(ancestor)
            part_name = parts.get(ancestor.stage)
            if part_name and not any(name.startswith("heldout/") for name in ancestor.absent):
                verify_artifact(ancestor, ("heldout",))
                shard_artifacts.setdefault(part_name, ancestor)
    return shard_artifacts


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
