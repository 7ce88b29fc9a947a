"""Steps whose figures stay on the device until a logging step, so that the host does not wait for a GPU in between.

The host cannot see whether a gradient is finite before it asks for the update. So the device decides: the update of a step
that is not finite changes nothing, as if it had been skipped, and the host learns of it when it reads the figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_STEPS = 64  # more are read before, so that a run without logging steps keeps few micro-batches' losses


@dataclass(frozen=True)
class DeferredStep:
    """A step that the device may not have finished yet; sums are over all ranks."""

    step: int
    live: float
    figures: Tensor  # of `stacked`
    norm: Tensor
    losses: Mapping[int, Tensor]
    data_seconds: float


class DeferredSteps:
    """The steps since the last reading. After more than `most_skips` in a row that are not finite nothing is updated."""

    def __init__(self, device: torch.device, most_skips: int) -> None:
        self._steps: list[DeferredStep] = []
        self._device, self._most_skips = device, most_skips
        self._over = torch.zeros((), device=device)
        self._skips: Tensor | None = None  # in a row
        self._began = time.monotonic()

    def __len__(self) -> int:
        return len(self._steps)

    def stacked(self, losses: Mapping[int, Tensor], others: Sequence[Tensor | float]) -> Tensor:
        """The sum of the losses and the other sums in fp64."""
        total = torch.stack([losses[number].double() for number in sorted(losses)]).sum()
        return torch.stack([total, *(torch.as_tensor(figure, device=self._device).double() for figure in others)])

    def prevents(self, total: Tensor, norm: Tensor, skips: int) -> Tensor:
        """1.0 where the step may not be applied, else 0.0, on the device. `skips`: in a row before the first of all."""
        if self._skips is None:
            self._skips = torch.full((), float(skips), device=self._device)
        bad = (~(torch.isfinite(total) & torch.isfinite(norm))).float()
        self._skips = (self._skips + 1) * bad
        self._over = torch.maximum(self._over, (self._skips > self._most_skips).float())
        return torch.maximum(bad, self._over)

    def add(self, step: DeferredStep, began: float) -> None:
        """Add a step that began at this time of `time.monotonic`."""
        if not self._steps:
            self._began = began
        self._steps.append(step)

    def read(self) -> Iterator[tuple[DeferredStep, Sequence[float], float]]:
        """Wait for the device; each step with (sum of the losses, norm, other sums), and its share of the seconds."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        figures = torch.stack([torch.cat([step.norm.double().view(1), step.figures]) for step in steps]).tolist()
        seconds = (time.monotonic() - self._began) / len(steps)
        for step, (norm, total, *others) in zip(steps, figures, strict=True):
            yield step, (total, norm, *others), seconds
