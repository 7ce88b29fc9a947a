"""Seconds of the steps of a plan's trainings, whatever of their inputs is there."""

import os
from collections.abc import Mapping
from pathlib import Path

import transformers

from ttrain.config import Settings, Training
from ttrain.config.training import TRAINING_STAGES
from ttrain.data.encoder import Encoder
from ttrain.doctor.inputs import paths_of
from ttrain.doctor.run import subject
from ttrain.tasks import STAGES
from ttrain.tasks.common import training
from ttrain.train import precision
from ttrain.train.measured_steps import Measured
from ttrain.train.memory_rows import made_up_rows
from ttrain.train.timing import ROWS, measure


def measure_stage(
    stage: str,
    config: Training,
    settings: Settings,
    artifacts: Mapping[str, Path],
    directory: Path,
) -> Measured:
    """Measure a training. `config`: its settings with numbers for what is `auto`.

    `artifacts`: directories of those that are in the store, by stage; what else it reads is made
    under `directory`. Raises what a training would, such as for lack of memory.
    """
    transformers.utils.logging.disable_progress_bar()  # of a base that is loaded
    threads = settings.runtime.threads or max(1, (os.cpu_count() or 1) // settings.runtime.devices)
    runtime = settings.runtime.model_copy(update={"threads": threads})  # those of one rank
    device = training.start(runtime).device
    paths, _ = paths_of(stage, settings, artifacts, directory)
    model = subject(stage, Settings.rebuilt(STAGES[stage].part_of(settings)), paths)
    task = training.task_of(config, model.model, settings.runtime)
    vocabulary = len(Encoder(paths["tokenizer"], fast=False))
    rows = made_up_rows(ROWS, config.row_length, vocabulary, TRAINING_STAGES[stage].rows)
    computed_in = precision.resolve_precision(config.precision, device)
    return measure(task, rows, model, computed_in, settings.runtime)
