"""Run tasks on models: read the items once, then evaluate one model after another."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from ttrain.config.evaluate import HarnessTask, Task
from ttrain.core.files import JsonObject
from ttrain.data import contamination
from ttrain.data.plain_text import plain
from ttrain.errors import UsageError
from ttrain.evaluate import chats, choices, generation, perplexity
from ttrain.evaluate.items import Items, SuiteFiles
from ttrain.evaluate.suites import LoadedSuite, check_parts
from ttrain.evaluate.task_result import TaskResult
from ttrain.inference.loading import LoadedModel

ReportProgress = Callable[[float], None]  # gets the share of the tasks that is done
Functions = tuple[Callable[..., Items[Any]], Callable[..., TaskResult]]
FUNCTIONS: dict[str, Functions] = {
    "text": (perplexity.read, perplexity.run),
    "chats": (chats.read, chats.run),
    "pairs": (chats.read_pairs, chats.run_pairs),
    "choices": (choices.read, choices.score_choices),
    "last_word": (choices.read, choices.score_passages),
    "generation": (generation.read, generation.run),
}


def read(
    suites: Sequence[LoadedSuite], heldout: Mapping[str, Sequence[JsonObject]]
) -> list[Items[Any]]:
    """Read the items of every task. `heldout` has the records of each part, such as "documents".

    Raises UsageError for a task whose held-out part or file is missing.
    """
    items: list[Items[Any]] = []
    for loaded in suites:
        check_parts(loaded, heldout)
        items += [
            functions_of(spec)[0](name, spec, SuiteFiles(loaded.base, heldout))
            for name, spec in loaded.suite.tasks.items()
        ]
    return items


def ask(
    items: Sequence[Items[Any]], subject: LoadedModel, report: ReportProgress
) -> list[TaskResult]:
    """Evaluate a model on every task."""
    outcomes = []
    for number, task_items in enumerate(items):

        def progress(done: int, total: int, number: int = number) -> None:
            report((number + done / max(1, total)) / len(items))

        outcomes.append(functions_of(task_items.spec)[1](task_items, subject, progress))
    return outcomes


def mark_overlaps(items: Items[Any], overlap_digests: Collection[str]) -> Items[Any]:
    """Group the items by whether the digest of their plain text is in `overlap_digests`."""
    if not overlap_digests:
        return items
    texts = [contamination.of_row(dict(row)) or "" for row in items.rows]
    has_overlap = [contamination.digest_of_text(plain(text)) in overlap_digests for text in texts]
    if not any(has_overlap):
        return items
    numbers = range(len(texts))
    groups = {"overlap=yes": tuple(compress(numbers, has_overlap))}
    if not all(has_overlap):
        groups["overlap=no"] = tuple(number for number in numbers if not has_overlap[number])
    return replace(items, groups={**items.groups, **groups})


def functions_of(spec: Task) -> Functions:
    """(reader, scorer) of a kind of task. Raises UsageError if the harness is not installed."""
    if not isinstance(spec, HarnessTask):
        return FUNCTIONS[spec.kind]
    try:
        from ttrain.evaluate import lm_eval_tasks
    except ImportError as error:
        raise UsageError(
            f"task {spec.task} needs lm-evaluation-harness, which is not installed ({error}); "
            "install it with: pip install 'ttrain[harness]'"
        ) from None
    return lm_eval_tasks.read, lm_eval_tasks.run
