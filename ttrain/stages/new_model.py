"""Whole models in stages: make one from the settings, read it, write it; and the stage `new-model`, which does no more."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ttrain.config import Model, NewModelConfig
from ttrain.data.encoder import Encoder
from ttrain.model import factory, multi_token
from ttrain.stages.job import Figures, StageContext
from ttrain.store.model_files import MODEL
from ttrain.train import checkpoint_format
from ttrain.train.snapshots import copy_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DIRECTORY = "model"  # of an artifact

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """A tokenizer's files, to stand beside the weights."""
    return {name: (directory / name).read_bytes() for name in TOKENIZER_FILES}


def special_ids(encoder: Encoder) -> dict[str, int]:
    """The ids of the special tokens, by the names that models have for them."""
    return {"bos_token_id": encoder.bos_id, "eos_token_id": encoder.eos_id, "pad_token_id": encoder.pad_id}


def new(config: Model, encoder: Encoder, seed: int) -> PreTrainedModel:
    """A freshly initialised model for this tokenizer."""
    stops = [encoder.eos_id, encoder.end_id]
    model = factory.build(config, vocab_size=len(encoder), ids=special_ids(encoder), stop_ids=stops, seed=seed)
    if config.multi_token is not None:
        multi_token.attach(model, config.multi_token, seed)
    return model


def count_parameters(model: nn.Module, *, trained: bool = False) -> int:
    """The number of parameters, or of those alone that are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad or not trained)


def load(directory: Path) -> PreTrainedModel:
    """A model from its Hugging Face directory, with the second head that may lie beside it."""
    model = factory.load(directory)
    multi_token.attach_from(model, directory)
    return model


def write(model: PreTrainedModel, tokenizer: Path, directory: Path) -> None:
    """Write a Hugging Face directory, in the layout of the training stages."""
    write_files(directory, {**factory.files(model), **tokenizer_files(tokenizer)}, multi_token.state(model))


def write_files(
    directory: Path,
    files: Mapping[str, bytes],
    weights: Mapping[str, Tensor],
    weights_file: str = MODEL,
    left_out: Collection[str] = (),
) -> None:
    """Write the files of a model and its weights; a tensor that is named FILE.safetensors/NAME into that file.

    A file of weights that is `left_out` is removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    for file, tensors in checkpoint_format.by_file(copy_tensors(weights), weights_file).items():
        if file in left_out:
            (directory / file).unlink(missing_ok=True)
        else:
            write_weights(directory / file, tensors)


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of weights, which replaces an old one when it is whole."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.unlink(missing_ok=True)
    checkpoint_format.write(temporary, checkpoint_format.tensor_parts(tensors, {"format": "pt"}))
    temporary.replace(path)


def run(config: NewModelConfig, job: StageContext) -> Figures:
    """Write the model that pretraining would begin with as `model/`; returns its size."""
    tokenizer = job.inputs["tokenizer"]
    model = new(config.model, Encoder(tokenizer, fast=False), config.pretrain.seed)
    write(model, tokenizer, job.output / DIRECTORY)
    return {"parameters": count_parameters(model)}
