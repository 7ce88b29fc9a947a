"""Metrics of steps and validations: summed over micro-batches and ranks, read at once or later."""
# They may stay on the device until a logging step, so that the host does not wait for a GPU. Then
# the device decides whether a gradient is finite: the update of a step that is not changes nothing,
# and the host learns of it when it reads the metrics.

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ttrain.config import Loop
from ttrain.core.text import first_of
from ttrain.data.packing import Array
from ttrain.errors import TTrainError
from ttrain.train.distributed import Ranks
from ttrain.train.precision import Precision
from ttrain.train.task import LossSum, Metrics, TrainingTask

PART = "part/"  # before the name of a part of the loss, among the names of sums


SHOWN_ROWS = 16
# A run that only skips learns nothing: the weights are non-finite, or the data is bad.
SKIPS_IN_A_ROW = 20


@dataclass
class MicroBatchSums:
    """Sums over the micro-batches of a step on one rank: targets, losses, vectors by name."""

    live: int = 0
    # By the number of the micro-batch, on the device.
    losses: dict[int, Tensor] = field(default_factory=dict)
    # Parts of the loss, of length 1, and other sums.
    vectors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, number: int, loss: LossSum) -> None:
        """Add a micro-batch."""
        self.live += loss.count
        self.losses[number] = loss.total.detach()
        parts = {f"{PART}{name}": value for name, value in loss.parts.items()}
        for name, value in {**parts, **loss.sums}.items():
            self.vectors[name] = value.detach().flatten() + self.vectors.get(name, 0)

    @property
    def only_parts(self) -> bool:
        """Whether all vectors are parts of the loss."""
        return all(name.startswith(PART) for name in self.vectors)

    def read(self) -> dict[str, list[float]]:
        """The vectors as numbers; waits for the device."""
        return {name: vector.tolist() for name, vector in self.vectors.items()}


class ReducedSums:
    """Packs named vectors into one list of numbers. The first step fixes the names."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._lengths: dict[str, int] | None = None

    def flat(self, vectors: Mapping[str, Any]) -> list[Any]:
        """All numbers in the agreed order, 0 if missing. Raises TTrainError for a new part."""
        if self._lengths is None:
            agreed = self._ranks.union(
                [f"{name}|{len(vector)}" for name, vector in vectors.items()]
            )
            pairs = (entry.rsplit("|", 1) for entry in agreed)
            self._lengths = {name: int(length) for name, length in pairs}
        if unknown := sorted(vectors.keys() - self._lengths.keys()):
            raise TTrainError(
                f"the loss has the part {unknown[0].removeprefix(PART)!r}, which the first step "
                "did not have; return the same parts from every training step, with 0 for an "
                "absent one"
            )
        return [
            number
            for name, length in self._lengths.items()
            for number in vectors.get(name, [0.0] * length)
        ]

    def named(self, values: Sequence[float]) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Unpack a list made by `flat`: the parts of the loss, and the other sums."""
        assert self._lengths is not None, "flat() comes first"
        numbers = iter(values)
        vectors = {name: [*islice(numbers, length)] for name, length in self._lengths.items()}
        parts = {
            name.removeprefix(PART): vectors.pop(name)[0]
            for name in [*vectors]
            if name.startswith(PART)
        }
        return parts, vectors


@dataclass(frozen=True)
class FinishedStep:
    """A step that was done or skipped: sums over all ranks, losses of this rank's micro-batches."""

    step: int
    live: float
    losses: Mapping[int, Tensor]
    total: float  # of the losses
    norm: float  # of the gradient of the mean, before the clip
    others: Sequence[float]  # as `ReducedSums` packs them
    seconds: float
    data_seconds: float

    @property
    def finite(self) -> bool:
        """Whether the weights were updated."""
        return math.isfinite(self.total) and math.isfinite(self.norm)

    @property
    def loss(self) -> float:
        """Mean per target."""
        return self.total / self.live


class DeferredSteps:
    """The steps since the last reading. After too many skips in a row nothing is updated."""

    def __init__(self, device: torch.device, config: Loop) -> None:
        self._steps: list[tuple[Callable[..., FinishedStep], Tensor, float]] = []
        self._device = device
        self._most_skips = SKIPS_IN_A_ROW if config.nonfinite == "skip" else 0
        self._over = torch.zeros((), device=device)
        self._skips: Tensor | None = None  # in a row
        self._began = time.monotonic()

    def stacked(self, losses: Mapping[int, Tensor], others: Sequence[Tensor | float]) -> Tensor:
        """The sum of the losses and the other sums in fp64."""
        total = torch.stack([losses[number].double() for number in sorted(losses)]).sum()
        return torch.stack(
            [total, *(torch.as_tensor(figure, device=self._device).double() for figure in others)]
        )

    def prevents(self, total: Tensor, norm: Tensor, skips: int) -> Tensor:
        """1.0 if the step may not be applied, else 0.0. `skips`: in a row before the first step."""
        if self._skips is None:
            self._skips = torch.full((), float(skips), device=self._device)
        bad = (~(torch.isfinite(total) & torch.isfinite(norm))).float()
        self._skips = (self._skips + 1) * bad
        self._over = torch.maximum(self._over, (self._skips > self._most_skips).float())
        return torch.maximum(bad, self._over)

    def add(
        self,
        finish: Callable[..., FinishedStep],
        norm: Tensor,
        figures: Tensor,
        data_seconds: float,
        began: float,
    ) -> None:
        """Add a step; `finish`: FinishedStep with its first three fields."""
        if not self._steps:
            self._began = began
        self._steps.append((finish, torch.cat([norm.double().view(1), figures]), data_seconds))

    def read(self) -> Iterator[FinishedStep]:
        """Wait for the device; yields the steps since the last reading."""
        steps = self._steps
        self._steps = []
        if not steps:
            return
        numbers = torch.stack([figures for _, figures, _ in steps]).tolist()
        seconds = (time.monotonic() - self._began) / len(steps)
        for (finish, _, data_seconds), (norm, total, *others) in zip(steps, numbers, strict=True):
            yield finish(total, norm, others, seconds, data_seconds)


def measure(
    task: TrainingTask, model: nn.Module, batches: Sequence[Any], ranks: Ranks, precision: Precision
) -> tuple[float, Metrics]:
    """Mean loss per target over the batches, NaN without any, and the metrics of the task."""
    was_training = model.training
    total = 0.0
    sums = MicroBatchSums()
    model.eval()
    for number in range(ranks.rank, -(-len(batches) // ranks.world) * ranks.world, ranks.world):
        # Sharded models must be called equally often on all ranks.
        is_filler = number >= len(batches)
        batch = batches[0].without_targets() if is_filler else batches[number]
        with precision.autocast():
            loss = task.validation_step(model, batch, ranks.device)
        total += float(loss.total)
        sums.add(number, loss)
    model.train(was_training)
    packed = ReducedSums(ranks)
    total, live, *values = ranks.sum([total, float(sums.live), *packed.flat(sums.read())])
    _, others = packed.named(values)
    return total / live if live else math.nan, dict(task.figures(others)) if others else {}


class NonFinite(TTrainError):
    """The loss or the gradient of a step is not finite; `rows` are those to blame."""

    def __init__(
        self, finished: FinishedStep, rows: Sequence[int], config: Loop, in_a_row: int
    ) -> None:
        """`in_a_row`: such steps up to this one."""
        self.step = finished.step + 1
        self.rows = list(rows)
        # Else the run ends.
        self.is_skipped = config.nonfinite == "skip" and in_a_row <= SKIPS_IN_A_ROW
        remedy = f", or set {config.prefix}nonfinite=skip (it is {config.nonfinite})"
        if config.nonfinite == "skip":
            skipped = f"{SKIPS_IN_A_ROW} steps in a row were skipped before"
            remedy = f"; {'it is skipped' if self.is_skipped else skipped}"
        name = "gradient" if math.isfinite(finished.loss) else "loss"
        super().__init__(
            f"the {name} of step {self.step} is not finite (loss {finished.loss:.6g}, gradient "
            f"norm {finished.norm:.6g}); its {len(self.rows)} rows: "
            f"{first_of(self.rows, SHOWN_ROWS)}. The weights are unchanged. Check these "
            f"rows, lower {config.prefix}optim.lr ({config.optim.lr}){remedy}"
        )


def rows_to_blame(parts: Sequence[Array], losses: Mapping[int, Tensor], ranks: Ranks) -> list[int]:
    """Rows of micro-batches with a non-finite loss on any rank; all rows if there are none."""
    bad = [
        float(number in losses and not math.isfinite(float(losses[number])))
        for number in range(len(parts))
    ]
    blamed = [
        micro_batch_rows
        for micro_batch_rows, is_bad in zip(parts, ranks.sum(bad), strict=True)
        if is_bad
    ]
    return [int(row) for micro_batch_rows in blamed or parts for row in micro_batch_rows]
