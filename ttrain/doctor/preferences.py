"""Checks of preference tuning: the loss before the first step, what it learns, and that the order of answers is nothing.

Letters in names: B rows, T positions, A answers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from ttrain.config import Dpo
from ttrain.data.packing import Rows
from ttrain.data.pair_rows import PairBatch
from ttrain.doctor.model import LEARNT_STEPS, ROWS_PER_STEP
from ttrain.doctor.parts import (
    Check,
    InMemoryRows,
    Learner,
    LossRecorder,
    make_check,
    numbered_answers,
    select_rows,
    trainer_of,
    without_dropout,
)
from ttrain.train.distributed import Ranks
from ttrain.train.precision import Precision, resolve_precision
from ttrain.train.preference_tuning import PreferenceTuning, score_answers

PAIR_ROWS = 8
AT_START = 1e-6  # of the loss; the reference is scored one row at a time, the batch at once
MIRRORED = 1e-5  # of a log-probability, relative

FIX_MASK = "fix the mask between the answers of a pair: one sees the other"


def with_references(learner: Learner, rows: Rows, device: torch.device, count: int = PAIR_ROWS) -> InMemoryRows:
    """`count` of the rows with the log-probabilities of the model before its first step, scored row by row in fp32."""
    sample = select_rows(rows, count)
    largest = int(sample.whole.answer_ids_A.max()) if isinstance(sample.whole, PairBatch) else 0
    references = np.full(largest + 1, np.nan)
    model = learner.task(learner.config, learner.build().model, learner.runtime).build_model().to(device).eval()
    with torch.no_grad():
        for number in range(len(sample)):
            batch = sample.batch([number])
            assert isinstance(batch, PairBatch)
            references[batch.answer_ids_A] = score_answers(model, batch, device)[0].cpu().numpy()
    return select_rows(InMemoryRows(sample.whole, references), len(sample))


def first_loss(learner: Learner, rows: Rows, device: torch.device) -> Check | None:
    """Whether the loss is that of two equal models before the first step: ln 2 of dpo. None without a reference."""
    config = learner.config
    assert isinstance(config, Dpo)
    if not config.has_reference:
        return None
    expected = {"ipo": 1 / (4 * config.beta**2), "kto": _kto_at_start(config, rows)}.get(config.loss, math.log(2))
    task = learner.task(config, learner.build().model, learner.runtime)
    assert isinstance(task, PreferenceTuning)
    without_sft = replace_weight(task, config)
    loss_sum = without_sft.validation_step(without_sft.build_model().to(device).eval(), rows.batch(range(len(rows))), device)
    loss = float(loss_sum.total) / max(1, loss_sum.count)
    figure = f"{loss:.7f}, that of a model equal to its reference is {expected:.7f}"
    ok = abs(loss - expected) <= AT_START * max(1.0, expected)
    return make_check(
        "loss at the start", ok, figure, "the reference was not scored by the model that the stage starts from"
    )
