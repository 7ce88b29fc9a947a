"""Which module reads and asks the tasks of a kind. Each has two functions:

read(task, spec, places) -> Items       the items, and the rows that are none; once, for all models
run(items, subject, progress) -> Outcome   what a model made of them; `progress(done, total)` in whatever unit
"""

from __future__ import annotations

from typing import Any

from ttrain.config import suite
from ttrain.evaluate.evaluated_model import Progress, Subject
from ttrain.evaluate.items import Items, Places
from ttrain.evaluate.task_result import Outcome


def read(task: str, spec: suite.Task, places: Places) -> Items[Any]:
    """The items of a task. Raises UsageError or DataError where its files cannot be read or hold no item."""
    match spec:
        case suite.TextTask():
            from ttrain.evaluate import text

            return text.read(task, spec, places)
        case suite.ChatsTask():
            from ttrain.evaluate import chats

            return chats.read(task, spec, places)
        case suite.ChoicesTask():
            from ttrain.evaluate import choices

            return choices.read(task, spec, places)
        case suite.LastWordTask():
            from ttrain.evaluate import last_word

            return last_word.read(task, spec, places)
        case suite.GenerationTask():
            from ttrain.evaluate import generation

            return generation.read(task, spec, places)
        case suite.HarnessTask():
            from ttrain.evaluate import lm_eval_tasks

            return lm_eval_tasks.read(task, spec, places)


def run(items: Items[Any], subject: Subject, progress: Progress) -> Outcome:
    """What the model makes of the items."""
    match items.spec:
        case suite.TextTask():
            from ttrain.evaluate import text

            return text.run(items, subject, progress)
        case suite.ChatsTask():
            from ttrain.evaluate import chats

            return chats.run(items, subject, progress)
        case suite.ChoicesTask():
            from ttrain.evaluate import choices

            return choices.run(items, subject, progress)
        case suite.LastWordTask():
            from ttrain.evaluate import last_word

            return last_word.run(items, subject, progress)
        case suite.GenerationTask():
            from ttrain.evaluate import generation

            return generation.run(items, subject, progress)
        case suite.HarnessTask():
            from ttrain.evaluate import lm_eval_tasks

            return lm_eval_tasks.run(items, subject, progress)
