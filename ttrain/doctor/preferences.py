"""Checks of preference tuning, whose loss is no cross entropy of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ttrain.doctor import model
from ttrain.doctor.parts import Finding, InMemoryRows, Learner, select_rows
from ttrain.stages import training
from ttrain.train.preference_tuning import score_answers

if TYPE_CHECKING:
    from ttrain.config.training import Dpo
    from ttrain.data.pair_rows import PairBatch

PAIR_ROWS = 8
AT_START = 1e-6  # of the loss; the reference is scored one row at a time, the batch at once


def with_references(learner: Learner) -> Learner:
    """The learner with a few of its rows, scored row by row with the model before its first step."""
    sample, device = select_rows(learner.rows, PAIR_ROWS), learner.precision.device
    references = np.full(1 + cast("PairBatch", sample.whole).answer_ids_A.max(), np.nan)
    _, scored = learner.prepared()
    with torch.no_grad():
        for number in range(len(sample)):
            batch = cast("PairBatch", sample.batch([number]))
            references[batch.answer_ids_A] = score_answers(scored, batch, device)[0].cpu().numpy()
    return replace(learner, rows=InMemoryRows(sample.whole, references))


def first_loss(learner: Learner) -> Finding | None:
    """Whether the loss is that of two equal models: ln 2 of dpo. None without a reference."""
    config = cast("Dpo", learner.config)
    if not config.has_reference:
        return None
    batch = cast("PairBatch", learner.rows.batch(range(len(learner.rows))))
    weights_A = np.where(batch.ratings_A > 0, config.desirable_weight, config.undesirable_weight)
    of_loss = {"ipo": 1 / (4 * config.beta**2), "kto": float(weights_A.mean()) / 2}
    expected = of_loss.get(config.loss, math.log(2))
    task, objective = learner.changed(sft_weight=0.0).prepared()
    loss_sum = task.validation_step(objective, batch, learner.precision.device)
    loss = float(loss_sum.total) / max(1, loss_sum.count)
    measured = f"{loss:.7f}; of two equal models {expected:.7f}"
    fix = "score the reference with the model that the stage starts from"
    return Finding(abs(loss - expected) <= AT_START * max(1.0, expected), measured, fix)


def learns(learner: Learner) -> Finding:
    """Whether ten steps on one batch lower the loss of its preferences."""
    return model.learns(learner.changed(sft_weight=0.0))


def of_text(check: Callable[[Learner], Finding]) -> Callable[[Learner], Finding]:
    """The check on next-token prediction: what a position sees is the same in both tasks."""
    return lambda learner: check(replace(learner, task=training.task_of))


# In place of the checks of all stages with these names.
CHECKS: Mapping[str, Callable[[Learner], Finding | None]] = {
    "no future leak": of_text(model.future),
    "records apart": of_text(model.documents),
    "loss at the start": first_loss,
    "one batch is learnt": learns,
}
