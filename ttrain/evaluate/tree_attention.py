"""Costs of continuations, where what several of them have before them is computed once.

The continuations of one context stand in one row, side by side as branches: a mask hides each from the others, and its
positions go on from the context's (the tree attention of arXiv:2305.09781). What the contexts of several rows begin with,
such as worked examples or a passage with several questions, is a prefix whose keys and values are computed once. Rows of
like length share a batch, and only positions that predict something meet the output head.

Letters in names: B rows, T positions, U positions that predict, N targets, D width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ttrain.evaluate import shared_prefixes
from ttrain.evaluate.evaluated_model import Progress, Subject
from ttrain.evaluate.shared_prefixes import Ids, Laid, Pair, Row
from ttrain.evaluate.token_losses import PROBED_TOKENS, plain_parts
from ttrain.train import attention
from ttrain.train.losses import CHUNK_TOKENS, CHUNK_TOKENS_ELSEWHERE

LEAST_SAVED = {"cpu": 64}  # tokens for which a prefix is worth a forward pass of its own
LEAST_SAVED_ELSEWHERE = 4096  # a GPU takes about as long for one token as for thousands
DEFAULT_WIDTH = 512
SLACK = {torch.float32: 1e-3, torch.float64: 1e-6}  # nats a token by which branches may differ from rows without them
SLACK_16_BITS = 0.03
REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError)
log = logging.getLogger("ttrain")


class Way(NamedTuple):
    """What is shared: the most tokens of a row with several continuations (0: there is none), and whether prefixes are."""

    longest: int
    prefixes: bool

    def __str__(self) -> str:
        return f"in rows of up to {self.longest} tokens with{'' if self.prefixes else 'out'} a prefix computed once"


@dataclass
class Tried:
    """What a model was seen to do: ways that gave equal scores, with the longest row and context so far, and those that did
    not."""

    passed: dict[Way, tuple[int, int]] = field(default_factory=dict)
    failed: set[Way] = field(default_factory=set)


# By subject, so that the tasks of a suite, and an evaluation every n steps of a training, try it once.
_TRIED: WeakKeyDictionary[Subject, Tried] = WeakKeyDictionary()


class Prefix(NamedTuple):
    """Tokens that several contexts begin with, and their keys and values in each layer, [1, heads, P, width]."""

    tokens: int
    states: Sequence[tuple[Tensor, Tensor]]


@final
class Scorer:
    """Scores pairs under one subject. What its model can share is found out on the longest of them.

    `alone`: nothing is shared, which any causal model can do.
    """

    def __init__(self, subject: Subject, *, alone: bool = False) -> None:
        self._subject = subject
        model: Any = subject.model
        self._causal = model.get_base_model() if hasattr(model, "get_base_model") else model  # within PEFT's
        config = getattr(self._causal, "config", None)
        self._width = int(getattr(config, "hidden_size", None) or DEFAULT_WIDTH)
        self._shares = not alone and config is not None
        self._parts: tuple[Callable[..., Any], nn.Module] | None = None

    def score(self, pairs: Sequence[Pair], progress: Progress) -> list[tuple[float, bool]]:
        """(nats, whether every token was the most likely one) of each (context, continuation), neither of them empty.

        The same, up to the rounding of sums (1e-5 nats in fp32), whatever is shared and whatever is in a batch.
        """
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        if not pairs:
            return found
        done = 0
        with torch.no_grad():  # not inference_mode: a table that the model keeps would be unfit for training
            probe = torch.tensor([pairs[0][0][:PROBED_TOKENS]], device=self._subject.device)
            self._parts = plain_parts(self._subject.model, probe)
            rows = shared_prefixes.by_context(pairs)
            least_saved = LEAST_SAVED.get(self._subject.device.type, LEAST_SAVED_ELSEWHERE)
            clusters = shared_prefixes.clusters(rows, least_saved)
            way = self._best_way(rows, any(start for start, _ in clusters))
            for start, some in clusters if way.prefixes else [((), rows)]:
                prefix = self._prefix(start) if start else None
                cut = [one for row in some for one in (self._split(row, way.longest) if way.longest else _apart(row))]
                for batch in shared_prefixes.batches(cut, prefix=len(start), most=self._subject.batch_tokens):
                    for number, nats, every in self._batch(batch, prefix):
                        found[number] = nats, every
                        done += 1
                    progress(done, len(pairs))
        return found

    def _best_way(self, rows: Sequence[Row], prefixes: bool) -> Way:
        """How much this model can share: the first way that gives what rows of one continuation each give.

        Tried on the longest rows, since a window, or a table of positions that is too short, shows on no other. `prefixes`:
        whether there is any that is worth it.
        """
        alone = Way(longest=0, prefixes=False)
        if not self._shares or not (prefixes or any(len(row.branches) > 1 for row in rows)):
            return alone
        most, limit = self._subject.batch_tokens, self._subject.max_length or self._subject.batch_tokens
        ways = (Way(size, begun) for begun in ([True, False] if prefixes else [False]) for size in (most, min(most, limit)))
        tried = _TRIED.setdefault(self._subject, Tried())
        for way in dict.fromkeys(way for way in ways if way not in tried.failed):
            cut = [one for row in rows for one in self._split(row, way.longest)]
            longest = [
                max(cut, key=lambda row: (len(row.branches) > 1, row.tokens)),
                max(cut, key=lambda row: len(row.context)),
            ]
            size = longest[0].tokens, len(longest[1].context)
            before = tried.passed.get(way, (0, 0))
            if size[0] <= before[0] and size[1] <= before[1]:
                return way
            reasons = [self._failure(way, row) for row in dict.fromkeys(longest if way.prefixes else longest[:1])]
            if not any(reasons):
                tried.passed[way] = max(size[0], before[0]), max(size[1], before[1])
                return way
            tried.failed.add(way)
            log.info("%s cannot be scored %s: %s", self._subject.name, way, next(filter(None, reasons)))
        return alone

    def _failure(self, way: Way, row: Row) -> str:
        """Why this row cannot be computed in that way; empty where it can."""
        start = row.context[:-1] if way.prefixes else ()
        try:
            shared = self._batch([row], self._prefix(start) if start else None, masked=True)
        except torch.OutOfMemoryError:
            raise
        except REFUSALS as error:
            return " ".join(str(error).split())[:200] or type(error).__name__
        some = dict([row.branches[0], row.branches[-1]])
        plain = {number: nats for one in some.items() for number, nats, _ in self._batch([Row(row.context, (one,))], None)}
        moved = max(abs(nats - plain[number]) / len(some[number]) for number, nats, _ in shared if number in some)
        slack = SLACK.get(next(self._causal.parameters()).dtype, SLACK_16_BITS)
        return "" if moved <= slack else f"it moves a log-likelihood by {moved:.2g} nats a token"

    def _split(self, row: Row, longest: int) -> list[Row]:
        return list(shared_prefixes.split(row, width=self._width, most=longest))

    def _prefix(self, ids: Ids) -> Prefix:
        """Raises NotImplementedError where a layer keeps something other than all its keys and values."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._causal.config)
        self._states(torch.tensor([ids], device=self._subject.device), past_key_values=cache, use_cache=True)
        states: list[tuple[Tensor, Tensor]] = []
        for layer in cache.layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None or keys.shape[-2] != len(ids):
                raise NotImplementedError("its layers do not keep all keys and values")
            states.append((keys, values))
        return Prefix(len(ids), states)

    def _batch(self, rows: Sequence[Row], prefix: Prefix | None, *, masked: bool = False) -> list[tuple[int, float, bool]]:
        """(number, nats, whether every token was the most likely one) of each continuation."""
        before, device = prefix.tokens if prefix else 0, self._subject.device
        laid = shared_prefixes.lay_out(rows, before)
        inputs: dict[str, Any] = {}
        if masked or prefix or any(len(row.branches) > 1 for row in rows):
            inputs = {"position_ids": laid.positions_BT.to(device), "attention_mask": laid.mask(before).to(device)}
            inputs = attention.suited(self._causal, inputs)
        if prefix:
            inputs |= {"past_key_values": _repeated(prefix, len(rows)), "use_cache": True}
        states = self._states(laid.input_ids_BT.to(device), **inputs).flatten(0, 1)
        costs_N, best_N = self._costs(states.index_select(0, laid.places_U.to(device)), laid)
        size = int(laid.numbers_N.max()) + 1
        nats, wrong = np.bincount(laid.numbers_N, costs_N, size), np.bincount(laid.numbers_N, ~best_N, size)
        return [(number, float(nats[number]), not wrong[number]) for row in rows for number, _ in row.branches]

    def _states(self, input_ids_BT: Tensor, **inputs: Any) -> Tensor:
        """Hidden states, [B, T, D], where the output head is applied here; else logits, [B, T, V]."""
        inputs.setdefault("use_cache", False)
        if self._parts is None:
            logits_BTV: Tensor = self._subject.model(input_ids=input_ids_BT, **inputs).logits
            return logits_BTV
        hidden_BTD: Tensor = self._parts[0](input_ids=input_ids_BT, **inputs).last_hidden_state
        return hidden_BTD

    def _costs(self, states_U: Tensor, laid: Laid) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """(nats of each target, whether it was the most likely token), both of shape [N]. The log-sum-exp is of fp32."""
        device = states_U.device
        chunk = CHUNK_TOKENS.get(device.type, CHUNK_TOKENS_ELSEWHERE)
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


def _apart(row: Row) -> list[Row]:
    """Each continuation in a row of its own."""
    return [Row(row.context, (branch,)) for branch in row.branches]


def _repeated(prefix: Prefix, rows: int) -> Any:
    """A cache that holds the prefix in every row; what a pass adds to it goes into copies."""
    from transformers import DynamicCache

    return DynamicCache([(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)) for keys, values in prefix.states])
