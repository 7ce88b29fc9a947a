"""Preference tuning: its losses, the task of the stage `dpo`, and the scores of answers."""
# Letters in names: B rows, T positions, A answers of a batch, P pairs. Answers 2k and 2k + 1 are
# the chosen and the rejected one of a pair.

from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttrain.config.training import Dpo
from ttrain.data.packing import Array, Rows
from ttrain.data.pair_rows import PairBatch
from ttrain.errors import UsageError
from ttrain.train.distributed import Tensors, on_device
from ttrain.train.language_modeling import CausalTask
from ttrain.train.task import LossSum, Metrics, Sums

CHOSEN = "chosen"
REJECTED = "rejected"
LEADS = "leads"
RATIOS = "ratios"  # sums of a step


Count = TypeVar("Count", int, Array)
Scores = tuple[Tensor, Tensor]  # log-probability and number of the tokens of each answer, both [A]


@dataclass(frozen=True)
class Answers:
    """The answers of a batch: summed log-probabilities under the model and the reference."""

    log_probs_A: Tensor
    reference_A: Tensor  # zeros where the loss has no reference
    tokens_A: Tensor
    ratings_A: Tensor  # 1 for a chosen or desirable answer, else -1

    @property
    def ratios_A(self) -> Tensor:
        """log pi(y|x) / pi_ref(y|x) of each answer."""
        return self.log_probs_A - self.reference_A


def loss_sum(config: Dpo, answers: Answers, reference_point: float) -> Tensor:
    """The loss of a batch, summed over its pairs, with kto over its answers.

    `reference_point`: of kto, a log-ratio; the same on all ranks in a step.
    """
    total = (
        kto(config, answers, reference_point)
        if config.loss == "kto"
        else pair_losses(config, answers)
    ).sum()
    weight = 1.0 if config.loss == "orpo" else config.sft_weight
    if weight:
        # Their mean, of each answer.
        token_losses_A = -answers.log_probs_A / answers.tokens_A.clamp(min=1)
        total = total + weight * token_losses_A.masked_select(answers.ratings_A > 0).sum()
    return total


def loss_count(config: Dpo, answers: Count) -> Count:
    """The number of losses of so many answers, which divides their sum."""
    return answers if config.loss == "kto" else answers // 2


def log_ratios(config: Dpo, answers: Answers) -> Tensor:
    """Log-ratio of each answer to the reference, [A]; per token for some losses and settings."""
    if config.length_normalized or config.loss in ("ipo", "simpo", "orpo"):
        return answers.ratios_A / answers.tokens_A.clamp(min=1)
    return answers.ratios_A


def pair_losses(config: Dpo, answers: Answers) -> Tensor:
    """The loss of each pair, [P], without the cross entropy of chosen answers."""
    chosen_P, rejected_P = log_ratios(config, answers).view(-1, 2).unbind(1)
    lead_P = chosen_P - rejected_P
    if config.loss == "ipo":
        # ArXiv:2310.12036, equation 17: a lead a token.
        return (lead_P - 1 / (2 * config.beta)).square()
    if config.loss == "simpo":
        return sigmoid(config.beta * lead_P - config.margin)
    if config.loss == "orpo":
        return config.beta * sigmoid(log_odds(chosen_P) - log_odds(rejected_P))
    return sigmoid(config.beta * lead_P, config.label_smoothing if config.loss == "cdpo" else 0.0)


def sigmoid(lead_P: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-log sigmoid of the lead in reward (arXiv:2305.18290); smoothed for swapped pairs."""
    losses_P = -F.logsigmoid(lead_P)
    if not label_smoothing:
        return losses_P
    return (1 - label_smoothing) * losses_P - label_smoothing * F.logsigmoid(-lead_P)


def log_odds(log_prob: Tensor) -> Tensor:
    """log p / (1 - p) of a mean log-probability below 0 (arXiv:2403.07691)."""
    # An answer that is certain has infinite odds.
    log_prob = log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)
    return log_prob - torch.log(-torch.expm1(log_prob))


def kto(config: Dpo, answers: Answers, reference_point: float) -> Tensor:
    """The loss of each answer, [A] (arXiv:2402.01306): its reward against the reference point."""
    gains_A = config.beta * (log_ratios(config, answers) - reference_point) * answers.ratings_A
    weights_A = torch.where(
        answers.ratings_A > 0, config.desirable_weight, config.undesirable_weight
    )
    return weights_A * torch.sigmoid(-gains_A)


# --- the task ---


def score_answers(model: nn.Module, batch: PairBatch, device: torch.device) -> Scores:
    """The scores of the answers, in one forward pass of a NextTokenLoss.

    In fp64 if the device has it: two passes then differ by the rounding of their terms alone.
    """
    return _scored(model, batch, device, next_only=True)[0]


def _scored(
    model: nn.Module, batch: PairBatch, device: torch.device, **options: Any
) -> tuple[Scores, Tensors, Tensors]:
    arrays = (
        batch.input_ids_BT,
        batch.positions_BT,
        batch.segments_BT,
        batch.labels_BT,
        batch.branches_BT,
    )
    *inputs, branches_BT = on_device(arrays, device)
    [answers_BT] = on_device([batch.answers_BT], device)
    losses_BT, parts, router_sums = model(*inputs, branches_BT=branches_BT, **options)
    wide = torch.float32 if device.type == "mps" else torch.float64
    at_N = answers_BT.flatten() + 1  # 0: no answer
    none = torch.zeros(len(batch.answer_ids_A) + 1, dtype=wide, device=device)
    sums = none.index_add(0, at_N, losses_BT.flatten().to(wide))
    tokens = none.index_add(0, at_N, torch.ones_like(at_N, dtype=wide))
    return (-sums[1:], tokens[1:]), parts, router_sums


def is_paired(answer_ids_A: Array) -> bool:
    """Whether all answers are in pairs, none rated alone."""
    chosen_P = answer_ids_A[::2]
    rejected_P = answer_ids_A[1::2]
    return len(chosen_P) == len(rejected_P) and bool((chosen_P + 1 == rejected_P).all())


@final
class PreferenceTuning(CausalTask):
    """Learns to prefer one answer to another; rows bring the reference's log-probabilities."""

    # The reference point of kto is the mean log-ratio of all answers of the step before, at least
    # 0; 0 in the first step. So it is the same for all micro-batches and ranks.

    config: Dpo

    def __init__(self, config: Dpo, model: nn.Module, **options: Any) -> None:
        super().__init__(config, model, **options)
        self._reference_point = 0.0

    def train_step(self, model: nn.Module, batch: PairBatch, device: torch.device) -> LossSum:
        """Routers add their balance terms, weighted by the losses of each row."""
        [weights_B] = on_device([loss_count(self.config, batch.answers_B)], device)
        scores, balance, router_sums = _scored(model, batch, device, weights_B=weights_B)
        loss = self._loss(scores, batch, device)
        sums = {**loss.sums, **router_sums}
        if not balance:
            return replace(loss, sums=sums)
        return replace(
            loss,
            total=loss.total + self._model.balance_of(balance),
            parts={"preference": loss.total, **balance},
            sums=sums,
        )

    def validation_step(self, model: nn.Module, batch: PairBatch, device: torch.device) -> LossSum:
        """The loss of the preferences alone."""
        with torch.no_grad():
            return self._loss(score_answers(model, batch, device), batch, device)

    def check_rows(self, rows: Rows) -> None:
        rated = rows.counts()["rated_answers"]
        if rated and self.config.loss != "kto":
            raise UsageError(
                f"dpo.loss is {self.config.loss}, which compares two answers, but {rated} rows of "
                "data.dpo have a single rated one; set dpo.loss=kto, or bring pairs"
            )

    def after_step(self, sums: Sums) -> None:
        super().after_step(sums)
        answers, _, score = sums[RATIOS]
        self._reference_point = max(0.0, score / max(1.0, answers))

    def state(self) -> dict[str, float]:
        return {"reference_point": self._reference_point}

    def load_state(self, state: Metrics) -> None:
        self._reference_point = float(state.get("reference_point", 0.0))

    def figures(self, sums: Sums) -> Metrics:
        """Means over answers and pairs: log-probabilities, rewards, tokens, leads."""
        means = dict(super().figures(sums))
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

    def _loss(self, scores: Scores, batch: PairBatch, device: torch.device) -> LossSum:
        log_probs_A, tokens_A = scores
        [ratings_A] = on_device([batch.ratings_A], device)
        reference_A = torch.zeros_like(log_probs_A)
        if self.config.has_reference:
            assert batch.references_A is not None, (
                "the rows bring no log-probabilities of the reference"
            )
            reference_A = on_device([batch.references_A], device)[0].to(reference_A)
        answers = Answers(log_probs_A, reference_A, tokens_A, ratings_A)
        total = loss_sum(self.config, answers, self._reference_point)
        sums = self._sums(answers, paired=is_paired(batch.answer_ids_A))
        return LossSum(total, loss_count(self.config, len(batch.answer_ids_A)), sums=sums)

    def _sums(self, answers: Answers, *, paired: bool) -> Tensors:
        log_probs_A = answers.log_probs_A.detach()
        ratios_A = answers.ratios_A.detach()
        # Implicit; without a reference beta log pi.
        rewards_A = self.config.beta * log_ratios(self.config, answers).detach()
        sums = dict[str, Tensor]()
        for name, rating in ((CHOSEN, 1), (REJECTED, -1)):
            mine = (answers.ratings_A == rating).to(log_probs_A)
            sums[name] = torch.stack(
                [
                    (mine * values).sum()
                    for values in (mine, log_probs_A, rewards_A, answers.tokens_A)
                ]
            )
        sums[LEADS] = torch.zeros(3).to(log_probs_A)
        if paired:
            lead_P = -rewards_A.view(-1, 2).diff(dim=1).flatten()
            sums[LEADS] = torch.stack(
                [torch.ones_like(lead_P).sum(), (lead_P > 0).to(lead_P).sum(), lead_P.sum()]
            )
        sums[RATIOS] = torch.stack(
            [torch.ones_like(ratios_A).sum(), ratios_A.sum(), rewards_A.sum() / self.config.beta]
        )
        return sums
