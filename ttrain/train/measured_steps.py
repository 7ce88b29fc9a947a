"""Seconds of training steps that were measured on this machine, remembered in the home."""

# Imports nothing heavy: a plan reads it.

import os
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from ttrain.config import Settings, Training
from ttrain.config.training import TRAINING_STAGES
from ttrain.core.files import read_object, write_json
from ttrain.core.hashing import digest_of
from ttrain.core.machine import processor

FILE = Path("cache", "measured_steps.json")  # in the home: by the digest of what shapes the speed
GPUS = Path("/proc/driver/nvidia/gpus")  # of Linux: without torch, which a plan does not load
SHAPE_NO_STEP = {"tokens", "epochs", "schedule", "seed", "start_from"}  # of a stage's settings
SHAPE_SPEED = {  # of `runtime`
    "rows_per_device",
    "threads",
    "device",
    "devices",
    "nodes",
    "parallel",
    "gpus",
    "attention",
    "loss_chunk_tokens",
    "gradient_checkpointing",
    "deterministic",
}


@dataclass(frozen=True)
class Measured:
    """Seconds of an optimizer step of a training, and of a row of its validations."""

    step: float
    row: float


Measure = Callable[[str, Training], Measured | None]  # of a stage with these settings


def can_be_measured(stage: str, settings: Settings, artifacts: Collection[str]) -> bool:
    """Whether a training can be timed by steps on made-up rows. `artifacts`: stages in the store.

    Not one on pairs, whose lengths decide; of an existing model or tokenizer that is not in the
    store yet; or of a model that is sharded over several GPUs.
    """
    runtime = settings.runtime
    return (
        TRAINING_STAGES[stage].rows != "pairs"
        and (not settings.existing_model or "base-model" in artifacts)
        and (not settings.tokenizer.existing or "tokenizer" in artifacts)
        and (runtime.parallel != "fsdp" or runtime.devices * runtime.nodes == 1)
    )


def recall_or_measure(
    home: Path, stage: str, config: Training, settings: Settings, measure: Measure | None
) -> Measured | None:
    """What was measured for such a training; else what `measure` returns now, or None without it.

    `config`: the stage's settings, with numbers for what is `auto`.
    """
    tree = settings.model_dump(mode="json", include={"model", "tokenizer"})
    shape = [
        [processor(), os.environ.get("CUDA_VISIBLE_DEVICES"), stage, settings.existing_model],
        sorted(path.read_text() for path in GPUS.glob("*/information")),
        [tree["model"], tree["tokenizer"], Measured.__match_args__],  # the fields of an entry
        config.model_dump(mode="json", exclude=SHAPE_NO_STEP),
        settings.runtime.model_dump(mode="json", include=SHAPE_SPEED),
    ]
    key = digest_of(shape)
    path = home / FILE
    by_key = read_object(path)
    if key not in by_key and measure and (measured := measure(stage, config)):
        by_key[key] = asdict(measured)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, by_key)
    return Measured(**by_key[key]) if key in by_key else None
