"""The part of training that all training stages share: rows and their order, task, callbacks, figures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ttrain.config import TRAINING_STAGES, Runtime, Settings, Training, flatten
from ttrain.data.encoder import Encoder
from ttrain.data.loader import BatchSource, Loader, pad_fraction
from ttrain.data.packing import Rows
from ttrain.errors import UsageError
from ttrain.model import factory, multi_token
from ttrain.tasks.common import plateau
from ttrain.tasks.common.callbacks import METRICS, TrainingParts, is_without_effect, language_model_callbacks
from ttrain.tasks.common.job import Figures, Inputs, StageContext
from ttrain.tasks.common.rows import open_rows, order_of, validation_batches, with_replay
from ttrain.tasks.common.trainable_model import TrainableModel, start, train
from ttrain.tasks.common.tuning import tuned
from ttrain.tasks.new_model import tokenizer_files
from ttrain.train import checkpoint, leakage_check, precision
from ttrain.train.checkpoint import Snapshot
from ttrain.train.distributed import Ranks
from ttrain.train.early_stopping import early_stopping
from ttrain.train.language_modeling import CausalTask, LanguageModeling
from ttrain.train.schedules import BUDGET, RATES, quick_rows, shared_steps
from ttrain.train.training_options import Origin, Validation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TrainableModel", "run", "start", "task_of", "tokenizer_files", "whole_model"]

log = logging.getLogger("ttrain")


def whole_model(model: PreTrainedModel, tokenizer: Path, identity: Mapping[str, Any] | None = None) -> TrainableModel:
    """All weights of a model, with the tokenizer of this directory; `identity`: as in `TrainableModel`."""
    return TrainableModel(
        model,
        state=lambda: multi_token.state(model),
        files={**factory.files(model), **tokenizer_files(tokenizer)},
        left_out=multi_token.discarded_files(model),
        identity=identity or {},
    )


def task_of(config: Training, model: nn.Module, runtime: Runtime) -> LanguageModeling:
    """The task of most stages: next-token prediction."""
    return LanguageModeling(config, model, **task_options(runtime))


def task_options(runtime: Runtime) -> dict[str, Any]:
    """How a task computes: results are equal up to the order of summation."""
    return {
        "chunk_tokens": runtime.loss_chunk_tokens,
        "attention": runtime.attention,
        "gradient_checkpointing": runtime.gradient_checkpointing,
    }


@dataclass(frozen=True)
class Objective:
    """What a stage trains for: the task, by default next-token prediction, and the batches of `train` or `heldout`."""

    task: Callable[[Training, nn.Module, Runtime], CausalTask] = task_of
    batches: Callable[[str, Rows], BatchSource] = lambda part, rows: rows


NEXT_TOKEN = Objective()


def run(
    settings: Settings,
    config: Training,
    job: StageContext,
    prepare: Callable[[Settings, Inputs, Encoder], TrainableModel],
    objective: Objective = NEXT_TOKEN,
) -> Figures:
    """Train what `prepare` makes of settings, inputs and tokenizer, write the model under the output.

    Returns the figures of the manifest. Raises Interrupted after saving.
    """
    ranks = start(job.runtime)
    tokenizer = job.inputs["tokenizer"] if "tokenizer" in job.inputs else job.inputs["base"] / "model"
    encoder = Encoder(tokenizer, fast=False)  # its ids are asked for, no text is encoded
    trained = prepare(settings, job.inputs, encoder)
    rows = open_rows(job.inputs["shards"] / "train", encoder, config)
    if "replay" in job.inputs:
        rows = with_replay(rows, job.inputs["replay"] / "train", encoder, config)
    heldout = open_rows(job.inputs["shards"] / "heldout", encoder, config, heldout=True)
    automatic, config = config.automatic, config.resolved(rows.epoch)
    by_rule = {name: getattr(config, name) for name in automatic}
    if by_rule:
        log.info("by the %d rows: %s", rows.epoch, by_rule)
    order, computed_in = order_of(config, rows), precision.resolve_precision(config.precision, ranks.device)
    learner = objective.task(config, trained.model, job.runtime)
    leakage_check.check(learner.build_model(), config, branches=TRAINING_STAGES[config.section].rows == "pairs")
    learner.check_rows(rows)
    learner.check_rows(heldout)
    runtime = job.runtime
    if isinstance(learner, LanguageModeling):  # what it measures are passes of next-token prediction
        runtime = tuned(learner, rows, order, job, ranks, computed_in)
    chosen = {} if runtime is job.runtime else {"tuned": {"rows_per_device": runtime.rows_per_device}}
    job = replace(job, runtime=runtime)
    batches, size = objective.batches("train", rows), runtime.rows_per_device
    loader = Loader(batches, order, rows_per_device=size, rank=ranks.rank, world=ranks.world)
    heldout_batches = objective.batches("heldout", heldout)
    validation = Validation(validation_batches(heldout_batches, config.validation_rows, size))
    if not config.validates_while_training:  # then there are quick ones, over fewer rows
        fewer = min(config.validation_rows, quick_rows(order.total_rows, runtime.quick_validations + 1))
        validation = replace(validation, quick=validation_batches(heldout_batches, fewer, size))
    extended = _extended(config, job, trained, order.steps)
    counts = rows.counts()
    named = ("rows", "row_length", "records", "fill")
    rest = [f"{name.replace('_', ' ')} {count:,.6g}" for name, count in counts.items() if name not in named]
    log.info(
        "trains on %s rows of %s tokens, %.1f %% full, from %s records; %s",
        f"{counts['rows']:,}",
        f"{counts['row_length']:,}",
        100 * counts["fill"],
        f"{counts['records']:,}",
        ", ".join(rest),
    )
    identity = {**trained.identity, **dict(flatten(config.model_dump(mode="json", exclude={"start_from"})))}
    earlier = plateau.read(job.inputs["plateau"], trained.weights_file) if "plateau" in job.inputs else None
    # A shorter run is extended, --continue names work of another rate; all else has another key.
    origin = Origin(extended, earlier, identity, BUDGET | RATES)
    parts = TrainingParts(loader, ranks, computed_in, validation, origin)
    callbacks = [
        *early_stopping(config, validation.batches),
        *language_model_callbacks(config, job, parts, trained.model, encoder),
    ]
    figures = train(learner, trained, parts, job, callbacks)
    return {
        **figures,
        **chosen,
        **({"by_rule": by_rule} if by_rule else {}),
        "guard_warnings": _warnings(config, job, ranks, figures["guard_warnings"]),
        "extended_from_step": extended.step if extended else None,
        "rows": {**counts, "pad_fraction": pad_fraction(rows, loader)},
        "heldout_rows": heldout.counts(),
    }


def _extended(config: Training, job: StageContext, trained: TrainableModel, steps: int) -> Snapshot | None:
    """The checkpoint of the shorter run that `--extend` continues.

    The plan, which reads no rows, estimates the steps of a budget in tokens where rows count by their length.
    """
    if not job.start_from:
        return None
    if config.early_stopping:
        raise UsageError(
            f"--extend cannot be combined with {config.prefix}early_stopping: the best weights may lie in the shorter run; "
            f"remove one of them"
        )
    snapshot = checkpoint.read(job.start_from, trained.weights_file)
    shared = shared_steps(config.schedule, steps)
    if snapshot.step <= shared:
        return snapshot
    log.warning("--extend starts from scratch: step %d is after step %d, where the decay begins", snapshot.step, shared)
    return None


def _warnings(config: Training, job: StageContext, ranks: Ranks, warned: Mapping[str, int]) -> dict[str, int]:
    """How often each guard warned, and whether the training had no effect."""
    if not (ranks.first and is_without_effect(job.run_directory / METRICS)):
        return dict(warned)
    fix = f"{config.prefix}optim.lr is {config.optim.lr:g}: try a larger one, or train longer"
    log.warning("the loss on held-out rows hardly changed in all of this stage; %s", fix)
    return {**warned, "no_effect": 1}
