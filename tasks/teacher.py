"""Stage `teacher`: the likeliest next tokens of an earlier model at every position of the rows.

Pretraining then learns a mixture of the labels and of these (arXiv:1503.02531).

Letters in names: T positions of a row, K likeliest tokens.
"""

import io
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from ttrain.config import Pretrain, Settings
from ttrain.core.files import write_bytes
from ttrain.data.encoder import Encoder
from ttrain.data.packing import Batch, Rows, Taught
from ttrain.errors import UsageError
from ttrain.tasks import new_model
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.tasks.common.rows import open_rows, with_replay
from ttrain.tasks.common.training import start
from ttrain.train import precision
from ttrain.train.language_modeling import NextTokenLoss

FEWEST_PASSES = 3
TOP = 32  # tokens a position
BLOCK_ROWS = 1024  # rows per file; a killed pass keeps its finished files
IDS, LOG_PROBABILITIES = "ids", "log_probabilities"
NAMES = (IDS, LOG_PROBABILITIES)


def run(settings: Settings, job: StageContext) -> Figures:
    """Write `IDS` and `LOG_PROBABILITIES`, [rows, T, K], in files of `BLOCK_ROWS` rows.

    Blocks are dealt to the ranks in turn. Of a night these are the replayed rows alone, which the
    champion has learnt.
    """
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

    def likeliest(numbers: range) -> dict[str, npt.NDArray[Any]]:
        batch = rows.batch(numbers)
        with torch.no_grad(), computed_in.autocast():
            logits_BTV = model.logits(batch, ranks.device)
        top = torch.log_softmax(logits_BTV.float(), -1).topk(min(TOP, len(encoder)))
        rest = ((0, 0), (0, rows.row_length - logits_BTV.shape[1]), (0, 0))
        ids = top.indices.cpu().numpy().astype(np.min_scalar_type(len(encoder)))
        log_probs = top.values.cpu().numpy().astype(np.float16)
        return {IDS: np.pad(ids, rest), LOG_PROBABILITIES: np.pad(log_probs, rest)}

    for block, begin in enumerate(range(first, len(rows), BLOCK_ROWS)):
        job.progress.update(begin - first, len(rows) - first, "rows")
        paths = {name: job.output / f"{name}-{block:06}.npy" for name in NAMES}
        if block % ranks.world != ranks.rank or all(path.exists() for path in paths.values()):
            continue
        numbers = range(begin, min(begin + BLOCK_ROWS, len(rows)))
        size = runtime.rows_per_device
        parts = [likeliest(numbers[at : at + size]) for at in range(0, len(numbers), size)]
        for name, path in paths.items():
            file = io.BytesIO()
            np.save(file, np.concatenate([part[name] for part in parts]))
            write_bytes(path, file.getvalue())
    ranks.barrier()
    return {"rows": len(rows) - first, "precision": computed_in.word}


def check_passes(config: Pretrain, rows: Rows) -> None:
    """Raise UsageError where the rows are read too rarely for a teacher to help."""
    resolved = config.resolved(rows.epoch)
    passes = resolved.passes or (resolved.token_budget or 0) / max(1, rows.epoch * rows.row_length)
    if passes < FEWEST_PASSES:
        raise UsageError(
            f"pretrain.teacher is {config.teacher}, but the rows are read {passes:.2g} times: a "
            f"teacher helps from {FEWEST_PASSES} passes on; set pretrain.tokens=null "
            f"pretrain.epochs={FEWEST_PASSES} or more, or leave it out"
        )


@final
class TaughtRows:
    """Rows whose batches bring the shares of targets that a teacher gives to tokens.

    The last rows are taught, as many as the teacher has read.
    """

    def __init__(self, rows: Rows, directory: Path, weight: float) -> None:
        """`directory`: the output of the stage `teacher`. `weight`: its share of a target."""
        self.trimmed = rows.trimmed
        self._rows = rows
        self._weight = weight
        self._blocks = {
            name: [np.load(path, mmap_mode="r") for path in sorted(directory.glob(f"{name}-*"))]
            for name in NAMES
        }
        self._first = len(rows) - sum(map(len, self._blocks[IDS]))
        self._tokens = self._blocks[IDS][0].shape[-1] if self._blocks[IDS] else 0

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Collection[int]) -> Batch:
        """A batch of the rows with these numbers."""
        batch = self._rows.batch(rows)
        width = batch.input_ids_BT.shape[1]
        shape = (len(rows), width, self._tokens)
        ids_BTK = np.zeros(shape, np.int64)
        shares_BTK = np.zeros(shape, np.float32)
        for line, row in enumerate(np.asarray(rows) - self._first):
            if row >= 0:
                block, place = divmod(int(row), BLOCK_ROWS)
                ids_BTK[line] = self._blocks[IDS][block][place, :width]
                shares_BTK[line] = self._blocks[LOG_PROBABILITIES][block][place, :width]
                shares_BTK[line] = self._weight * np.exp(shares_BTK[line])
        return replace(batch, taught=Taught(ids_BTK, shares_BTK))
