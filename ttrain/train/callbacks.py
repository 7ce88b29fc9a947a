"""Callbacks: observers that get frozen records of each event and cannot change the training."""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from ttrain.core.files import JsonDict, ProgressWriter, fsync, write_bytes
from ttrain.core.text import format_duration
from ttrain.data.order import Order
from ttrain.data.packing import Array
from ttrain.errors import TTrainError, UsageError

# In the log; prefixes of names.
LOGGED_PREFIXES = (
    "loss",
    "grad_norm",
    "lr_",
    "skipped_steps",
    "validation_loss",
    "perplexity",
)

LARGEST_EXPONENT = 709.0  # exp of more than 709.78 overflows a float

GROUP = "ttrain.callbacks"

log = logging.getLogger("ttrain")


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, over all ranks and micro-batches."""

    step: int  # steps done, this one among them
    steps: int
    loss: float  # mean per target
    grad_norm: float  # before the clip
    live_tokens: int
    skipped: bool  # its gradient was not finite, and the weights were not updated
    seconds: float
    data_seconds: float  # of them, waiting for the loader
    rows: Callable[[], Array]  # row numbers
    tokens: int  # of its rows
    tokens_read: int  # of the rows of all steps so far


@dataclass(frozen=True)
class LogRecord:
    """Metrics at a logging step: means over the tokens since the last one, over all ranks."""

    step: int
    steps: int
    tokens: int  # of the rows of all steps so far
    metrics: Mapping[str, float]


class Callback:
    """Hooks that rank 0 calls; the base class does nothing.

    A callback may add metrics to the log, ask for a stop, and keep a state in the checkpoint. One
    that raises ends the run with an error that names it.
    """

    # Order: start, (epoch_start, (step_start, step_end, log, validated, saved)*, epoch_end)*, end.
    # After an error `failed` is the last call on every callback. On CUDA `step_end` is called at
    # logging steps, for all steps since the last one.

    # That are its state in the checkpoint, as JSON.
    saved_attributes: ClassVar[tuple[str, ...]] = ()
    # Whether `log` keeps what it is given, so that later metrics are given to it too.
    keeps_metrics = False
    # False: an error where it asks for a stop, since what it watches has a key that does not hold
    # it.
    may_stop = True

    def start(self, step: int, steps: int) -> None:
        """The loop begins at `step`; above 0, it continues."""

    def epoch_start(self, epoch: int) -> None:
        """The next step holds the first row of an epoch (from 0), or the run continues in one."""

    def step_start(self, step: int) -> None:
        """The loop begins to wait for the rows of step number `step`."""

    def step_end(self, record: StepRecord) -> None:
        """The weights were updated."""

    def figures(self, record: StepRecord) -> Mapping[str, float]:
        """Metrics to add to the log, requested before `log`."""
        return {}

    def log(self, record: LogRecord) -> None:
        """A logging step, or the metrics of a validation."""

    def validation_figures(self, loss: float) -> Mapping[str, float]:
        """Metrics to add to a validation loss, requested before `log`."""
        return {}

    def validated(self, step: int, loss: float) -> None:
        """The held-out rows were measured: nats per target."""

    def saved(self, step: int) -> None:
        """A checkpoint was handed to the writer."""

    def epoch_end(self, epoch: int) -> None:
        """The last step held the last row of an epoch."""

    def stop_reason(self) -> str | None:
        """Reason to stop the run and save its state, or None; called after steps, validations."""
        # After a step the answer travels with the next step's collective: the run ends one step
        # later.
        return None

    def state(self) -> JsonDict:
        """State of this callback for the checkpoint, as JSON."""
        return {name: getattr(self, f"_{name}") for name in self.saved_attributes}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state()` returned."""
        for name in self.saved_attributes:
            setattr(self, f"_{name}", state[name])

    def end(self, step: int) -> None:
        """The loop ended as planned, or stopped after saving."""

    def failed(self, error: BaseException) -> None:
        """The loop raised `error`, which is raised again afterwards."""


def installed_callbacks(*, may_stop: bool) -> list[Callback]:
    """New callbacks of the installed packages, sorted by name.

    Entry points are called without arguments. Raises UsageError for one that cannot be imported or
    made, or makes something else.
    """
    callbacks = []
    for point in sorted(entry_points(group=GROUP)):
        try:
            callback = point.load()()
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"{type(callback).__name__} is not derived from ttrain.train.callbacks.Callback"
                )
        except Exception as error:
            raise UsageError(
                f"the callback {point.name} ({point.value}, of the entry points {GROUP}) raised "
                f"{error!r}; fix or uninstall its package"
            ) from error
        callback.may_stop = may_stop
        callbacks.append(callback)
    return callbacks


def truncate_after(path: Path, step: int) -> None:
    """Drop the torn lines of a JSON lines file and those after `step`; all lines if step is 0."""
    lines = path.read_bytes().splitlines(keepends=True) if step and path.exists() else []
    kept_lines = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, b"".join(kept_lines))


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class MetricsFile(Callback):
    """Writes metrics as JSON lines for trackers. Resuming drops lines after the checkpoint."""

    keeps_metrics = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, step: int, steps: int) -> None:
        truncate_after(self.path, step)

    def log(self, record: LogRecord) -> None:
        finite = {
            name: value if math.isfinite(value) else None for name, value in record.metrics.items()
        }
        line = {
            "step": record.step,
            "tokens": record.tokens,
            "time": time.time(),
            "metrics": finite,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def saved(self, step: int) -> None:
        fsync(self.path)


class ProgressBar(Callback):
    """Sends progress to the parent process, which draws the bar."""

    def __init__(
        self, progress: ProgressWriter, tokens_per_step: int, unit: str = "tokens"
    ) -> None:
        self._progress = progress
        self._tokens_per_step = tokens_per_step
        self._unit = unit

    def start(self, step: int, steps: int) -> None:
        self._progress.update(
            step * self._tokens_per_step, steps * self._tokens_per_step, self._unit, start=True
        )

    def log(self, record: LogRecord) -> None:
        shown = {
            name: record.metrics[name]
            for name in ("loss", "validation_loss")
            if name in record.metrics
        }
        if shown:  # else a quick validation: the bar goes on showing the loss
            done = record.step * self._tokens_per_step
            total = record.steps * self._tokens_per_step
            self._progress.update(done, total, self._unit, start=False, **shown)


class Perplexity(Callback):
    """Adds the perplexity, exp(loss), to a validation loss that is a mean cross entropy."""

    def validation_figures(self, loss: float) -> Mapping[str, float]:
        return {"perplexity": math.exp(loss) if loss < LARGEST_EXPONENT else math.inf}


class LogLines(Callback):
    """Writes plain lines for people to the stage's log; the metrics file has all metrics."""

    def start(self, step: int, steps: int) -> None:
        log.info("training from step %d to %d", step, steps)

    def step_end(self, record: StepRecord) -> None:
        log.debug(
            "step %d/%d  loss %.6g  grad_norm %.4g  %d targets in %.3f s, %.3f s of them waiting "
            "for rows",
            *(record.step, record.steps, record.loss, record.grad_norm),
            *(record.live_tokens, record.seconds, record.data_seconds),
        )

    def log(self, record: LogRecord) -> None:
        shown = [
            f"{name} {value:.4g}"
            for name, value in record.metrics.items()
            if name.startswith(LOGGED_PREFIXES)
        ]
        if "tokens_per_second" in record.metrics:
            shown.append(f"{record.metrics['tokens_per_second']:.0f} tokens/s")
        if "eta_seconds" in record.metrics:
            shown.append(f"ETA {format_duration(record.metrics['eta_seconds'])}")
        log.info("step %d/%d  %s", record.step, record.steps, "  ".join(shown))

    def saved(self, step: int) -> None:
        log.info("checkpoint of step %d", step)


class CallbackList:
    """Dispatches events to the callbacks of rank 0, the only rank with any."""

    def __init__(self, callbacks: Sequence[Callback], order: Order) -> None:
        self.callbacks = callbacks
        self._order = order

    def dispatch(self, event: str, *arguments: Any) -> None:
        """Call the hook of this name on every callback."""
        for callback in self.callbacks:
            _call(callback, event, *arguments)

    def epoch_start(self, step: int, *, continued: bool) -> None:
        """Dispatch `epoch_start` for epochs that begin in this step, or in which the run begins."""
        start, end = self._rows(step)
        first = start // self._order.rows if continued else -(-start // self._order.rows)
        for epoch in range(first, -(-end // self._order.rows)):
            self.dispatch("epoch_start", epoch)

    def epoch_end(self, step: int) -> None:
        """Dispatch `epoch_end` for epochs that end in this step, or with the run."""
        start, end = self._rows(step)
        is_last = end == self._order.total_rows
        ended = -(-end // self._order.rows) if is_last else end // self._order.rows
        for epoch in range(start // self._order.rows, ended):
            self.dispatch("epoch_end", epoch)

    def figures(self, event: str, *arguments: Any) -> dict[str, float]:
        """Metrics that the callbacks add to the log."""
        metrics: dict[str, float] = {}
        for callback in self.callbacks:
            metrics |= _call(callback, event, *arguments)
        return metrics

    def wants_stop(self) -> bool:
        """Whether any callback asks to stop the run. Raises TTrainError for one that may not."""
        for callback in self.callbacks:
            reason = _call(callback, "stop_reason")
            if reason and not callback.may_stop:
                raise TTrainError(
                    f"the callback {type(callback).__name__}.stop_reason returned {reason!r}, but "
                    "in a stage of a pipeline a callback of another package only watches: no key "
                    "holds it; set early_stopping.patience of the stage"
                )
            if reason:
                return True
        return False

    def failed(self, error: BaseException) -> None:
        """Call `failed` on every callback; errors raised there are logged only."""
        for callback in self.callbacks:
            try:
                callback.failed(error)
            except Exception as second:
                log.warning("the callback %s.failed raised %r", type(callback).__name__, second)

    def state(self) -> list[JsonDict]:
        """Callback states for the checkpoint, without empty ones."""
        entries = [
            {"name": type(callback).__name__, "state": _call(callback, "state")}
            for callback in self.callbacks
        ]
        return [entry for entry in entries if entry["state"]]

    def load_state(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Restore callback states, matched by class name."""
        states = {entry["name"]: entry["state"] for entry in entries}
        for callback in self.callbacks:
            if type(callback).__name__ in states:
                callback.load_state(states[type(callback).__name__])

    def _rows(self, step: int) -> tuple[int, int]:
        start = step * self._order.rows_per_step
        return start, min(start + self._order.rows_per_step, self._order.total_rows)


def _call(callback: Callback, event: str, *arguments: Any) -> Any:
    try:
        return getattr(callback, event)(*arguments)
    except TTrainError:
        raise
    except Exception as error:
        raise TTrainError(
            f"the callback {type(callback).__name__}.{event} raised {error!r}"
        ) from error
