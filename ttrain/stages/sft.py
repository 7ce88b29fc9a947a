"""Stage `sft`: the base model learns to answer; the loss counts the assistant's tokens only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.config import SftConfig
from ttrain.data.encoder import Encoder
from ttrain.stages import new_model, training
from ttrain.stages.job import StageContext


def run(config: SftConfig, job: StageContext) -> dict[str, Any]:
    """Train all weights of the base model on chats; leaves `model/` (Hugging Face), `checkpoints/` and the curves."""
    ranks = training.start(job.runtime)
    encoder = Encoder(job.inputs["base"] / "model", fast=False)  # its ids are asked for, no text is encoded
    return training.fit(config.sft, prepare(config, job.inputs, encoder), job, ranks, encoder)


def prepare(config: SftConfig, inputs: Mapping[str, Path], encoder: Encoder) -> training.TrainableModel:
    """The model before its first step."""
    base = inputs["base"] / new_model.DIRECTORY
    return training.whole_model(new_model.load(base), base)
