"""A model on its devices, with its optimizers: the gradient of a step, and the update."""
# The gradient is the sum over all targets of the step, divided once by their number over all ranks
# and micro-batches. Dropout is a function of (seed, step, micro-batch), so that a run continues bit
# for bit.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ttrain.data.loader import Loader, MicroBatch
from ttrain.train.averaging import MovingAverage
from ttrain.train.distributed import Ranks
from ttrain.train.parallel import place
from ttrain.train.precision import Precision
from ttrain.train.step_figures import MicroBatchSums, measure
from ttrain.train.task import Metrics, TrainingTask
from ttrain.train.training_options import Speed


class PlacedModel:
    """The task's model over the ranks, its optimizers and the average of its weights."""

    def __init__(
        self,
        module: nn.Module,
        task: TrainingTask,
        loader: Loader,
        ranks: Ranks,
        precision: Precision,
        speed: Speed,
    ) -> None:
        self.task = task
        self.loader = loader
        self.ranks = ranks
        self.precision = precision
        is_whole = speed.parallel != "fsdp" or ranks.world == 1
        # Else each rank moves only its shard.
        self.bare = module.to(ranks.device) if is_whole else module
        self.parallel, self._compiled_layers = place(
            self.bare, ranks, speed.parallel, self._trial_pass if speed.compile else None
        )
        self.optimizers = task.build_optimizer(self.bare)
        self.optimizers.prepare(precision.product_dtype, ranks)
        self.average = MovingAverage(
            self.optimizers.names, task.config.schedule.average, loader.order.steps
        )
        self.loss_scale = precision.loss_scale()
        self.can_defer = (
            is_whole and not self.loss_scale.enabled and self.optimizers.can_be_prevented
        )
        # The loss is scaled by about 1/targets before the backward pass, so that fp16 gradients of
        # a sum do not overflow.
        self._scale = 1.0 / task.config.step_tokens

    @property
    def compiled(self) -> bool:
        """Whether training passes are compiled."""
        return self._compiled_layers.any

    def measure(self, batches: Sequence[Any]) -> tuple[float, Metrics]:
        """Mean loss per target over the batches, NaN without any; the metrics of the task."""
        with self.average.as_weights():
            return measure(self.task, self.bare, batches, self.ranks, self.precision)

    def backward(self, step: int, micro_batches: Sequence[MicroBatch]) -> MicroBatchSums:
        """Pass through this rank's micro-batches; leaves the (scaled) gradient over all ranks."""
        self.bare.train()
        sums = MicroBatchSums()
        for micro in micro_batches:
            # Of dropout: a function of the micro-batch, not of the rank that computes it
            seed = (
                self.task.config.seed * 0x9E3779B97F4A7C15
                + step * 0xBF58476D1CE4E5B9
                + micro.number * 0x94D049BB133111EB
            )
            # torch.manual_seed takes 0.9 ms: it notes a traceback for each kind of device that is
            # not in use.
            (torch.default_generator if self.ranks.device.type == "cpu" else torch).manual_seed(
                seed % (1 << 63)
            )
            self.parallel.before_backward(last=micro is micro_batches[-1])
            with self._compiled_layers.used():
                with self.precision.autocast():
                    loss = self.task.train_step(
                        self.parallel.module, micro.batch, self.ranks.device
                    )
                factor = self._scale * self.loss_scale.scale * self.parallel.loss_factor
                (loss.total * factor).backward()  # type: ignore[no-untyped-call]
            sums.add(micro.number, loss)
        self.parallel.finish()
        return sums

    def norm(self, live: float) -> tuple[float, Tensor]:
        """The factor that turns the gradient into the mean per target, and the norm of that."""
        factor = 1.0 / (self._scale * self.loss_scale.scale * live)
        gradients = [p.grad for p in self.optimizers.parameters if p.grad is not None]
        return factor, nn.utils.get_total_norm(gradients) * factor

    def update(self, factor: float, norm: Tensor, prevented: Tensor | None) -> None:
        """Scale and clip the gradients, step, clear them; no change if `prevented` is 1.0."""
        gradients = [p.grad for p in self.optimizers.parameters if p.grad is not None]
        clip = self.task.config.optim.clip
        # Once: at 28 M parameters each pass over the gradients takes 1 % of a step.
        torch._foreach_mul_(
            gradients, torch.clamp(clip / (norm + 1e-6), max=1.0) * factor if clip else factor
        )
        self.optimizers.step() if prevented is None else self.optimizers.step_unless(prevented)
        self.optimizers.zero_grad()
        self.average.update(prevented)

    def _trial_pass(self, module: nn.Module) -> None:
        with self.precision.autocast():
            loss = self.task.train_step(module, self.loader.step(0)[0].batch, self.ranks.device)
        loss.total.backward()  # type: ignore[no-untyped-call]
