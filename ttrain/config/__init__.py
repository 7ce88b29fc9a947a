"""Every setting, typed and frozen.

A stage's sections change its weights and enter its key. `runtime`, `tracking` and `data` do not;
data files count by their bytes. Defaults are the quickstart: 1 M parameters, 80 to 120 s on two
cores.
"""

from ttrain.config.base import Section, Weighted, as_tuple, flatten, part_of
from ttrain.config.data import DATASETS, PYTHON_DOCS, PythonDocs, Reading, Shards, Tokenizer
from ttrain.config.evaluate import Evaluate, Expert, Gate, GateJob
from ttrain.config.loop import Loop, Optim, Schedule
from ttrain.config.model import Model, Moe, MultiToken
from ttrain.config.nightly import Event, Nightly, Notify, Promotion
from ttrain.config.runtime import QuietHours, Runtime, Tracking
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
    "Nightly",
    "Notify",
    "Optim",
    "Pretrain",
    "Promotion",
    "PythonDocs",
    "QuietHours",
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
