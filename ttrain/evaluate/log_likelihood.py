"""What a continuation costs after a context: pairs of texts as tokens, cut to what a model takes, scored together.

Tokens are made and contexts are cut as lm-evaluation-harness does it (`TemplateLM._encode_pair` and
`HFLM._loglikelihood_tokens` of https://github.com/EleutherAI/lm-evaluation-harness), so that scores can be compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ttrain.data.jinja_templates import BOS
from ttrain.errors import DataError, UsageError
from ttrain.evaluate.evaluated_model import Progress, Subject
from ttrain.evaluate.shared_prefixes import Ids
from ttrain.evaluate.tree_attention import Scorer


class Likelihood(NamedTuple):
    """What a continuation costs in nats, over how many tokens; whether each of them was the most likely one; and how many
    tokens of its context the model could not take."""

    nats: float
    tokens: int
    greedy: bool
    cut: int


def log_likelihoods(
    subject: Subject, texts: Sequence[tuple[str, str]], progress: Progress, *, alone: bool = False
) -> list[Likelihood]:
    """Of each (context, continuation). `alone`: each pair in a row of its own, as a reference for what is shared.

    Raises DataError for a continuation that has no token.
    """
    pairs = encode_pairs(subject, texts)
    pieces: list[tuple[Ids, Ids]] = []
    owners: list[int] = []
    cuts: list[int] = []
    for number, pair in enumerate(pairs):
        fitted, cut = fit(*pair, subject.max_length)
        pieces += fitted
        owners += [number] * len(fitted)
        cuts.append(cut)
    scored = Scorer(subject, alone=alone).score(pieces, progress)
    nats, greedy = [0.0] * len(pairs), [True] * len(pairs)
    for number, (more, every) in zip(owners, scored, strict=True):
        nats[number] += more
        greedy[number] &= every
    return [
        Likelihood(cost, len(continuation), every, cut)
        for cost, every, cut, (_, continuation) in zip(nats, greedy, cuts, pairs, strict=True)
    ]


def encode_pairs(subject: Subject, texts: Sequence[tuple[str, str]]) -> list[tuple[Ids, Ids]]:
    """Tokens of each (context, continuation): those of the whole text, of which the context has as many as it has alone.

    White space at the end of a context goes to the continuation, where words begin with their space. A context without any
    token is what texts begin with; a continuation that melts into its context is encoded by itself. (The harness takes that
    one for certain, so that any choice that melts away is the right one: "0" after "45 - 30".)
    """
    encoder, begin_ids = subject.encoder, subject.begin_ids
    texts = [_spaces_moved(*pair) for pair in texts]
    contexts = list(dict.fromkeys(context for context, _ in texts))  # a question once for all its choices
    alone = {one: (*begin_ids, *ids) for one, ids in zip(contexts, encoder.encode(contexts), strict=True)}
    whole = encoder.encode([context + continuation for context, continuation in texts])
    found: list[tuple[Ids, Ids]] = []
    for (context, continuation), ids in zip(texts, whole, strict=True):
        before = alone[context]
        after = ids[len(before) - len(begin_ids) :] or encoder.encode([continuation])[0]
        if not after:
            raise DataError(
                f"the continuation {continuation!r} has no token in the tokenizer of {subject.name}, so that its likelihood "
                "says nothing; leave its item out"
            )
        found.append((before or beginning(subject), tuple(after)))
    return found


def beginning(subject: Subject) -> Ids:
    """What stands before a text, so that its first token is scored too: what its tokenizer puts there, else its bos, as the
    harness has it, else its eos.

    A bos that ttrain added to a tokenizer which has none is unknown to the model. Raises UsageError where all are.
    """
    model, encoder = subject.model, subject.encoder
    rows = getattr(model, "get_input_embeddings")().weight.shape[0]  # noqa: B009  # a method of transformers' models
    own = () if encoder.tokens["bos_token"] == BOS else (encoder.bos_id,)
    for ids in (subject.begin_ids, own, (encoder.eos_id,)):
        if ids and max(ids) < rows:
            return ids
    raise UsageError(
        f"the model {subject.name} knows no token that begins or ends a text, so that the first token of a text cannot be "
        "scored; give its tokenizer a bos_token or an eos_token"
    )


def fit(context: Ids, continuation: Ids, max_length: int | None) -> tuple[list[tuple[Ids, Ids]], int]:
    """(pairs that a model of `max_length` positions takes, tokens that the context lost on the left).

    The last token of a continuation is a target only, so that `max_length + 1` tokens fit. A continuation that is longer
    than that comes in pieces, each after as much as fits, so that every token is scored once.
    """
    if max_length is None or len(context) + len(continuation) <= max_length + 1:
        return [(context, continuation)], 0
    if len(continuation) <= max_length:
        kept = context[-(max_length + 1 - len(continuation)) :]
        return [(kept, continuation)], len(context) - len(kept)
    size = max(1, max_length // 2)
    pieces = [
        ((*context, *continuation[:start])[-(max_length + 1 - size) :], continuation[start : start + size])
        for start in range(0, len(continuation), size)
    ]
    return pieces, len(context) - min(len(context), max_length + 1 - size)


def _spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation
