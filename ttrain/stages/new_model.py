"""Stage `new-model`: the model before its first step, for a stage other than pretraining that starts from none."""

from __future__ import annotations

from typing import Any

from ttrain.config import NewModelConfig
from ttrain.data.encoder import Encoder
from ttrain.stages import models
from ttrain.stages.job import Job


def run(config: NewModelConfig, job: Job) -> dict[str, Any]:
    """Write the model that pretraining would begin with as `model/`; returns its size."""
    tokenizer = job.inputs["tokenizer"]
    model = models.new(config.model, Encoder(tokenizer, fast=False), config.pretrain.seed)
    models.write(model, tokenizer, job.output / models.DIRECTORY)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}
