"""Stage `reference`: the log-probability of every answer under the model that preference tuning starts from.

Letters in names: A answers, of the whole set of shards or of a batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import nn

from ttrain.config import Settings
from ttrain.core.files import remove_tree, write_bytes
from ttrain.data.encoder import Encoder
from ttrain.data.packing import Rows
from ttrain.data.pair_rows import PairBatch
from ttrain.data.shards import ShardSet
from ttrain.errors import ArtifactError
from ttrain.tasks import new_model
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.tasks.common.rows import open_rows
from ttrain.tasks.common.trainable_model import start
from ttrain.train import leakage_check, precision
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import NextTokenLoss
from ttrain.train.losses import token_loss_sum
from ttrain.train.precision import Precision
from ttrain.train.preference_tuning import score_answers

PARTS = ("train", "heldout")
BLOCK_ROWS = 64  # scored between two files, which a killed pass finds again
LOG_PROBABILITIES, TOKENS, ANSWERS = "log_probabilities", "tokens", "answers"

Floats = npt.NDArray[np.float64]


def run(settings: Settings, job: StageContext) -> Figures:
    """Write `train.safetensors` and `heldout.safetensors`: log-probability and tokens of each answer, by its number.

    The ranks take turns in blocks of rows, each of which is a file until the end, so that a pass which is killed goes on
    there. The model is frozen, without dropout, and in the precision of the training.
    """
    ranks, config = start(job.runtime), settings.dpo
    base = job.inputs["base"] / new_model.DIRECTORY
    encoder = Encoder(base, fast=False)  # its ids are asked for, no text is encoded
    options = job.runtime.loss_chunk_tokens, job.runtime.attention
    model = NextTokenLoss(new_model.load(base), token_loss_sum, *options)
    leakage_check.check(model, config, branches=True)
    computed_in = precision.resolve_precision(config.precision, ranks.device)
    scorer = _Scorer(model.to(ranks.device).eval(), computed_in, job, ranks)
    rows = {part: open_rows(job.inputs["shards"] / part, encoder, config, heldout=part == "heldout") for part in PARTS}
    blocks = job.output / "blocks"
    for part in PARTS:
        scorer.score(rows[part], blocks / part)
    ranks.barrier()
    if not ranks.first:
        return {}
    figures = {part: _join(blocks / part, job.output / f"{part}.safetensors", answers_of(job, part)) for part in PARTS}
    remove_tree(blocks)
    return {
        "answers": figures["train"][0],
        "heldout_answers": figures["heldout"][0],
        "log_probability": figures["train"][1],
        "precision": computed_in.word,
    }


def answers_of(job: StageContext, part: str) -> int:
    """One more than the largest number that an answer of this part may have."""
    return 2 * int(ShardSet(job.inputs["shards"] / part).index["rows"])


@dataclass(frozen=True)
class _Scorer:
    """Scores blocks of rows, and leaves out those that are there."""

    model: nn.Module
    precision: Precision
    job: StageContext
    ranks: Ranks

    def score(self, rows: Rows, directory: Path) -> None:
        """Write the blocks of this rank."""
        directory.mkdir(parents=True, exist_ok=True)
        for number, first in enumerate(range(0, len(rows), BLOCK_ROWS)):
            self.job.progress.update(first, len(rows), "rows")
            path = directory / f"{number:06}.safetensors"
            if number % self.ranks.world == self.ranks.rank and not _is_whole(path):
                write_bytes(path, save(self._block(rows, range(first, min(first + BLOCK_ROWS, len(rows))))))
        self.job.progress.update(len(rows), len(rows), "rows")

    def _block(self, rows: Rows, numbers: range) -> dict[str, npt.NDArray[Any]]:
        columns: dict[str, list[npt.NDArray[Any]]] = {ANSWERS: [], LOG_PROBABILITIES: [], TOKENS: []}
        size = self.job.runtime.rows_per_device
        for first in range(numbers.start, numbers.stop, size):
            batch = rows.batch(range(first, min(first + size, numbers.stop)))
            assert isinstance(batch, PairBatch)
            with torch.no_grad(), self.precision.autocast():
                log_probs_A, tokens_A = score_answers(self.model, batch, self.ranks.device)
            columns[ANSWERS].append(batch.answer_ids_A)
            columns[LOG_PROBABILITIES].append(log_probs_A.cpu().numpy().astype(np.float64))
            columns[TOKENS].append(tokens_A.cpu().numpy().astype(np.int64))
        return {name: np.concatenate(arrays) for name, arrays in columns.items()}


def _join(directory: Path, path: Path, answers: int) -> tuple[int, float | None]:
    """Write the scores of all blocks by the answers' numbers; returns how many there are, and their mean.

    An answer that no row holds has no number of tokens, and NaN.
    """
    log_probs_A, tokens_A = np.full(answers, np.nan), np.zeros(answers, np.int64)
    for block in sorted(directory.iterdir()):
        scores = load_file(block)
        log_probs_A[scores[ANSWERS]], tokens_A[scores[ANSWERS]] = scores[LOG_PROBABILITIES], scores[TOKENS]
    write_bytes(path, save({LOG_PROBABILITIES: log_probs_A, TOKENS: tokens_A}))
    scored = tokens_A > 0
    return int(scored.sum()), float(log_probs_A[scored].mean()) if scored.any() else None


def _is_whole(path: Path) -> bool:
    """Whether the block is there and can be read."""
    try:
        return bool(load_file(path))
    except (OSError, SafetensorError):
        return False


@final
class ReferencedRows:
    """Rows of pairs whose batches bring the log-probabilities of the reference."""

    def __init__(self, rows: Rows, reference: Path, part: str) -> None:
        """`reference`: the output of the stage `reference`, of the same rows."""
        self._rows = rows
        path = reference / f"{part}.safetensors"
        try:
            self._log_probs_A: Floats = load_file(path)[LOG_PROBABILITIES]
        except (OSError, SafetensorError, KeyError) as error:
            raise ArtifactError(f"cannot read the log-probabilities of the reference in {path}: {error}") from None

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Collection[int]) -> PairBatch:
        """A batch of the rows with these numbers."""
        batch = self._rows.batch(rows)
        assert isinstance(batch, PairBatch)
        ids_A = batch.answer_ids_A
        if len(ids_A) and (ids_A.max() >= len(self._log_probs_A) or np.isnan(self._log_probs_A[ids_A]).any()):
            raise ArtifactError(
                f"the stage reference has no score of one of the answers {ids_A.min()} to {ids_A.max()}, which the training "
                f"reads: it was made of other rows; make it again with --force reference"
            )
        return replace(batch, references_A=self._log_probs_A[ids_A])
