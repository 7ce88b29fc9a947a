"""Stage `lora`: train an adapter on a frozen model for a domain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.config import LoraConfig
from ttrain.config.training import NONE, TRAININGS
from ttrain.data.encoder import Encoder
from ttrain.model import adapters
from ttrain.model import adapters as quantizing
from ttrain.stages import training
from ttrain.stages.job import StageContext
from ttrain.store.model_files import weights_digest


def run(config: LoraConfig, job: StageContext) -> dict[str, Any]:
    """Train an adapter; leaves `adapter/` (PEFT), `checkpoints/` and the curves."""
    ranks = training.start(job.runtime)
    encoder = Encoder(job.inputs["base"] / "model", fast=False)  # its ids are asked for, no text is encoded
    return training.fit(config.lora, prepare(config, job.inputs, encoder), job, ranks, encoder)


def prepare(config: LoraConfig, inputs: Mapping[str, Path], encoder: Encoder) -> training.TrainableModel:
    """The model before its first step."""
    base, quantize = inputs["base"] / "model", config.lora.quantize
    model = adapters.attach(quantizing.load_quantized(base, config.lora), config.lora)
    return training.TrainableModel(
        model,
        state=lambda: adapters.state(model),
        load=lambda weights: adapters.load_state(model, weights),
        files={
            **adapters.files(
                model,
                base=_name_of_base(config),
                base_digest=weights_digest(base),
                held_in=None if quantize == "none" else quantize,
            ),
            **training.tokenizer_files(base),
        },
        directory="adapter",
        weights_file=adapters.WEIGHTS,
    )


def _name_of_base(config: LoraConfig) -> str:
    """The base's name for people, which reveals no path; what binds the adapter to its base is the digest."""
    start = config.lora.start_from
    return f"ttrain-{start}" if start in TRAININGS else "ttrain-new-model" if start == NONE else "ttrain-base-model"
