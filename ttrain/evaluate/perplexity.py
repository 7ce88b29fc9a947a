"""Loss on held-out text and chats. Every token is scored once, with context; sums are divided once.

Letters in names: B windows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ttrain.data.packing import IGNORE
from ttrain.evaluate.token_losses import TokenLosses
from ttrain.train.distributed import Ranks

# Padded tokens of a forward pass: the most, where nobody says how many, and how many are enough for full speed. On a CPU 512
# tokens take as long each as 2048 (S, rows of 512: 829 and 807 us).
BATCH_TOKENS, ENOUGH_TOKENS = {"cpu": 4096}, {"cpu": 512}
BATCH_TOKENS_ELSEWHERE, ENOUGH_TOKENS_ELSEWHERE = 32_768, 8192
LEAST_FILL = 0.9  # of a row that is added to a batch which is large enough already
Tokens = tuple[Sequence[int], Sequence[bool]]  # ids, and whether each counts


class Score(NamedTuple):
    """Summed negative log-likelihood in nats over `tokens` scored tokens."""

    nats: float
    tokens: int


class Window(NamedTuple):
    """The model reads the ids from `start` to before `end`; those from `first` on are scored, each after those before it."""

    start: int
    first: int
    end: int

    @property
    def inputs(self) -> int:
        """Tokens that the model is given: the last one is a target only."""
        return self.end - self.start - 1


def windows(tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Windows of at most `length` inputs in which each token after the first is scored once, with as much context as fits.

    The first window scores all that it holds; each later one its last `stride` tokens, so that all of these have at least
    `length - stride + 1` tokens before them (as in the strided perplexity of
    https://huggingface.co/docs/transformers/perplexity). So about `stride / length` of what is computed in a long text is
    scored, and all of a text that fits.
    """
    first = 1
    while first < tokens:
        end = min(tokens, length + 1 if first == 1 else first + stride)
        yield Window(max(0, end - length - 1), first, end)
        first = end


def score_each(
    model: nn.Module,
    sequences: Sequence[Tokens],
    *,
    length: int,
    stride: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    progress: Callable[[int, int], None],
    batch_tokens: int | None = None,
    ranks: Ranks | None = None,
) -> list[Score]:
    """Loss of the live tokens of each sequence, (ids, live). The first token of each is context only.

    Windows are sorted by length, so that those of a batch are padded little, and `batch_tokens` bounds what a forward pass
    gets, padding included. With `ranks`, each has the whole model, computes a share of the batches, and all get all scores:
    the same to the last bit on any number of ranks, and up to the rounding of a matrix product (1e-7) with any batch.
    `progress` gets (batches done, batches) of this rank.
    """
    held = [(np.asarray(ids, np.int64), np.asarray(live, np.bool_)) for ids, live in sequences]
    found = [
        (number, window)
        for number, (ids, live) in enumerate(held)
        for window in windows(len(ids), length, stride)
        if live[window.first : window.end].any()
    ]
    found.sort(key=lambda item: -item[1].inputs)
    most = batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS_ELSEWHERE)
    enough = ENOUGH_TOKENS.get(device.type, ENOUGH_TOKENS_ELSEWHERE)
    batches = _batches([window.inputs for _, window in found], most, enough)
    mine = batches if ranks is None else batches[ranks.rank :: ranks.world]
    nats, losses = np.zeros(len(found)), TokenLosses(model)
    was_training = model.training
    model.eval()
    try:
        for done, batch in enumerate(mine, start=1):
            inputs_BT, labels_BT = _padded([(*held[number], window) for number, window in found[batch]])
            with autocast():
                each_N = losses(inputs_BT.to(device), labels_BT)
            firsts_B = (labels_BT != IGNORE).sum(1).cumsum(0)[:-1].numpy()
            nats[batch] = [part.sum() for part in np.split(each_N.double().cpu().numpy(), firsts_B)]
            progress(done, len(mine))
    finally:
        model.train(was_training)
    if ranks is not None:  # a window has a number on one rank and zero on the others
        nats = np.array(ranks.sum(nats.tolist()))
    totals, counts = [0.0] * len(held), [0] * len(held)
    for more, (number, window) in zip(nats.tolist(), found, strict=True):
        totals[number] += more
        counts[number] += int(held[number][1][window.first : window.end].sum())
    return [Score(*pair) for pair in zip(totals, counts, strict=True)]


def _batches(lengths: Sequence[int], most: int, enough: int) -> list[slice]:
    """Consecutive parts of a list that falls; one at least in each, and at most `most` tokens when padded to its first.

    A part that has `enough` tokens ends before a length that would be padded by more than a tenth: of 6,000 tokens in texts
    of log-normal lengths the padding is then 4 % instead of 29 %.
    """
    found, start = [], 0
    while start < len(lengths):
        widest, end = lengths[start], start + 1
        while end < len(lengths) and (end + 1 - start) * widest <= most:
            if (end - start) * widest >= enough and lengths[end] < LEAST_FILL * widest:
                break
            end += 1
        found.append(slice(start, end))
        start = end
    return found


def _padded(rows: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], Window]]) -> tuple[Tensor, Tensor]:
    """Inputs and labels of windows. Padding stands on the right, where a causal model's earlier positions cannot see it."""
    shape = (len(rows), max(window.inputs for _, _, window in rows))
    inputs_BT, labels_BT = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
    for row, (ids, live, (start, first, end)) in enumerate(rows):
        inputs_BT[row, : end - start - 1] = ids[start : end - 1]
        labels_BT[row, first - start - 1 : end - start - 1] = np.where(live[first:end], ids[first:end], IGNORE)
    return torch.from_numpy(inputs_BT), torch.from_numpy(labels_BT)
