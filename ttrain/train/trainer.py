"""The one training loop, under every stage.

The gradient of a step is the sum over all its targets, divided once by their number over all ranks and micro-batches. Data,
dropout and position are functions of (seed, step, micro-batch), so a run continues bit for bit from any checkpoint.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ttrain.data.loader import Loader, MicroBatch
from ttrain.errors import TTrainError, UsageError
from ttrain.train import resume
from ttrain.train.callback_list import Listeners
from ttrain.train.callbacks import Callback, LogRecord, StepRecord
from ttrain.train.checkpoint import Checkpoints, Snapshot, SnapshotBuffers
from ttrain.train.compile import compiled
from ttrain.train.distributed import Ranks, global_norm
from ttrain.train.dtensor import whole
from ttrain.train.night_throttle import NightShift
from ttrain.train.non_finite import SKIPS_IN_A_ROW, NonFinite, rows_of
from ttrain.train.parallel import spread
from ttrain.train.precision import LossScale, Precision
from ttrain.train.progress import Counters
from ttrain.train.reduced_sums import Totals
from ttrain.train.schedules import decay_start, spread_steps
from ttrain.train.task import TrainingTask

QUICK = "validation_loss_quick"
COMPLETED, INTERRUPTED, STOPPED = "completed", "interrupted", "stopped by a callback"
log = logging.getLogger("ttrain")


class Weights(Protocol):
    """How the trained weights leave and enter the model."""

    def state(self) -> dict[str, Tensor]: ...

    def load(self, weights: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Cadence:
    """How often things happen that do not move the weights, in steps; 0 is never."""

    log: int = 10
    checkpoint: int = 100
    checkpoint_steps: frozenset[int] = frozenset()  # beside those of the cadence
    validate: int = 0
    quick_validations: int = 0  # over the whole run, on the few rows of `Trainer.quick`


@dataclass(frozen=True)
class How:
    """What changes only speed and memory; equal up to the order of summation."""

    compile: bool = False
    parallel: str = "ddp"
    reduction: str = "fast"


@dataclass
class FitResult:
    """What a run did."""

    step: int
    stop_reason: str  # COMPLETED, INTERRUPTED or STOPPED
    resumed_from_step: int
    loss: float | None
    validation_loss: float | None
    skipped_steps: int
    live_tokens: int
    seconds: float


class Trainer:
    """Trains the task's model on the loader's rows. Parts come finished; nothing is chosen inside the loop."""

    def __init__(
        self,
        task: TrainingTask,
        loader: Loader,
        *,
        ranks: Ranks,
        precision: Precision,
        weights: Weights,
        checkpoints: Checkpoints | None = None,
        validation: Sequence[Any] = (),
        quick: Sequence[Any] = (),
        callbacks: Sequence[Callback] = (),
        cadence: Cadence = Cadence(),
        stop_requested: Callable[[], bool] = lambda: False,
        how: How = How(),
        night: NightShift | None = None,
        start: Snapshot | None = None,
        identity: Mapping[str, Any] | None = None,
        allow: frozenset[str] = frozenset(),
    ) -> None:
        """`quick`: batches of the few rows whose loss is a curve while training; it chooses no checkpoint and stops nothing.
        `start`: a checkpoint of a shorter run. `identity`: settings that a checkpoint remembers and must find again when
        it is continued, but for those in `allow`. Raises UsageError where they differ.
        """
        self.task, self.loader, self.ranks, self.precision = task, loader, ranks, precision
        self.weights, self.checkpoints, self.validation = weights, checkpoints, validation
        self.listeners, self.night = Listeners(callbacks, ranks, loader.order), night
        self.cadence, self.stop_requested, self.identity = cadence, stop_requested, dict(identity or {})
        self.steps = loader.order.steps
        self.quick, self._quick_steps = quick, spread_steps(self.steps, cadence.quick_validations if quick else 0)
        snapshot = (checkpoints.newest() if checkpoints else None) or start
        self.bare = task.build_model()
        self.first = self.step = resume.check(self, snapshot, allow) if snapshot else 0
        if snapshot:
            weights.load(dict(snapshot.weights))
        if how.parallel != "fsdp" or ranks.world == 1:  # else each rank moves its part only
            self.bare = self.bare.to(ranks.device)
        if how.compile and how.parallel == "fsdp" and ranks.world > 1:
            raise UsageError("runtime.compile and runtime.parallel=fsdp do not go together yet; set one of them")
        self._wants_compiled = how.compile
        called, self.compiled = compiled(self._try, self.bare, ranks) if how.compile else (self.bare, False)
        self.parallel = spread(called, ranks, parallel=how.parallel, reduction=how.reduction)
        self.optimizers = task.build_optimizer(self.bare)
        self.factor = task.build_scheduler(self.steps)
        self.counters, self.loss_scale, self._buffers = Counters(), precision.loss_scale(), SnapshotBuffers()
        self._totals = Totals(ranks)
        # The loss is scaled by about 1/targets before the backward pass, so that fp16 gradients of a sum do not overflow.
        self._scale = 1.0 / task.config.tokens_per_step
        resume.check_same(self, snapshot)
        if snapshot:
            self._restore(snapshot)
        self.loader.load_state_dict({"consumed_steps": self.first})
        self._saved = self.first if snapshot and snapshot is not start else -1
        self._recount = bool(snapshot and snapshot is not start and self.first < snapshot.step)

    def fit(self) -> FitResult:
        """Train to the end of the order, or until a stop is asked for."""
        began = time.monotonic()
        try:
            if self.checkpoints and self.ranks.first:
                self.checkpoints.begin()
            self.listeners.tell("start", self.first, self.steps)
            if self._recount:
                self._begin_anew_count()
            self._night_due = self.ranks.sum([float(self._dusk())])[0]
            signalled, asked = self._agree(False, False)  # a callback may remember that the run was over
            reason = INTERRUPTED if signalled else STOPPED if asked else self._loop()
            kept = self.step
            if reason == STOPPED or (reason == COMPLETED and self.task.config.early_stopping):
                kept = self._restore_best()
            if self.checkpoints and self.ranks.first:
                with self.ranks.busy("saving"):
                    self.checkpoints.wait() if reason == INTERRUPTED else self.checkpoints.end(kept)
            self.listeners.tell("end", self.step)
        except BaseException as error:
            self.listeners.failed(error)
            raise
        found = self.counters
        return FitResult(
            self.step, reason, self.first, found.last_loss, found.validation_loss, found.skipped, found.live_tokens,
            time.monotonic() - began,
        )  # fmt: skip

    def validate(self, batches: Sequence[Any]) -> float:
        """Mean loss per target over the batches, which all ranks share; NaN where there is none."""
        was_training = self.bare.training
        self.bare.eval()
        total, count, world = 0.0, 0, self.ranks.world
        for number in range(self.ranks.rank, -(-len(batches) // world) * world, world):
            filler = number >= len(batches)  # sharded models are asked equally often on all ranks
            batch = batches[0].without_targets() if filler else batches[number]
            with self.precision.autocast():
                loss = self.task.validation_step(self.bare, batch, self.ranks.device)
            total, count = total + float(loss.total), count + loss.count
        self.bare.train(was_training)
        total, live = self.ranks.sum([total, float(count)])
        return total / live if live else math.nan

    def _try(self, module: nn.Module) -> None:
        """One forward and backward pass that leaves no trace."""
        with self.precision.autocast():
            loss = self.task.train_step(module, self.loader.step(0)[0].batch, self.ranks.device)
        loss.total.backward()  # type: ignore[no-untyped-call]  # torch's
        self.bare.zero_grad(set_to_none=True)

    def _loop(self) -> str:
        batches = iter(self.loader)
        if self.first == 0 and self._quick_steps:
            self._validate_quickly()
        for step in range(self.first, self.steps):
            batches = self._follow_the_clock(batches)
            self.listeners.epoch_start(step, continued=step == self.first)
            self.listeners.tell("step_start", step + 1)
            began = time.monotonic()
            micro_batches = next(batches)
            signalled, asked = self._train_step(step, micro_batches, began, time.monotonic() - began)
            self.step = step + 1
            last = self.step == self.steps
            improved = False
            if self.step in self._quick_steps:
                self._validate_quickly()
            if self.validation and (last or self._due(self.cadence.validate, self.step)):
                improved = self._validated(self.validate(self.validation))
                signalled, asked = self._agree(signalled, asked)
            reason = INTERRUPTED if signalled and not last else STOPPED if asked else None
            if last or reason or improved or self._save_due(self.step):
                self._save(self.step)
            self.listeners.epoch_end(step)
            if reason:
                return reason
        return COMPLETED

    def _dusk(self) -> bool:
        """Whether it is night by the clock of rank 0, which counts for all."""
        return self.night is not None and self.ranks.first and self.night.due()

    def _follow_the_clock(self, batches: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """Where night begins or ends, micro-batches get another size; what was made ahead in the old one is made again."""
        if self.night is None or self.night.on == bool(self._night_due):
            return batches
        self.loader.rows_per_device = self.night.turn(bool(self._night_due))
        return iter(self.loader)

    def _train_step(
        self, step: int, micro_batches: Sequence[MicroBatch], began: float, data_seconds: float
    ) -> tuple[bool, bool]:
        """One optimizer step; returns whether a signal, or a callback, asked any rank to stop."""
        self.bare.train()
        with self.ranks.exchanging():
            total, live, parts, sums, losses = self._backward(step, micro_batches)
        others = self._totals.flat(parts, sums)
        asks = [float(self.stop_requested()), float(self.listeners.ask()), float(self._dusk())]
        summed = self.ranks.sum([float(total), float(live), *asks, *others])
        total_sum, live_sum, signalled, asked, self._night_due = summed[:5]
        if live_sum == 0:
            raise TTrainError(f"step {step + 1} has no token to learn from; every label of its rows is masked")
        norm, finite = self._apply(step, live_sum, total_sum, losses)
        if finite:
            parts, sums = self._totals.named(summed[5:])
            self.task.after_step(sums)
            self.counters.add(total_sum, live_sum, norm, parts, sums)
        self.counters.live_tokens += int(live_sum)
        done = step + 1
        rows = partial(self.loader.order.step_rows, step)
        seconds = time.monotonic() - began
        record = StepRecord(
            done, self.steps, total_sum / live_sum, norm, int(live_sum), not finite, seconds, data_seconds, rows
        )
        self.listeners.tell("step_end", record)
        if self._due(self.cadence.log, done) or done == self.steps:
            self._log_window(record)
        return signalled > 0, asked > 0

    def _backward(
        self, step: int, micro_batches: Sequence[MicroBatch]
    ) -> tuple[float, int, dict[str, float], dict[str, list[float]], dict[int, Tensor]]:
        """Sum of the losses (in fp64), targets, sums of the parts, other sums, and the loss of each of this rank's
        micro-batches; the parameters then hold the (scaled) gradient of the step over all ranks.
        """
        live, parts, sums, losses = 0, dict[str, Any](), dict[str, Tensor](), dict[int, Tensor]()
        ordered = self.parallel.begin(micro_batches, len(self.loader.parts(step)))
        for micro in ordered:
            torch.manual_seed(_seed(self.task.config.seed, step, micro.number))
            self.parallel.before_backward(last=micro is ordered[-1])
            with self.precision.autocast():
                loss = self.task.train_step(self.parallel.module, micro.batch, self.ranks.device)
            factor = self._scale * self.loss_scale.scale * self.parallel.loss_factor
            (loss.total * factor).backward()  # type: ignore[no-untyped-call]  # torch's
            self.parallel.after_backward(micro)
            losses[micro.number] = loss.total.detach()
            live += loss.count
            for name, value in loss.parts.items():
                parts[name] = parts.get(name, 0.0) + value.detach()
            for name, vector in loss.sums.items():
                sums[name] = vector.detach().flatten() + sums.get(name, 0)
        self.parallel.finish()
        total = math.fsum(float(losses[number]) for number in sorted(losses))
        listed = {name: vector.tolist() for name, vector in sums.items()}
        return total, live, {name: float(value) for name, value in parts.items()}, listed, losses

    def _apply(self, step: int, live: float, total: float, losses: dict[int, Tensor]) -> tuple[float, bool]:
        """Divide by the targets of the whole step, clip, update; returns the norm before the clip and whether it was one."""
        parameters = self.optimizers.parameters
        factor = 1.0 / (self._scale * self.loss_scale.scale * live)
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
        norm = global_norm(parameters)
        whole_norm = float(whole(norm))
        finite = math.isfinite(total) and math.isfinite(whole_norm)
        clip = self.task.config.optim.clip
        if finite:
            if clip:
                torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
            self.optimizers.set_factor(self.factor(step))
            self.optimizers.step()
        self.optimizers.zero_grad()
        if not finite:
            self.counters.skipped += 1
            self.counters.skipped_in_a_row += 1
            if not self.loss_scale.enabled:  # fp16 overflows now and then, which a smaller scale cures
                self._not_finite(step, total / live, whole_norm, losses)
        else:
            self.counters.skipped_in_a_row = 0
        self.loss_scale.update(finite)
        return whole_norm, finite

    def _not_finite(self, step: int, loss: float, norm: float, losses: dict[int, Tensor]) -> None:
        """Skip the step, or end the run with an error that names its rows; the weights are those before it."""
        rows = rows_of(self.loader.parts(step), losses, self.ranks)
        error = NonFinite(step, loss, norm, rows, self.task.config)
        policy = self.task.config.nonfinite
        if policy == "skip" and self.counters.skipped_in_a_row <= SKIPS_IN_A_ROW:
            log.warning("%s; it is skipped", error)
            return
        self.counters.skipped -= 1
        if policy != "raise" and step > max(0, self._saved):
            self._save(step)
        if self.checkpoints and self.ranks.first:
            with self.ranks.busy("saving"):
                self.checkpoints.wait()
        raise error

    def _validate_quickly(self) -> None:
        """One more point of the curve on few rows; it is no validation that decides anything."""
        self._log(self.step, {QUICK: self.validate(self.quick)})

    def _validated(self, loss: float) -> bool:
        """Note a validation; returns whether it is the best so far."""
        improved = self.counters.validated(loss)
        self.listeners.tell("validated", self.step, loss)
        self._log(self.step, {"validation_loss": loss, **self.listeners.figures("validation_figures", loss)})
        return improved

    def _log_window(self, record: StepRecord) -> None:
        of_task = self.task.figures(self.counters.window.sums)
        losses, rates = self.counters.close_window(), self.optimizers.learning_rates()
        metrics = {**losses, **self.task.derived(losses), **of_task}
        metrics |= {"lr": [*rates.values()][-1], **{f"lr_{name}": rate for name, rate in rates.items()}}
        if self.counters.skipped or self.loss_scale.enabled:
            metrics["skipped_steps"] = self.counters.skipped
        if self.night is not None:
            metrics["night"] = float(self.night.on)
        if self._wants_compiled:
            metrics["compiled"] = float(self.compiled)
        if self.loss_scale.enabled:
            metrics["loss_scale"] = self.loss_scale.scale
        self._log(record.step, metrics | self.listeners.figures("figures", record))

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.listeners.tell("log", LogRecord(step, self.steps, step * self.task.config.tokens_per_step, metrics))

    def _agree(self, signalled: bool, asked: bool) -> tuple[bool, bool]:
        """Whether any rank has meanwhile been asked to stop, by a signal or by a callback."""
        sums = self.ranks.sum([float(signalled or self.stop_requested()), float(asked or self.listeners.ask())])
        return sums[0] > 0, sums[1] > 0

    def _due(self, every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def _save_due(self, step: int) -> bool:
        is_due = self._due(self.cadence.checkpoint, step) or step in self.cadence.checkpoint_steps
        return is_due or step == decay_start(self.task.config.schedule, self.steps)

    def _save(self, step: int) -> None:
        if self.checkpoints is None:
            return
        weights, optimizer = self.parallel.whole(self.weights.state()), self.parallel.whole(self.optimizers.state())
        self._saved = step
        if not self.ranks.first:
            return
        metric = self.counters.validation_loss if step == self.step and self._validated_at(step) else None
        state = resume.state_of(self, step)
        with self.ranks.busy("saving"):
            self.checkpoints.save(self._buffers.take(step, weights, optimizer, state), metric=metric)
        self.listeners.tell("saved", step)

    def _validated_at(self, step: int) -> bool:
        return bool(self.validation) and (step == self.steps or self._due(self.cadence.validate, step))

    def _restore(self, snapshot: Snapshot) -> None:
        """Put back all but the weights."""
        resume.check_optimizers(self, snapshot)
        self.optimizers.load_state(dict(snapshot.optimizer))
        if snapshot.state["precision"] == self.precision.word:
            self.loss_scale = LossScale(**snapshot.state["loss_scale"])
        self.counters = Counters.of(snapshot.state["counters"])
        self.listeners.load_state(snapshot.state["callbacks"])
        log.info("continues at step %d", self.first)

    def _begin_anew_count(self) -> None:
        """With larger steps, fewer of them were done: checkpoints of the old count would pass for later ones."""
        if self.checkpoints is None:
            return
        self.checkpoints.keep(self.first)
        self._save(self.first)
        if self.ranks.first:
            self.checkpoints.forget_after(self.first)

    def _restore_best(self) -> int:
        """The weights of the checkpoint with the least validation loss, on all ranks; returns their step."""
        if self.checkpoints is None:
            return self.step
        if self.ranks.first:
            with self.ranks.busy("saving"):
                self.checkpoints.wait()
        self.ranks.barrier()
        best = self.checkpoints.best()
        if best is not None:
            log.info("the weights of step %d, whose validation loss was the least, are kept", best.step)
            self.parallel.load(self.weights.state(), best.weights)
        return best.step if best is not None else self.step


def _seed(seed: int, step: int, micro_batch: int) -> int:
    """Seed of dropout: a function of what is computed, not of who computes it."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + micro_batch * 0x94D049BB133111EB) % (1 << 63)
