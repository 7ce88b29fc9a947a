"""Run tasks on models: read the items once, then evaluate model after model, one in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ttrain.config import evaluate
from ttrain.data import contamination
from ttrain.data.chat_templates import Message
from ttrain.data.contamination import digest_of_text
from ttrain.data.plain_text import plain
from ttrain.data.preferences import Preference
from ttrain.errors import DataError, UsageError
from ttrain.evaluate import choices, generation
from ttrain.evaluate.evaluated_model import EvaluatedModel
from ttrain.evaluate.items import IN_TRAINING, Items, LeftOut, SuiteFiles
from ttrain.evaluate.suites import LoadedSuite, check_parts
from ttrain.evaluate.task_result import TaskResult

Records = Sequence[Mapping[str, Any]]

ReportProgress = Callable[[str, float, int], None]  # (task, number of tasks done, with fractions, number of tasks)


def read(suites: Sequence[LoadedSuite], heldout: Mapping[str, Records]) -> list[Items[Any]]:
    """Read the items of every task. `heldout` has the records of each held-out part, such as "documents".

    Raises UsageError for a task whose held-out part or file is missing.
    """
    for loaded in suites:
        check_parts(loaded, heldout)
    items: list[Items[Any]] = []
    for loaded in suites:
        files = SuiteFiles(loaded.base, heldout, loaded.options, loaded.suite.allow_code)
        items += [functions_of(spec)[0](name, spec, files) for name, spec in loaded.suite.tasks.items()]
    return items


def ask(items: Sequence[Items[Any]], subject: EvaluatedModel, report: ReportProgress) -> list[TaskResult]:
    """Evaluate a model on every task."""
    outcomes = []
    for number, task_items in enumerate(items):

        def progress(done: int, total: int, task_items: Items[Any] = task_items, number: int = number) -> None:
            report(task_items.task, number + done / max(1, total), len(items))

        outcomes.append(functions_of(task_items.spec)[1](task_items, subject, progress))
        report(task_items.task, number + 1, len(items))
    return outcomes


GROUPS = ("overlap=yes", "overlap=no")


def mark_overlaps(items: Items[Any], overlap_digests: Collection[str], *, leave_out: bool) -> Items[Any]:
    """Put the items whose plain text's digest is in `overlap_digests` into a group of their own, or leave them out.

    Raises DataError if no item would be left.
    """
    overlapping = {number for number, item in enumerate(items.items) if _digest(item) in overlap_digests}
    if not overlapping:
        return items
    clean = [number for number in range(len(items.items)) if number not in overlapping]
    if not leave_out:
        marked = {GROUPS[0]: tuple(sorted(overlapping)), **({GROUPS[1]: tuple(clean)} if clean else {})}
        return replace(items, groups={**items.groups, **marked})
    if not clean:
        raise DataError(
            f"all {len(overlapping)} items of {items.task} occur in the training documents, so no item is left; set "
            "evaluate.overlapping=report, or have shards.decontaminate remove the documents"
        )
    new_numbers = {number: new for new, number in enumerate(clean)}
    groups = {
        name: tuple(new_numbers[number] for number in numbers if number in new_numbers)
        for name, numbers in items.groups.items()
        if not overlapping.issuperset(numbers)
    }
    return replace(
        items,
        items=tuple(items.items[number] for number in clean),
        digests=tuple(items.digests[number] for number in clean),
        left_out=(*items.left_out, *(LeftOut(items.digests[number], None, IN_TRAINING) for number in sorted(overlapping))),
        groups=groups,
    )


def _digest(item: object) -> str | None:
    """Digest of the text that `item_text.of_row` makes of the item's row; None for kinds of items without such a text."""
    match item:
        case str():
            text = item
        case choices.ChoicePrompt(choice=choice):
            text = contamination.of_row({"question": choice.question, "answer": choice.choices[choice.answer]}) or ""
        case choices.PassagePrompt(passage=passage):
            text = passage.context + passage.target
        case (generation.Problem() as problem, _):
            text = contamination.of_row({"question": problem.question, "answer": problem.answer}) or ""
        case Preference():
            text = contamination.of_chat((*item.prompt, *item.chosen))
        case (Message(), *_):
            text = contamination.of_chat(item)  # type: ignore[arg-type]
        case _:
            return None
    return digest_of_text(plain(text))


def functions_of(spec: evaluate.Task) -> tuple[Callable[..., Items[Any]], Callable[..., TaskResult]]:
    """(reads the items, scores a model on them) of a kind of task; loads only what this kind needs.

    Raises UsageError if the package of a kind is not installed.
    """
    match spec:
        case evaluate.TextTask():
            from ttrain.evaluate import perplexity

            return perplexity.read, perplexity.run
        case evaluate.ChatsTask():
            from ttrain.evaluate import chats

            return chats.read, chats.run
        case evaluate.PairsTask():
            from ttrain.evaluate import preferences

            return preferences.read, preferences.run
        case evaluate.ChoicesTask():
            return choices.read_choices, choices.score_choices
        case evaluate.LastWordTask():
            return choices.read_passages, choices.score_passages
        case evaluate.GenerationTask():
            return generation.read, generation.run
        case evaluate.HarnessTask():
            try:
                from ttrain.evaluate import lm_eval_tasks
            except ImportError as error:
                raise UsageError(
                    f"task {spec.task} needs lm-evaluation-harness, which is not installed ({error}); "
                    "install it with: pip install 'ttrain[harness]'"
                ) from None
            return lm_eval_tasks.read, lm_eval_tasks.run
