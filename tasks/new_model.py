"""Models in stages: make one from the settings, read it, write it; and the stage `new-model`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.config import Model, Settings
from ttrain.data.encoder import Encoder
from ttrain.model import factory, multi_token
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.train import checkpoint_format

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DIRECTORY = "model"  # of an artifact

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """A tokenizer's files, to stand beside the weights."""
    return {name: (directory / name).read_bytes() for name in TOKENIZER_FILES}


def special_ids(encoder: Encoder) -> dict[str, int]:
    """The ids of the special tokens, by the names that models have for them."""
    return {
        "bos_token_id": encoder.bos_id,
        "eos_token_id": encoder.eos_id,
        "pad_token_id": encoder.pad_id,
    }


def new(config: Model, encoder: Encoder, seed: int) -> PreTrainedModel:
    """A freshly initialised model for this tokenizer."""
    model = factory.build(
        config,
        vocab_size=len(encoder),
        ids=special_ids(encoder),
        stop_ids=[encoder.eos_id, encoder.end_id],
        seed=seed,
    )
    if config.multi_token is not None:
        multi_token.attach(model, config.multi_token, seed)
    return model


def load(directory: Path) -> PreTrainedModel:
    """A model from its Hugging Face directory, with its second head, if any."""
    model = factory.load(directory)
    multi_token.attach_from(model, directory)
    return model


def write(model: PreTrainedModel, tokenizer: Path, directory: Path) -> None:
    """Write a Hugging Face directory, in the layout of the training stages."""
    checkpoint_format.write_model(
        directory, {**factory.files(model), **tokenizer_files(tokenizer)}, multi_token.state(model)
    )


def run(settings: Settings, job: StageContext) -> Figures:
    """Write the model that pretraining would begin with as `model/`; returns its size."""
    tokenizer = job.inputs["tokenizer"]
    model = new(settings.model, Encoder(tokenizer, fast=False), settings.pretrain.seed)
    write(model, tokenizer, job.output / DIRECTORY)
    return {"parameters": factory.count_parameters(model)}
