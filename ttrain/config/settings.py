"""The whole tree of settings, and which part of it each stage may see."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from ttrain.config.base import Section
from ttrain.config.data import Data, PythonDocs, Reading, Shards, Tokenizer
from ttrain.config.evaluate import Evaluate
from ttrain.config.model import Model
from ttrain.config.runtime import Runtime, Tracking
from ttrain.config.training import Lora, Pretrain, Sft


class Settings(Section):
    """The whole tree."""

    name: str = Field("quickstart", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="prefix of registered models")
    data: Data = Data()
    python_docs: PythonDocs = PythonDocs()
    reading: Reading = Reading()
    tokenizer: Tokenizer = Tokenizer()
    shards: Shards = Shards()
    model: Model = Model()
    pretrain: Pretrain = Pretrain()
    sft: Sft = Sft()
    lora: Lora = Lora()
    evaluate: Evaluate = Evaluate()
    runtime: Runtime = Runtime()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _rows_fit_the_model(self) -> Settings:
        for name in ("pretrain", "sft", "lora", "evaluate"):
            length = getattr(self, name).row_length
            if length > self.model.max_length:
                raise ValueError(
                    f"{name}.row_length is {length} but model.max_length is {self.model.max_length}; "
                    f"set model.max_length={length}"
                )
        return self


# Sections that each stage is allowed to see: what is not here cannot shape its result.
class SourceConfig(Section):
    python_docs: PythonDocs


class TokenizerConfig(Section):
    reading: Reading
    tokenizer: Tokenizer


class ShardsConfig(Section):
    reading: Reading
    shards: Shards


class PretrainConfig(Section):
    model: Model
    pretrain: Pretrain


class SftConfig(Section):
    sft: Sft


class LoraConfig(Section):
    lora: Lora


class EvaluateConfig(Section):
    evaluate: Evaluate


class UserTaskConfig(Section):
    """What `ttrain train --task` hands to its process, which alone knows the task's own settings."""

    task: str
    given: tuple[tuple[str, str, Any], ...]  # (origin, key, value) of the settings, the weakest first
    allow: tuple[str, ...]
