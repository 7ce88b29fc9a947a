"""Run one training of any model: ranks, loader, checkpoints, the trainer, and the files of the trained model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ttrain.config import Loop, Runtime, Training
from ttrain.core.files import finite
from ttrain.data.loader import BatchSource, Loader
from ttrain.data.order import Order
from ttrain.errors import ArtifactError, Interrupted, TTrainError
from ttrain.model.factory import count_parameters, need_finite, overwrite
from ttrain.tasks.common import plateau
from ttrain.tasks.common.callbacks import GUARDS, TrainingParts
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.train import checkpoint, checkpoint_format, guards, precision
from ttrain.train.callbacks import Callback
from ttrain.train.checkpoint import Checkpoints
from ttrain.train.distributed import Ranks, share_cores
from ttrain.train.precision import set_deterministic
from ttrain.train.resource_limits import NightThrottle, explain_out_of_memory, limit_bytes, limit_memory
from ttrain.train.schedules import decay_start, plateau_end
from ttrain.train.task import TrainingTask
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import INTERRUPTED, Cadence, FitResult, Speed, TrainerOptions

COMPILED_STEPS = 500  # compiling takes about a minute

log = logging.getLogger("ttrain")


@dataclass(frozen=True)
class TrainableModel:
    """A model to train, and how it is stored: `directory` under the output, weights file, files beside it.

    `identity`: the settings that shaped it, which a checkpoint must match as it must those of the stage. A tensor that
    `state` names FILE.safetensors/NAME is stored in that file; files in `left_out` are in checkpoints only.
    """

    model: nn.Module
    state: Callable[[], dict[str, Tensor]]
    files: dict[str, bytes]
    directory: str = "model"
    weights_file: str = checkpoint.WEIGHTS
    identity: Mapping[str, Any] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()

    def load(self, weights: dict[str, Tensor]) -> None:
        """Load weights into the model. Raises ArtifactError if names or shapes differ."""
        overwrite(self.state(), weights)


def start(runtime: Runtime) -> Ranks:
    """Join the other ranks and share the cores among them."""
    local_rank = share_cores(runtime.threads)
    set_deterministic(runtime.deterministic)
    device = precision.resolve_device(runtime.device, local_rank)
    limit_memory(limit_bytes(runtime), device)
    return Ranks.join(device, runtime.rank_timeout_seconds)


def loader_of(rows: BatchSource, order: Order, runtime: Runtime, ranks: Ranks) -> Loader:
    """This rank's batches of the rows."""
    return Loader(rows, order, rows_per_device=runtime.rows_per_device, rank=ranks.rank, world=ranks.world)


def compiles(runtime: Runtime, device: torch.device, rows: BatchSource, steps: int) -> bool:
    """Whether the model is compiled: as the setting says; where it is empty, on CUDA in long runs over rows of one width.

    The rows of a user's task may have any shape: they are not compiled unless that is asked for.
    """
    if runtime.compile is not None:
        return runtime.compile
    return device.type == "cuda" and steps >= COMPILED_STEPS and getattr(rows, "trimmed", True) is False


def train(
    task: TrainingTask, trained: TrainableModel, parts: TrainingParts, job: StageContext, callbacks: Sequence[Callback]
) -> Figures:
    """Train, write the model under the output, return the figures. Raises Interrupted after saving."""
    config, order, runtime = task.config, parts.loader.order, job.runtime
    checkpoints = Checkpoints(
        job.output / "checkpoints",
        files=lambda: trained.files,
        weights_file=trained.weights_file,
        keep=runtime.keep_checkpoints,
        keep_every=runtime.keep_every_steps,
        # A longer run continues the one where the decay begins.
        permanent=frozenset({decay_start(config.schedule, order.steps)}),
    )
    night = None
    if runtime.night:
        night = NightThrottle(
            runtime.night,
            parts.ranks.device,
            rows_per_device=runtime.rows_per_device,
            memory_limit=limit_bytes(runtime),
        )
    options = TrainerOptions(
        trained,
        parts.ranks,
        parts.precision,
        checkpoints,
        parts.validation,
        Cadence(
            log=runtime.log_every_steps,
            checkpoint=runtime.checkpoint_every_steps,
            checkpoint_steps=order.epoch_ends(runtime.checkpoint_every_epochs),
            validate=config.validate_every_steps,
            validate_steps=order.epoch_ends(config.validate_every_epochs),
            quick_validations=runtime.quick_validations,
        ),
        parts.origin,
        Speed(compiles(runtime, parts.ranks.device, parts.loader.rows, order.steps), runtime.parallel),
        night,
        job.stop_requested,
    )
    trainer = Trainer(task, parts.loader, options, callbacks)
    for group in trainer.optimizers.groups():
        log.info(
            "%s updates %s parameters in %d tensors (%s, ...): peak learning rate %g, weight decay %g",
            group["optimizer"],
            f"{group['parameters']:,}",
            group["tensors"],
            ", ".join(group["names"]),
            group["lr"],
            group["weight_decay"],
        )
    try:
        with explain_out_of_memory(limit_bytes(runtime), runtime.rows_per_device):
            result = trainer.fit()
    finally:
        checkpoints.close()
    if result.stop_reason == INTERRUPTED:
        raise Interrupted(f"stopped after step {result.step} of {order.steps}; the state is saved")
    if result.step and result.skipped_steps >= result.step:  # the model is the one before training
        raise TTrainError(
            f"all {result.step} steps were left out, since loss or gradient was not finite; {_remedy(config)}, "
            f"or look at the rows that the log names"
        )
    _write(trainer, trained, job)
    warned = guards.counts(job.run_directory / GUARDS)
    return {**_figures(trainer, result, runtime, trained.model), "guard_warnings": warned}


def _write(trainer: Trainer, trained: TrainableModel, job: StageContext) -> None:
    """Write the model, and with it the plateau that another training continues; the first rank does."""
    config, steps = trainer.task.config, trainer.loader.order.steps
    weights = trainer.parallel.whole(trained.state())
    if trainer.ranks.first:
        _check_weights(config, weights, trained.model)
        directory = job.output / trained.directory
        checkpoint_format.write_model(directory, trained.files, weights, trained.weights_file, trained.left_out)
        if (step := plateau_end(config.schedule, steps)) is not None:
            plateau.write(job.output, step)
    trainer.ranks.barrier()


def _check_weights(config: Loop, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise TTrainError where what was trained became NaN: no such model is published. Buffers may hold any number."""
    buffers = dict(model.named_buffers())
    try:
        need_finite({name: tensor for name, tensor in weights.items() if name not in buffers}, "the trained model")
    except ArtifactError as error:
        raise TTrainError(f"{str(error).partition(', so that')[0]}; {_remedy(config)}") from None


def _remedy(config: Loop) -> str:
    remedies = f"lower {config.prefix}optim.lr ({config.optim.lr:g})"
    return remedies if config.precision == "fp32" else f"{remedies}, set {config.prefix}precision=fp32"


def _figures(trainer: Trainer, result: FitResult, runtime: Runtime, model: nn.Module) -> Figures:
    """The figures of a training, for the manifest."""
    order, ranks, read = trainer.loader.order, trainer.ranks, dict[str, float]()
    if isinstance(trainer.task.config, Training):  # the rows of a user's task have no tokens
        new_tokens = result.tokens - trainer.first_tokens
        read = {"tokens": result.tokens, "tokens_per_second": new_tokens / max(result.seconds, 1e-9)}
    return {
        "steps": result.step,
        "kept_step": result.kept_step,
        **read,
        "target_tokens": result.live_tokens,
        "loss": result.loss,
        **finite({"validation_loss": result.validation_loss, "best_validation_loss": trainer.counters.best_loss}),
        "resumed_from_step": result.resumed_from_step,
        "stop_reason": result.stop_reason,
        "skipped_steps": result.skipped_steps,
        "epochs": min(result.step * order.rows_per_step, order.total_rows) / order.rows,
        "train_seconds": result.seconds,
        "optimizer_groups": trainer.optimizers.groups(),
        "precision": trainer.precision.word,
        "compiled": trainer.model.compiled,
        "deterministic": runtime.deterministic,
        "device": ranks.device.type,
        "ranks": ranks.world,
        "threads": torch.get_num_threads(),
        "parameters": count_parameters(model),
        "trainable_parameters": count_parameters(model, trained=True),
    }
