"""What contexts and continuations have in common, and how they are laid into rows of a batch. No model.

Letters in names: B rows, T positions, P positions of a prefix, U positions that predict, N targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

Ids = tuple[int, ...]
Pair = tuple[Ids, Ids]  # context and continuation, neither of them empty
CACHED = 4  # a token whose keys and values are there takes about a quarter of the memory of one that is computed


class Row(NamedTuple):
    """A context, and the continuations after it with their numbers: branches, each hidden from the others."""

    context: Ids
    branches: tuple[tuple[int, Ids], ...]

    @property
    def tokens(self) -> int:
        """What the model is given: the last token of a continuation is a target only."""
        return len(self.context) + sum(len(ids) - 1 for _, ids in self.branches)


class Laid(NamedTuple):
    """Rows as a batch, padded on the right; what predicts, in ascending order; and each target's predictor, id and pair."""

    input_ids_BT: Tensor
    positions_BT: Tensor
    branches_BT: Tensor  # 0 for a context, then 1, 2, ...; -1 for padding
    places_U: Tensor  # into B*T
    predictors_N: npt.NDArray[np.int64]  # into U, ascending
    targets_N: npt.NDArray[np.int64]
    numbers_N: npt.NDArray[np.int64]

    def mask(self, prefix: int) -> Tensor:
        """[B, 1, T, P + T] bool: a position sees the prefix, and what is before it in its context and in its own branch."""
        T = self.branches_BT.shape[1]
        branches_BT1, branches_B1T = self.branches_BT[:, :, None], self.branches_BT[:, None, :]
        sees_BTT = ((branches_B1T == branches_BT1) | (branches_B1T == 0)) & torch.ones(T, T, dtype=torch.bool).tril()
        return F.pad(sees_BTT, (prefix, 0), value=True)[:, None]


def by_context(pairs: Sequence[Pair]) -> list[Row]:
    """A row for each different context, with all its continuations."""
    found: dict[Ids, list[tuple[int, Ids]]] = {}
    for number, (context, continuation) in enumerate(pairs):
        found.setdefault(context, []).append((number, continuation))
    return [Row(context, tuple(branches)) for context, branches in found.items()]


def clusters(rows: Sequence[Row], least_saved: int) -> list[tuple[Ids, list[Row]]]:
    """(what the contexts of these rows begin with, the rows): at least `least_saved` tokens are computed less often.

    The rows that share too little come first, with nothing. A row joins its neighbours in the order of the contexts unless
    the shorter beginning that they would then share saves less. At least one token of every context is not shared.
    """
    ordered = sorted(rows, key=lambda row: row.context)
    loose: list[Row] = []
    found: list[tuple[Ids, list[Row]]] = []

    def close(start: Ids, some: list[Row]) -> None:
        if len(start) * (len(some) - 1) >= max(1, least_saved):
            found.append((start, some))
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
    return [((), loose), *found] if loose else found


def split(row: Row, *, width: int, most: int) -> Iterator[Row]:
    """The row, or several with its context: a continuation goes where it costs less than after a context of its own.

    For a layer of this width a token costs 24 width^2 of products, and 4 width for each position of its row: its attention
    is computed with a mask, not with less. No row with several continuations has more than `most` tokens.
    """
    some: list[tuple[int, Ids]] = []
    length = len(row.context)
    for number, ids in row.branches:
        more, alone = len(ids) - 1, len(row.context) + len(ids) - 1
        beside = more * (6 * width + 2 * length + more)
        if some and (beside > alone * (6 * width + alone) or length + more > most):
            yield Row(row.context, tuple(some))
            some, length = [], len(row.context)
        some.append((number, ids))
        length += more
    yield Row(row.context, tuple(some))


def batches(rows: Sequence[Row], *, prefix: int, most: int) -> Iterator[list[Row]]:
    """Rows of like length, the longest first, at most `most` padded tokens together; without a prefix, those of a single
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


def lay_out(rows: Sequence[Row], prefix: int) -> Laid:
    """The batch of these rows, whose first `prefix` tokens are elsewhere."""
    T = max(row.tokens for row in rows) - prefix
    # Padding is hidden from what counts. It repeats a token: some models warn where one that pads has no mask.
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
            more = len(ids) - 1
            ids_BT[b, at : at + more] = ids[:-1]
            positions_BT[b, at : at + more] = np.arange(len(row.context), len(row.context) + more)
            branches_BT[b, at : at + more] = branch
            places += [b * T + end - 1, *range(b * T + at, b * T + at + more)]
            targets += ids
            numbers += [number] * len(ids)
            at += more
    order_N = np.argsort(places, kind="stable")
    places_U, predictors_N = np.unique(np.asarray(places)[order_N], return_inverse=True)
    return Laid(
        input_ids_BT=torch.from_numpy(ids_BT),
        positions_BT=torch.from_numpy(positions_BT),
        branches_BT=torch.from_numpy(branches_BT),
        places_U=torch.from_numpy(places_U),
        predictors_N=predictors_N,
        targets_N=np.asarray(targets)[order_N],
        numbers_N=np.asarray(numbers)[order_N],
    )


def _common(first: Ids, second: Ids) -> int:
    """How many ids two rows have in common at their beginning."""
    if first == second[: len(first)]:  # all of them, as with worked examples: told without a loop
        return len(first)
    different = (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(different, min(len(first), len(second)))
