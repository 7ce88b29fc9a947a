"""The work of `ttrain eval`: models, tasks and held-out records, scored and saved."""

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ttrain.cli.chat import LoadingOptions
from ttrain.config.training import BITS_PER_BYTE
from ttrain.core.files import JsonDict, JsonObject, user_path
from ttrain.core.terminal import bar
from ttrain.data import existing
from ttrain.errors import UsageError
from ttrain.evaluate import run, suites
from ttrain.evaluate.items import comparable, notes_on
from ttrain.evaluate.results import Results
from ttrain.evaluate.statistics import Rule
from ttrain.evaluate.task_result import TaskResult
from ttrain.inference import loading
from ttrain.lineage import lookup
from ttrain.store import layout
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.heldout_shards import heldout_shards
from ttrain.store.model_files import Reference
from ttrain.tasks.shards import heldout_records

Records = Mapping[str, Sequence[JsonObject]]


def load_suites(
    named: Sequence[str], files: dict[str, list[Path] | None]
) -> list[suites.LoadedSuite]:
    """Load suites and files as one suite. Raises UsageError for a missing file."""
    tasks: dict[str, JsonDict] = {}
    for kind, paths in files.items():
        option = f"--{kind.replace('_', '-')}"
        for path in paths or ():
            file = user_path(path)
            if not file.is_file():
                raise UsageError(f"{option} is {path}, which is not a file; name a JSON Lines file")
            stem = (
                re.sub(r"[^A-Za-z0-9_.-]+", "-", path.name.partition(".")[0]).lstrip("-_.")
                or "task"
            )
            task = stem if stem not in tasks else f"{stem}-{len(tasks) + 1}"
            tasks[task] = {"kind": kind, "file": str(file.absolute())}
    return [
        *map(suites.load, named),
        *([suites.of_tasks(tasks, "the command line")] if tasks else []),
    ]


def evaluate(
    models: Sequence[str],
    loaded: list[suites.LoadedSuite],
    limit: int | None,
    options: LoadingOptions,
    say: Callable[[str], None],
) -> tuple[Results, JsonDict, list[str]]:
    """(results of every task on every model, identities of the models, notes).

    Raises UsageError and DataError before a model is loaded.
    """
    references = lookup.resolve_all(models, base=options.base, from_hub=True, run=options.run)
    store = ArtifactStore(layout.home())
    notes: list[str] = []
    for reference in references:
        say(lookup.line_of(reference))
    heldout = heldout_of(references, store)
    if not loaded:
        default, notes = default_suite(heldout, references)
        loaded = [default]
    if limit is not None:
        loaded = [suites.at_most(each, limit=limit) for each in loaded]
    suites.check_distinct_tasks(loaded)
    items = run.read(loaded, heldout)
    texts = [reference.text for reference in references]
    labels = [
        text if texts.count(text) == 1 else f"{text} ({number})"
        for number, text in enumerate(texts, 1)
    ]
    outcomes: list[TaskResult] = []
    with bar("evaluating", "% of all tasks", 100) as progress:
        for number, (label, reference) in enumerate(zip(labels, references, strict=True)):

            def report(share: float, number: int = number) -> None:
                progress(int(100 * (number + share) / len(references)))

            loaded_model = loading.load(reference, device=options.device, dtype=options.dtype)
            outcomes += run.ask(items, replace(loaded_model, name=label), report)
            del loaded_model
            gc.collect()  # the next model needs the memory
    identities = dict(zip(labels, map(lookup.to_json, references), strict=True))
    return Results(outcomes, Rule()), identities, [*notes, *notes_on(items)]


def default_suite(
    heldout: Records, models: Sequence[Reference]
) -> tuple[suites.LoadedSuite, list[str]]:
    """(suite of the held-out data that all models can be evaluated on, notes on the rest).

    Raises UsageError if nothing remains.
    """
    shown = ", ".join(reference.text for reference in models)
    advice = (
        "so name tasks: --text, --choices, --last-word, --generation, --chats or --pairs with a "
        "file, or --suite with "
        f"{', '.join(suites.names())} or a file of your own"
    )
    if not heldout:
        raise UsageError(f"there is no held-out data of {shown} in this store, {advice}")
    without_template = [
        reference.text for reference in models if not existing.brings_template(reference.tokenizer)
    ]
    parts = [part for part in heldout if part == BITS_PER_BYTE.records or not without_template]
    why = f"the tokenizer of {' and '.join(without_template)} has no chat template"
    if not parts:
        raise UsageError(
            f"all held-out data of {shown} are {' and '.join(heldout)}, but {why}, {advice}"
        )
    whole, loaded = (suites.with_parts(suites.load_heldout(), some) for some in (heldout, parts))
    left_out = ", ".join(name for name in whole.suite.tasks if name not in loaded.suite.tasks)
    return loaded, [f"not asked: {left_out}, for {why}"] if left_out else []


def heldout_of(models: Sequence[Reference], store: ArtifactStore) -> dict[str, list[JsonDict]]:
    """Held-out records by part, each from the first model whose stages have them."""
    records_by_part: dict[str, list[JsonDict]] = {}
    for reference in models:
        for part_name, artifact in heldout_shards(reference.artifact, store).items():
            if part_name not in records_by_part and (
                records := comparable(heldout_records(artifact.path))
            ):
                records_by_part[part_name] = records
    return records_by_part
