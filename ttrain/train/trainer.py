"""The training loop of every stage: draws rows, takes steps, validates, logs and saves."""
# Position and rows are functions of (seed, step), so that a run continues bit for bit from any
# checkpoint; what a step does to the weights is in `placed_model`.

import contextlib
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch

from ttrain.data.loader import Loader, MicroBatch
from ttrain.errors import ArtifactError, TTrainError, UsageError
from ttrain.train.callbacks import Callback, CallbackList, LogRecord, StepRecord
from ttrain.train.checkpoint import Snapshot, SnapshotBuffers
from ttrain.train.counters import Counters
from ttrain.train.distributed import full_tensor
from ttrain.train.placed_model import PlacedModel
from ttrain.train.schedules import decay_start, spread_steps
from ttrain.train.step_figures import (
    DeferredSteps,
    FinishedStep,
    MicroBatchSums,
    NonFinite,
    ReducedSums,
    rows_to_blame,
)
from ttrain.train.task import Metrics, TrainingTask
from ttrain.train.training_options import COMPLETED, INTERRUPTED, STOPPED, FitResult, TrainerOptions

QUICK = "validation_loss_quick"
QUICK_ACCURACY = "validation_accuracy_quick"
log = logging.getLogger("ttrain")


class Votes(NamedTuple):
    """How many ranks vote for a stop by a signal, a stop by a callback, and quiet hours."""

    signal: float = 0.0
    callback: float = 0.0
    quiet: float = 0.0


class Trainer:
    """Trains the task's model on the loader's rows."""

    def __init__(
        self,
        task: TrainingTask,
        loader: Loader,
        options: TrainerOptions,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Build the model and restore the newest checkpoint. Raises UsageError."""
        self.task = task
        self.loader = loader
        self.options = options
        self.ranks = options.ranks
        self.precision = options.precision
        self.weights = options.weights
        self.checkpoints = options.checkpoints
        self.stop_requested = options.stop_requested
        self.callback_list = CallbackList(callbacks if self.ranks.first else (), loader.order)
        self.steps = loader.order.steps
        self._quick_steps = spread_steps(
            self.steps,
            self.options.cadence.quick_validations if self.options.validation.quick else 0,
        )
        newest = self.checkpoints.newest() if self.checkpoints else None
        origin = options.origin
        speed = options.speed
        snapshot = newest or origin.start
        bare = task.build_model()
        self.first = self.step = self._resume_step(snapshot, origin.allow) if snapshot else 0
        if tensors := snapshot or origin.plateau:
            self.weights.load(tensors.weights)
        self.model = PlacedModel(bare, task, loader, self.ranks, self.precision, speed)
        self.bare = self.model.bare
        self.parallel = self.model.parallel
        self.loss_scale = self.model.loss_scale
        self.optimizers = self.model.optimizers
        self.factor = task.build_scheduler(self.steps)
        self.counters = Counters()
        self._buffers = SnapshotBuffers()
        self._totals = ReducedSums(self.ranks)
        self._votes = Votes()
        defers = self.ranks.device.type == "cuda" if speed.defer is None else speed.defer
        self.deferred = (
            DeferredSteps(self.ranks.device, task.config)
            if defers and self.model.can_defer
            else None
        )
        self._check_ranks(snapshot)
        if snapshot:
            self._restore(snapshot)
        elif origin.plateau:
            self.optimizers.load_state(self.model.average.load_state(origin.plateau.optimizer))
        self.first_tokens = self.counters.tokens  # read before this process began
        self.loader.load_state_dict({"consumed_steps": self.first})
        self._saved = self.first if newest else -1
        self._recount = newest is not None and self.first < newest.step

    def fit(self) -> FitResult:
        """Train to the end of the order, or until a stop is requested."""
        began = time.monotonic()
        try:
            if self.checkpoints and self.ranks.first:
                self.checkpoints.begin()
            self.callback_list.dispatch("start", self.first, self.steps)
            if self._recount:
                self._drop_outdated_checkpoints()
            self._vote()  # a callback may remember that the run was over
            with contextlib.closing(self.loader):
                reason = self._stop_reason() or self._loop()
            kept_step = self.step
            kept = self.counters
            self.model.average.end()
            if reason == STOPPED or (reason == COMPLETED and self.task.config.early_stopping):
                kept_step, kept = self._restore_best()
            if self.checkpoints and self.ranks.first:
                self.checkpoints.wait() if reason == INTERRUPTED else self.checkpoints.end(
                    kept_step
                )
            self.callback_list.dispatch("end", self.step)
        except BaseException as error:
            self.callback_list.failed(error)
            raise
        totals = self.counters
        return FitResult(
            self.step,
            reason,
            self.first,
            kept_step,
            kept.loss,
            kept.validation_loss,
            totals.skipped,
            totals.live_tokens,
            totals.tokens,
            time.monotonic() - began,
        )

    def _loop(self) -> str:
        batches = iter(self.loader)
        if self.first == 0 and self._quick_steps:
            self._validate_quickly()
        for step in range(self.first, self.steps):
            throttle = self.options.quiet_hours
            if throttle is not None and throttle.on != bool(self._votes.quiet):
                self.loader.rows_per_device = throttle.set(bool(self._votes.quiet))
                batches = iter(self.loader)
            self.callback_list.epoch_start(step, continued=step == self.first)
            self.callback_list.dispatch("step_start", step + 1)
            began = time.monotonic()
            self._train_step(step, next(batches), began)
            self.step = step + 1
            improved = False
            if self.step in self._quick_steps and not self._validates(self.step):
                self._validate_quickly()
            if self._validates(self.step):
                improved = self._validated(*self.model.measure(self.options.validation.batches))
                self._vote()
            reason = self._stop_reason()
            if self.step == self.steps or reason or improved or self._save_due(self.step):
                self._save(self.step)
            self.callback_list.epoch_end(step)
            if reason:
                return reason
        return COMPLETED

    def _votes_of_rank(self) -> Votes:
        throttle = self.options.quiet_hours
        is_quiet = throttle is not None and self.ranks.first and throttle.is_quiet()
        # Before the first step there is nothing to keep.
        wants_stop = self.step > 0 and self.callback_list.wants_stop()
        return Votes(float(self.stop_requested()), float(wants_stop), float(is_quiet))

    def _vote(self) -> None:
        self._votes = Votes(*map(max, self._votes, self.ranks.sum([*self._votes_of_rank()])))

    def _stop_reason(self) -> str | None:
        if self._votes.signal and self.step < self.steps:
            return INTERRUPTED
        return STOPPED if self._votes.callback else None

    def _train_step(self, step: int, micro_batches: Sequence[MicroBatch], began: float) -> None:
        data_seconds = time.monotonic() - began
        # Also of a step that is skipped, whose rate is logged.
        self.optimizers.set_factor(self.factor(step))
        with self.ranks.exchanging():
            sums = self.model.backward(step, micro_batches)
            # The first one names the parts.
            if self.deferred is not None and step > self.first and sums.only_parts:
                self._defer_step(self.deferred, step, sums, began, data_seconds)
                return
            losses = (float(sums.losses[number]) for number in sorted(sums.losses))
            figures = [math.fsum(losses), *self._totals.flat(sums.read())]
        live, (total, *others) = self._agree(step, sums.live, figures)
        factor, norm = self.model.norm(live)
        whole_norm = float(full_tensor(norm))
        if math.isfinite(total) and math.isfinite(whole_norm):
            # A step that could have been deferred, by the same products: on a GPU other ones round
            # otherwise.
            prevented = None if self.deferred is None else torch.zeros((), device=self.ranks.device)
            self.model.update(factor, norm, prevented)
        self.optimizers.zero_grad()
        seconds = time.monotonic() - began
        self._account(
            FinishedStep(step, live, sums.losses, total, whole_norm, others, seconds, data_seconds)
        )

    def _defer_step(
        self,
        deferred: DeferredSteps,
        step: int,
        sums: MicroBatchSums,
        began: float,
        data_seconds: float,
    ) -> None:
        live, _ = self._agree(step, sums.live)
        figures = self.ranks.add_up(deferred.stacked(sums.losses, self._totals.flat(sums.vectors)))
        factor, norm = self.model.norm(live)
        self.model.update(
            factor, norm, deferred.prevents(figures[0], norm, self.counters.skipped_in_a_row)
        )
        deferred.add(
            partial(FinishedStep, step, live, sums.losses), norm, figures, data_seconds, began
        )
        done = step + 1
        is_due = (
            self._due(self.options.cadence.log, done)
            or self._validates(done)
            or self._save_due(done)
        )
        is_read = is_due or done == self.steps or done in self._quick_steps
        if self._votes.signal or self._votes.callback or is_read:
            for finished in deferred.read():
                self._account(finished)

    def _agree(
        self, step: int, live: int, figures: Sequence[float] = ()
    ) -> tuple[float, list[float]]:
        """Sum targets and metrics of a step over all ranks; votes travel in the same message."""
        live_sum, signal, callback, quiet, *summed = self.ranks.sum(
            [float(live), *self._votes_of_rank(), *figures]
        )
        self._votes = Votes(signal, callback, quiet)
        if not live_sum:
            raise TTrainError(
                f"step {step + 1} has no token to learn from; every label of its rows is masked. "
                "Check what masks them, or give a step more rows"
            )
        return live_sum, summed

    def _account(self, finished: FinishedStep) -> None:
        if finished.finite:
            parts, sums = self._totals.named(finished.others)
            self.task.after_step(sums)
            self.counters.skipped_in_a_row = 0
            self.counters.add(finished.total, finished.live, finished.norm, parts, sums)
        else:
            self.counters.skipped += 1
            self.counters.skipped_in_a_row += 1
            # Fp16 overflows now and then, which a smaller scale fixes.
            if not self.loss_scale.enabled:
                self._not_finite(finished)
        self.loss_scale.update(finished.finite)
        tokens = self.loader.order.step_tokens(finished.step)
        self.counters.live_tokens += int(finished.live)
        self.counters.tokens += tokens
        done = finished.step + 1
        record = StepRecord(
            done,
            self.steps,
            finished.loss,
            finished.norm,
            int(finished.live),
            not finished.finite,
            finished.seconds,
            finished.data_seconds,
            partial(self.loader.order.step_rows, finished.step),
            tokens,
            self.counters.tokens,
        )
        self.callback_list.dispatch("step_end", record)
        if self._due(self.options.cadence.log, done) or done == self.steps:
            self._log_window(record)

    def _not_finite(self, finished: FinishedStep) -> None:
        step = finished.step
        rows = rows_to_blame(self.loader.parts(step), finished.losses, self.ranks)
        error = NonFinite(finished, rows, self.task.config, self.counters.skipped_in_a_row)
        if error.is_skipped:
            log.warning("%s", error)
            return
        self.counters.skipped -= 1  # the state before the step is saved
        self.counters.skipped_in_a_row -= 1
        if self.task.config.nonfinite != "raise" and step > max(0, self._saved):
            self._save(step)
        if self.checkpoints and self.ranks.first:
            self.checkpoints.wait()
        raise error

    def _validate_quickly(self) -> None:
        self._log(self.step, _quick_metrics(*self.model.measure(self.options.validation.quick)))

    def _validated(self, loss: float, figures: Metrics) -> bool:
        improved = self.counters.validated(loss)
        self.callback_list.dispatch("validated", self.step, loss)
        of_task = {f"validation_{name}": value for name, value in figures.items()}
        metrics = {
            "validation_loss": loss,
            **of_task,
            **self.callback_list.figures("validation_figures", loss),
        }
        if self.step in self._quick_steps:  # of all rows, so that both curves end at the same value
            metrics |= _quick_metrics(loss, figures)
        self._log(self.step, metrics)
        return improved

    def _log_window(self, record: StepRecord) -> None:
        of_task = self.task.figures(self.counters.window.sums)
        losses = self.counters.close_window()
        rates = self.optimizers.learning_rates()
        metrics = {**losses, **self.task.derived(losses), **of_task}
        metrics |= {
            "lr": [*rates.values()][-1],
            **{f"lr_{name}": rate for name, rate in rates.items()},
        }
        if self.counters.skipped or self.loss_scale.enabled:
            metrics["skipped_steps"] = self.counters.skipped
        if self.options.quiet_hours is not None:
            metrics["quiet_hours"] = float(self.options.quiet_hours.on)
        if self.options.speed.compile:
            metrics["compiled"] = float(self.model.compiled)
        if self.loss_scale.enabled:
            metrics["loss_scale"] = self.loss_scale.scale
        self._log(record.step, metrics | self.callback_list.figures("figures", record))

    def _log(self, step: int, metrics: Metrics) -> None:
        self.callback_list.dispatch(
            "log", LogRecord(step, self.steps, self.counters.tokens, metrics)
        )

    def _due(self, every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def _validates(self, step: int) -> bool:
        is_due = (
            self._due(self.options.cadence.validate, step)
            or step in self.options.cadence.validate_steps
        )
        return bool(self.options.validation.batches) and (step == self.steps or is_due)

    def _save_due(self, step: int) -> bool:
        is_due = (
            self._due(self.options.cadence.checkpoint, step)
            or step in self.options.cadence.checkpoint_steps
        )
        return is_due or step == decay_start(self.task.config.schedule, self.steps)

    def _save(self, step: int) -> None:
        if self.checkpoints is None:
            return
        with self.model.average.as_weights():
            tensors = {**self.optimizers.state(), **self.model.average.state()}
            weights = self.parallel.whole(self.weights.state())
            optimizer = self.parallel.whole(tensors)
            self._saved = step
            if not self.ranks.first:
                return
            metric = (
                self.counters.validation_loss
                if step == self.step and self._validates(step)
                else None
            )
            snapshot = self._buffers.take(step, weights, optimizer, self._state(step))
            self.checkpoints.save(snapshot, metric=metric)
        self.callback_list.dispatch("saved", step)

    def _restore(self, snapshot: Snapshot) -> None:
        """Restore everything but the weights from a snapshot."""
        old = snapshot.state["optimizers"]
        new = self._optimizer_names()
        if old != new:
            raise UsageError(
                f"the checkpoint of step {snapshot.step} holds the state of {' and '.join(old)}, "
                f"which {' and '.join(new)} cannot continue; restore optim.kind, or start a new "
                "run in another output directory"
            )
        self.optimizers.load_state(self.model.average.load_state(snapshot.optimizer))
        if snapshot.state["precision"] == self.precision.word:
            vars(self.loss_scale).update(snapshot.state["loss_scale"])
        self.counters = Counters.of(snapshot.state["counters"])
        self.callback_list.load_state(snapshot.state["callbacks"])
        self.task.load_state(snapshot.state.get("task", {}))
        log.info("continuing at step %d", self.first)

    def _optimizer_names(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self.optimizers.optimizers]

    def _state(self, step: int) -> dict[str, Any]:
        """The JSON part of a snapshot; `rows` are those consumed."""
        order = self.loader.order
        return {
            "steps": self.steps,
            "counters": asdict(self.counters),
            "loss_scale": dict(vars(self.loss_scale)),
            "callbacks": self.callback_list.state(),
            "task": self.task.state(),
            "rows": min(step * order.rows_per_step, order.total_rows),
            "optimizers": self._optimizer_names(),
            "identity": self.options.origin.identity,
            "world": self.ranks.world,
            "precision": self.precision.word,
        }

    def _resume_step(self, snapshot: Snapshot, allow: frozenset[str]) -> int:
        """The step at which this run continues from the snapshot: consumed rows are not read again.

        Raises UsageError with the differences if settings changed that may not.
        """
        state = snapshot.state
        order = self.loader.order
        old = state["identity"]
        new = self.options.origin.identity
        changes = {
            name: f"{old.get(name)} → {new.get(name)}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        }
        if refused := [name for name in changes if name not in allow]:
            raise UsageError(
                f"the checkpoint of step {snapshot.step} was made under other settings "
                f"({'; '.join(f'{name}: {changes[name]}' for name in refused)}); restore them, "
                "start a new run in another output directory, or allow the change of "
                f"{', '.join(refused)} (--allow)"
            )
        for name, change in changes.items():
            log.warning("continues with another %s: %s", name, change)
        if state["precision"] != self.precision.word:
            log.warning(
                "continues in %s what was computed in %s: not the same bits",
                self.precision.word,
                state["precision"],
            )
        rows = int(state["rows"])
        if rows % order.rows_per_step and rows != order.total_rows:
            raise UsageError(
                f"the checkpoint of step {snapshot.step} has consumed {rows} rows, which is not a "
                f"multiple of the {order.rows_per_step} rows of a step now; use a tokens_per_step "
                "that divides it, or start a new run in another output directory"
            )
        return -(-rows // order.rows_per_step)

    def _check_ranks(self, snapshot: Snapshot | None) -> None:
        state = (
            json.dumps({**snapshot.state, "step": snapshot.step}, sort_keys=True)
            if snapshot
            else ""
        )
        if len(self.ranks.union([state])) > 1:
            raise ArtifactError(
                f"the ranks start at different steps, rank {self.ranks.rank} at step "
                f"{self.first}; all ranks must be able to read the checkpoints"
            )

    def _drop_outdated_checkpoints(self) -> None:
        if self.checkpoints is None:
            return
        self.checkpoints.keep(self.first)
        self._save(self.first)
        if self.ranks.first:
            self.checkpoints.forget_after(self.first)

    def _restore_best(self) -> tuple[int, Counters]:
        """Load the checkpoint with the lowest validation loss; returns its step and counters."""
        if self.checkpoints and self.ranks.first:
            self.checkpoints.wait()
        self.ranks.barrier()
        best = self.checkpoints.best() if self.checkpoints else None
        if best is None:
            return self.step, self.counters
        log.info("keeping the weights of step %d, which had the lowest validation loss", best.step)
        self.parallel.load(self.weights.state(), best.weights)
        return best.step, Counters.of(best.state["counters"])


def _quick_metrics(loss: float, figures: Metrics) -> Metrics:
    accuracy = {QUICK_ACCURACY: figures["accuracy"]} if "accuracy" in figures else {}
    return {QUICK: loss, **accuracy}
