"""How well a gate routes: against the best choice for each record, against always the same one. R records, E experts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def best(nats_RE: Floats) -> Ints:
    """The expert with the least loss on each record, of shape [R]; of equal ones the first.

    A record's bytes, and under one tokenizer its tokens, are the same for all experts: its sums compare as its means do.
    """
    best_R: Ints = nats_RE.argmin(axis=1)
    return best_R


def figures(nats_RE: Floats, tokens_RE: Ints, bytes_R: Ints, chosen_R: Ints) -> dict[str, Any]:
    """What becomes of records that are routed to `chosen_R`.

    accuracy            share of records that went to the expert with the least loss
    majority_accuracy   the same, had all gone to the one that is best most often: what the accuracy must exceed
    loss_routed         mean loss of the records as routed
    loss_oracle         the same, each by its best expert
    loss_best_single    the same, all by the one expert that is best for them together
    gain                share of the way from `loss_best_single` to `loss_oracle`; None where there is none to go
    unit                "nats per token"; "bits per byte" where the experts cut the records into other tokens
    experts             of each: its loss on all records, the share of them it is best at, and the share routed to it
    confusion           [E, E] counts: rows the best expert, columns the chosen one
    """
    records, experts = nats_RE.shape
    best_R, rows = best(nats_RE), np.arange(records)
    same_tokens = bool((tokens_RE == tokens_RE[:, :1]).all())
    size = float(tokens_RE[:, 0].sum()) if same_tokens else float(bytes_R.sum()) * math.log(2)
    losses_E = nats_RE.sum(axis=0) / size
    routed, oracle = float(nats_RE[rows, chosen_R].sum() / size), float(nats_RE[rows, best_R].sum() / size)
    best_often_E, chosen_often_E = (np.bincount(choice, minlength=experts) for choice in (best_R, chosen_R))
    confusion = np.zeros((experts, experts), np.int64)
    np.add.at(confusion, (best_R, chosen_R), 1)
    single = float(losses_E.min())
    return {
        "records": records,
        "unit": "nats per token" if same_tokens else "bits per byte",
        "accuracy": float((best_R == chosen_R).mean()),
        "majority_accuracy": float(best_often_E.max() / records),
        "loss_routed": routed,
        "loss_oracle": oracle,
        "loss_best_single": single,
        "gain": (single - routed) / (single - oracle) if single > oracle else None,
        "experts": [
            {"loss": float(loss), "best_share": float(often / records), "routed_share": float(chosen / records)}
            for loss, often, chosen in zip(losses_E, best_often_E, chosen_often_E, strict=True)
        ],
        "confusion": confusion.tolist(),
    }
