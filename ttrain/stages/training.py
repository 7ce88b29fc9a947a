"""What pretraining, SFT and LoRA do in the same way: rows, ranks, checkpoints, the trainer, and the model they leave."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ttrain.config import Runtime, Training
from ttrain.data.encoder import Encoder
from ttrain.data.loader import Loader
from ttrain.errors import Interrupted
from ttrain.job import Job
from ttrain.stages.rows import open_rows, order_of, validation_batches
from ttrain.train import checkpoint, precision
from ttrain.train.callbacks import LogLines, MetricsFile, ProgressBar
from ttrain.train.checkpoint import Checkpoints
from ttrain.train.ranks import Ranks
from ttrain.train.schedules import decay_start
from ttrain.train.task import LanguageModeling
from ttrain.train.trainer import Cadence, Trainer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
log = logging.getLogger("ttrain")


@dataclass(frozen=True)
class Trained:
    """A model about to be trained, and how it is kept: `directory` under the output, weights file, files beside it."""

    model: nn.Module
    state: Callable[[], dict[str, Tensor]]
    load: Callable[[dict[str, Tensor]], None]
    files: dict[str, bytes]
    directory: str = "model"
    weights_file: str = checkpoint.WEIGHTS


def start(runtime: Runtime) -> Ranks:
    """Join the other ranks and share the cores among them."""
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    torch.set_num_threads(runtime.threads or max(1, (os.cpu_count() or 1) // world))
    return Ranks.join(precision.resolve_device(runtime.device, local))


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """A tokenizer's files, to stand beside the weights."""
    return {name: (directory / name).read_bytes() for name in TOKENIZER_FILES}


def fit(config: Training, trained: Trained, job: Job, ranks: Ranks, encoder: Encoder) -> dict[str, Any]:
    """Train, leave the model under the output, return the figures of the manifest. Raises Interrupted after saving."""
    rows = open_rows(job.inputs["shards"] / "train", encoder, config)
    heldout = open_rows(job.inputs["shards"] / "heldout", encoder, config, heldout=True)
    order = order_of(config, rows)
    runtime = job.runtime
    loader = Loader(
        rows,
        order,
        rows_per_device=runtime.rows_per_device,
        rank=ranks.rank,
        world=ranks.world,
        prefetch_steps=runtime.prefetch_steps,
    )
    checkpoints = Checkpoints(
        job.output / "checkpoints",
        files=lambda: trained.files,
        weights_file=trained.weights_file,
        keep=runtime.keep_checkpoints,
        permanent=frozenset({decay_start(config.schedule, order.steps)}),
    )
    computed_in = precision.resolve(config.precision, ranks.device)
    extended = checkpoint.read(job.start_from, trained.weights_file) if job.start_from else None
    trainer = Trainer(
        LanguageModeling(config, trained.model),
        loader,
        ranks=ranks,
        precision=computed_in,
        weights=trained,
        checkpoints=checkpoints,
        validation=validation_batches(heldout, config.validation_rows, runtime.rows_per_device),
        callbacks=[
            MetricsFile(job.run_directory / "metrics.jsonl"),
            ProgressBar(job.progress, config.tokens_per_step),
            LogLines(),
        ],
        cadence=Cadence(runtime.log_every_steps, runtime.checkpoint_every_steps, config.validate_every_steps),
        stop_requested=job.stop_requested,
        compile=runtime.compile,
        start=extended,
    )
    log.info("rows %s, optimizer groups %s", rows.counts(), trainer.optimizers.groups())
    result = trainer.fit()
    checkpoints.close()
    if result.stop_reason == "interrupted":
        raise Interrupted(f"stopped after step {result.step} of {order.steps}; the state is saved")
    if ranks.first:
        _write_model(job.output / trained.directory, trained)
    ranks.barrier()
    return {
        "steps": result.step,
        "tokens": order.total_rows * config.row_length,
        "target_tokens": result.live_tokens,
        "loss": result.loss,
        "validation_loss": _finite(result.validation_loss),
        "resumed_from_step": result.resumed_from_step,
        "extended_from_step": extended.step if extended else None,
        "stop_reason": result.stop_reason,
        "skipped_steps": result.skipped_steps,
        "epochs": order.total_rows / len(rows),
        "train_seconds": result.seconds,
        "tokens_per_second": (result.step - result.resumed_from_step) * config.tokens_per_step / max(result.seconds, 1e-9),
        "precision": computed_in.word,
        "device": ranks.device.type,
        "ranks": ranks.world,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "trainable_parameters": sum(p.numel() for p in trained.model.parameters() if p.requires_grad),
        "rows": {**rows.counts(), "pad_fraction": loader.pad_fraction()},
        "heldout_rows": heldout.counts(),
    }


def _write_model(directory: Path, trained: Trained) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in trained.files.items():
        (directory / name).write_bytes(data)
    weights = save(checkpoint.copy_tensors(trained.state()), metadata={"format": "pt"})
    (directory / trained.weights_file).write_bytes(weights)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
