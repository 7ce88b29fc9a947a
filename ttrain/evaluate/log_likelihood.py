"""Log-likelihoods of continuations after their contexts: encode pairs of texts, cut them to the model's length, score them.

Texts are encoded and contexts cut as in lm-evaluation-harness (`TemplateLM._encode_pair` and
`HFLM._loglikelihood_tokens` of https://github.com/EleutherAI/lm-evaluation-harness), so that scores can be compared with it.

On a CPU the keys and values of a context are computed once for all its continuations, and what it
begins with, such as worked examples, once for all contexts. A GPU takes about as long for one row
as for many, so there rows are only batched.

Letters in names: B rows, T positions, N targets.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, takewhile
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ttrain.data.jinja_templates import BOS
from ttrain.data.packing import IGNORE
from ttrain.errors import DataError, UsageError
from ttrain.evaluate.evaluated_model import EvaluatedModel, ProgressCallback
from ttrain.evaluate.token_losses import PROBED_TOKENS, TokenLosses, causal_of

Ids = tuple[int, ...]
Pair = tuple[Ids, Ids]  # context and continuation, neither of them empty
Score = tuple[float, bool]  # nats of a continuation, whether every token was the most likely one

LEAST_SAVED = 64  # tokens that a pass more must save: about what the call itself costs
CACHED = 4  # a token with cached keys and values takes a quarter of the memory of a computed one


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
    scored = score_pairs(subject, pieces, progress)
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


def score_pairs(subject: EvaluatedModel, pairs: Sequence[Pair], progress: ProgressCallback) -> list[Score]:
    """Score each pair; equal, up to the rounding of sums (1e-5 nats in fp32), for any batches."""
    scores: list[Score] = [(0.0, True)] * len(pairs)
    if not pairs:
        return scores
    losses = TokenLosses(subject.model)
    start_cache = StartCache(subject, losses)
    shares = start_cache.works(pairs[0][0][:PROBED_TOKENS])
    done = 0
    for start, numbers in _batches(pairs, shares=shares, most=subject.batch_tokens):
        inputs = start_cache.repeated(start, len(numbers)) if start else {}
        ids_BT, labels_BT = _laid_out([pairs[number] for number in numbers], len(start))
        nats_N, likeliest_N = losses.with_greedy(ids_BT.to(subject.device), labels_BT, **inputs)
        lengths = [len(pairs[number][1]) for number in numbers]
        nats_by_row = torch.split(nats_N.double().cpu(), lengths)
        likeliest_by_row = torch.split(likeliest_N.cpu(), lengths)
        for number, nats, likeliest in zip(numbers, nats_by_row, likeliest_by_row, strict=True):
            scores[number] = float(nats.sum()), bool(likeliest.all())
        done += len(numbers)
        progress(done, len(pairs))
    return scores


@final
class StartCache:
    """Keys and values of what the rows of a batch begin with.

    The next batch computes only what it has not in common with the last one.
    """

    def __init__(self, subject: EvaluatedModel, losses: TokenLosses) -> None:
        self._device, self._losses = subject.device, losses
        self._config = getattr(causal_of(subject.model), "config", None)
        self._ids: Ids = ()
        self._cache: Any = None

    def works(self, ids: Ids) -> bool:
        """Whether it saves time here, and each layer keeps all keys and values, unlike a window."""
        parts = self._losses.parts(torch.tensor([ids], device=self._device))
        if self._device.type != "cpu" or self._config is None or parts is None:
            return False
        if "past_key_values" not in inspect.signature(parts[0].forward).parameters:
            return False
        self._cache = DynamicCache(config=self._config)
        if not all(type(layer) is DynamicLayer for layer in self._cache.layers):
            return False
        self._extend(ids)
        return all(layer.get_seq_length() == len(ids) for layer in self._cache.layers)

    def repeated(self, ids: Ids, rows: int) -> dict[str, Any]:
        """Inputs with the keys and values of `ids` in every row; a pass adds to copies of them."""
        self._extend(ids)
        states: list[tuple[Tensor, Tensor]] = []
        for layer in self._cache.layers:
            states.append((layer.keys.expand(rows, -1, -1, -1), layer.values.expand(rows, -1, -1, -1)))
        return {"past_key_values": DynamicCache(states), "use_cache": True}

    def _extend(self, ids: Ids) -> None:
        same = _common(self._ids, ids)
        if same < len(self._ids):
            self._cache.crop(same - len(self._ids))
        if same < len(ids):
            ids_1T = torch.tensor([ids[same:]], device=self._device)
            no_labels_1T = torch.full(ids_1T.shape, IGNORE)
            self._losses(ids_1T, no_labels_1T, past_key_values=self._cache, use_cache=True)
        self._ids = ids


def _batches(pairs: Sequence[Pair], *, shares: bool, most: int) -> Iterator[tuple[Ids, list[int]]]:
    """Yield (shared beginning, numbers of pairs).

    A batch has the continuations of one context where that saves enough, if the model `shares`,
    else whole rows. The contexts come in order, so that neighbours have much in common.
    """
    order = sorted(range(len(pairs)), key=lambda number: pairs[number])
    groups = [list(group) for _, group in groupby(order, key=lambda number: pairs[number][0])]
    starts = [pairs[group[0]][0][:-1] for group in groups]  # the last token predicts
    in_common = [0, *map(_common, starts, starts[1:]), 0]
    separate: list[int] = []
    for at, (start, group) in enumerate(zip(starts, groups, strict=True)):
        saved = max(in_common[at], in_common[at + 1]) + len(start) * (len(group) - 1)
        if shares and saved >= LEAST_SAVED:
            for numbers in _of_like_length(pairs, group, most, start_tokens=len(start)):
                yield start, numbers
        else:
            separate += group
    for numbers in _of_like_length(pairs, separate, most, start_tokens=0):
        yield (), numbers


def _of_like_length(
    pairs: Sequence[Pair],
    numbers: Sequence[int],
    most: int,
    *,
    start_tokens: int,
) -> Iterator[list[int]]:
    """Batch rows, the longest first, with at most `most` padded tokens.

    The few continuations of one context differ in length: together they have little padding.
    """

    def tokens(number: int) -> int:
        return len(pairs[number][0]) + len(pairs[number][1]) - 1 - start_tokens

    longest_first = sorted(numbers, key=tokens, reverse=True)
    while longest_first:
        longest = tokens(longest_first[0])
        count = max(1, most // (longest + start_tokens // CACHED))
        if start_tokens:
            padding = accumulate(longest - tokens(number) for number in longest_first)
            count = min(count, sum(tokens_lost <= LEAST_SAVED for tokens_lost in padding))
        yield longest_first[:count]
        longest_first = longest_first[count:]


def _laid_out(pairs: Sequence[Pair], start_tokens: int) -> tuple[Tensor, Tensor]:
    """(ids, labels) of rows without their first tokens, which are cached.

    Rows are padded on the right, where nothing sees it.
    """
    rows = [(*context, *continuation)[start_tokens:] for context, continuation in pairs]
    T = max(map(len, rows)) - 1
    ids_BT = torch.full((len(rows), T), rows[0][0])  # some models warn about a pad token without a mask
    labels_BT = torch.full((len(rows), T), IGNORE)
    for b, (row, (_, continuation)) in enumerate(zip(rows, pairs, strict=True)):
        end = len(row) - 1  # the last token is a target only
        ids_BT[b, :end] = torch.tensor(row[:-1])
        labels_BT[b, end - len(continuation) : end] = torch.tensor(continuation)
    return ids_BT, labels_BT


def _common(first: Ids, second: Ids) -> int:
    """Length of the common beginning."""
    return sum(takewhile(bool, map(operator.eq, first, second)))
