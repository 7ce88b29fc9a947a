"""Log-likelihoods of continuations after their contexts, as in lm-evaluation-harness."""

# On a CPU, keys and values of a context are computed once for all its continuations, and common
# beginnings, such as worked examples, once for all contexts. A GPU takes about as long for one row
# as for many, so there rows are only batched. Letters in names: B rows, T positions, N targets.

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, final

import numpy as np
import torch
from transformers import DynamicCache

from ttrain.data.packing import IGNORE
from ttrain.errors import DataError
from ttrain.evaluate.perplexity import ProgressCallback, ScoringWindow, batch_slices, padded
from ttrain.evaluate.token_losses import PROBED_TOKENS, TokenLosses
from ttrain.inference.generate import KVCache, common
from ttrain.inference.loading import LoadedModel

Ids = tuple[int, ...]
Pair = tuple[Ids, Ids]  # context and continuation, neither of them empty

LEAST_SAVED = 64  # tokens that a pass more must save: about what the call itself costs
CACHED = 4  # a token with cached keys and values takes a quarter of the memory of a computed one


class Likelihood(NamedTuple):
    """Cost of a continuation: nats, tokens, whether all were the likeliest ones, tokens cut."""

    nats: float
    tokens: int
    greedy: bool
    cut: int


def log_likelihoods(
    subject: LoadedModel, texts: Sequence[tuple[str, str]], progress: ProgressCallback
) -> list[Likelihood]:
    """Score each (context, continuation); equal for any batches up to 1e-5 nats in fp32.

    Raises DataError for a continuation without tokens.
    """
    whole = encode_pairs(subject, texts)
    pairs = [fit(*pair, subject.max_length) for pair in whole]
    scored: dict[int, Likelihood] = {}
    losses = TokenLosses(subject.model)
    cache = StartCache(subject, losses)
    for start, numbers in _batches(pairs, shares=cache.works(), most=subject.batch_tokens):
        cached = cache.repeated(start, len(numbers)) if start else {}
        inputs_BT, labels_BT = padded([_row(*pairs[number], len(start)) for number in numbers])
        nats_N, likeliest_N = losses.with_greedy(inputs_BT.to(subject.device), labels_BT, **cached)
        lengths = [len(pairs[number][1]) for number in numbers]
        by_row = (torch.split(tensor.cpu(), lengths) for tensor in (nats_N.double(), likeliest_N))
        for number, nats, likeliest in zip(numbers, *by_row, strict=True):
            cut = sum(map(len, whole[number])) - sum(map(len, pairs[number]))
            scored[number] = Likelihood(float(nats.sum()), len(nats), bool(likeliest.all()), cut)
        progress(len(scored), len(pairs))
    return [scored[number] for number in range(len(pairs))]


def encode_pairs(subject: LoadedModel, texts: Sequence[tuple[str, str]]) -> list[Pair]:
    """Encode each (context, continuation) as one text, split after the tokens of the context.

    As `TemplateLM._encode_pair` of the harness. An empty context is replaced by `beginning`.
    """
    # White space at the end of a context moves to the continuation, since words begin with their
    # space. A continuation that merges into its context is encoded by itself; the harness gives it
    # probability 1, so that it always wins ("0" after "45 - 30").
    encoder = subject.encoder
    texts = [
        (bare := context.rstrip(), context[len(bare) :] + continuation)
        for context, continuation in texts
    ]
    contexts = list(
        dict.fromkeys(context for context, _ in texts)
    )  # a question once for all its choices
    alone = {
        context: (*subject.begin_ids, *ids)
        for context, ids in zip(contexts, encoder.encode(contexts), strict=True)
    }
    pairs: list[Pair] = []
    for (context, continuation), ids in zip(
        texts, encoder.encode(["".join(pair) for pair in texts]), strict=True
    ):
        context_ids = alone[context]
        continuation_ids = (
            ids[len(context_ids) - len(subject.begin_ids) :] or encoder.encode([continuation])[0]
        )
        if not continuation_ids:
            raise DataError(
                f"the continuation {continuation!r} has no token in the tokenizer of "
                f"{subject.name}, so it has no "
                "likelihood; remove its item"
            )
        pairs.append((context_ids or subject.beginning(), tuple(continuation_ids)))
    return pairs


def fit(context: Ids, continuation: Ids, max_length: int | None) -> Pair:
    """Cut to `max_length` positions: the context on the left, then the continuation on the right.

    One token of the context stays; a continuation's last token is a target only.
    """
    if max_length is None:
        return context, continuation
    continuation = continuation[:max_length]
    return context[-(max_length + 1 - len(continuation)) :], continuation


@final
class StartCache(KVCache):
    """Keys and values of the common beginning of a batch's rows, kept for the next batch."""

    def __init__(self, subject: LoadedModel, losses: TokenLosses) -> None:
        super().__init__(subject)
        self._device = subject.device
        self._losses = losses

    def works(self) -> bool:
        """Whether it saves time here, and each layer keeps all keys and values, unlike a window."""
        if self._device.type != "cpu" or self._losses.parts is None or self.take(()) is None:
            return False
        return bool(self._filled(range(PROBED_TOKENS)).get_seq_length() == PROBED_TOKENS)

    def repeated(self, ids: Ids, rows: int) -> dict[str, Any]:
        """Inputs with the keys and values of `ids` in every row; a pass adds to copies of them."""
        shape = (rows, -1, -1, -1)
        states = [
            (layer.keys.expand(shape), layer.values.expand(shape))
            for layer in self._filled(ids).layers
        ]
        return {"cache": DynamicCache(states), "use_cache": True}

    def _filled(self, ids: Sequence[int]) -> Any:
        cache = self.take(ids)
        rest = ids[cache.get_seq_length() :]
        if rest:
            ids_1T = torch.tensor([list(rest)], device=self._device)
            self._losses(ids_1T, torch.full(ids_1T.shape, IGNORE), cache=cache, use_cache=True)
        self.put(ids, cache)
        return cache


def _batches(pairs: Sequence[Pair], *, shares: bool, most: int) -> Iterator[tuple[Ids, list[int]]]:
    # Yield (shared beginning, numbers of pairs) with at most `most` padded tokens. A batch has the
    # continuations of one context where that saves enough, else complete rows.
    order = sorted(range(len(pairs)), key=pairs.__getitem__)
    groups = [list(group) for _, group in groupby(order, key=lambda number: pairs[number][0])]
    starts = [pairs[group[0]][0][:-1] for group in groups]  # the last token predicts
    in_common = [0, *map(common, starts, starts[1:]), 0]
    batches: list[tuple[Ids, list[int]]] = []
    separate: list[int] = []
    for at, (start, group) in enumerate(zip(starts, groups, strict=True)):
        saved = max(in_common[at], in_common[at + 1]) + len(start) * (len(group) - 1)
        if shares and saved >= LEAST_SAVED:
            batches.append((start, group))
        else:
            separate += group
    for start, group in [*batches, ((), separate)]:
        lengths = {number: sum(map(len, pairs[number])) - 1 - len(start) for number in group}
        longest_first = sorted(group, key=lengths.__getitem__, reverse=True)
        memory = [lengths[number] + len(start) // CACHED for number in longest_first]
        for part in batch_slices(memory, most, most):
            yield start, longest_first[part]


def _row(context: Ids, continuation: Ids, start: int) -> tuple[Any, Any, ScoringWindow]:
    # A row without its cached tokens: ids, which of them count, what is read and scored.
    ids = np.array([*context, *continuation], np.int64)
    return ids, np.ones(len(ids), np.bool_), ScoringWindow(start, len(context), len(ids))
