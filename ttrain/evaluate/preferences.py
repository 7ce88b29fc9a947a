"""Preference pairs: whether a model gives the chosen answer a higher probability than the rejected one.

Tasks of kind `pairs` read those of a file, or those that a run held out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ttrain.config.evaluate import PairsTask
from ttrain.core.files import JsonDict
from ttrain.data import records as parsing
from ttrain.data.chat_templates import Messages
from ttrain.data.preferences import PREFERENCE_FIELDS, Preference
from ttrain.evaluate import chats, perplexity
from ttrain.evaluate import items as reading
from ttrain.evaluate.items import BadRow, Items, SuiteFiles
from ttrain.evaluate.perplexity import ProgressCallback, Score
from ttrain.evaluate.task_result import Metric, TaskResult
from ttrain.inference.loading import LoadedModel

PAIRS = "pairs"  # the held-out records, as the metric over them names them
RATED = "a single rated answer, which has no other one to be compared with"


class Comparison(NamedTuple):
    """One pair: 1 if the model prefers the chosen answer, 0.5 if both are equally likely, else 0; and by how many nats."""

    preferred: float
    margin: float


def read(task: str, spec: PairsTask, files: SuiteFiles) -> Items[Preference]:
    """Read the pairs of a file, or those that the model's run held out. Raises UsageError if the file does not exist,
    DataError if it has no pair."""

    def parse(row: JsonDict) -> Preference:
        pair = reading.accepted(parsing.parse_preference(row), Preference)
        if not (pair.chosen and pair.rejected):
            raise BadRow(RATED)
        return pair

    parsers = reading.Parsers(parse, Preference.from_json, lambda pair: pair.content().decode(), PREFERENCE_FIELDS)
    return reading.read_texts(task, spec, files, parsers)


def run(items: Items[Preference], subject: LoadedModel, progress: ProgressCallback) -> TaskResult:
    """Compute the share of pairs whose chosen answer is likelier, a tie counting one half, and its mean lead in nats.

    A pair that the model's own template refuses is not scored. Raises UsageError for a model without a chat template.
    """
    encoded = chats.encode(items, subject, conversations(items.items))
    errors = [next((side for side in sides if isinstance(side, str)), None) for sides in zip(*_sides(encoded), strict=True)]
    scores = perplexity.score_items(items.spec, subject, encoded, progress)
    compared, sizes = compare(scores), tuple(float(error is None) for error in errors)
    rows: list[JsonDict] = []
    for (preferred, margin), chosen, rejected, error in zip(compared, *_sides(scores), errors, strict=True):
        answers = {"chosen": chosen._asdict(), "rejected": rejected._asdict()}
        rows.append({"refused": error} if error else {"preferred": preferred, "margin": margin, **answers})

    def figure(name: str, values: Iterable[float], unit: str) -> Metric:
        sums = tuple(value * size for value, size in zip(values, sizes, strict=True))
        return Metric(name, sums, sizes, higher_is_better=True, unit=unit)

    figures = [
        figure("accuracy", (pair.preferred for pair in compared), "share"),
        figure("margin", (pair.margin for pair in compared), "nats"),
    ]
    return items.result(subject.name, figures, rows)


def _sides(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """(those of the chosen answers, those of the rejected ones)."""
    return values[::2], values[1::2]


def conversations(pairs: Sequence[Preference]) -> list[Messages]:
    """Each chosen answer after its prompt, followed by the rejected one after it."""
    return [(*pair.prompt, *answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]


def compare(scores: Sequence[Score]) -> list[Comparison]:
    """The comparison of each pair, by the log-probability of the whole answers, which is not divided by their length.

    `scores` are those of `sequences`. It is the quantity that preference tuning moves; divided by length, an answer that
    ends too early would count by its first tokens.
    """
    margins = [rejected.nats - chosen.nats for chosen, rejected in zip(*_sides(scores), strict=True)]
    return [Comparison((margin > 0) + 0.5 * (margin == 0), margin) for margin in margins]
