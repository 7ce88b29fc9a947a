"""Held-out preference pairs: whether a model gives the chosen answer a higher probability than the rejected one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ttrain.data.chat import encode_chats
from ttrain.data.encoder import Encoder
from ttrain.data.preferences import Preference
from ttrain.evaluate.perplexity import Score, Tokens

PAIRS = "pairs"  # the held-out records, as the metric over them names them


class Comparison(NamedTuple):
    """One pair: 1 if the model prefers the chosen answer, 0.5 if both are equally likely, else 0; and by how many nats."""

    preferred: float
    margin: float


def read(records: Iterable[Mapping[str, Any]], limit: int) -> list[Preference]:
    """The first pairs of held-out records. A single rated answer has none that it could be preferred to."""
    preferences = map(Preference.from_json, records)
    return list(islice((pair for pair in preferences if pair.chosen and pair.rejected), limit))


def sequences(encoder: Encoder, pairs: Sequence[Preference]) -> list[Tokens]:
    """(ids, live) of each chosen answer after its prompt, followed by those of the rejected one."""
    answers = [(*pair.prompt, *answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    return [(ids.tolist(), live.tolist()) for ids, live in encode_chats(encoder, answers)] if answers else []


def compare(scores: Sequence[Score]) -> list[Comparison]:
    """The comparison of each pair, by the log-probability of the whole answers, which is not divided by their length.

    `scores` are those of `sequences`. It is the quantity that preference tuning moves; divided by length, an answer that
    ends too early would count by its first tokens.
    """
    margins = [rejected.nats - chosen.nats for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]
    return [Comparison((margin > 0) + 0.5 * (margin == 0), margin) for margin in margins]
