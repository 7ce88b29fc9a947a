"""Training: what the stages that train share, and one training of any model, from the ranks to the
files it leaves.

A stage gives `run` its settings and what prepares its model; a user's task calls `train` with its
own parts.

An artifact of `schedule.kind=infinite` holds a `plateau/`: weights and optimizer state, in the
files of a checkpoint, which another training continues. The model beside it has been annealed in
the decay that ends it; a rate as high as the peak would raise its loss on what it has learnt
(arXiv:2308.04014).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ttrain.config import TRAINING_STAGES, Loop, Runtime, Settings, Training, flatten
from ttrain.core.files import finite, link_or_copy, remove_tree
from ttrain.data.encoder import Encoder
from ttrain.data.loader import BatchSource, Loader, pad_fraction
from ttrain.data.packing import Rows
from ttrain.errors import ArtifactError, Interrupted, TTrainError
from ttrain.model import factory
from ttrain.store.model_files import PLATEAU
from ttrain.tasks.common.callbacks import (
    GUARDS,
    METRICS,
    is_without_effect,
    language_model_callbacks,
)
from ttrain.tasks.common.job import Figures, Inputs, StageContext
from ttrain.tasks.common.rows import open_rows, order_of, validation_batches, with_replay
from ttrain.tasks.common.tuning import tuned
from ttrain.train import checkpoint, checkpoint_format, guards, leakage_check, precision
from ttrain.train.callbacks import Callback
from ttrain.train.distributed import Ranks, Tensors, share_cores
from ttrain.train.early_stopping import early_stopping
from ttrain.train.language_modeling import CausalTask, LanguageModeling
from ttrain.train.resource_limits import (
    QuietHoursThrottle,
    explain_out_of_memory,
    limit_bytes,
    limit_memory,
)
from ttrain.train.schedules import BUDGET, RATES, decay_start, plateau_end, quick_rows
from ttrain.train.task import TrainingTask
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import (
    INTERRUPTED,
    Cadence,
    FitResult,
    Origin,
    Speed,
    TrainerOptions,
    Validation,
)

COMPILED_STEPS = 500  # compiling takes about a minute

log = logging.getLogger("ttrain")


@dataclass(frozen=True)
class TrainableModel:
    """A model to train, and how it is stored: `directory` under the output, weights file, files
    beside it.

    `identity`: the settings that shaped it, which a checkpoint must match as it must those of the
    stage. A tensor that `state` names FILE.safetensors/NAME is stored in that file; files in
    `left_out` are in checkpoints only. `finish` is called with the output once the files are
    written.
    """

    model: nn.Module
    state: Callable[[], Tensors]
    files: dict[str, bytes]
    directory: str = "model"
    weights_file: str = checkpoint.WEIGHTS
    identity: Mapping[str, Any] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    finish: Callable[[Path], object] = lambda output: None

    def load(self, weights: Tensors) -> None:
        """Load weights into the model. Raises ArtifactError if names or shapes differ."""
        factory.overwrite(self.state(), weights)


# --- a training stage -----------------------------------------------------------------------------


task_of = LanguageModeling.of  # of most stages


def run(
    settings: Settings,
    config: Training,
    job: StageContext,
    prepare: Callable[[Settings, Inputs, Encoder], TrainableModel],
    task: Callable[[Training, nn.Module, Runtime], CausalTask] = task_of,
    batches: Callable[[str, Rows], BatchSource] = lambda part, rows: rows,
) -> Figures:
    """Train what `prepare` makes of settings, inputs and tokenizer, write the model under the
    output.

    `batches` makes those of a part, `train` or `heldout`, of its rows.

    Returns the figures of the manifest. Raises Interrupted after saving.
    """
    ranks = start(job.runtime)
    tokenizer = (
        job.inputs["tokenizer"] if "tokenizer" in job.inputs else job.inputs["base"] / "model"
    )
    encoder = Encoder(tokenizer, fast=False)  # its ids are asked for, no text is encoded
    trained = prepare(settings, job.inputs, encoder)
    rows = open_rows(job.inputs["shards"] / "train", encoder, config)
    if "replay" in job.inputs:
        rows = with_replay(rows, job.inputs["replay"] / "train", encoder, config)
    heldout = open_rows(job.inputs["shards"] / "heldout", encoder, config, heldout=True)
    automatic = config.automatic
    config = config.resolved(rows.epoch)
    by_rule = {name: getattr(config, name) for name in automatic}
    if by_rule:
        log.info("by the %d rows: %s", rows.epoch, by_rule)
    order = order_of(config, rows)
    computed_in = precision.resolve_precision(config.precision, ranks.device)
    learner = task(config, trained.model, job.runtime)
    leakage_check.check(
        learner.build_model(), config, branches=TRAINING_STAGES[config.section].rows == "pairs"
    )
    learner.check_rows(rows)
    learner.check_rows(heldout)
    # What is measured are passes of next-token prediction.
    runtime = (
        tuned(learner, rows, order, job, ranks, computed_in)
        if isinstance(learner, LanguageModeling)
        else job.runtime
    )
    chosen = (
        {} if runtime is job.runtime else {"tuned": {"rows_per_device": runtime.rows_per_device}}
    )
    job = replace(job, runtime=runtime)
    size = runtime.rows_per_device
    loader = Loader(
        batches("train", rows), order, rows_per_device=size, rank=ranks.rank, world=ranks.world
    )
    heldout_batches = batches("heldout", heldout)
    validation = Validation(validation_batches(heldout_batches, config.validation_rows, size))
    if not config.validates_while_training:  # then there are quick ones, over fewer rows
        fewer = min(
            config.validation_rows, quick_rows(order.total_rows, runtime.quick_validations + 1)
        )
        validation = replace(validation, quick=validation_batches(heldout_batches, fewer, size))
    counts = rows.counts()
    rest = [
        f"{name.replace('_', ' ')} {count:,.6g}"
        for name, count in counts.items()
        if name not in ("rows", "row_length", "records", "fill")
    ]
    log.info(
        "trains on %s rows of %s tokens, %.1f %% full, from %s records; %s",
        f"{counts['rows']:,}",
        f"{counts['row_length']:,}",
        100 * counts["fill"],
        f"{counts['records']:,}",
        ", ".join(rest),
    )
    identity = {
        **trained.identity,
        **dict(flatten(config.model_dump(mode="json", exclude={"start_from"}))),
    }
    origin = Origin(
        plateau=read_plateau(job.inputs["plateau"], trained.weights_file)
        if "plateau" in job.inputs
        else None,
        identity=identity,
        # --extend begins with checkpoints of a smaller budget, --continue names work of another
        # rate; all else has another key
        allow=BUDGET | RATES,
    )
    options = TrainerOptions(trained, ranks, computed_in, validation=validation, origin=origin)
    callbacks = [
        *early_stopping(config, validation.batches),
        *language_model_callbacks(config, job, loader, options, trained.model, encoder),
    ]
    figures = train(learner, trained, loader, options, job, callbacks)
    is_overfit = "overfit" in figures["guard_warnings"]  # it did have an effect, and lost it
    if ranks.first and not is_overfit and is_without_effect(job.run_directory / METRICS):
        fix = f"{config.prefix}optim.lr is {config.optim.lr:g}: try a larger one, or train longer"
        log.warning("the loss on held-out rows hardly changed in all of this stage; %s", fix)
        figures["guard_warnings"]["no_effect"] = 1
    return {
        **figures,
        **chosen,
        **({"by_rule": by_rule} if by_rule else {}),
        "rows": {**counts, "pad_fraction": pad_fraction(rows, loader)},
        "heldout_rows": heldout.counts(),
    }


# --- a training of any model ----------------------------------------------------------------------


def start(runtime: Runtime) -> Ranks:
    """Join the other ranks and share the cores among them."""
    local_rank = share_cores(runtime.threads)
    precision.set_deterministic(runtime.deterministic)
    device = precision.resolve_device(runtime.device, local_rank)
    limit_memory(limit_bytes(runtime), device)
    return Ranks.join(device, runtime.rank_timeout_seconds)


def compiles(runtime: Runtime, device: torch.device, rows: BatchSource, steps: int) -> bool:
    """Whether the model is compiled: as the setting says; where it is empty, on CUDA in long runs
    over rows of one width.

    The rows of a user's task may have any shape: they are not compiled unless that is asked for.
    """
    if runtime.compile is not None:
        return runtime.compile
    return (
        device.type == "cuda"
        and steps >= COMPILED_STEPS
        and getattr(rows, "trimmed", True) is False
    )


def train(
    task: TrainingTask,
    trained: TrainableModel,
    loader: Loader,
    options: TrainerOptions,
    job: StageContext,
    callbacks: Sequence[Callback],
) -> Figures:
    """Train, write the model under the output, return the figures. Raises Interrupted after saving.

    `options`: without those of the runtime settings.
    """
    config = task.config
    order = loader.order
    runtime = job.runtime
    checkpoints = checkpoint.Checkpoints(
        job.output / "checkpoints",
        files=lambda: trained.files,
        weights_file=trained.weights_file,
        keep=runtime.keep_checkpoints,
        keep_every=runtime.keep_every_steps,
        # A longer run continues the one where the decay begins.
        permanent=frozenset({decay_start(config.schedule, order.steps)}),
    )
    limit = limit_bytes(runtime)
    options = replace(
        options,
        checkpoints=checkpoints,
        cadence=Cadence(
            log=runtime.log_every_steps,
            checkpoint=runtime.checkpoint_every_steps,
            checkpoint_steps=order.epoch_ends(runtime.checkpoint_every_epochs),
            validate=config.validate_every_steps,
            validate_steps=order.epoch_ends(config.validate_every_epochs),
            quick_validations=runtime.quick_validations,
        ),
        speed=Speed(
            compiles(runtime, options.ranks.device, loader.rows, order.steps), runtime.parallel
        ),
        quiet_hours=QuietHoursThrottle(
            runtime.quiet_hours,
            options.ranks.device,
            rows_per_device=runtime.rows_per_device,
            memory_limit=limit,
        )
        if runtime.quiet_hours
        else None,
        stop_requested=job.stop_requested,
    )
    trainer = Trainer(task, loader, options, callbacks)
    for group in trainer.optimizers.groups():
        log.info(
            "%s updates %s parameters in %d tensors (%s, ...): peak learning rate %g, weight "
            "decay %g",
            group["optimizer"],
            f"{group['parameters']:,}",
            group["tensors"],
            ", ".join(group["names"]),
            group["lr"],
            group["weight_decay"],
        )
    try:
        with explain_out_of_memory(limit, runtime.rows_per_device):
            result = trainer.fit()
    finally:
        checkpoints.close()
    if result.stop_reason == INTERRUPTED:
        raise Interrupted(f"stopped after step {result.step} of {order.steps}; the state is saved")
    if result.step and result.skipped_steps >= result.step:  # the model is the one before training
        raise TTrainError(
            f"all {result.step} steps were left out, since loss or gradient was not finite; "
            f"{_remedy(config)}, "
            f"or look at the rows that the log names"
        )
    _write(trainer, trained, job)
    return {
        **_figures(trainer, result, runtime, trained.model),
        "guard_warnings": guards.counts(job.run_directory / GUARDS),
    }


def _write(trainer: Trainer, trained: TrainableModel, job: StageContext) -> None:
    # Write the model, and with it the plateau that another training continues; the first rank does.
    config = trainer.task.config
    weights = trainer.parallel.whole(trained.state())
    if trainer.ranks.first:
        buffers = dict(trained.model.named_buffers())  # which may hold any number
        try:
            factory.need_finite(
                {name: tensor for name, tensor in weights.items() if name not in buffers},
                "the trained model",
            )
        except ArtifactError as error:  # what was trained became NaN
            raise TTrainError(
                f"{str(error).partition(', so that')[0]}; {_remedy(config)}"
            ) from None
        checkpoint_format.write_model(
            job.output / trained.directory,
            trained.files,
            weights,
            trained.weights_file,
            trained.left_out,
        )
        step = plateau_end(config.schedule, trainer.loader.order.steps)
        if step is not None:
            write_plateau(job.output, step)
        trained.finish(job.output)
    trainer.ranks.barrier()


def _remedy(config: Loop) -> str:
    remedies = f"lower {config.prefix}optim.lr ({config.optim.lr:g})"
    return (
        remedies if config.precision == "fp32" else f"{remedies}, set {config.prefix}precision=fp32"
    )


def _figures(trainer: Trainer, result: FitResult, runtime: Runtime, model: nn.Module) -> Figures:
    order = trainer.loader.order
    read: dict[str, float] = {}
    if isinstance(trainer.task.config, Training):  # the rows of a user's task have no tokens
        read = {
            "tokens": result.tokens,
            "tokens_per_second": (result.tokens - trainer.first_tokens) / max(result.seconds, 1e-9),
        }
    return {
        "steps": result.step,
        "kept_step": result.kept_step,
        **read,
        "target_tokens": result.live_tokens,
        "loss": result.loss,
        **finite(
            {
                "validation_loss": result.validation_loss,
                "best_validation_loss": trainer.counters.best_loss,
            }
        ),
        "resumed_from_step": result.resumed_from_step,
        "stop_reason": result.stop_reason,
        "skipped_steps": result.skipped_steps,
        "epochs": min(result.step * order.rows_per_step, order.total_rows) / order.rows,
        "train_seconds": result.seconds,
        "optimizer_groups": trainer.optimizers.groups(),
        "precision": trainer.precision.word,
        "compiled": trainer.model.compiled,
        "deterministic": runtime.deterministic,
        "device": trainer.ranks.device.type,
        "ranks": trainer.ranks.world,
        "threads": torch.get_num_threads(),
        "parameters": factory.count_parameters(model),
        "trainable_parameters": factory.count_parameters(model, trained=True),
    }


# --- the plateau ----------------------------------------------------------------------------------


def write_plateau(output: Path, step: int) -> None:
    """Link the checkpoint of this step as `plateau/` of the output; warn if there is none."""
    remove_tree(output / PLATEAU)
    source = output / "checkpoints" / f"step-{step:08d}"
    if not source.exists():
        log.warning(
            "there is no checkpoint of step %d, the end of the plateau; a night will warm "
            "this model up again",
            step,
        )
        return
    (output / PLATEAU).mkdir()
    for path in source.glob(f"*{checkpoint_format.SAFETENSORS}"):
        link_or_copy(path, output / PLATEAU / path.name)


def read_plateau(directory: Path, weights_file: str) -> checkpoint.Snapshot:
    """Read the plateau of an artifact, as a snapshot at step 0. Raises ArtifactError that names the
    damaged file.
    """
    path = directory / PLATEAU
    names = [file.name for file in sorted(path.iterdir())]
    return checkpoint.Snapshot(0, *checkpoint_format.read_tensors(path, names, weights_file), {})
