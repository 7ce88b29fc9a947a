"""Stage `lora`: a low-rank adapter on the SFT model learns a domain; the base stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.config import LoraConfig
from ttrain.data.encoder import Encoder
from ttrain.digests import sha256_file
from ttrain.job import Job
from ttrain.model import adapters, factory
from ttrain.stages import training
from ttrain.train import checkpoint


def run(config: LoraConfig, job: Job) -> dict[str, Any]:
    """Train an adapter; leaves `adapter/` (PEFT), `checkpoints/` and the curves."""
    ranks = training.start(job.runtime)
    encoder = Encoder(job.inputs["base"] / "model", fast=False)  # its ids are asked for, no text is encoded
    return training.fit(config.lora, prepare(config, job.inputs, encoder), job, ranks, encoder)


def prepare(config: LoraConfig, inputs: Mapping[str, Path], encoder: Encoder) -> training.Trained:
    """The model before its first step."""
    base = inputs["base"] / "model"
    model = adapters.attach(factory.load(base), config.lora)
    return training.Trained(
        model,
        state=lambda: adapters.state(model),
        load=lambda weights: adapters.load_state(model, weights),
        files={
            **adapters.files(model, base="ttrain-sft", base_digest=sha256_file(base / checkpoint.WEIGHTS)),
            **training.tokenizer_files(base),
        },
        directory="adapter",
        weights_file=adapters.WEIGHTS,
    )
