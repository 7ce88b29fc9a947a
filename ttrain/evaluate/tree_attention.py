"""Score continuations with tree attention: what several of them share is computed once.

The continuations of one context are branches of one row: a mask hides each from the others, and its positions continue the
context's (the tree attention of arXiv:2305.09781). The common beginning of several rows' contexts, such as worked examples
or a passage with several questions, is a prefix whose keys and values are computed once. Rows of like length share a
batch, and the output head is applied only to positions that predict something.

Letters in names: B rows, T positions, U positions that predict, N targets, D width, V vocabulary.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from ttrain.data.packing import Array, Flags
from ttrain.evaluate.evaluated_model import EvaluatedModel, ProgressCallback
from ttrain.evaluate.token_losses import PROBED_TOKENS, Parts, causal_of, plain_parts
from ttrain.train import attention
from ttrain.train.losses import default_chunk_tokens

LEAST_SAVED = {"cpu": 64}  # tokens that make a prefix worth its own forward pass

LEAST_SAVED_ELSEWHERE = 4096  # a GPU takes about as long for one token as for thousands

DEFAULT_WIDTH = 512

SLACK = {torch.float32: 1e-3, torch.float64: 1e-6}  # tolerance in nats per token between rows with and without branches

SLACK_16_BITS = 0.03

REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError)

log = logging.getLogger("ttrain")


class ScoringStrategy(NamedTuple):
    """What is shared: the most tokens of a row with several continuations (0: no such rows), and whether prefixes are."""

    longest: int
    prefixes: bool

    def __str__(self) -> str:
        return f"in rows of up to {self.longest} tokens with{'' if self.prefixes else 'out'} a prefix computed once"


@dataclass
class StrategyTrials:
    """Trials on a model: strategies that gave equal scores, with the longest row and context so far, and those that did
    not."""

    passed: dict[ScoringStrategy, tuple[int, ...]] = field(default_factory=dict)
    failed: set[ScoringStrategy] = field(default_factory=set)


# By model, so that the tasks of a suite, and evaluations during training, try each strategy once.
_TRIALS: WeakKeyDictionary[EvaluatedModel, StrategyTrials] = WeakKeyDictionary()


class Prefix(NamedTuple):
    """Number of tokens that several contexts begin with, and their keys and values by layer, [1, heads, P, width]."""

    tokens: int
    states: Sequence[tuple[Tensor, Tensor]]

    def repeated(self, rows: int) -> Any:
        """Cache with the prefix in every row; a forward pass adds to copies of it."""
        from transformers import DynamicCache

        return DynamicCache(
            [(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)) for keys, values in self.states]
        )


@final
class Scorer:
    """Scores pairs under one model, with the sharing strategy that the model supports, tried on the longest pairs."""

    def __init__(self, subject: EvaluatedModel) -> None:
        self._subject = subject
        self._causal = causal_of(subject.model)
        config = getattr(self._causal, "config", None)
        self._width = int(getattr(config, "hidden_size", None) or DEFAULT_WIDTH)
        self._shares = config is not None
        self._parts: Parts | None = None

    def score(self, pairs: Sequence[Pair], progress: ProgressCallback) -> list[tuple[float, bool]]:
        """(nats, whether every token was the most likely one) of each (context, continuation), neither of them empty.

        Equal, up to the rounding of sums (1e-5 nats in fp32), for any strategy and any batches.
        """
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        if not pairs:
            return scores
        done = 0
        with torch.no_grad():  # not inference_mode: tables that the model caches could not be used in training
            probe = torch.tensor([pairs[0][0][:PROBED_TOKENS]], device=self._subject.device)
            self._parts = plain_parts(self._subject.model, probe)
            rows = by_context(pairs)
            least_saved = LEAST_SAVED.get(self._subject.device.type, LEAST_SAVED_ELSEWHERE)
            clusters = prefix_clusters(rows, least_saved)
            strategy = self._best_strategy(rows, any(start for start, _ in clusters))
            for start, some in clusters if strategy.prefixes else [((), rows)]:
                prefix = self._prefix(start) if start else None
                cut = self._split(some, strategy.longest)
                for batch in batches(cut, prefix=len(start), most=self._subject.batch_tokens):
                    for number, nats, every in self._batch(batch, prefix):
                        scores[number] = nats, every
                        done += 1
                    progress(done, len(pairs))
        return scores

    def _best_strategy(self, rows: Sequence[BranchedRow], prefixes: bool) -> ScoringStrategy:
        """Choose the first strategy whose scores equal those of rows with one continuation each.

        Tried on the longest rows, since only these reveal an attention window or a short table of positions. `prefixes`:
        whether any is worth sharing.
        """
        alone = ScoringStrategy(longest=0, prefixes=False)
        if not self._shares or not (prefixes or any(len(row.branches) > 1 for row in rows)):
            return alone
        most, limit = self._subject.batch_tokens, self._subject.max_length or self._subject.batch_tokens
        strategies = (
            ScoringStrategy(size, begun)
            for begun in ([True, False] if prefixes else [False])
            for size in (most, min(most, limit))
        )
        trials = _TRIALS.setdefault(self._subject, StrategyTrials())
        for strategy in dict.fromkeys(strategy for strategy in strategies if strategy not in trials.failed):
            cut = self._split(rows, strategy.longest)
            longest = [
                max(cut, key=lambda row: (len(row.branches) > 1, row.tokens)),
                max(cut, key=lambda row: len(row.context)),
            ]
            size = longest[0].tokens, len(longest[1].context)
            tested_size = trials.passed.get(strategy, (0, 0))
            if all(map(operator.le, size, tested_size)):
                return strategy
            reasons = [self._failure(strategy, row) for row in dict.fromkeys(longest if strategy.prefixes else longest[:1])]
            if not any(reasons):
                trials.passed[strategy] = tuple(map(max, size, tested_size))
                return strategy
            trials.failed.add(strategy)
            log.info("%s cannot be scored %s: %s", self._subject.name, strategy, next(filter(None, reasons)))
        return alone

    def _failure(self, strategy: ScoringStrategy, row: BranchedRow) -> str:
        """Why this row cannot be computed with the strategy; "" if it can."""
        start = row.context[:-1] if strategy.prefixes else ()
        try:
            shared = self._batch([row], self._prefix(start) if start else None, masked=True)
        except torch.OutOfMemoryError:
            raise
        except REFUSALS as error:
            return " ".join(str(error).split())[:200] or type(error).__name__
        some = dict([row.branches[0], row.branches[-1]])
        plain = {
            number: nats
            for branch_ids in some.items()
            for number, nats, _ in self._batch([BranchedRow(row.context, (branch_ids,))], None)
        }
        moved = max(abs(nats - plain[number]) / len(some[number]) for number, nats, _ in shared if number in some)
        slack = SLACK.get(next(self._causal.parameters()).dtype, SLACK_16_BITS)
        return "" if moved <= slack else f"it changes a log-likelihood by {moved:.2g} nats per token"

    def _split(self, rows: Sequence[BranchedRow], longest: int) -> list[BranchedRow]:
        return [cut_row for row in rows for cut_row in split(row, width=self._width, most=longest)]

    def _prefix(self, ids: Ids) -> Prefix:
        """Compute a prefix. Raises NotImplementedError if a layer does not cache all its keys and values."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._causal.config)
        self._states(torch.tensor([ids], device=self._subject.device), past_key_values=cache, use_cache=True)
        states: list[tuple[Tensor, Tensor]] = []
        for layer in cache.layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None or keys.shape[-2] != len(ids):
                raise NotImplementedError("its layers do not cache all keys and values")
            states.append((keys, values))
        return Prefix(len(ids), states)

    def _batch(
        self, rows: Sequence[BranchedRow], prefix: Prefix | None, *, masked: bool = False
    ) -> list[tuple[int, float, bool]]:
        """(number, nats, whether every token was the most likely one) of each continuation."""
        prefix_tokens, device = prefix.tokens if prefix else 0, self._subject.device
        laid = lay_out(rows, prefix_tokens)
        inputs: dict[str, Any] = {}
        if masked or prefix or any(len(row.branches) > 1 for row in rows):
            inputs = {"position_ids": laid.positions_BT.to(device), "attention_mask": laid.mask(prefix_tokens).to(device)}
            inputs = attention.with_attention_mask(self._causal, inputs)
        if prefix:
            inputs |= {"past_key_values": prefix.repeated(len(rows)), "use_cache": True}
        states = self._states(laid.input_ids_BT.to(device), **inputs).flatten(0, 1)
        costs_N, best_N = self._costs(states.index_select(0, laid.places_U.to(device)), laid)
        size = int(laid.numbers_N.max()) + 1
        nats, wrong = np.bincount(laid.numbers_N, costs_N, size), np.bincount(laid.numbers_N, ~best_N, size)
        return [(number, float(nats[number]), not wrong[number]) for row in rows for number, _ in row.branches]

    def _states(self, input_ids_BT: Tensor, **inputs: Any) -> Tensor:
        """Hidden states, [B, T, D], if the output head is applied here; else logits, [B, T, V]."""
        inputs.setdefault("use_cache", False)
        if self._parts is None:
            logits_BTV: Tensor = self._subject.model(input_ids=input_ids_BT, **inputs).logits
            return logits_BTV
        hidden_BTD: Tensor = self._parts[0](input_ids=input_ids_BT, **inputs).last_hidden_state
        return hidden_BTD

    def _costs(self, states_U: Tensor, laid: TreeBatch) -> tuple[npt.NDArray[np.float64], Flags]:
        """(nats of each target, whether it was the most likely token), both of shape [N]. The log-sum-exp is in fp32."""
        device = states_U.device
        chunk = default_chunk_tokens(device)
        costs, best = [], []
        for start in range(0, len(states_U), chunk):
            some_UD = states_U[start : start + chunk]
            logits_UV = some_UD if self._parts is None else self._parts[1](some_UD)
            logits_UV = logits_UV.to(torch.promote_types(logits_UV.dtype, torch.float32))
            first, end = np.searchsorted(laid.predictors_N, [start, start + len(some_UD)])
            at_N = torch.from_numpy(laid.predictors_N[first:end] - start).to(device)
            targets_N = torch.from_numpy(laid.targets_N[first:end]).to(device)
            costs.append(logits_UV.logsumexp(-1)[at_N] - logits_UV[at_N, targets_N])
            best.append(logits_UV.argmax(-1)[at_N] == targets_N)
        return torch.cat(costs).double().cpu().numpy(), torch.cat(best).cpu().numpy()


Ids = tuple[int, ...]

Pair = tuple[Ids, Ids]  # context and continuation, neither of them empty

CACHED = 4  # a token with cached keys and values takes about a quarter of the memory of a computed one


class BranchedRow(NamedTuple):
    """A context with its numbered continuations as branches, each hidden from the others."""

    context: Ids
    branches: tuple[tuple[int, Ids], ...]

    @property
    def tokens(self) -> int:
        """Number of input tokens: the last token of a continuation is a target only."""
        return len(self.context) + sum(len(ids) - 1 for _, ids in self.branches)


class TreeBatch(NamedTuple):
    """Rows as a batch, padded on the right; predicting positions, ascending; and each target's predictor, id and pair."""

    input_ids_BT: Tensor
    positions_BT: Tensor
    branches_BT: Tensor  # 0 for a context, then 1, 2, ...; -1 for padding
    places_U: Tensor  # into B*T
    predictors_N: Array  # into U, ascending
    targets_N: Array
    numbers_N: Array

    def mask(self, prefix: int) -> Tensor:
        """[B, 1, T, P + T] bool: a position sees the prefix and the earlier positions of its context and its own branch."""
        T = self.branches_BT.shape[1]
        branches_BT1, branches_B1T = self.branches_BT[:, :, None], self.branches_BT[:, None, :]
        sees_BTT = ((branches_B1T == branches_BT1) | (branches_B1T == 0)) & torch.ones(T, T, dtype=torch.bool).tril()
        return F.pad(sees_BTT, (prefix, 0), value=True)[:, None]


def by_context(pairs: Sequence[Pair]) -> list[BranchedRow]:
    """Group pairs into a row for each different context, with all its continuations."""
    branches_by_context: dict[Ids, list[tuple[int, Ids]]] = {}
    for number, (context, continuation) in enumerate(pairs):
        branches_by_context.setdefault(context, []).append((number, continuation))
    return [BranchedRow(context, tuple(branches)) for context, branches in branches_by_context.items()]


def prefix_clusters(rows: Sequence[BranchedRow], least_saved: int) -> list[tuple[Ids, list[BranchedRow]]]:
    """Group rows by common prefix: (prefix, rows), where sharing it saves the computation of at least `least_saved` tokens.

    The rows that share too little come first, with an empty prefix. A row joins its neighbours in the order of the contexts
    unless the shorter prefix that they would then share saves less. At least one token of every context is not shared.
    """
    ordered = sorted(rows, key=lambda row: row.context)
    loose: list[BranchedRow] = []
    shared_clusters: list[tuple[Ids, list[BranchedRow]]] = []

    def close(start: Ids, some: list[BranchedRow]) -> None:
        if len(start) * (len(some) - 1) >= max(1, least_saved):
            shared_clusters.append((start, some))
        else:
            loose.extend(some)

    start, some = ordered[0].context[:-1], ordered[:1]
    for row in ordered[1:]:
        shared = _common(start, row.context[:-1])
        if shared and shared * len(some) >= len(start) * (len(some) - 1):
            start = start[:shared]
            some.append(row)
        else:
            close(start, some)
            start, some = row.context[:-1], [row]
    close(start, some)
    return [((), loose), *shared_clusters] if loose else shared_clusters


def split(row: BranchedRow, *, width: int, most: int) -> Iterator[BranchedRow]:
    """Split a row into one or more with its context: continuations share a row where that costs less than a row each.

    For a layer of this width a token costs 24 width^2 of products, and 4 width for each position of its row: its attention
    is computed with a mask, not with less. No row with several continuations has more than `most` tokens (0: no such row).
    """
    some: list[tuple[int, Ids]] = []
    length = len(row.context)
    for number, ids in row.branches:
        added, alone = len(ids) - 1, len(row.context) + len(ids) - 1
        shared_cost = added * (6 * width + 2 * length + added)
        if some and (shared_cost > alone * (6 * width + alone) or length + added > most):
            yield BranchedRow(row.context, tuple(some))
            some, length = [], len(row.context)
        some.append((number, ids))
        length += added
    yield BranchedRow(row.context, tuple(some))


def batches(rows: Sequence[BranchedRow], *, prefix: int, most: int) -> Iterator[list[BranchedRow]]:
    """Batch rows of like length, the longest first, with at most `most` padded tokens; without a prefix, rows of a single
    continuation apart, which need no mask."""
    for several in (True, False):
        some = [row for row in rows if (len(row.branches) > 1 or prefix > 0) == several]
        some.sort(key=lambda row: -row.tokens)
        start = 0
        while start < len(some):
            each = some[start].tokens - prefix + prefix // CACHED
            count = max(1, most // each)
            yield some[start : start + count]
            start += count


def lay_out(rows: Sequence[BranchedRow], prefix: int) -> TreeBatch:
    """Build the batch of these rows, whose first `prefix` tokens are in the cache."""
    T = max(row.tokens for row in rows) - prefix
    # Padding is hidden from the positions that count. It repeats a token: some models warn about a pad token without a mask.
    ids_BT = np.repeat(np.array([[row.context[0]] for row in rows], np.int64), T, axis=1)
    positions_BT = np.zeros((len(rows), T), np.int64)
    branches_BT = np.full((len(rows), T), -1, np.int64)
    places: list[int] = []
    targets: list[int] = []
    numbers: list[int] = []
    for b, row in enumerate(rows):
        end = len(row.context) - prefix
        ids_BT[b, :end] = row.context[prefix:]
        positions_BT[b, :end] = np.arange(prefix, len(row.context))
        branches_BT[b, :end] = 0
        at = end
        for branch, (number, ids) in enumerate(row.branches, start=1):
            added = len(ids) - 1
            ids_BT[b, at : at + added] = ids[:-1]
            positions_BT[b, at : at + added] = np.arange(len(row.context), len(row.context) + added)
            branches_BT[b, at : at + added] = branch
            places += [b * T + end - 1, *range(b * T + at, b * T + at + added)]
            targets += ids
            numbers += [number] * len(ids)
            at += added
    order_N = np.argsort(places, kind="stable")
    places_U, predictors_N = np.unique(np.asarray(places)[order_N], return_inverse=True)
    return TreeBatch(
        input_ids_BT=torch.from_numpy(ids_BT),
        positions_BT=torch.from_numpy(positions_BT),
        branches_BT=torch.from_numpy(branches_BT),
        places_U=torch.from_numpy(places_U),
        predictors_N=predictors_N,
        targets_N=np.asarray(targets)[order_N],
        numbers_N=np.asarray(numbers)[order_N],
    )


def _common(first: Ids, second: Ids) -> int:
    """Length of the common prefix of two rows of ids."""
    if first == second[: len(first)]:  # common with worked examples, and avoids the loop
        return len(first)
    return sum(takewhile(bool, map(operator.eq, first, second)))
