"""Stage `base-model`: a model that exists, taken in: checked, in fp32, with the pipeline's tokenizer."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.config import ExistingModelConfig
from ttrain.data.encoder import Encoder, open_tokenizer
from ttrain.errors import ArtifactError
from ttrain.model import vocabulary
from ttrain.stages import models
from ttrain.stages.job import Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORDS = re.compile(r"[^\W_]+")
log = logging.getLogger("ttrain")


def run(config: ExistingModelConfig, job: Job) -> dict[str, Any]:
    """Write the model as `model/`, as the stages that train leave theirs; returns what was done to it."""
    files = {role: [Path(path) for path in paths] for role, paths in job.files.items()}
    return take(files, job.inputs["tokenizer"], job.output / models.DIRECTORY)


def take(files: Mapping[str, Sequence[Path]], tokenizer: Path, directory: Path) -> dict[str, Any]:
    """Load the files, give the model a row for each token of the tokenizer, and write it with that under `directory`.

    `files` by the roles of `existing_model.files`. Raises ArtifactError that lists each tensor which is missing, left over
    or of another shape.
    """
    model = _load(files)
    encoder = Encoder(tokenizer)
    before = vocabulary.rows_of(model)
    own = _vocabulary(files["tokenizer"][0]) if "tokenizer" in files else None
    new = _vocabulary(tokenizer / "tokenizer.json")
    unseen = {number for number in new.values() if number >= before or (own is not None and number not in own.values())}
    if own is not None:
        _warn_of_others(own, new, before)
    vocabulary.grow(model, len(encoder), _pieces(encoder, new, unseen))
    _set_ids(model, encoder)
    models.write(model, tokenizer, directory)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model_type": model.config.model_type,
        "vocab_size": vocabulary.rows_of(model),
        "vocab_size_before": before,
        "added_tokens": sorted(token for token, number in new.items() if number in unseen),
    }


def _load(files: Mapping[str, Sequence[Path]]) -> PreTrainedModel:
    """From the files that are in the key alone: others in the same folder must not have a say."""
    with tempfile.TemporaryDirectory(prefix="ttrain-model-") as temporary:
        for path in (*files["config"], *files["weights"], *files.get("second_head", ())):
            (Path(temporary) / path.name).symlink_to(path.absolute())
        try:
            return models.load(Path(temporary))
        except ArtifactError as error:
            raise ArtifactError(str(error).replace(temporary, str(files["config"][0].parent))) from None


def _vocabulary(path: Path) -> dict[str, int]:
    return dict(open_tokenizer(path).get_vocab(with_added_tokens=True))


def _warn_of_others(own: Mapping[str, int], new: Mapping[str, int], rows: int) -> None:
    others = sum(number < rows and new.get(token) != number for token, number in own.items())
    if others:
        log.warning(
            "%d of the %d tokens that the model knows have other ids in the tokenizer, so that their embeddings must be "
            "learnt anew; tokenizer.existing is better left out",
            others,
            len(own),
        )


def _pieces(encoder: Encoder, new: Mapping[str, int], unseen: set[int]) -> dict[int, list[int]]:
    """For each token that the model has never seen, the tokens of its words: of <|user|>, those of "user"."""
    tokens = sorted((number, token) for token, number in new.items() if number in unseen)
    spelled = encoder.encode([" ".join(WORDS.findall(token)) for _, token in tokens])
    return {
        number: [piece for piece in ids if piece not in unseen] for (number, _), ids in zip(tokens, spelled, strict=True)
    }


def _set_ids(model: PreTrainedModel, encoder: Encoder) -> None:
    """The ids of the tokenizer, also where the model names others; what it stops at, it goes on stopping at."""
    generation = model.generation_config
    stops = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    ids = {"bos_token_id": encoder.bos_id, "eos_token_id": encoder.eos_id, "pad_token_id": encoder.pad_id}
    for name, number in ids.items():
        setattr(model.config, name, number)
        setattr(generation, name, number)
    known = [number for number in stops if number is not None]
    generation.eos_token_id = list(dict.fromkeys([encoder.eos_id, encoder.end_id, *known]))
