"""Stage `base-model`: write an existing model in fp32 with the pipeline's tokenizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.config import Settings
from ttrain.core.files import temporary_directory
from ttrain.data.encoder import Encoder, open_tokenizer
from ttrain.errors import ArtifactError
from ttrain.model import factory
from ttrain.model.embeddings import embedding_rows, grow
from ttrain.tasks import new_model
from ttrain.tasks.common.job import Figures, StageContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel


WORDS = re.compile(r"[^\W_]+")

log = logging.getLogger("ttrain")


def run(settings: Settings, job: StageContext) -> Figures:
    """Write the model as `model/`, as training stages do; returns what was changed."""
    files = {role: list(map(Path, paths)) for role, paths in job.files.items()}
    return prepare_base_model(files, job.inputs["tokenizer"], job.output / new_model.DIRECTORY)


def prepare_base_model(
    files: Mapping[str, Sequence[Path]], tokenizer: Path, directory: Path
) -> Figures:
    """Load the model, give it a row for each token, and write both under `directory`.

    `files`: as of `existing.model_files`. Raises ArtifactError with every tensor that does not fit.
    """
    model = _load(files)
    encoder = Encoder(tokenizer)
    rows_before = embedding_rows(model)
    known = _vocabulary(files["tokenizer"][0]) if "tokenizer" in files else {}
    seen = {*known.values()} if "tokenizer" in files else range(rows_before)
    new = _vocabulary(tokenizer / "tokenizer.json")
    unseen = {number for number in new.values() if number >= rows_before or number not in seen}
    moved = sum(
        number < rows_before and new.get(token) != number for token, number in known.items()
    )
    if moved:
        log.warning(
            "%d of the %d tokens that the model knows have other ids in the tokenizer, so "
            "that their embeddings must be "
            "learnt again; better leave tokenizer.existing out",
            moved,
            len(known),
        )
    grow(model, len(encoder), _pieces(encoder, new, unseen))
    _set_ids(model, encoder)
    new_model.write(model, tokenizer, directory)
    return {
        "parameters": factory.count_parameters(model),
        "model_type": model.config.model_type,
        "vocab_size": embedding_rows(model),
        "vocab_size_before": rows_before,
        "added_tokens": sorted(token for token, number in new.items() if number in unseen),
    }


def _load(files: Mapping[str, Sequence[Path]]) -> PreTrainedModel:
    # Only from the files that are in the key: others in the folder must not affect it.
    with temporary_directory("model") as temporary:
        for path in (*files["config"], *files["weights"], *files.get("second_head", ())):
            (temporary / path.name).symlink_to(path.absolute())
        try:
            return new_model.load(temporary)
        except ArtifactError as error:
            raise ArtifactError(
                str(error).replace(str(temporary), str(files["config"][0].parent))
            ) from None


def _vocabulary(path: Path) -> dict[str, int]:
    return dict(open_tokenizer(path).get_vocab(with_added_tokens=True))


def _pieces(encoder: Encoder, new: Mapping[str, int], unseen: set[int]) -> dict[int, list[int]]:
    # By new token the known tokens of its text: <|user|> to those of "user".
    tokens = sorted((number, token) for token, number in new.items() if number in unseen)
    spelled = encoder.encode([" ".join(WORDS.findall(token)) for _, token in tokens])
    pieces = {}
    for (number, _), ids in zip(tokens, spelled, strict=True):
        pieces[number] = [piece for piece in ids if piece not in unseen]
    return pieces


def _set_ids(model: PreTrainedModel, encoder: Encoder) -> None:
    # The model's own stop tokens stay.
    generation = model.generation_config
    own_stops = generation.eos_token_id
    stops = own_stops if isinstance(own_stops, list) else [own_stops]
    for name, number in new_model.special_ids(encoder).items():
        setattr(model.config, name, number)
        setattr(generation, name, number)
    stop_ids = dict.fromkeys([encoder.eos_id, encoder.end_id, *stops])
    generation.eos_token_id = [number for number in stop_ids if number is not None]
