"""Checks of preference tuning: the loss before the first step, what it learns, and that the order of answers is nothing.

Letters in names: B rows, T positions, A answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from ttrain.config.training import Dpo
from ttrain.data.packing import Rows
from ttrain.data.pair_rows import PairBatch, finished_pairs
from ttrain.doctor.model import LEARNT_STEPS, ROWS_PER_STEP, learn_batch
from ttrain.doctor.parts import (
    BATCH_ARRAYS,
    Check,
    InMemoryRows,
    Learner,
    LossRecorder,
    make_check,
    numbered_answers,
    select_rows,
)
from ttrain.train.precision import Precision
from ttrain.train.preference_tuning import is_paired, score_answers

PAIR_ROWS = 8
AT_START = 1e-6  # of the loss; the reference is scored one row at a time, the batch at once
MIRRORED = 1e-5  # of a log-probability, relative

FIX_MASK = "fix the mask between the answers of a pair: one sees the other"


def with_references(learner: Learner, rows: Rows, device: torch.device) -> InMemoryRows:
    """PAIR_ROWS of the rows with the log-probabilities of the model before its first step, scored row by row in fp32."""
    sample = select_rows(rows, PAIR_ROWS)
    largest = int(sample.whole.answer_ids_A.max()) if isinstance(sample.whole, PairBatch) else 0
    references = np.full(largest + 1, np.nan)
    _, model = learner.prepared(device)
    with torch.no_grad():
        for number in range(len(sample)):
            batch = _pairs(sample, [number])
            references[batch.answer_ids_A] = score_answers(model, batch, device)[0].cpu().numpy()
    return select_rows(InMemoryRows(sample.whole, references), len(sample))


def checks(learner: Learner, rows: InMemoryRows, precision: Precision) -> dict[str, Callable[[], Check | None]]:
    """What is examined beside, or instead of, the checks of all stages: what pairs teach is no cross entropy of tokens."""
    device = precision.device
    return {
        "loss at the start": lambda: first_loss(learner, rows, device),
        "swapped pairs mirror": lambda: mirror(learner, rows, device),
        "one batch is learnt": lambda: learns(learner, rows, precision),
    }


def first_loss(learner: Learner, rows: Rows, device: torch.device) -> Check | None:
    """Whether the loss is that of two equal models before the first step: ln 2 of dpo. None without a reference."""
    config = learner.config
    assert isinstance(config, Dpo)
    if not config.has_reference:
        return None
    batch = _pairs(rows, range(len(rows)))
    weights_A = np.where(batch.ratings_A > 0, config.desirable_weight, config.undesirable_weight)
    of_loss = {"ipo": 1 / (4 * config.beta**2), "kto": float(weights_A.mean()) / 2}
    expected = of_loss.get(config.loss, math.log(2))
    task, model = learner.prepared(device, sft_weight=0.0)
    loss_sum = task.validation_step(model, batch, device)
    loss = float(loss_sum.total) / max(1, loss_sum.count)
    figure = f"{loss:.7f}; of two equal models {expected:.7f}"
    ok = abs(loss - expected) <= AT_START * max(1.0, expected)
    return make_check("loss at the start", ok, figure, "score the reference with the model that the stage starts from")


def learns(learner: Learner, rows: Rows, precision: Precision) -> Check:
    """Whether ten steps on one batch, at the peak learning rate, raise the rewards of its good answers above the others."""
    name, section = "a preference is learnt", learner.config.section
    sample, subject, recorder = select_rows(rows, ROWS_PER_STEP), learner.build(), LossRecorder()
    before = _lead(learner, subject.model, sample, precision.device)
    learn_batch(learner, subject, sample, precision, recorder)
    after = _lead(learner, subject.model, sample, precision.device)
    losses = f"{recorder.losses[0]:.4f} to {recorder.losses[-1]:.4f} in {LEARNT_STEPS} steps"
    figure = f"loss {losses}; lead of the good answers {before:+.4f} to {after:+.4f}"
    ok = after > before and recorder.losses[-1] < recorder.losses[0]
    return make_check(name, ok, figure, f"lower {section}.optim.lr: the steps are too long")


def _lead(learner: Learner, model: nn.Module, rows: InMemoryRows, device: torch.device) -> float:
    """Mean log-ratio of the good answers less that of the bad ones."""
    batch = _pairs(rows, range(len(rows)))
    _, objective = learner.prepared(device, model)
    with torch.no_grad():
        log_probs_A = score_answers(objective, batch, device)[0].cpu().numpy()
    good, ratios_A = batch.ratings_A > 0, log_probs_A - (0 if batch.references_A is None else batch.references_A)
    means = [float(ratios_A[mask].mean()) if mask.any() else 0.0 for mask in (good, ~good)]
    return means[0] - means[1]


def mirror(learner: Learner, rows: InMemoryRows, device: torch.device) -> Check | None:
    """Whether each answer keeps its log-probability where the other one comes first: margins only change their sign.

    None for answers that are rated alone.
    """
    swapped = InMemoryRows(_swapped(rows.whole)) if isinstance(rows.whole, PairBatch) else rows
    _, objective = learner.prepared(device)
    margins = []
    with torch.no_grad():
        for sample in (rows, swapped):
            batch = _pairs(sample, range(len(sample)))
            if not is_paired(batch.answer_ids_A):
                return None
            log_probs_P2 = score_answers(objective, batch, device)[0].cpu().numpy().reshape(-1, 2)
            margins.append(log_probs_P2[:, 0] - log_probs_P2[:, 1])
    largest = float(np.abs(margins[0]).max())
    apart = float(np.abs(margins[0] + margins[1]).max()) / max(1.0, largest)
    figure = f"margins of {len(margins[0])} swapped pairs are {apart:.1e} from their mirror, of up to {largest:.3f}"
    return make_check("swapped pairs mirror", apart <= MIRRORED, figure, FIX_MASK)


def _pairs(rows: Rows, numbers: Sequence[int]) -> PairBatch:
    batch = rows.batch(numbers)
    assert isinstance(batch, PairBatch)
    return batch


def _swapped(batch: PairBatch) -> PairBatch:
    """The same pairs with the rejected answer as the chosen one, also in their order within a row."""
    branches_BT = np.where(batch.branches_BT > 0, 3 - batch.branches_BT, 0)
    segments_BT = np.where(batch.segments_BT < 0, batch.segments_BT.shape[1], batch.segments_BT)
    order_BT = np.lexsort((branches_BT, segments_BT), axis=1)
    ids_BT = numbered_answers(batch)
    swapped_BT = np.where(ids_BT >= 0, ids_BT ^ 1, -1)
    arrays = (*(getattr(batch, name) for name in BATCH_ARRAYS), branches_BT, swapped_BT)
    return finished_pairs(PairBatch(*(np.take_along_axis(array, order_BT, 1) for array in arrays)))
