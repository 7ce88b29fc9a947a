"""The last word of a passage: whether the model would say it, and what it costs (LAMBADA, arXiv:1606.06031)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ttrain.config.suite import LastWordTask
from ttrain.evaluate import prompts
from ttrain.evaluate.choices import cut_figure
from ttrain.evaluate.evaluated_model import Progress, Subject
from ttrain.evaluate.items import Items, Places, digests, groups, read_rows, sampled
from ttrain.evaluate.log_likelihood import log_likelihoods
from ttrain.evaluate.task_result import Figure, Outcome

WANTED = '{"context": text, "target": text}'


@dataclass(frozen=True)
class Passage:
    """A row, with the space before its target, where the script has spaces and neither side brings one."""

    context: str
    target: str
    labels: dict[str, Any] = field(default_factory=dict, compare=False)


class Asked(NamedTuple):
    """What a model is given, worked examples first, and what it continues it with; and the passage alone."""

    context: str
    continuation: str
    passage: Passage


def parse(record: dict[str, Any], by: Sequence[str] = ()) -> Passage:
    """The item of a row. Raises BadRow where there is no text to continue, or nothing to continue it with."""
    context, target = prompts.text(record, "context"), prompts.text(record, "target")
    return Passage(context, prompts.between(context, target) + target, prompts.labels(record, by))


def read(task: str, spec: LastWordTask, places: Places) -> Items[Asked]:
    """The passages of the file. Raises UsageError, or DataError where it has none."""
    setting = places.setting(task, "file")

    def parsed(record: dict[str, Any]) -> Passage:
        return parse(record, spec.by)

    rows, left_out = read_rows(places.file(spec.file), parsed, setting)
    prompts.check_some(rows, left_out, f"{setting} {spec.file}", WANTED)
    items = sampled(rows, spec.limit, spec.seed)
    shots, more = prompts.examples(task, spec, rows, items, places, parsed)
    asked = tuple(
        Asked("".join(one.context + one.target + spec.shots_separator for one in before) + item.context, item.target, item)
        for item, before in zip(items, shots, strict=True)
    )
    names = digests([one[:2] for one in asked])
    return Items(task, spec, asked, names, (*left_out, *more), groups([item.labels for item in items], spec.by))


def run(items: Items[Asked], subject: Subject, progress: Progress) -> Outcome:
    """`accuracy`: all tokens of the target are the most likely ones; `perplexity`: exp of the nats of a target."""
    found = log_likelihoods(subject, texts(items.items), progress)
    ones = (1.0,) * len(found)
    figures = [
        Figure("accuracy", tuple(float(one.greedy) for one in found), ones, higher_is_better=True, unit="share"),
        Figure("perplexity", tuple(one.nats for one in found), ones, higher_is_better=False, unit="", shown="exp"),
        *cut_figure([one.cut for one in found]),
    ]
    rows = [
        {
            "context": context, "target": target, "right": one.greedy, "nats": one.nats if math.isfinite(one.nats) else None,
            **({"cut": one.cut} if one.cut else {}),
        }
        for (context, target, _), one in zip(items.items, found, strict=True)
    ]  # fmt: skip
    return Outcome(
        items.task, items.spec.kind, subject.name, items.digests, tuple(figures), rows, items.reasons, items.groups
    )


def texts(items: Sequence[Asked]) -> list[tuple[str, str]]:
    """(context, continuation) of every item."""
    return [(one.context, one.continuation) for one in items]
