"""`ttrain eval`: models by reference, what their runs held out, the tasks, what came of them. Loads torch when it asks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ttrain.data import existing_tokenizer
from ttrain.errors import UsageError
from ttrain.evaluate import suites
from ttrain.evaluate.results import Results
from ttrain.evaluate.statistics import Rule
from ttrain.store.artifacts import Store
from ttrain.store.integrity import verify_artifact
from ttrain.store.layout import Artifact
from ttrain.store.model_reference import Reference

if TYPE_CHECKING:
    from ttrain.evaluate.task_result import Outcome

COMPARISON_TABLE = "comparison_table.json"
PARTS = {"shards-pretrain": "documents", "shards-sft": "chats", "shards-lora": "domain"}
Records = Mapping[str, Sequence[Mapping[str, Any]]]
Told = Callable[[str, str, float, int], None]  # (model, task, how much is done, of how many tasks)


@dataclass(frozen=True)
class How:
    """How to ask: the device, the numbers, and how many padded tokens at once (None: as many as suit the device)."""

    device: str = "auto"
    dtype: str = "fp32"
    batch_tokens: int | None = None


def evaluate(
    references: Sequence[Reference],
    asked: Sequence[suites.Loaded],
    heldout: Records,
    *,
    how: How,
    rule: Rule,
    told: Told = lambda model, task, done, total: None,
) -> Results:
    """Ask every model every task; the first is the one that the others are compared with.

    Raises UsageError and DataError for what cannot be asked, before a model is loaded.
    """
    suites.distinct(asked)
    from ttrain.evaluate import run as running
    from ttrain.inference import loading
    from ttrain.inference.evaluated_model import subject_of

    items = running.read(asked, heldout)
    outcomes: list[Outcome] = []
    for name, reference in zip(names_of(references), references, strict=True):
        speaker = replace(loading.load(reference, device=how.device, dtype=how.dtype), name=name)
        subject = subject_of(speaker, batch_tokens=how.batch_tokens)
        outcomes += running.ask(items, subject, partial(told, name))
        del speaker, subject
        gc.collect()  # the next one needs the room
    return Results(outcomes, rule, items)


def default_suite(heldout: Records, references: Sequence[Reference]) -> tuple[suites.Loaded, list[str]]:
    """(what to ask where nothing is said: all that the models' runs held out, and that each of them can be asked; a line
    for what is left out). Raises UsageError where that is nothing."""
    names = ", ".join(reference.text for reference in references)
    wanted = (
        "so say what to ask: --text, --choices, --last-word, --generation or --chats with a file, or --suite with "
        f"{', '.join(suites.names())} or a file of your own"
    )
    if not heldout:
        raise UsageError(f"no held-out data of {names} is here, {wanted}")
    loaded = suites.of_heldout(heldout)
    mute = [reference.text for reference in references if not existing_tokenizer.brings_template(reference.tokenizer)]
    rest = suites.without_chats(loaded)
    if not mute or rest == loaded.suite:
        return loaded, []
    why = f"the tokenizer of {' and '.join(mute)} has no chat template"
    if rest is None:
        raise UsageError(f"all held-out data of {names} that is here are chats, but {why}, {wanted}")
    left_out = ", ".join(name for name in loaded.suite.tasks if name not in rest.tasks)
    return replace(loaded, suite=rest), [f"not asked: {left_out}, for {why}"]


def heldout_of(references: Sequence[Reference], store: Store) -> dict[str, list[dict[str, Any]]]:
    """Records of the held-out documents, chats and domain, each of the first model behind which there are some that are
    here: a base model has no chats, but the one that was trained on top of it has."""
    from ttrain.stages.shards import heldout_records

    found: dict[str, list[dict[str, Any]]] = {}
    for reference in references:
        for part, artifact in _held_out(reference.artifact, store).items():
            if part not in found and (records := heldout_records(artifact.path)):
                found[part] = records
    return found


def names_of(references: Sequence[Reference]) -> list[str]:
    """What the models are called in tables: as the user wrote them, and told apart where that is the same twice."""
    texts = [reference.text for reference in references]
    return [text if texts.count(text) == 1 else f"{text} ({number})" for number, text in enumerate(texts, 1)]


def check_tracked(references: Sequence[Reference], store: Store) -> None:
    """Raise UsageError where one of the models is of no tracked run."""
    for reference in references:
        _tracked(reference, store)


def track(references: Sequence[Reference], results: Results, store: Store) -> list[str]:
    """Keep each model's results as a run below the one that made it, in MLflow; their names.

    Raises UsageError where one is of no tracked run.
    """
    from ttrain import tracking
    from ttrain.pipeline.registration import EVALUATION_TABLE, tag_of_tables

    parents = [_tracked(reference, store) for reference in references]
    made = []
    for reference, name, (run_id, experiment) in zip(references, names_of(references), parents, strict=True):
        tracker = tracking.open_store(store.root, experiment)
        artifact = reference.artifact
        tags = {"ttrain.stage": "eval", "ttrain.evaluated": f"{artifact.stage} {artifact.key}" if artifact else ""}
        own = Results([one for one in results.outcomes if one.subject == name], results.rule, results.read)
        run = tracker.start_run(f"eval {name}", parent_run_id=run_id, tags=tags, params={"model": reference.text})
        run.log_summary({f"eval/{key}": value for key, value in own.metrics().items()})
        run.log_inputs(tracking.of_tasks(own.to_json()["tasks"]))
        tables = {EVALUATION_TABLE: own.table()}
        if len(references) > 1:
            tables |= {COMPARISON_TABLE: results.comparison_table()}
        for file, (header, rows) in tables.items():
            run.log_text(orjson.dumps({"columns": header, "data": rows}).decode(), file)
        run.set_tags(tag_of_tables(tables))
        run.log_text(orjson.dumps(own.to_json(), option=orjson.OPT_INDENT_2).decode(), "evaluation.json")
        run.log_text("".join(orjson.dumps(row).decode() + "\n" for row in own.rows()), "items.jsonl")
        run.finish("FINISHED")
        tracker.close()
        made.append(f"eval {name}")
    return made


def check_writable(path: Path, asked: Sequence[suites.Loaded]) -> None:
    """Raise UsageError where the items could not be written, or would overwrite what is read: before the work, not after
    it."""
    for loaded in asked:
        read = [] if loaded.file is None else [(f"the suite is {loaded.name}", loaded.file)]
        for what, file in (*read, *suites.read_by(loaded)):
            if _same(path, file):
                raise UsageError(f"--items is {path}, but {what}, which would be overwritten; name another file")
    with _told_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass


def write_items(path: Path, results: Results) -> None:
    """Every item of every model as a line of JSON. Raises UsageError where they cannot be written."""
    with _told_of(path), path.open("wb") as file:
        file.writelines(orjson.dumps(row) + b"\n" for row in results.rows())


def _same(first: Path, second: Path) -> bool:
    """Whether both are one file, by whatever links; also where there is none yet."""
    try:
        return first.samefile(second)
    except OSError:
        return first.resolve() == second.resolve()


@contextlib.contextmanager
def _told_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--items is {path}, which cannot be written: {error.strerror}; name another file") from None


def _held_out(artifact: Artifact | None, store: Store) -> dict[str, Artifact]:
    """The shards behind a model, by part: its own, and those of what it was trained on top of."""
    found: dict[str, Artifact] = {}
    waiting = [artifact] if artifact else []
    while waiting:
        for used in waiting.pop().manifest["inputs"].values():
            one = store.find(used["stage"], used["key"])
            if one is None:
                continue
            waiting.append(one)
            part = PARTS.get(one.stage)
            if part and not any(name.startswith("heldout/") for name in one.absent):
                verify_artifact(one, ("heldout",))
                found.setdefault(part, one)
    return found


def _tracked(reference: Reference, store: Store) -> tuple[str, str]:
    """(id of the tracked run that made the model, its experiment). Raises UsageError where there is none."""
    from ttrain.core.files import read_json

    name = reference.artifact.manifest.get("provenance", {}).get("run") if reference.artifact else None
    record = (read_json(store.root / "runs" / f"{name}.json") if name else None) or {}
    run_id = (record.get("tracking") or {}).get("run_id")
    if not run_id:
        raise UsageError(
            f"--track keeps results with the run that made the model, but '{reference.text}' is of no tracked run"
        )
    return str(run_id), str(record["settings"]["tracking"]["experiment"])
