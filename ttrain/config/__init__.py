"""Every setting, typed and frozen.

What changes the weights sits in a stage's sections and enters its key; what changes only how fast or where it runs sits in
`runtime`, `tracking` and `data` (whose files count by their bytes, never by their path) and does not.
Defaults are the quickstart: a model of 1 M parameters that learns in about a minute on two cores.
"""

from ttrain.config.base import Paths, Section, Share, Weighted, as_tuple, flatten
from ttrain.config.data import DATASETS, PYTHON_DOCS, Data, PythonDocs, Reading, Shards, Tokenizer
from ttrain.config.evaluate import Evaluate, Expert, Gate, GateConfig
from ttrain.config.model import Model, Moe, MultiToken
from ttrain.config.nightly import Event, Nightly, Notify, Promotion
from ttrain.config.runtime import Auth, Night, Runtime, Servers, ServersConfig, Tracking
from ttrain.config.settings import (
    NAMES_CODE,
    SHAPE_NO_RESULT,
    EvaluateConfig,
    ExistingModelConfig,
    HeldoutConfig,
    LoraConfig,
    NewModelConfig,
    PretrainConfig,
    Settings,
    SftConfig,
    ShardsConfig,
    SourceConfig,
    TokenizerConfig,
    UserTaskConfig,
)
from ttrain.config.training import EarlyStopping, Loop, Lora, Optim, Precision, Pretrain, Schedule, Sft, TaskConfig, Training

__all__ = [
    "DATASETS",
    "NAMES_CODE",
    "PYTHON_DOCS",
    "SHAPE_NO_RESULT",
    "Auth",
    "Data",
    "EarlyStopping",
    "Evaluate",
    "EvaluateConfig",
    "Event",
    "ExistingModelConfig",
    "Expert",
    "Gate",
    "GateConfig",
    "HeldoutConfig",
    "Loop",
    "Lora",
    "LoraConfig",
    "Model",
    "Moe",
    "MultiToken",
    "NewModelConfig",
    "Night",
    "Nightly",
    "Notify",
    "Optim",
    "Paths",
    "Precision",
    "Pretrain",
    "PretrainConfig",
    "Promotion",
    "PythonDocs",
    "Reading",
    "Runtime",
    "Schedule",
    "Section",
    "Servers",
    "ServersConfig",
    "Settings",
    "Sft",
    "SftConfig",
    "Shards",
    "ShardsConfig",
    "Share",
    "SourceConfig",
    "TaskConfig",
    "Tokenizer",
    "TokenizerConfig",
    "Tracking",
    "Training",
    "UserTaskConfig",
    "Weighted",
    "as_tuple",
    "flatten",
]
