"""`ttrain doctor`: run every check on a stage's own parts, before the long run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import transformers

from ttrain.config import Section, Training
from ttrain.config.training import TRAINING_STAGES
from ttrain.core.files import temporary_directory
from ttrain.core.text import first_line
from ttrain.data.encoder import Encoder
from ttrain.doctor import data, machine, model, preferences
from ttrain.doctor.data import Data
from ttrain.doctor.parts import Finding, Learner
from ttrain.doctor.sample import StageInputs, gather
from ttrain.engine.plan import Plan
from ttrain.errors import DataError, TTrainError, UsageError
from ttrain.pipeline.plan import section_of
from ttrain.stages import STAGES, training
from ttrain.stages.rows import check_left_out, open_rows, resolved
from ttrain.stages.shards import heldout_records
from ttrain.train import leakage_check, precision
from ttrain.train.schedules import steps_of

Subject = TypeVar("Subject", Data, Learner)

CHECKS: Mapping[str, Callable[[Learner], Finding | None]] = {
    "device": machine.device,
    "memory": machine.memory,
    "disk": machine.disk,
    "no future leak": model.future,
    "records apart": model.documents,
    "loss at the start": model.first_loss,
    "routers balanced": model.routers,
    "accumulation": model.accumulation,
    "two ranks equal one": model.two_ranks,
    "save and resume": model.resume,
    "one batch is learnt": model.learns,
}


def examine(stage: str, plan: Plan) -> Iterator[tuple[str, Finding]]:
    """Yield the name of each check with what it found, as it is done.

    Raises UsageError where the settings cannot be met.
    """
    transformers.utils.logging.disable_progress_bar()  # of an existing model that is loaded
    with temporary_directory("doctor") as directory:
        try:
            learner, read, origin = prepare(stage, plan, directory)
        except UsageError:
            raise
        except TTrainError as error:
            fix = "fix the data or the setting; `ttrain data check` lists every bad row"
            yield "data", Finding(False, str(error), fix)
            return
        counts = read.rows.counts()
        size = f"{counts['rows']} rows of {read.rows.row_length} tokens, {counts['fill']:.1%} filled"
        yield "data", Finding(True, f"{origin}: {size}")
        yield from run_checks(data.CHECKS, read)
        if read.kind == "pairs":
            learner = preferences.with_references(learner, read.rows)
            yield from run_checks({**CHECKS, **preferences.CHECKS}, learner)
        else:
            yield from run_checks(CHECKS, learner)


def prepare(stage: str, plan: Plan, directory: Path) -> tuple[Learner, Data, str]:
    """(how the stage trains, what it reads, where that comes from).

    Raises UsageError and DataError for what the stage itself would refuse before its first step.
    """
    settings, row = plan.settings, TRAINING_STAGES[stage]
    config: Training = getattr(settings, stage)
    computed_in = precision.resolve_precision(config.precision, training.start(settings.runtime).device)
    artifacts = {
        planned.stage.name: planned.artifact for planned in plan.stages if planned.artifact and planned.state == "cached"
    }
    inputs = gather(stage, settings, artifacts, directory)
    encoder, shards = Encoder(inputs.paths["tokenizer"]), inputs.paths["shards"]
    rows = open_rows(shards / "train", encoder, config)
    check_left_out(config, rows)
    if not len(rows):
        raise DataError("the training data is empty: it gave no row to learn from")
    config = resolved(config, rows)
    heldout = open_rows(shards / "heldout", encoder, config, heldout=True)
    read = Data(row.rows, encoder, rows, heldout, heldout_records(shards), bool(config.mask_intervals))
    learner = Learner(
        config,
        settings.runtime,
        build=partial(subject, stage, section_of(STAGES[stage], settings), inputs),
        task=getattr(import_module(STAGES[stage].module), "task_of", training.task_of),
        rows=rows,
        precision=computed_in,
        is_trained=inputs.is_trained,
        steps=steps_of(config, int(rows.counts()["rows"]))[0],
        home=plan.store.root,
        unmade_bytes=inputs.unmade_bytes,
    )
    task, objective = learner.prepared()
    task.check_rows(rows)
    leakage_check.check(objective, config, branches=row.rows == "pairs")
    return learner, read, inputs.origin


def subject(stage: str, config: Section, inputs: StageInputs) -> training.TrainableModel:
    """The stage's model before its first step; the same weights every time."""
    transformers.utils.logging.disable_progress_bar()
    encoder = Encoder(inputs.paths["tokenizer"], fast=False)
    made: training.TrainableModel = import_module(STAGES[stage].module).prepare(config, inputs.paths, encoder)
    return made


def run_checks(
    checks: Mapping[str, Callable[[Subject], Finding | None]], examined: Subject
) -> Iterator[tuple[str, Finding]]:
    """Yield what the checks find; an exception becomes a finding, so that the others are not hidden.

    UsageError is not caught: the settings are wrong, and there is nothing to examine.
    """
    for name, check in checks.items():
        try:
            finding = check(examined)
        except UsageError:
            raise
        except Exception as error:
            kind = "" if isinstance(error, TTrainError) else f"{type(error).__name__}: "
            fix = "training would fail with it too: do what it says, or report it"
            finding = Finding(False, f"{kind}{first_line(error)}", fix)
        if finding is not None:
            yield name, finding
