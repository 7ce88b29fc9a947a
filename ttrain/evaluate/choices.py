"""Multiple choice by log-likelihood: the likeliest continuation of the question is chosen.

Scores and metrics are those of lm-evaluation-harness, item by item: `accuracy` is its acc,
`accuracy_characters` its acc_norm, `accuracy_bytes` its acc_bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np

from ttrain.config.evaluate import ChoicesTask, LastWordTask
from ttrain.core.files import JsonDict, finite
from ttrain.core.text import is_number
from ttrain.evaluate.items import (
    BadRow,
    Items,
    SuiteFiles,
    read_rows,
    separator,
    text_of,
    with_examples,
)
from ttrain.evaluate.log_likelihood import Likelihood, log_likelihoods
from ttrain.evaluate.perplexity import ProgressCallback
from ttrain.evaluate.task_result import ANSWER_BITS, LN2, Metric, TaskResult, mean
from ttrain.inference.loading import LoadedModel

ROW_FORMATS = {
    "choices": '{"question": text, "choices": [texts], "answer": number from 0, letter or text}',
    "last_word": '{"context": text, "target": text}',
}
FIGURES = {
    "none": "accuracy",
    "characters": "accuracy_characters",
    "bytes": "accuracy_bytes",
    "tokens": "accuracy_tokens",
}


@dataclass(frozen=True)
class ChoiceQuestion:
    """A row of the file; `answer` is the number of the right choice."""

    question: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class ChoicePrompt:
    """An item as the model gets it: the context and its possible continuations."""

    choice: ChoiceQuestion
    context: str
    continuations: tuple[str, ...]


def parse_choice(record: JsonDict) -> ChoiceQuestion:
    """Parse a row. Raises BadRow unless exactly one of several different choices is right."""
    question = text_of(record, "question")
    choices = record.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise BadRow("choices is not a list of strings")
    texts = {choice.strip() for choice in choices} - {""}
    if len(texts) < max(2, len(choices)):
        raise BadRow("choices are not two or more different texts")
    return ChoiceQuestion(question, tuple(choices), _answer(record.get("answer"), choices))


def parse_passage(record: JsonDict) -> ChoiceQuestion:
    """Parse a row of last words, a question with one choice. Raises BadRow if a part is missing."""
    return ChoiceQuestion(text_of(record, "context"), (text_of(record, "target"),), 0)


def read(task: str, spec: ChoicesTask | LastWordTask, files: SuiteFiles) -> Items[ChoicePrompt]:
    """Read the questions or passages of a file. Raises UsageError or DataError if it has none."""
    parser = (
        parse_choice if spec.kind == "choices" else parse_passage,
        ROW_FORMATS[spec.kind],
    )
    template, delimiter = (
        (spec.template, spec.delimiter) if isinstance(spec, ChoicesTask) else ("{question}", None)
    )

    def prompt(
        item: ChoiceQuestion, examples: Sequence[ChoiceQuestion]
    ) -> tuple[ChoicePrompt, object]:
        shots = ""
        for shot in examples:
            context, continuations = texts(shot)
            shots += context + continuations[shot.answer] + spec.shots_separator
        context, continuations = texts(item)
        return ChoicePrompt(item, shots + context, continuations), [
            shots + context,
            continuations,
            item.answer,
        ]

    def texts(row: ChoiceQuestion) -> tuple[str, tuple[str, ...]]:
        context = template.replace("{question}", row.question)
        between = [
            separator(context, choice) if delimiter is None else delimiter for choice in row.choices
        ]
        return context, tuple(map("".join, zip(between, row.choices, strict=True)))

    return with_examples(
        task,
        spec,
        read_rows(f"tasks.{task}.file", spec.file, files, parser),
        files,
        parser,
        prompt,
    )


def score_choices(
    items: Items[ChoicePrompt], subject: LoadedModel, progress: ProgressCallback
) -> TaskResult:
    """Score a model on the items; the first metric is the one that `normalise` selects.

    choice_loss    nats of the right choice, the probabilities of an item's choices summing to one
    bits_per_byte  of the right choice, whatever the others are
    """
    # Both improve in small models while their accuracies are at chance. An item with a score that
    # is not finite counts as wrong.
    scored = iter(log_likelihoods(subject, choice_texts(items.items), progress))
    rows = list[JsonDict]()
    losses = []
    answer_nats = []
    right: dict[str, list[float]] = {name: [] for name in FIGURES}
    for prompt in items.items:
        choice = prompt.choice
        costs = [next(scored) for _ in prompt.continuations]
        chosen = chosen_by(choice.choices, costs)
        for name, number in chosen.items():
            right[name].append(float(number == choice.answer))
        nats = tuple(cost.nats for cost in costs)
        cut = max(cost.cut for cost in costs)
        losses.append(_loss(nats, choice.answer))
        answer_nats.append(nats[choice.answer])
        picked = chosen[items.spec.normalise]
        rows.append(
            finite(
                {
                    "question": choice.question,
                    "choices": choice.choices,
                    "answer": choice.answer,
                    "chosen": picked,
                    "right": picked == choice.answer,
                    "nats": nats,
                    **({"cut": cut} if cut else {}),
                }
            )
        )
    order = [items.spec.normalise, *(name for name in FIGURES if name != items.spec.normalise)]
    answers = [prompt.continuations[prompt.choice.answer] for prompt in items.items]
    sizes = tuple(float(len(answer.encode("utf-8"))) for answer in answers)
    figures = [
        *(mean(FIGURES[name], right[name]) for name in order),
        mean("choice_loss", losses, "nats", higher=False),
        Metric(ANSWER_BITS, tuple(answer_nats), sizes, False, "bits per byte", factor=1 / LN2),
        *cut_figure([row.get("cut", 0) for row in rows]),
    ]
    return items.result(subject.name, figures, rows)


def choice_texts(items: Sequence[ChoicePrompt]) -> list[tuple[str, str]]:
    """(context, continuation) of every choice of every item."""
    return [
        (prompt.context, continuation) for prompt in items for continuation in prompt.continuations
    ]


def chosen_by(choices: Sequence[str], costs: Sequence[Likelihood]) -> dict[str, int | None]:
    """Number of the likeliest choice by total, per character, per byte and per token.

    The first of equal ones; None if a score is not finite.
    """
    scores = -np.array([cost.nats for cost in costs])
    if not np.isfinite(scores).all():
        return dict.fromkeys(FIGURES)
    lengths = {
        "none": [1] * len(choices),
        "characters": [len(choice) for choice in choices],
        "bytes": [len(choice.encode("utf-8")) for choice in choices],
        "tokens": [cost.tokens for cost in costs],
    }
    return {name: int((scores / np.array(lengths[name], np.float64)).argmax()) for name in FIGURES}


def cut_figure(cuts: Sequence[int]) -> list[Metric]:
    """Share of items whose context was cut to the model's length, if there are any."""
    return [mean("cut", (cut > 0 for cut in cuts), higher=False)] if any(cuts) else []


def _answer(value: object, choices: Sequence[str]) -> int:
    # The right choice: its number from 0 (1.0 is 1), its text or its letter.
    if is_number(value) and value in range(len(choices)):
        return int(value)
    text = value.strip() if isinstance(value, str) else None
    matches = {number for number, choice in enumerate(choices) if choice.strip() == text}
    if text and len(text) == 1:
        matches |= {ascii_uppercase[: len(choices)].find(text.upper())} - {-1}
    if not matches:
        raise BadRow("no answer" if value is None else "answer is no choice")
    if len(matches) > 1:
        raise BadRow("answer is the letter of one choice and the text of another")
    return matches.pop()


def _loss(nats: Sequence[float], answer: int) -> float:
    if not all(map(math.isfinite, nats)):
        return math.nan
    least = min(nats)
    return nats[answer] - least + math.log(math.fsum(math.exp(least - cost) for cost in nats))


def score_passages(
    items: Items[ChoicePrompt], subject: LoadedModel, progress: ProgressCallback
) -> TaskResult:
    """Compute `accuracy` (all tokens of the target are the likeliest ones) and `perplexity`."""
    costs = log_likelihoods(subject, choice_texts(items.items), progress)
    figures = [
        mean("accuracy", (cost.greedy for cost in costs)),
        mean("perplexity", (cost.nats for cost in costs), "", higher=False, shown="exp"),
        *cut_figure([cost.cut for cost in costs]),
    ]
    rows = [
        finite(
            {
                "context": prompt.context,
                "target": prompt.continuations[0],
                "right": cost.greedy,
                "nats": cost.nats,
                **({"cut": cost.cut} if cost.cut else {}),
            }
        )
        for prompt, cost in zip(items.items, costs, strict=True)
    ]
    return items.result(subject.name, figures, rows)
