"""What the trainer gets besides task, loader and callbacks, and the result of a training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ttrain.train.checkpoint import Checkpoints
from ttrain.train.distributed import Ranks, Tensors
from ttrain.train.precision import Precision
from ttrain.train.resource_limits import QuietHoursThrottle
from ttrain.train.snapshots import Snapshot

COMPLETED = "completed"
INTERRUPTED = "interrupted"
STOPPED = "stopped by a callback"


class Weights(Protocol):
    """Reads the trained weights of a model and loads them."""

    def state(self) -> Tensors: ...

    def load(self, weights: Tensors) -> None: ...


@dataclass(frozen=True)
class Validation:
    """Held-out batches. `quick`: a few rows, whose loss is logged and decides nothing."""

    batches: Sequence[Any] = ()
    quick: Sequence[Any] = ()


@dataclass(frozen=True)
class Origin:
    """Where a run without a checkpoint begins, and what must be equal to continue one."""

    start: Snapshot | None = None  # of another directory, or in memory, as the doctor's
    # Weights and optimizer state of another run, with which the first step begins.
    plateau: Snapshot | None = None
    # Settings that are saved in checkpoints, and must be equal.
    identity: Mapping[str, Any] = field(default_factory=dict)
    allow: frozenset[str] = frozenset()  # those of them that may differ


@dataclass(frozen=True)
class Cadence:
    """Intervals of logging, checkpoints and validation, in steps; 0 is never."""

    log: int = 10
    checkpoint: int = 100
    checkpoint_steps: frozenset[int] = frozenset()  # in addition to those of the cadence
    validate: int = 0
    validate_steps: frozenset[int] = frozenset()  # in addition to those of the cadence
    quick_validations: int = 0  # over the whole run


@dataclass(frozen=True)
class Speed:
    """Options of speed and memory; results are equal up to the order of summation."""

    compile: bool = False
    parallel: str = "ddp"
    defer: bool | None = None  # figures are read at logging steps only; None: on CUDA


@dataclass(frozen=True)
class TrainerOptions:
    """How a trainer trains: where, in which precision, what it saves, from where it begins."""

    weights: Weights
    ranks: Ranks
    precision: Precision
    checkpoints: Checkpoints | None = None
    validation: Validation = Validation()
    cadence: Cadence = Cadence()
    origin: Origin = Origin()
    speed: Speed = Speed()
    quiet_hours: QuietHoursThrottle | None = None
    stop_requested: Callable[[], bool] = lambda: False


@dataclass
class FitResult:
    """Result of a training run."""

    step: int
    stop_reason: str  # COMPLETED, INTERRUPTED or STOPPED
    resumed_from_step: int
    kept_step: (
        int  # of the weights, before `step` where those with the lowest validation loss were kept
    )
    loss: float | None  # of the kept weights, as is the next one
    validation_loss: float | None
    skipped_steps: int
    live_tokens: int
    tokens: int  # read up to `step`
    seconds: float
