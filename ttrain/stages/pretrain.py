"""Stage `pretrain`: a new model learns documents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.config import PretrainConfig
from ttrain.data.encoder import Encoder
from ttrain.job import Job
from ttrain.model import factory
from ttrain.stages import training


def run(config: PretrainConfig, job: Job) -> dict[str, Any]:
    """Train a freshly initialised model; leaves `model/` (Hugging Face), `checkpoints/` and the curves."""
    ranks = training.start(job.runtime)
    encoder = Encoder(job.inputs["tokenizer"], fast=False)  # its ids are asked for, no text is encoded
    return training.fit(config.pretrain, prepare(config, job.inputs, encoder), job, ranks, encoder)


def prepare(config: PretrainConfig, inputs: Mapping[str, Path], encoder: Encoder) -> training.Trained:
    """The model before its first step."""
    ids = {
        "bos_token_id": encoder.bos_id,
        "eos_token_id": encoder.eos_id,
        "pad_token_id": encoder.pad_id,
    }
    stops = [encoder.eos_id, encoder.end_id]
    model = factory.build(config.model, vocab_size=len(encoder), ids=ids, stop_ids=stops, seed=config.pretrain.seed)
    return training.Trained(
        model,
        state=lambda: factory.state(model),
        load=lambda weights: factory.load_state(model, weights),
        files={**factory.files(model), **training.tokenizer_files(inputs["tokenizer"])},
    )
