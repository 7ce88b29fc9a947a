"""Multiple choice by log-likelihood: each choice is scored as what follows the question, and the likeliest one counts.

Scores and figures are those of lm-evaluation-harness, item by item: `accuracy` is its acc, `accuracy_characters` its
acc_norm, `accuracy_bytes` its acc_bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ttrain.config.suite import ChoicesTask
from ttrain.evaluate import prompts
from ttrain.evaluate.evaluated_model import Progress, Subject
from ttrain.evaluate.items import BadRow, Items, Places, digests, groups, read_rows, sampled
from ttrain.evaluate.log_likelihood import Likelihood, log_likelihoods
from ttrain.evaluate.task_result import Figure, Outcome

WANTED = '{"question": text, "choices": [texts], "answer": number from 0, letter or text}'
FIGURES = {"none": "accuracy", "characters": "accuracy_characters", "bytes": "accuracy_bytes", "tokens": "accuracy_tokens"}


@dataclass(frozen=True)
class Choice:
    """A row: the answer is the number of the right choice."""

    question: str
    choices: tuple[str, ...]
    answer: int
    labels: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Asked:
    """An item as the model is given it: the context, and what may follow it."""

    choice: Choice
    context: str
    continuations: tuple[str, ...]


def parse(record: dict[str, Any], by: Sequence[str] = ()) -> Choice:
    """The item of a row. Raises BadRow for one that has no single right answer among different choices."""
    question, choices = prompts.text(record, "question"), record.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise BadRow("choices are no list of strings")
    if len(choices) < 2:
        raise BadRow("fewer than two choices")
    if not all(choice.strip() for choice in choices):
        raise BadRow("an empty choice")
    if len({choice.strip() for choice in choices}) < len(choices):
        raise BadRow("two choices are the same")
    return Choice(question, tuple(choices), _answer(record.get("answer"), choices), prompts.labels(record, by))


def read(task: str, spec: ChoicesTask, places: Places) -> Items[Asked]:
    """The questions of the file. Raises UsageError, or DataError where it has none."""
    setting = places.setting(task, "file")

    def parsed(record: dict[str, Any]) -> Choice:
        return parse(record, spec.by)

    rows, left_out = read_rows(places.file(spec.file), parsed, setting)
    prompts.check_some(rows, left_out, f"{setting} {spec.file}", WANTED)
    items = sampled(rows, spec.limit, spec.seed)
    shots, more = prompts.examples(task, spec, rows, items, places, parsed)
    asked = tuple(_asked(spec, item, examples) for item, examples in zip(items, shots, strict=True))
    names = digests([[one.context, one.continuations, one.choice.answer] for one in asked])
    return Items(task, spec, asked, names, (*left_out, *more), groups([item.labels for item in items], spec.by))


def run(items: Items[Asked], subject: Subject, progress: Progress) -> Outcome:
    """The figures of a model: the first one is what the task's `normalise` asks for.

    `choice_loss` is what the right choice costs in nats once the probabilities of an item's choices add up to one: it tells
    models apart that are far from getting more answers right. An item whose scores are no numbers is wrong.
    """
    assert isinstance(items.spec, ChoicesTask)
    scored = iter(log_likelihoods(subject, texts(items.items), progress))
    rows, losses = [], []
    right: dict[str, list[float]] = {name: [] for name in FIGURES}
    for one in items.items:
        found = [next(scored) for _ in one.continuations]
        chosen = chosen_by(one.choice.choices, found)
        for name, number in chosen.items():
            right[name].append(float(number == one.choice.answer))
        losses.append(_loss([one.nats for one in found], one.choice.answer))
        rows.append(_row(one.choice, found, chosen[items.spec.normalise]))
    ones = (1.0,) * len(rows)
    order = [items.spec.normalise, *(name for name in FIGURES if name != items.spec.normalise)]
    figures = [Figure(FIGURES[name], tuple(right[name]), ones, higher_is_better=True, unit="share") for name in order]
    figures.append(Figure("choice_loss", tuple(losses), ones, higher_is_better=False, unit="nats"))
    figures += cut_figure([row.get("cut", 0) for row in rows])
    return Outcome(
        items.task, items.spec.kind, subject.name, items.digests, tuple(figures), rows, items.reasons, items.groups
    )


def texts(items: Sequence[Asked]) -> list[tuple[str, str]]:
    """(context, continuation) of every choice of every item."""
    return [(one.context, continuation) for one in items for continuation in one.continuations]


def chosen_by(choices: Sequence[str], found: Sequence[Likelihood]) -> dict[str, int | None]:
    """The number of the likeliest choice (the first of equal ones) as it is, and by character, byte and token; None where
    a score is no number."""
    scores = -np.array([one.nats for one in found])
    if not np.isfinite(scores).all():
        return dict.fromkeys(FIGURES)
    lengths = {
        "none": [1] * len(choices),
        "characters": [len(choice) for choice in choices],
        "bytes": [len(choice.encode("utf-8")) for choice in choices],
        "tokens": [one.tokens for one in found],
    }
    return {name: int((scores / np.array(lengths[name], np.float64)).argmax()) for name in FIGURES}


def cut_figure(cuts: Sequence[int]) -> list[Figure]:
    """The share of items whose context was longer than what the model takes, where there are any."""
    if not any(cuts):
        return []
    return [Figure("cut", tuple(float(cut > 0) for cut in cuts), (1.0,) * len(cuts), higher_is_better=False, unit="share")]


def _asked(spec: ChoicesTask, item: Choice, examples: Sequence[Choice]) -> Asked:
    def before(one: Choice) -> str:
        return spec.template.replace("{question}", one.question)

    def after(one: Choice, choice: str) -> str:
        return (prompts.between(before(one), choice) if spec.delimiter is None else spec.delimiter) + choice

    shots = "".join(before(one) + after(one, one.choices[one.answer]) + spec.shots_separator for one in examples)
    return Asked(item, shots + before(item), tuple(after(item, choice) for choice in item.choices))


def _answer(value: object, choices: Sequence[str]) -> int:
    """The number of the right choice: a number from 0 (1.0 is 1), a choice's own text, or the letter of its place."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BadRow("no answer" if value is None else "answer is neither a whole number, a letter nor a choice")
    if isinstance(value, int):
        if not 0 <= value < len(choices):
            raise BadRow("answer is out of range")
        return value
    named = {number for number, choice in enumerate(choices) if choice.strip() == value.strip()}
    letter = value.strip().upper()
    if len(letter) == 1 and "A" <= letter <= "Z" and ord(letter) - ord("A") < len(choices):
        named.add(ord(letter) - ord("A"))
    if len(named) != 1:
        raise BadRow("answer is the letter of one choice and the text of another" if named else "answer is no choice")
    return named.pop()


def _loss(nats: Sequence[float], answer: int) -> float:
    if not all(map(math.isfinite, nats)):
        return math.nan
    least = min(nats)
    return nats[answer] - least + math.log(math.fsum(math.exp(least - one) for one in nats))


def _row(item: Choice, found: Sequence[Likelihood], chosen: int | None) -> dict[str, Any]:
    cut = max(one.cut for one in found)
    return {
        "question": item.question, "choices": list(item.choices), "answer": item.answer, "chosen": chosen,
        "right": chosen == item.answer, "nats": [one.nats if math.isfinite(one.nats) else None for one in found],
        **({"cut": cut} if cut else {}),
    }  # fmt: skip
