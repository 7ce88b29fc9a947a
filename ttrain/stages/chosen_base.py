"""Stage `chosen-base`: the better of a night's own weights and their average with the champion's."""

from __future__ import annotations

import shutil

from ttrain.config import ChosenBaseConfig, Promotion
from ttrain.config.training import BITS_PER_BYTE
from ttrain.core.files import finite
from ttrain.evaluate import candidates
from ttrain.evaluate.candidates import Judged
from ttrain.evaluate.scores import Evaluation
from ttrain.stages import CANDIDATES
from ttrain.stages.heldout import read_nights
from ttrain.stages.job import Figures, StageContext


def run(config: ChosenBaseConfig, job: StageContext) -> Figures:
    """Copy the better model as `model/`; returns its name, and what speaks for and against each.

    Both are compared with the champion by the rules of the gate, in bits per byte. The night's own is taken where the two
    are equal, or where no held-out document tells.
    """
    rules = Promotion(**config.promotion.model_dump(), metric=BITS_PER_BYTE.name, baseline=None)
    champion = Evaluation.at(job.inputs["of-champion"])
    # Which is which night is in the nights' records alone; the gate names them.
    nights = {f"night {number}": names for number, names in enumerate(read_nights(job.inputs["documents"]), start=1)}
    newest = next(reversed(nights), "")
    judged = {
        name: candidates.judge(Evaluation.at(job.inputs[f"of-{name}"]), champion, rules, nights, newest)
        for name in CANDIDATES
        if BITS_PER_BYTE.name in champion.metrics
    }
    chosen = candidates.choose(judged) if judged else CANDIDATES[0]
    shutil.copytree(job.inputs[chosen] / "model", job.output / "model", dirs_exist_ok=True)
    return {"chosen": chosen, "candidates": {name: _figures(candidate) for name, candidate in judged.items()}}


def _figures(candidate: Judged) -> Figures:
    decision = candidate.decision
    figures = {"figure": decision.challenger, "better_by": decision.difference, "would_be_promoted": decision.promote}
    return {**finite(figures), "lost": list(decision.lost)}
