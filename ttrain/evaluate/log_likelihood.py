"""Log-likelihoods of continuations after their contexts: encode pairs of texts, cut them to the model's length, score them.

Texts are encoded and contexts cut as in lm-evaluation-harness (`TemplateLM._encode_pair` and
`HFLM._loglikelihood_tokens` of https://github.com/EleutherAI/lm-evaluation-harness), so that scores can be compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ttrain.data.jinja_templates import BOS
from ttrain.errors import DataError, UsageError
from ttrain.evaluate.evaluated_model import EvaluatedModel, ProgressCallback
from ttrain.evaluate.tree_attention import Ids, Pair, Scorer


class Likelihood(NamedTuple):
    """Cost of a continuation in nats, its number of tokens, whether each token was the most likely one, and how many tokens
    of its context were cut."""

    nats: float
    tokens: int
    greedy: bool
    cut: int


def log_likelihoods(
    subject: EvaluatedModel, texts: Sequence[tuple[str, str]], progress: ProgressCallback
) -> list[Likelihood]:
    """Score each (context, continuation). Raises DataError for a continuation without tokens."""
    pairs = encode_pairs(subject, texts)
    pieces: list[Pair] = []
    owners: list[int] = []
    cuts: list[int] = []
    for number, pair in enumerate(pairs):
        fitted, cut = fit(*pair, subject.max_length)
        pieces += fitted
        owners += [number] * len(fitted)
        cuts.append(cut)
    scored = Scorer(subject).score(pieces, progress)
    nats, greedy = [0.0] * len(pairs), [True] * len(pairs)
    for number, (cost, every) in zip(owners, scored, strict=True):
        nats[number] += cost
        greedy[number] &= every
    return [
        Likelihood(cost, len(continuation), every, cut)
        for cost, every, cut, (_, continuation) in zip(nats, greedy, cuts, pairs, strict=True)
    ]


def encode_pairs(subject: EvaluatedModel, texts: Sequence[tuple[str, str]]) -> list[Pair]:
    """Encode each (context, continuation) as one text, split after as many tokens as the context has alone.

    White space at the end of a context moves to the continuation, since words begin with their space. A context without
    tokens is replaced by `beginning`; a continuation that merges into its context is encoded by itself. (The harness gives
    it probability 1, so that such a choice always wins: "0" after "45 - 30".)
    """
    encoder, begin_ids = subject.encoder, subject.begin_ids
    texts = [(bare := context.rstrip(), context[len(bare) :] + continuation) for context, continuation in texts]
    contexts = list(dict.fromkeys(context for context, _ in texts))  # a question once for all its choices
    alone = {context: (*begin_ids, *ids) for context, ids in zip(contexts, encoder.encode(contexts), strict=True)}
    whole = encoder.encode([context + continuation for context, continuation in texts])
    pairs: list[Pair] = []
    for (context, continuation), ids in zip(texts, whole, strict=True):
        context_ids = alone[context]
        continuation_ids = ids[len(context_ids) - len(begin_ids) :] or encoder.encode([continuation])[0]
        if not continuation_ids:
            raise DataError(
                f"the continuation {continuation!r} has no token in the tokenizer of {subject.name}, so it has no "
                "likelihood; remove its item"
            )
        pairs.append((context_ids or beginning(subject), tuple(continuation_ids)))
    return pairs


def beginning(subject: EvaluatedModel) -> Ids:
    """Ids before a text, so that its first token is scored too: those that the tokenizer adds, else its bos, as in the
    harness, else its eos.

    The model does not know a bos that ttrain added to the tokenizer. Raises UsageError if it knows none of these.
    """
    model, encoder = subject.model, subject.encoder
    rows = getattr(model, "get_input_embeddings")().weight.shape[0]  # noqa: B009  # a method of transformers' models
    bos_ids = () if encoder.tokens["bos_token"] == BOS else (encoder.bos_id,)
    for ids in (subject.begin_ids, bos_ids, (encoder.eos_id,)):
        if ids and max(ids) < rows:
            return ids
    raise UsageError(
        f"the model {subject.name} knows no token that begins or ends a text, so the first token of a text cannot be "
        "scored; give its tokenizer a bos_token or an eos_token"
    )


def fit(context: Ids, continuation: Ids, max_length: int | None) -> tuple[list[Pair], int]:
    """Cut to `max_length` positions: (pairs that fit, number of tokens that the context lost on the left).

    The last token of a continuation is a target only, so that `max_length + 1` tokens fit. A longer continuation is split
    into pieces, each after as much context as fits, so that every token is scored once.
    """
    if max_length is None or len(context) + len(continuation) <= max_length + 1:
        return [(context, continuation)], 0
    if len(continuation) <= max_length:
        shortened = context[-(max_length + 1 - len(continuation)) :]
        return [(shortened, continuation)], len(context) - len(shortened)
    size = max(1, max_length // 2)
    pieces = [
        ((*context, *continuation[:start])[-(max_length + 1 - size) :], continuation[start : start + size])
        for start in range(0, len(continuation), size)
    ]
    return pieces, len(context) - min(len(context), max_length + 1 - size)
