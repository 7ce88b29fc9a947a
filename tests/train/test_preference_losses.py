"""The losses of preference tuning, against those of TRL on 200 pairs, and what their gradients must
and must not do."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ttrain.config.training import Dpo
from ttrain.train.preference_tuning import Answers, log_odds, loss_count, loss_sum

PAIRS, LONGEST = 200, 40
# Log-probabilities of tokens, which are live, and the answers' log-probabilities by a reference.
Tokens = tuple[Tensor, Tensor, Tensor]


def of(loss: str, **more: Any) -> Dpo:
    return Dpo(loss=loss, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def without_wandb() -> Iterator[None]:
    """TRL imports it where it is installed: for seconds, and its settings parse their source, which
    Python 3.11.7 does not survive while another thread parses."""
    with pytest.MonkeyPatch.context() as patch:
        if "wandb" not in sys.modules:
            patch.setitem(sys.modules, "wandb", None)
        yield


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    generator = torch.Generator().manual_seed(0)
    lengths_A = torch.randint(1, LONGEST + 1, (2 * PAIRS,), generator=generator)
    live_AT = torch.arange(LONGEST) < lengths_A[:, None]
    size = (2 * PAIRS, LONGEST)
    log_probs_AT = -3 * torch.rand(size, generator=generator, dtype=torch.float64) - 0.01
    noise_A = torch.randn(2 * PAIRS, generator=generator, dtype=torch.float64)
    return log_probs_AT, live_AT, (log_probs_AT * live_AT).sum(1) + 4 * noise_A


def fields(log_probs_AT: Tensor, live_AT: Tensor, reference_A: Tensor) -> list[Tensor]:
    """Of `Answers`. Answers 2k and 2k + 1 are a pair."""
    tokens_A = live_AT.sum(1).to(log_probs_AT)
    return [(log_probs_AT * live_AT).sum(1), reference_A, tokens_A, torch.tensor([1, -1] * PAIRS)]


def mean_loss(
    config: Dpo, log_probs_AT: Tensor, live_AT: Tensor, reference_A: Tensor, point: float = 0.0
) -> Tensor:
    reference_A = reference_A if config.has_reference else torch.zeros_like(reference_A)
    answers = Answers(*fields(log_probs_AT, live_AT, reference_A))
    return loss_sum(config, answers, point) / loss_count(config, 2 * PAIRS)


class Judge:
    """The part of a trainer of TRL that its losses use; also the model, with these
    log-probabilities."""

    aux_loss_enabled, precompute_ref_logps, use_weighting, training = False, True, False, True
    ld_alpha, f_divergence_type, loss_weights = None, "reverse_kl", (1.0,)
    label_smoothing, alpha, _total_train_tokens, _tp_size = 0.0, 0.0, 0, 1

    def __init__(self, log_probs_AT: Tensor, live_AT: Tensor, **attributes: Any) -> None:
        self.log_probs_AT, self._metrics = log_probs_AT * live_AT, {"train": defaultdict(list)}
        unchanged: dict[str, Any] = dict.fromkeys(("gather", "gather_for_metrics"), lambda x: x)
        self.accelerator = SimpleNamespace(**unchanged, device=torch.device("cpu"))
        self.model = self
        vars(self).update(attributes)

    def __call__(self, **inputs: Any) -> Any:
        zeros = torch.zeros_like(self.log_probs_AT)
        others = {"entropy": zeros, "mean_logits": zeros, "is_top1": zeros.bool()}
        return SimpleNamespace(log_probs=self.log_probs_AT, **others)


def inputs(live_AT: Tensor) -> dict[str, Tensor]:
    mask = torch.cat([torch.zeros(len(live_AT), 1), live_AT], 1).long()
    return {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}


def halves(answers: Tensor) -> Tensor:
    return torch.cat([answers[::2], answers[1::2]])


def kto_of_trl(config: Dpo, judge: Any, live_AT: Tensor, reference_A: Tensor) -> Any:
    from trl.trainer.kto_trainer import KTOTrainer

    judge.loss_type, judge.calculate_KL = "kto", True
    judge.desirable_weight = config.desirable_weight
    judge.undesirable_weight = config.undesirable_weight
    judge._compute_kl_logps = lambda model, batch: judge.log_probs_AT.detach().sum(1)
    labels = torch.tensor([True, False]).repeat(PAIRS)
    references = {"ref_logps": reference_A, "ref_KL_logps": reference_A}
    batch = {**inputs(live_AT), "label": labels, **references}
    loss = KTOTrainer._compute_loss(judge, judge, batch, False)
    return loss, judge._metrics["train"]["kl"][0]


def of_trl(config: Dpo, log_probs_AT: Tensor, live_AT: Tensor, reference_A: Tensor) -> Any:
    """The loss of TRL's own trainers, and the reference point that its kto takes."""
    judge: Any = Judge(log_probs_AT, live_AT, beta=config.beta)
    if config.loss == "kto":
        return kto_of_trl(config, judge, live_AT, reference_A)
    sums_A = (log_probs_AT * live_AT).sum(1)
    means_A = sums_A / live_AT.sum(1)
    if config.loss == "orpo":
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer

        losses = ORPOTrainer.odds_ratio_loss(judge, means_A[::2], means_A[1::2])[0]
        # With the mean over answers where TRL takes that over tokens.
        return -means_A[::2].mean() - losses.mean(), 0.0
    if config.loss in ("simpo", "cdpo"):
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        is_simpo = config.loss == "simpo"
        scores_A = means_A if is_simpo else sums_A - reference_A
        judge.loss_type, judge.simpo_gamma = "simpo" if is_simpo else "sigmoid", config.margin
        judge.label_smoothing = 0.0 if is_simpo else config.label_smoothing
        return CPOTrainer.cpo_loss(judge, scores_A[::2], scores_A[1::2])[0].mean(), 0.0
    from trl.trainer.dpo_trainer import DPOTrainer

    normalized = "sigmoid_norm" if config.length_normalized else "sigmoid"
    kinds = ["ipo" if config.loss == "ipo" else normalized]
    judge = Judge(halves(log_probs_AT), halves(live_AT), beta=config.beta, loss_types=kinds)
    references = {"ref_chosen_logps": reference_A[::2], "ref_rejected_logps": reference_A[1::2]}
    batch = {**inputs(halves(live_AT)), **references}
    return DPOTrainer._compute_loss(judge, judge, batch, False), 0.0


CONFIGS = (
    of("dpo"),
    of("dpo", beta=0.5, length_normalized=True),
    of("ipo"),
    of("cdpo"),
    of("simpo", beta=2.0, margin=1.0),
    of("orpo"),
    of("kto"),
    of("kto", desirable_weight=0.7, undesirable_weight=1.3),
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.loss}-{config.beta}")
def test_loss_and_gradient_are_those_of_trl_on_200_pairs(config: Dpo, tokens: Tokens) -> None:
    log_probs_AT, live_AT, reference_A = tokens
    first, second = (log_probs_AT.clone().requires_grad_() for _ in range(2))
    expected, point = of_trl(config, first, live_AT, reference_A)
    loss = mean_loss(config, second, live_AT, reference_A, point)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    (theirs,), (ours,) = torch.autograd.grad(expected, first), torch.autograd.grad(loss, second)
    assert float((theirs - ours).norm() / theirs.norm()) < 1e-6


@pytest.mark.parametrize("loss", ["dpo", "ipo", "cdpo", "simpo", "orpo", "kto"])
def test_a_batch_in_parts_has_the_sum_of_the_whole(loss: str, tokens: Tokens) -> None:
    config, values = of(loss, sft_weight=0.0 if loss == "orpo" else 0.3), fields(*tokens)
    bounds = ((0, 2), (2, 134), (134, 134), (134, 400))
    parts = [Answers(*(column[start:end] for column in values)) for start, end in bounds]
    whole = loss_sum(config, Answers(*values), 0.5)
    total = sum(loss_sum(config, part, 0.5) for part in parts)
    assert float(total) == pytest.approx(float(whole), rel=1e-12)


def test_the_sft_term_is_the_mean_loss_of_each_chosen_answer(tokens: Tokens) -> None:
    log_probs_AT, live_AT, _ = tokens
    means_A = (log_probs_AT * live_AT).sum(1) / live_AT.sum(1)
    without, with_term = (mean_loss(of("dpo", sft_weight=w), *tokens) for w in (0.0, 0.5))
    assert float(with_term - without) == pytest.approx(-0.5 * float(means_A[::2].mean()))


def test_odds_of_an_answer_that_is_certain_are_finite() -> None:
    certain = torch.zeros(1, requires_grad=True)
    odds = log_odds(certain)
    odds.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(odds).all()
    assert certain.grad is not None and torch.isfinite(certain.grad).all()
