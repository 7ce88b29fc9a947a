"""Seconds of a training step on this machine, measured on made-up rows: before any data is read."""

import statistics
import time

from ttrain.config import Runtime
from ttrain.data.loader import Loader
from ttrain.data.order import ShuffledOrder
from ttrain.train.callbacks import Callback, StepRecord
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.measured_steps import Measured
from ttrain.train.memory_rows import InMemoryRows
from ttrain.train.precision import Precision
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence, Speed, TrainerOptions, Weights

SECONDS = 2.5  # of measured steps: with all else three stages take less than 20 s
MOST_MICRO_BATCHES = 8  # of a measured step; a larger one takes as many times as long
ROWS = 64  # made up
NEVER = 1 << 30  # steps between events that must not happen


class StepTimes(Callback):
    """The seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def step_end(self, record: StepRecord) -> None:
        self.seconds.append(record.seconds)

    def suffice(self) -> bool:
        """Whether they tell the mean. The first step does not count: libraries warm up in it."""
        return len(self.seconds) > 2 and sum(self.seconds[1:]) > SECONDS


def measure(
    task: LanguageModeling,
    rows: InMemoryRows,
    weights: Weights,
    precision: Precision,
    runtime: Runtime,
) -> Measured:
    """The seconds of an optimizer step of the task, and of a row of a validation."""
    config = task.config
    rows_per_device = min(runtime.rows_per_device, config.rows_per_step)
    rows_of_rank = -(-config.rows_per_step // (runtime.devices * runtime.nodes))
    rows_per_step = min(rows_of_rank, MOST_MICRO_BATCHES * rows_per_device)
    times = StepTimes()
    options = TrainerOptions(
        weights,
        Ranks(0, 1, precision.device),
        precision,
        cadence=Cadence(log=NEVER, checkpoint=NEVER),
        speed=Speed(parallel=runtime.parallel, defer=False),  # each step tells its seconds
        stop_requested=times.suffice,
    )
    order = ShuffledOrder(ROWS, rows_per_step, rows_per_step << 20, config.seed)
    trainer = Trainer(task, Loader(rows, order, rows_per_device), options, [times])
    trainer.fit()
    began = time.monotonic()
    trainer.model.measure([rows.batch(range(first, first + 8)) for first in range(0, ROWS, 8)])
    row = (time.monotonic() - began) / ROWS
    return Measured(statistics.mean(times.seconds[1:]) * rows_of_rank / rows_per_step, row)
