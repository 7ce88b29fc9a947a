"""Losses of preference tuning, from the log-probabilities of answers: pure functions, of sums and a count.

Letters in names: A answers, P pairs. Answers 2k and 2k + 1 of a batch are the chosen and the rejected one of a pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ttrain.config.training import Dpo
from ttrain.data.packing import Array

Count = TypeVar("Count", int, Array)


@dataclass(frozen=True)
class Answers:
    """The answers of a batch: log-probabilities, summed over their tokens, under the model and under the reference."""

    log_probs_A: Tensor
    reference_A: Tensor  # zeros where the loss has no reference
    tokens_A: Tensor
    ratings_A: Tensor  # 1 for a chosen or desirable answer, else -1

    def scores(self, *, per_token: bool) -> Tensor:
        """log pi(y|x) / pi_ref(y|x) of each answer, [A]."""
        ratios_A = self.log_probs_A - self.reference_A
        return ratios_A / self.tokens_A.clamp(min=1) if per_token else ratios_A

    @property
    def token_loss_A(self) -> Tensor:
        """Cross entropy of each answer's tokens, their mean."""
        return -self.log_probs_A / self.tokens_A.clamp(min=1)


def loss_sum(config: Dpo, answers: Answers, reference_point: float) -> Tensor:
    """The loss of a batch, summed over its pairs, with kto over its answers.

    `reference_point`: of kto, in units of a log-ratio; the same for all micro-batches and ranks of a step.
    """
    losses = kto(config, answers, reference_point) if config.loss == "kto" else pair_losses(config, answers)
    total = losses.sum()
    weight = 1.0 if config.loss == "orpo" else config.sft_weight
    if weight:
        total = total + weight * answers.token_loss_A.masked_select(answers.ratings_A > 0).sum()
    return total


def count(config: Dpo, answers: Count) -> Count:
    """The number of losses of so many answers, by which their sum is divided."""
    return answers if config.loss == "kto" else answers // 2


def rewards(config: Dpo, answers: Answers) -> Tensor:
    """Implicit reward of each answer, [A]: beta log pi / pi_ref, without a reference beta log pi; see `is_per_token`."""
    return config.beta * answers.scores(per_token=is_per_token(config))


def is_per_token(config: Dpo) -> bool:
    """Whether log-probabilities are divided by the tokens of the answer."""
    return config.length_normalized or config.loss in ("ipo", "simpo", "orpo")


def pair_losses(config: Dpo, answers: Answers) -> Tensor:
    """The loss of each pair, [P], without the cross entropy of the chosen answers."""
    chosen_P, rejected_P = answers.scores(per_token=is_per_token(config)).view(-1, 2).unbind(1)
    lead_P = chosen_P - rejected_P
    if config.loss == "ipo":
        return ipo(lead_P, config.beta)
    if config.loss == "simpo":
        return sigmoid(config.beta * lead_P - config.margin)
    if config.loss == "orpo":
        return config.beta * sigmoid(log_odds(chosen_P) - log_odds(rejected_P))
    return sigmoid(config.beta * lead_P, config.label_smoothing if config.loss == "cdpo" else 0.0)


def sigmoid(lead_P: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-log sigmoid of the lead in reward (arXiv:2305.18290); smoothed, as if that share of pairs were swapped."""
    losses_P = -F.logsigmoid(lead_P)
    if not label_smoothing:
        return losses_P
    return (1 - label_smoothing) * losses_P - label_smoothing * F.logsigmoid(-lead_P)


def ipo(lead_P: Tensor, beta: float) -> Tensor:
    """Squared distance of the lead, a token, from 1 / (2 beta) (arXiv:2310.12036, equation 17)."""
    return (lead_P - 1 / (2 * beta)).square()


def log_odds(log_prob: Tensor) -> Tensor:
    """log p / (1 - p) of a mean log-probability below 0 (arXiv:2403.07691)."""
    log_prob = log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)  # an answer that is certain has infinite odds
    return log_prob - torch.log(-torch.expm1(log_prob))


def kto(config: Dpo, answers: Answers, reference_point: float) -> Tensor:
    """The loss of each answer, [A] (arXiv:2402.01306): how far its reward is on the wrong side of the reference point."""
    gains_A = config.beta * (answers.scores(per_token=is_per_token(config)) - reference_point) * answers.ratings_A
    weights_A = torch.where(answers.ratings_A > 0, config.desirable_weight, config.undesirable_weight)
    return weights_A * torch.sigmoid(-gains_A)
