"""Preference tuning: the losses, the task of the stage `dpo`, and the scores of answers that its reference is made of.

Letters in names: B rows, T positions, A answers, P pairs. Answers 2k and 2k + 1 of a batch are the chosen and the rejected
one of a pair. The losses are pure functions of the log-probabilities of answers: sums and a count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttrain.config import Dpo
from ttrain.data.packing import Array
from ttrain.data.pair_rows import PairBatch
from ttrain.train.language_modeling import CausalTask, on_device
from ttrain.train.task import LossSum

CHOSEN, REJECTED, LEADS, RATIOS = "chosen", "rejected", "leads", "ratios"  # sums of a step


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


def count(config: Dpo, answers: int) -> int:
    """What the sum of the losses is divided by."""
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


def score_answers(model: nn.Module, batch: PairBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Log-probability and number of the tokens of each answer, both [A], in one forward pass. `model`: NextTokenLoss.

    In fp64 where the device has it: the sums of two passes then differ by the rounding of their terms alone.
    """
    arrays = (batch.input_ids_BT, batch.positions_BT, batch.segments_BT, batch.labels_BT, batch.branches_BT)
    ids_BT, positions_BT, segments_BT, labels_BT, branches_BT = on_device(arrays, device)
    [answers_BT] = on_device([batch.answers_BT], device)
    losses_BT, _, _ = model(ids_BT, positions_BT, segments_BT, labels_BT, branches_BT=branches_BT)
    wide = torch.float32 if device.type == "mps" else torch.float64
    at_N = answers_BT.flatten() + 1  # 0: no answer
    none = torch.zeros(len(batch.answer_ids_A) + 1, dtype=wide, device=device)
    sums = none.index_add(0, at_N, losses_BT.flatten().to(wide))
    tokens = none.index_add(0, at_N, torch.ones_like(at_N, dtype=wide))
    return -sums[1:], tokens[1:]


def is_paired(answer_ids_A: Array) -> bool:
    """Whether all answers are in pairs, none of them rated alone."""
    chosen_P, rejected_P = answer_ids_A[::2], answer_ids_A[1::2]
    return len(chosen_P) == len(rejected_P) and bool((chosen_P + 1 == rejected_P).all())


@final
class PreferenceTuning(CausalTask):
    """Learns to prefer one answer to another. The pairs bring the log-probabilities of the reference with them.

    The reference point of kto is the mean log-ratio of all answers of the step before, at least 0; 0 in the first step,
    in which model and reference are equal. So it is the same for all micro-batches and ranks.
    """

    config: Dpo

    def __init__(self, config: Dpo, model: nn.Module, **options: Any) -> None:
        super().__init__(config, model, **options)
        self._reference_point = 0.0

    def train_step(self, model: nn.Module, batch: PairBatch, device: torch.device) -> LossSum:
        answers = self._answers(model, batch, device)
        total = loss_sum(self.config, answers, self._reference_point)
        sums = self._sums(answers, paired=is_paired(batch.answer_ids_A))
        return LossSum(total, count(self.config, len(batch.answer_ids_A)), sums=sums)

    def validation_step(self, model: nn.Module, batch: PairBatch, device: torch.device) -> LossSum:
        with torch.no_grad():
            return self.train_step(model, batch, device)

    def after_step(self, sums: Mapping[str, Sequence[float]]) -> None:
        answers, _, score = sums[RATIOS]
        self._reference_point = max(0.0, score / max(1.0, answers))

    def state(self) -> dict[str, float]:
        return {"reference_point": self._reference_point}

    def load_state(self, state: Mapping[str, float]) -> None:
        self._reference_point = float(state.get("reference_point", 0.0))

    def figures(self, sums: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
        """Means over answers and pairs: log-probabilities, rewards, tokens, share of pairs in which the chosen one leads."""
        means: dict[str, float] = {}
        for name in (CHOSEN, REJECTED):
            number, *totals = sums[name]
            if number:
                figures = zip(("log_probability", "reward", "answer_tokens"), totals, strict=True)
                means |= {f"{figure}_{name}": total / number for figure, total in figures}
        pairs, leading, lead = sums[LEADS]
        if pairs:
            means |= {"reward_accuracy": leading / pairs, "reward_margin": lead / pairs}
        answers, ratio, _ = sums[RATIOS]
        if answers and self.config.has_reference:
            means["kl_to_reference"] = ratio / answers
        if self.config.loss == "kto":
            means["reference_point"] = self._reference_point
        return means

    def _answers(self, model: nn.Module, batch: PairBatch, device: torch.device) -> Answers:
        log_probs_A, tokens_A = score_answers(model, batch, device)
        [ratings_A] = on_device([batch.ratings_A], device)
        reference_A = torch.zeros_like(log_probs_A)
        if self.config.has_reference:
            assert batch.references_A is not None, "the rows bring no log-probabilities of the reference"
            reference_A = torch.from_numpy(batch.references_A).to(reference_A)
        return Answers(log_probs_A, reference_A, tokens_A, ratings_A)

    def _sums(self, answers: Answers, *, paired: bool) -> dict[str, Tensor]:
        log_probs_A, rewards_A = answers.log_probs_A.detach(), rewards(self.config, answers).detach()
        ratios_A, sums = answers.scores(per_token=False).detach(), dict[str, Tensor]()
        for name, rating in ((CHOSEN, 1), (REJECTED, -1)):
            mine = (answers.ratings_A == rating).to(log_probs_A)
            sums[name] = torch.stack([(mine * values).sum() for values in (mine, log_probs_A, rewards_A, answers.tokens_A)])
        sums[LEADS] = torch.zeros(3).to(log_probs_A)
        if paired:
            lead_P = -rewards_A.view(-1, 2).diff(dim=1).flatten()
            sums[LEADS] = torch.stack([torch.ones_like(lead_P).sum(), (lead_P > 0).to(lead_P).sum(), lead_P.sum()])
        sums[RATIOS] = torch.stack([torch.ones_like(ratios_A).sum(), ratios_A.sum(), rewards_A.sum() / self.config.beta])
        return sums
