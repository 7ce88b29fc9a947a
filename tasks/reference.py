"""Stage `reference`: the log-probability of every answer under the untuned model.

Letters in names: A answers, of the shards or of a batch.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

import numpy as np
import torch
from safetensors.numpy import load_file, save

from ttrain.config import Settings
from ttrain.core.files import remove_tree, write_bytes
from ttrain.data.encoder import Encoder
from ttrain.data.packing import Rows
from ttrain.data.pair_rows import PairBatch
from ttrain.data.shards import ShardSet
from ttrain.tasks import new_model
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.tasks.common.row_scores import Scores, write_scores
from ttrain.tasks.common.rows import open_rows
from ttrain.tasks.common.training import start
from ttrain.train import leakage_check, precision
from ttrain.train.language_modeling import NextTokenLoss
from ttrain.train.preference_tuning import score_answers

PARTS = ("train", "heldout")
BLOCK_ROWS = 64  # rows of a file
LOG_PROBABILITIES = "log_probabilities"
TOKENS = "tokens"
ANSWERS = "answers"


def run(settings: Settings, job: StageContext) -> Figures:
    """Write `train.safetensors` and `heldout.safetensors`: log-probability and tokens per answer.

    Blocks of rows are scored one by one, so that a killed pass continues after its finished blocks;
    they are joined at the end.
    """
    runtime = job.runtime
    ranks = start(runtime)
    base = job.inputs["base"] / new_model.DIRECTORY
    encoder = Encoder(base, fast=False)  # its ids are asked for, no text is encoded
    model = NextTokenLoss(new_model.load(base), runtime.loss_chunk_tokens, runtime.attention)
    leakage_check.check(model, settings.dpo, branches=True)
    computed_in = precision.resolve_precision(settings.dpo.precision, ranks.device)
    model.to(ranks.device).eval()

    def score(rows: Rows, numbers: range) -> Scores:
        batch = rows.batch(numbers)
        assert isinstance(batch, PairBatch)
        with torch.no_grad(), computed_in.autocast():
            log_probs_A, tokens_A = score_answers(model, batch, ranks.device)
        return {
            ANSWERS: batch.answer_ids_A,
            LOG_PROBABILITIES: log_probs_A.cpu().numpy().astype(np.float64),
            TOKENS: tokens_A.cpu().numpy().astype(np.int64),
        }

    blocks = job.output / "blocks"
    for part in PARTS:
        rows = open_rows(
            job.inputs["shards"] / part, encoder, settings.dpo, heldout=part == "heldout"
        )
        write_scores(blocks / part, range(len(rows)), BLOCK_ROWS, partial(score, rows), job, ranks)
    ranks.barrier()
    if not ranks.first:
        return {}
    figures = {part: _join(job, part) for part in PARTS}
    remove_tree(blocks)
    return {
        "answers": figures["train"][0],
        "heldout_answers": figures["heldout"][0],
        "log_probability": figures["train"][1],
        "precision": computed_in.word,
    }


def _join(job: StageContext, part: str) -> tuple[int, float | None]:
    # An answer that is in no row gets 0 tokens and the log-probability NaN.
    answers = 2 * int(
        ShardSet(job.inputs["shards"] / part).index["rows"]
    )  # each record has up to two answers
    log_probs_A = np.full(answers, np.nan)
    tokens_A = np.zeros(answers, np.int64)
    for block in sorted((job.output / "blocks" / part).glob("[0-9]*.safetensors")):
        scores = load_file(block)
        log_probs_A[scores[ANSWERS]] = scores[LOG_PROBABILITIES]
        tokens_A[scores[ANSWERS]] = scores[TOKENS]
    write_bytes(
        job.output / f"{part}.safetensors", save({LOG_PROBABILITIES: log_probs_A, TOKENS: tokens_A})
    )
    is_scored = tokens_A > 0
    return int(is_scored.sum()), float(log_probs_A[is_scored].mean()) if is_scored.any() else None


@final
class ReferencedRows:
    """Rows of pairs whose batches bring the log-probabilities of the reference."""

    def __init__(self, rows: Rows, reference: Path, part: str) -> None:
        """`reference`: the output of the stage `reference`, of the same rows."""
        self._rows = rows
        self._log_probs_A = load_file(reference / f"{part}.safetensors")[LOG_PROBABILITIES]

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Collection[int]) -> PairBatch:
        """A batch of the rows with these numbers."""
        batch = self._rows.batch(rows)
        assert isinstance(batch, PairBatch)
        return replace(batch, references_A=self._log_probs_A[batch.answer_ids_A])
