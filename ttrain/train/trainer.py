"""The one training loop, under every stage.

The gradient of a step is the sum over all its targets, divided once by their number over all ranks and micro-batches. Data,
dropout and position are functions of (seed, step, micro-batch), so a run continues bit for bit from any checkpoint.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ttrain.data.loader import Loader, MicroBatch
from ttrain.errors import TTrainError
from ttrain.train.callbacks import Callback, LogRecord
from ttrain.train.checkpoint import Checkpoints, Snapshot, copy_tensors
from ttrain.train.precision import LossScale, Precision
from ttrain.train.ranks import Ranks, global_norm
from ttrain.train.schedules import decay_start
from ttrain.train.task import TrainingTask

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
    validate: int = 0


@dataclass
class Window:
    """Sums since the last logging step; saved in the checkpoint, so that a resumed curve is the same curve."""

    loss: float = 0.0
    live_tokens: float = 0.0
    grad_norm: float = 0.0
    steps: int = 0


@dataclass
class FitResult:
    """What a run did."""

    step: int
    stop_reason: str  # "completed" or "interrupted"
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
        callbacks: Sequence[Callback] = (),
        cadence: Cadence = Cadence(),
        stop_requested: Callable[[], bool] = lambda: False,
        compile: bool = False,
        start: Snapshot | None = None,
    ) -> None:
        self.task, self.loader, self.ranks, self.precision = task, loader, ranks, precision
        self.weights, self.checkpoints, self.validation = weights, checkpoints, validation
        self.callbacks = callbacks if ranks.first else ()
        self.cadence, self.stop_requested, self._start = cadence, stop_requested, start
        self.steps = loader.order.steps
        bare = task.build_model().to(ranks.device)
        self.optimizers = task.build_optimizer(bare)
        self.factor = task.build_scheduler(self.steps)
        self.loss_scale = precision.loss_scale()
        self.model: nn.Module = ranks.wrap(torch.compile(bare, dynamic=False) if compile else bare)  # type: ignore[arg-type]
        self.bare = bare
        self.window, self.live_tokens, self.skipped = Window(), 0, 0
        self.last_loss: float | None = None
        # The loss is scaled by about 1/targets before the backward pass, so that fp16 gradients of a sum do not overflow.
        self._scale = 1.0 / (task.config.tokens_per_step)

    def fit(self) -> FitResult:
        """Train to the end of the order, or until a stop is asked for."""
        began = time.monotonic()
        first = step = self._restore()
        reason, validation_loss = "completed", None
        try:
            self._tell("start", first, self.steps)
            for step, micro_batches in enumerate(self.loader.steps(first, self.steps), start=first):
                stop = self._train_step(step, micro_batches)
                done = step + 1
                if done < self.steps and self._due(self.cadence.validate, done):
                    validation_loss = self.validate()
                    self._log(done, {"validation_loss": validation_loss})
                if stop and done < self.steps:
                    reason = "interrupted"
                if done == self.steps or reason == "interrupted" or self._save_due(done):
                    self._save(done)
                if reason == "interrupted":
                    break
            done = step + 1 if self.steps > first else first
            if reason == "completed" and self.validation:
                validation_loss = self.validate()
                self._log(done, {"validation_loss": validation_loss})
            if self.checkpoints and self.ranks.first:
                self.checkpoints.wait()
            self._tell("end", done)
        except BaseException as error:
            for callback in self.callbacks:
                callback.failed(error)
            raise
        return FitResult(
            done,
            reason,
            first,
            self.last_loss,
            validation_loss,
            self.skipped,
            self.live_tokens,
            time.monotonic() - began,
        )

    def validate(self) -> float:
        """Mean loss per target over the validation batches, which all ranks share."""
        was_training = self.bare.training
        self.bare.eval()
        total, count = 0.0, 0
        for number, batch in enumerate(self.validation):
            if number % self.ranks.world == self.ranks.rank:
                with self.precision.autocast():
                    loss = self.task.validation_step(self.bare, batch, self.ranks.device)
                total, count = total + float(loss.total), count + loss.count
        self.bare.train(was_training)
        total, live = self.ranks.sum([total, float(count)])
        return total / live if live else math.nan

    def _train_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> bool:
        """One optimizer step; returns whether any rank was asked to stop."""
        began = time.monotonic()
        self.bare.train()
        total, live = self._backward(step, micro_batches)
        stop = float(self.stop_requested())
        total_sum, live_sum, stops = self.ranks.sum([float(total), float(live), stop])
        if live_sum == 0:
            raise TTrainError(f"step {step + 1} has no token to learn from; every label of its rows is masked")
        norm = self._apply(step, live_sum, total_sum)
        if math.isfinite(norm) and math.isfinite(total_sum):  # else fp16 skipped the step, and it counts as skipped only
            self.window.loss += total_sum
            self.window.live_tokens += live_sum
            self.window.grad_norm += norm
            self.window.steps += 1
        self.live_tokens += int(live_sum)
        if self._due(self.cadence.log, step + 1) or step + 1 == self.steps:
            self._log_window(step + 1, time.monotonic() - began)
        return stops > 0

    def _backward(self, step: int, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, int]:
        """Sum of the losses, and gradients of it (scaled) over this rank's micro-batches; DDP sums at the last one."""
        total, live = torch.zeros((), device=self.ranks.device), 0
        for micro in micro_batches:
            torch.manual_seed(_seed(self.task.config.seed, step, micro.number))
            if isinstance(self.model, nn.parallel.DistributedDataParallel):
                self.model.require_backward_grad_sync = micro is micro_batches[-1]
            with self.precision.autocast():
                loss = self.task.train_step(self.model, micro.batch, self.ranks.device)
            (loss.total * (self._scale * self.loss_scale.scale * self.ranks.world)).backward()  # type: ignore[no-untyped-call]  # torch's
            total += loss.total.detach()
            live += loss.count
        return total, live

    def _apply(self, step: int, live: float, total: float) -> float:
        """Divide by the targets of the whole step, clip, update; returns the norm before the clip."""
        parameters = self.optimizers.parameters
        factor = 1.0 / (self._scale * self.loss_scale.scale * live)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        norm = global_norm(parameters)
        finite = math.isfinite(total) and bool(torch.isfinite(norm))
        if finite:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.task.config.optim.clip, norm)
            self.optimizers.set_factor(self.factor(step))
            self.optimizers.step()
        elif self.loss_scale.enabled:
            self.skipped += 1
        else:
            raise TTrainError(
                f"the loss of step {step + 1} is not finite (loss {total / live}, gradient norm {float(norm)}); "
                f"lower the learning rate, or look at the rows of this step"
            )
        self.loss_scale.update(finite)
        self.optimizers.zero_grad()
        return float(norm)

    def _log_window(self, step: int, step_seconds: float) -> None:
        window, self.window = self.window, Window()
        metrics: dict[str, float] = {}
        if window.steps:
            self.last_loss = window.loss / window.live_tokens
            metrics = {"loss": self.last_loss, "grad_norm": window.grad_norm / window.steps}
        metrics |= {f"lr_{name}": rate for name, rate in self.optimizers.learning_rates().items()}
        if self.loss_scale.enabled:
            metrics |= {"skipped_steps": self.skipped, "loss_scale": self.loss_scale.scale}
        metrics["step_seconds"] = step_seconds
        metrics["tokens_per_second"] = self.task.config.tokens_per_step / max(step_seconds, 1e-9)
        self._log(step, metrics)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self._tell("log", LogRecord(step, self.steps, step * self.task.config.tokens_per_step, metrics))

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            try:
                getattr(callback, event)(*arguments)
            except Exception as error:
                raise TTrainError(f"the callback {type(callback).__name__}.{event} raised {error!r}") from error

    def _due(self, every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def _save_due(self, step: int) -> bool:
        return self._due(self.cadence.checkpoint, step) or step == decay_start(self.task.config.schedule, self.steps)

    def _save(self, step: int) -> None:
        if self.checkpoints is None or not self.ranks.first:
            return
        state: dict[str, Any] = {
            "steps": self.steps,
            "window": dict(vars(self.window)),
            "live_tokens": self.live_tokens,
            "skipped": self.skipped,
            "last_loss": self.last_loss,
            "loss_scale": dict(vars(self.loss_scale)),
            "world": self.ranks.world,
            "precision": self.precision.word,
        }
        snapshot = Snapshot(step, copy_tensors(self.weights.state()), copy_tensors(self.optimizers.state()), state)
        self.checkpoints.save(snapshot)
        self._tell("saved", step)

    def _restore(self) -> int:
        """Continue from the newest checkpoint, or from the one that was given; returns the step to begin with."""
        snapshot = (self.checkpoints.newest() if self.checkpoints else None) or self._start
        if snapshot is None:
            return 0
        self.weights.load(dict(snapshot.weights))
        self.optimizers.load_state(dict(snapshot.optimizer))
        state: Mapping[str, Any] = snapshot.state
        self.loss_scale = LossScale(**state["loss_scale"])
        self.window = Window(**state["window"])
        self.live_tokens, self.skipped, self.last_loss = state["live_tokens"], state["skipped"], state["last_loss"]
        log.info("continues at step %d", snapshot.step)
        return snapshot.step


def _seed(seed: int, step: int, micro_batch: int) -> int:
    """Seed of dropout: a function of what is computed, not of who computes it."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + micro_batch * 0x94D049BB133111EB) % (1 << 63)
