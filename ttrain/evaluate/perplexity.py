"""Loss on held-out text and chats. Every token is scored once, with context; sums are divided once.

Letters in names: B windows, T positions, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORE = -100
WINDOWS_PER_BATCH = 16
Tokens = tuple[Sequence[int], Sequence[bool]]  # ids, and whether each counts


class Score(NamedTuple):
    """Summed negative log-likelihood in nats over `tokens` scored tokens."""

    nats: float
    tokens: int


def windows(ids: Sequence[int], live: Sequence[bool], length: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """(inputs, labels) of at most `length`; each token after the first is scored once, with as much context as fits.

    The first window scores all it holds; each later one its last `stride` tokens. Labels are shifted: `labels[t]` follows
    `inputs[t]`.
    """
    scored = 1
    while scored < len(ids):
        end = min(len(ids), length + 1 if scored == 1 else scored + stride)
        start = max(0, end - length - 1)
        labels = [ids[t] if t >= scored and live[t] else IGNORE for t in range(start + 1, end)]
        if any(label != IGNORE for label in labels):
            yield list(ids[start : end - 1]), labels
        scored = end


def score_each(
    model: nn.Module,
    sequences: Sequence[Tokens],
    *,
    length: int,
    stride: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    progress: Callable[[int, int], None],
) -> list[Score]:
    """Loss of the live tokens of each sequence, (ids, live). Windows of like length share a batch."""
    found = [
        (number, window) for number, (ids, live) in enumerate(sequences) for window in windows(ids, live, length, stride)
    ]
    found.sort(key=lambda item: len(item[1][0]))
    nats, tokens = [0.0] * len(sequences), [0] * len(sequences)
    model.eval()
    for start in range(0, len(found), WINDOWS_PER_BATCH):
        batch = found[start : start + WINDOWS_PER_BATCH]
        inputs_BT, labels_BT = _pad([window for _, window in batch], device)
        with torch.inference_mode(), autocast():
            # Padding stands on the right, where a causal model's earlier positions cannot see it.
            logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
            loss_BT = F.cross_entropy(
                logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORE, reduction="none"
            ).view_as(labels_BT)
        sums, counts = loss_BT.sum(1).tolist(), (labels_BT != IGNORE).sum(1).tolist()
        for (number, _), more_nats, more_tokens in zip(batch, sums, counts, strict=True):
            nats[number] += more_nats
            tokens[number] += more_tokens
        progress(min(start + WINDOWS_PER_BATCH, len(found)), len(found))
    return [Score(*pair) for pair in zip(nats, tokens, strict=True)]


def _pad(batch: Sequence[tuple[list[int], list[int]]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(inputs) for inputs, _ in batch)
    inputs_BT = torch.zeros(len(batch), width, dtype=torch.long)
    labels_BT = torch.full((len(batch), width), IGNORE, dtype=torch.long)
    for row, (inputs, labels) in enumerate(batch):
        inputs_BT[row, : len(inputs)] = torch.tensor(inputs)
        labels_BT[row, : len(labels)] = torch.tensor(labels)
    return inputs_BT.to(device), labels_BT.to(device)
