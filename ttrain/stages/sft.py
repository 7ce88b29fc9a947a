"""Stage `sft`: the base model learns to answer; the loss counts the assistant's tokens only."""

from __future__ import annotations

from typing import Any

from ttrain.config import SftConfig
from ttrain.data.encoder import Encoder
from ttrain.job import Job
from ttrain.model import factory
from ttrain.stages import training


def run(config: SftConfig, job: Job) -> dict[str, Any]:
    """Train all weights of the base model on chats; leaves `model/` (Hugging Face), `checkpoints/` and the curves."""
    ranks = training.start(job.runtime)
    base = job.inputs["base"] / "model"
    encoder = Encoder(base, fast=False)  # its ids are asked for, no text is encoded
    model = factory.load(base)
    trained = training.Trained(
        model,
        state=lambda: factory.state(model),
        load=lambda weights: factory.load_state(model, weights),
        files={**factory.files(model), **training.tokenizer_files(base)},
    )
    return training.fit(config.sft, trained, job, ranks, encoder)
