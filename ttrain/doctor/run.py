"""`ttrain doctor`: run every check on a stage's own parts, before the long run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar, cast

import transformers

from ttrain.config import Settings, Training
from ttrain.config.training import TRAINING_STAGES
from ttrain.core.files import temporary_directory
from ttrain.core.text import first_line
from ttrain.data.encoder import Encoder
from ttrain.doctor import data, machine, model
from ttrain.doctor.data import Data
from ttrain.doctor.inputs import paths_of
from ttrain.doctor.parts import Finding, Learner, with_references
from ttrain.engine.graph import Plan
from ttrain.errors import UsageError
from ttrain.tasks import STAGES
from ttrain.tasks.common import training
from ttrain.tasks.common.rows import open_rows, order_of
from ttrain.tasks.shards import heldout_records
from ttrain.train import leakage_check, precision

Subject = TypeVar("Subject", Data, Learner)

# By the name of a check: its function, and the fix where the finding is not ok and has none.
Checks = Mapping[str, tuple[Callable[[Subject], Finding | None], str]]

DATA_CHECKS: Checks[Data] = {
    "tokenizer round trip": (data.round_trip, "take another tokenizer, or train one with ttrain"),
    "chat template": (
        data.template,
        "correct chat_template.jinja of the tokenizer, or set tokenizer.template=ttrain",
    ),
    "labels and mask": (
        data.labels,
        "look at `ttrain data show`: the template, or the code that makes rows, is wrong",
    ),
}
# Checks with the next-token loss, whatever the stage's own objective is.
MODEL_CHECKS: Checks[Learner] = {
    "no future leak": (
        model.future,
        "fix the model's causal mask: a position sees what it should predict",
    ),
    "records apart": (
        model.documents,
        "fix the model's document mask: what shares a row by chance is trained on",
    ),
    "loss at the start": (model.first_loss, ""),
}
CHECKS: Checks[Learner] = {
    "memory": (machine.memory, ""),
    "disk": (
        machine.disk,
        "free some space, set TTRAIN_HOME to a larger disk, or lower runtime.keep_checkpoints",
    ),
    "accumulation": (
        model.accumulation,
        "fix the loss of the task: train_step must return a sum and a count, never a mean",
    ),
    "save and resume": (
        model.resume,
        "set runtime.deterministic=true, or fix what the task keeps between steps in no checkpoint",
    ),
    "one batch is learnt": (model.learns, ""),
}


def examine(stage: str, plan: Plan) -> Iterator[tuple[str, Finding]]:
    """Yield the name and finding of each check as it is done.

    The store has the artifacts of `inputs.missing_data`. Raises UsageError where the settings
    cannot be met, DataError where the data cannot be read.
    """
    transformers.utils.logging.disable_progress_bar()  # of an existing model that is loaded
    with temporary_directory("doctor") as directory:
        learner, read = prepare(stage, plan, directory)
        counts = read.rows.counts()
        yield (
            "data",
            Finding(
                True,
                f"{counts['rows']} rows of {read.rows.row_length} tokens, "
                f"{counts['fill']:.1%} full",
            ),
        )
        yield from run_checks(DATA_CHECKS, read)
        yield from run_checks(MODEL_CHECKS, replace(learner, task=training.task_of))
        if read.kind == "pairs":
            learner = with_references(learner)
        yield from run_checks(CHECKS, learner)


def prepare(stage: str, plan: Plan, directory: Path) -> tuple[Learner, Data]:
    """(how the stage trains, what it reads).

    Raises UsageError and DataError for what the stage would refuse before its first step.
    """
    settings = plan.settings
    row = TRAINING_STAGES[stage]
    config: Training = getattr(settings, stage)
    device = training.start(settings.runtime).device
    paths, is_trained = paths_of(stage, settings, plan.paths, directory)
    encoder = Encoder(paths["tokenizer"])
    shards = paths["shards"]
    rows = open_rows(shards / "train", encoder, config)
    config = config.resolved(rows.epoch)
    order = order_of(config, rows)
    heldout = open_rows(shards / "heldout", encoder, config, heldout=True)
    records = list(heldout_records(shards))
    read = Data(row.rows, encoder, rows, heldout, records, bool(config.mask_intervals))
    learner = Learner(
        config,
        settings.runtime,
        build=partial(subject, stage, Settings.rebuilt(STAGES[stage].part_of(settings)), paths),
        task=getattr(import_module(STAGES[stage].module), "task_of", training.task_of),
        rows=rows,
        precision=precision.resolve_precision(config.precision, device),
        is_trained=is_trained,
        steps=order.steps,
        home=plan.store.root,
    )
    task, objective = learner.prepared()
    task.check_rows(rows)
    leakage_check.check(objective, config, branches=row.rows == "pairs")
    return learner, read


def subject(stage: str, settings: Settings, paths: Mapping[str, Path]) -> training.TrainableModel:
    """The stage's model before its first step; the same weights every time."""
    encoder = Encoder(paths["tokenizer"], fast=False)
    return cast(
        training.TrainableModel,
        import_module(STAGES[stage].module).prepare(settings, paths, encoder),
    )


def run_checks(checks: Checks[Subject], examined: Subject) -> Iterator[tuple[str, Finding]]:
    """Yield the findings; an exception becomes a finding, and the next check follows.

    UsageError is not caught: the settings are wrong, and there is nothing to examine.
    """
    for name, (check, fix) in checks.items():
        try:
            finding = check(examined)
        except UsageError:
            raise
        except Exception as error:
            finding = Finding(
                False,
                f"{type(error).__name__}: {first_line(error)}",
                "training would fail with it too: do what it says",
            )
        if finding is not None:
            yield name, replace(finding, fix=finding.fix or fix)
