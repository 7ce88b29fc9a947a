"""Stage `teacher`: the likeliest next tokens of an earlier model at every position of the rows.

Pretraining then learns a mixture of the labels and of these (arXiv:1503.02531).
"""

import torch

from ttrain.config import Pretrain, Settings, rules
from ttrain.data.encoder import Encoder
from ttrain.data.packing import Rows
from ttrain.errors import UsageError
from ttrain.tasks import new_model
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.tasks.common.row_scores import Scores, write_scores
from ttrain.tasks.common.rows import open_rows, with_replay
from ttrain.tasks.common.training import start
from ttrain.train import precision
from ttrain.train.language_modeling import NextTokenLoss
from ttrain.train.teacher import BLOCK_ROWS, likeliest

FEWEST_PASSES = 3


def run(settings: Settings, job: StageContext) -> Figures:
    """Write the likeliest tokens of all rows, or of the replayed ones, which a champion learnt."""
    config = settings.pretrain
    runtime = job.runtime
    ranks = start(runtime)
    encoder = Encoder(job.inputs["tokenizer"], fast=False)  # its ids are asked for, none encoded
    base = job.inputs["teacher"] / new_model.DIRECTORY
    if Encoder(base, fast=False).digest != encoder.digest:
        raise UsageError(
            f"pretrain.teacher is {config.teacher}, a model with another tokenizer, whose tokens "
            f"are not those of the rows; name a model of this tokenizer, or leave it out"
        )
    rows = open_rows(job.inputs["shards"] / "train", encoder, config)
    first = 0
    if "replay" in job.inputs:
        first = len(rows)
        rows = with_replay(rows, job.inputs["replay"] / "train", encoder, config)
    else:
        check_passes(config, rows)
    model = NextTokenLoss(new_model.load(base), runtime.loss_chunk_tokens, runtime.attention)
    computed_in = precision.resolve_precision(config.precision, ranks.device)
    model.to(ranks.device).eval()

    def score(numbers: range) -> Scores:
        with torch.no_grad(), computed_in.autocast():
            return likeliest(model.logits(rows.batch(numbers), ranks.device), rows.row_length)

    write_scores(job.output, range(first, len(rows)), BLOCK_ROWS, score, job, ranks)
    ranks.barrier()
    return {"taught_rows": len(rows) - first, "precision": computed_in.word}


def check_passes(config: Pretrain, rows: Rows) -> None:
    """Raise UsageError where the rows are read too rarely for a teacher to help."""
    tokens = rows.epoch * rows.row_length
    budget = rules.budget(tokens) if config.tokens == rules.AUTO else config.token_budget
    passes = config.passes or (budget or 0) / max(1, tokens)
    if passes < FEWEST_PASSES:
        raise UsageError(
            f"pretrain.teacher is {config.teacher}, but the rows are read {passes:.2g} times: a "
            f"teacher helps from {FEWEST_PASSES} passes on; set pretrain.tokens=null "
            f"pretrain.epochs={FEWEST_PASSES} or more, or leave it out"
        )
