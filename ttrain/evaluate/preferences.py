"""Preference pairs: whether a model gives the chosen answer a higher probability than the rejected one.

Tasks of kind `pairs` read those of a file, or those that a run held out.
"""

from __future__ import annotations

from dataclasses import replace

from ttrain.config.evaluate import PairsTask
from ttrain.core.files import JsonDict
from ttrain.data import records as parsing
from ttrain.data.preferences import PREFERENCE_FIELDS, Preference
from ttrain.evaluate import chats, perplexity
from ttrain.evaluate import items as reading
from ttrain.evaluate.items import BadRow, Items, SuiteFiles
from ttrain.evaluate.perplexity import ProgressCallback
from ttrain.evaluate.task_result import Metric, TaskResult
from ttrain.inference.loading import LoadedModel

RATED = "a single rated answer, which has no other one to be compared with"


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
    conversations = [(*pair.prompt, *answer) for pair in items.items for answer in (pair.chosen, pair.rejected)]
    encoded = chats.encode(items, subject, conversations)
    scores = perplexity.score_items(items.spec, subject, encoded, progress)
    rows: list[JsonDict] = []
    preferred, margins, sizes = list[float](), list[float](), list[float]()
    for number in range(0, len(scores), 2):
        chosen, rejected = scores[number : number + 2]
        errors = [side for side in encoded[number : number + 2] if isinstance(side, str)]
        # Of whole answers, which preference tuning moves; divided by length, an answer that ends too early would count by
        # its first tokens.
        margin = rejected.nats - chosen.nats
        sizes.append(float(not errors))
        margins.append(margin * sizes[-1])
        preferred.append(((margin > 0) + 0.5 * (margin == 0)) * sizes[-1])
        answers = {"chosen": chosen._asdict(), "rejected": rejected._asdict()}
        rows.append({"refused": errors[0]} if errors else {"preferred": preferred[-1], "margin": margin, **answers})
    accuracy = Metric("accuracy", tuple(preferred), tuple(sizes), higher_is_better=True, unit="share")
    return items.result(subject.name, [accuracy, replace(accuracy, name="margin", sums=tuple(margins), unit="nats")], rows)
