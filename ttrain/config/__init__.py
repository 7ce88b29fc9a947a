"""Every setting, typed and frozen.

What changes the weights sits in a stage's sections and enters its key; what changes only how fast or where it runs sits in
`runtime`, `tracking` and `data` (whose files count by their bytes, never by their path) and does not.
Defaults are the quickstart: a model of 1 M parameters that learns in 80 to 120 seconds on two cores.
"""

from ttrain.config.base import Section, Weighted, as_tuple, flatten, part_of
from ttrain.config.data import DATASETS, PYTHON_DOCS, PythonDocs, Reading, Shards, Tokenizer
from ttrain.config.evaluate import Evaluate, Expert, Gate, GateJob
from ttrain.config.loop import Loop, Optim, Schedule
from ttrain.config.model import Model, Moe, MultiToken
from ttrain.config.nightly import Event, Nightly, Notify, Promotion
from ttrain.config.runtime import Night, Runtime, Tracking
from ttrain.config.settings import NAMES_CODE, SHAPE_NO_RESULT, Settings, by_weight
from ttrain.config.training import (
    TRAINING_STAGES,
    TRAININGS,
    Dpo,
    Lora,
    Pretrain,
    Sft,
    TaskConfig,
    TaskJob,
    Training,
    TrainingStage,
)

__all__ = [
    "DATASETS",
    "NAMES_CODE",
    "PYTHON_DOCS",
    "SHAPE_NO_RESULT",
    "TRAININGS",
    "TRAINING_STAGES",
    "Dpo",
    "Evaluate",
    "Event",
    "Expert",
    "Gate",
    "GateJob",
    "Loop",
    "Lora",
    "Model",
    "Moe",
    "MultiToken",
    "Night",
    "Nightly",
    "Notify",
    "Optim",
    "Pretrain",
    "Promotion",
    "PythonDocs",
    "Reading",
    "Runtime",
    "Schedule",
    "Section",
    "Settings",
    "Sft",
    "Shards",
    "TaskConfig",
    "TaskJob",
    "Tokenizer",
    "Tracking",
    "Training",
    "TrainingStage",
    "Weighted",
    "as_tuple",
    "by_weight",
    "flatten",
    "part_of",
]
