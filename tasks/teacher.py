"""Stage `teacher`: the likeliest next tokens of earlier models at every position of the rows.

Pretraining then learns a mixture of the labels and of these (arXiv:1503.02531).
"""
# Letters in names: B rows, T positions, V entries of the vocabulary.

import torch

from ttrain.config import Settings
from ttrain.data.encoder import Encoder
from ttrain.errors import UsageError
from ttrain.tasks import TAUGHT_BY, new_model
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.tasks.common.row_scores import Scores, write_scores
from ttrain.tasks.common.rows import open_rows, with_replay
from ttrain.tasks.common.training import start
from ttrain.train import precision
from ttrain.train.language_modeling import NextTokenLoss
from ttrain.train.teacher import BLOCK_ROWS, likeliest


def run(settings: Settings, job: StageContext) -> Figures:
    """Write the likeliest tokens of all rows, or of the replayed ones, which a champion learnt."""
    config = settings.pretrain
    ranks = start(job.runtime)
    encoder = Encoder(job.inputs["tokenizer"], fast=False)  # no text is encoded
    bases = [
        path / new_model.DIRECTORY
        for name, path in job.inputs.items()
        if name.startswith(TAUGHT_BY)
    ]
    if any(Encoder(base, fast=False).digest != encoder.digest for base in bases):
        raise UsageError(
            "pretrain.teacher names a model of another tokenizer, whose tokens are not those of "
            "the rows; name models of this tokenizer, or leave it out"
        )
    rows = open_rows(job.inputs["shards"] / "train", encoder, config)
    first = 0
    if "replay" in job.inputs:
        first = len(rows)
        rows = with_replay(rows, job.inputs["replay"] / "train", encoder, config)
    computed_in = precision.resolve_precision(config.precision, ranks.device)
    models = [
        NextTokenLoss(new_model.load(base), job.runtime.loss_chunk_tokens, job.runtime.attention)
        .to(ranks.device)
        .eval()
        for base in bases
    ]

    def score(numbers: range) -> Scores:
        batch = rows.batch(numbers)
        mean_BTV = torch.zeros(())
        with torch.no_grad(), computed_in.autocast():
            for model in models:
                # A model of the Hub may have more columns than its tokenizer has tokens.
                logits_BTV = model.logits(batch, ranks.device)[..., : len(encoder)]
                mean_BTV = mean_BTV + logits_BTV.float().softmax(-1) / len(models)
        return likeliest(mean_BTV, rows.row_length)

    write_scores(job.output, range(first, len(rows)), BLOCK_ROWS, score, job, ranks)
    ranks.barrier()
    return {"taught_rows": len(rows) - first, "precision": computed_in.word}
