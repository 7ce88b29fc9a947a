"""One training, whatever is trained: ranks, loader, checkpoints, the trainer, and the model that it leaves."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ttrain.config import Runtime
from ttrain.data.loader import BatchSource, Loader
from ttrain.data.samplers import Order
from ttrain.errors import Interrupted
from ttrain.stages.callbacks import GUARDS
from ttrain.stages.job import Job
from ttrain.train import checkpoint, guards, precision, tensor_files
from ttrain.train.callbacks import Callback
from ttrain.train.checkpoint import Checkpoints, Snapshot
from ttrain.train.determinism import set_deterministic
from ttrain.train.distributed import Ranks
from ttrain.train.memory import explained, limit_memory, limit_of
from ttrain.train.night_throttle import NightShift
from ttrain.train.precision import Precision
from ttrain.train.schedules import decay_start
from ttrain.train.task import TrainingTask
from ttrain.train.trainer import INTERRUPTED, Cadence, FitResult, How, Trainer

log = logging.getLogger("ttrain")


@dataclass(frozen=True)
class Trained:
    """A model about to be trained, and how it is kept: `directory` under the output, weights file, files beside it.

    `identity`: the settings that shaped it, which a checkpoint must agree with as with those of the stage. What `state` has
    as FILE.safetensors/NAME lies in that file, beside the other weights; files in `left_out` are in checkpoints only.
    """

    model: nn.Module
    state: Callable[[], dict[str, Tensor]]
    load: Callable[[dict[str, Tensor]], None]
    files: dict[str, bytes]
    directory: str = "model"
    weights_file: str = checkpoint.WEIGHTS
    identity: Mapping[str, Any] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()


def start(runtime: Runtime) -> Ranks:
    """Join the other ranks and share the cores among them."""
    here, local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    torch.set_num_threads(runtime.threads or max(1, (os.cpu_count() or 1) // here))
    set_deterministic(runtime.deterministic)
    device = precision.resolve_device(runtime.device, local)
    limit_memory(limit_of(runtime), device)
    return Ranks.join(device)


def loader_of(rows: BatchSource, order: Order, runtime: Runtime, ranks: Ranks) -> Loader:
    """This rank's batches of the rows."""
    return Loader(
        rows,
        order,
        rows_per_device=runtime.rows_per_device,
        rank=ranks.rank,
        world=ranks.world,
        prefetch_steps=runtime.prefetch_steps,
    )


def train(
    task: TrainingTask,
    loader: Loader,
    trained: Trained,
    job: Job,
    ranks: Ranks,
    *,
    precision: Precision,
    validation: Sequence[Any],
    callbacks: Sequence[Callback],
    identity: Mapping[str, Any],
    allow: frozenset[str],
    quick: Sequence[Any] = (),
    start: Snapshot | None = None,
) -> dict[str, Any]:
    """Train, leave the model under the output, return the figures. Raises Interrupted after saving."""
    config, order, runtime = task.config, loader.order, job.runtime
    checkpoints = Checkpoints(
        job.output / "checkpoints",
        files=lambda: trained.files,
        weights_file=trained.weights_file,
        keep=runtime.keep_checkpoints,
        keep_every=runtime.keep_every_steps,
        permanent=frozenset({decay_start(config.schedule, order.steps), *runtime.keep_steps}),
    )
    trainer = Trainer(
        task,
        loader,
        ranks=ranks,
        precision=precision,
        weights=trained,
        checkpoints=checkpoints,
        validation=validation,
        quick=quick,
        callbacks=callbacks,
        cadence=Cadence(
            log=runtime.log_every_steps,
            checkpoint=runtime.checkpoint_every_steps,
            checkpoint_steps=frozenset(runtime.keep_steps),
            validate=config.validate_every_steps,
            quick_validations=runtime.quick_validations,
        ),
        stop_requested=job.stop_requested,
        how=How(runtime.compile, runtime.parallel, runtime.reduction),
        night=_night(runtime, ranks),
        start=start,
        identity=identity,
        allow=allow,
    )
    log.info("optimizer groups %s", trainer.optimizers.groups())
    try:
        with explained(limit_of(runtime), runtime.rows_per_device):
            result = trainer.fit()
    finally:
        with ranks.busy("saving"):
            checkpoints.close()
    if result.stop_reason == INTERRUPTED:
        raise Interrupted(f"stopped after step {result.step} of {order.steps}; the state is saved")
    weights = trainer.parallel.whole(trained.state())
    if ranks.first:
        with ranks.busy("writing the model"):
            _write_model(job.output / trained.directory, trained, weights)
    ranks.barrier()
    warned = guards.counts(job.run_directory / GUARDS)
    return {**_figures(trainer, result, runtime, trained.model), "guard_warnings": warned}


def _night(runtime: Runtime, ranks: Ranks) -> NightShift | None:
    if runtime.night is None:
        return None
    day = runtime.rows_per_device
    return NightShift(runtime.night, ranks.device, rows_per_device=day, memory_limit=limit_of(runtime))


def _figures(trainer: Trainer, result: FitResult, runtime: Runtime, model: nn.Module) -> dict[str, Any]:
    """What became of a training, for the manifest."""
    order, ranks = trainer.loader.order, trainer.ranks
    return {
        "steps": result.step,
        "target_tokens": result.live_tokens,
        "loss": result.loss,
        "validation_loss": _finite(result.validation_loss),
        "best_validation_loss": _finite(trainer.counters.best_loss),
        "resumed_from_step": result.resumed_from_step,
        "stop_reason": result.stop_reason,
        "skipped_steps": result.skipped_steps,
        "epochs": order.total_rows / order.rows,
        "train_seconds": result.seconds,
        "optimizer_groups": trainer.optimizers.groups(),
        "precision": trainer.precision.word,
        "compiled": trainer.compiled,
        "deterministic": runtime.deterministic,
        "device": ranks.device.type,
        "ranks": ranks.world,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def _write_model(directory: Path, trained: Trained, weights: dict[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in trained.files.items():
        (directory / name).write_bytes(data)
    for file, tensors in tensor_files.by_file(checkpoint.copy_tensors(weights), trained.weights_file).items():
        if file in trained.left_out:
            (directory / file).unlink(missing_ok=True)
            continue
        temporary = directory / f".{file}.writing"
        temporary.unlink(missing_ok=True)
        tensor_files.write(temporary, tensor_files.tensor_parts(tensors, {"format": "pt"}))
        temporary.replace(directory / file)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
