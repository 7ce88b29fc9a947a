"""Tasks for models: what is asked is read once, then model after model is asked, one in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ttrain.evaluate import task_types
from ttrain.evaluate.evaluated_model import Subject
from ttrain.evaluate.items import Items, Places
from ttrain.evaluate.suites import Loaded, check_parts
from ttrain.evaluate.task_result import Outcome

Records = Sequence[Mapping[str, Any]]
Told = Callable[[str, float, int], None]  # (task, how much of all the tasks is done, of how many tasks)


def read(suites: Sequence[Loaded], heldout: Mapping[str, Records]) -> list[Items[Any]]:
    """The items of every task. `heldout`: records of the held-out "documents", "chats" and "domain", where there are some.

    Raises UsageError for a task whose held-out part is missing, or whose file is.
    """
    for loaded in suites:
        check_parts(loaded, heldout)
    return [
        task_types.read(name, spec, Places(loaded.base, heldout, loaded.named, loaded.suite.allow_code))
        for loaded in suites
        for name, spec in loaded.suite.tasks.items()
    ]


def ask(items: Sequence[Items[Any]], subject: Subject, told: Told) -> list[Outcome]:
    """What the model makes of every task."""
    found = []
    for number, one in enumerate(items):

        def progress(done: int, total: int, one: Items[Any] = one, number: int = number) -> None:
            told(one.task, number + done / max(1, total), len(items))

        found.append(task_types.run(one, subject, progress))
        told(one.task, number + 1, len(items))
    return found
