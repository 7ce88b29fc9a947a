"""The losses of preference tuning, against those of TRL on 200 pairs, and what their gradients must and must not do."""

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


def of(loss: str, **more: Any) -> Dpo:
    return Dpo(loss=loss, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def without_wandb() -> Iterator[None]:
    """TRL imports it where it is installed: for seconds, and its settings parse their source, which Python 3.11.7 does not
    survive beside another thread that parses."""
    with pytest.MonkeyPatch.context() as patch:
        if "wandb" not in sys.modules:
            patch.setitem(sys.modules, "wandb", None)
        yield


@pytest.fixture(scope="module")
def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the tokens of 200 pairs, which are live, and the answers' log-probabilities by a reference."""
    generator = torch.Generator().manual_seed(0)
    lengths_A = torch.randint(1, LONGEST + 1, (2 * PAIRS,), generator=generator)
    live_AT = torch.arange(LONGEST) < lengths_A[:, None]
    log_probs_AT = (
        -3 * torch.rand(2 * PAIRS, LONGEST, generator=generator, dtype=torch.float64) - 0.01
    )
    reference_A = (log_probs_AT * live_AT).sum(1) + 4 * torch.randn(
        2 * PAIRS, generator=generator, dtype=torch.float64
    )
    return log_probs_AT, live_AT, reference_A


def ours(
    config: Dpo, log_probs_AT: Tensor, live_AT: Tensor, reference_A: Tensor, point: float = 0.0
) -> Tensor:
    """The mean loss. Answers 2k and 2k + 1 are a pair."""
    ratings_A = torch.tensor([1, -1]).repeat(PAIRS)
    reference_A = reference_A if config.has_reference else torch.zeros_like(reference_A)
    answers = Answers(
        (log_probs_AT * live_AT).sum(1), reference_A, live_AT.sum(1).to(log_probs_AT), ratings_A
    )
    return loss_sum(config, answers, point) / loss_count(config, 2 * PAIRS)


class Judge:
    """As much of a trainer of TRL as its losses ask for; it is the model, too, and gives these log-probabilities."""

    def __init__(self, log_probs_AT: Tensor, live_AT: Tensor, **attributes: Any) -> None:
        self.log_probs_AT, self._metrics = log_probs_AT * live_AT, {"train": defaultdict(list)}
        same = SimpleNamespace(
            gather=lambda x: x, gather_for_metrics=lambda x: x, device=torch.device("cpu")
        )
        self.accelerator, self.model, self.training = same, self, True
        self.__dict__ |= {
            "aux_loss_enabled": False,
            "precompute_ref_logps": True,
            "ld_alpha": None,
            "f_divergence_type": "reverse_kl",
            "use_weighting": False,
            "label_smoothing": 0.0,
            "loss_weights": [1.0],
            "_total_train_tokens": 0,
            "_tp_size": 1,
            "alpha": 0.0,
            **attributes,
        }

    def __call__(self, **inputs: Any) -> Any:
        more = dict.fromkeys(
            ("entropy", "mean_logits", "is_top1"), torch.zeros_like(self.log_probs_AT)
        )
        more["is_top1"] = more["is_top1"].bool()
        return SimpleNamespace(log_probs=self.log_probs_AT, **more)


def inputs(live_AT: Tensor) -> dict[str, Tensor]:
    mask = torch.cat([torch.zeros(len(live_AT), 1), live_AT], 1).long()
    return {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}


def halves(answers: Tensor) -> Tensor:
    return torch.cat([answers[::2], answers[1::2]])


def of_trl(
    config: Dpo, log_probs_AT: Tensor, live_AT: Tensor, reference_A: Tensor
) -> tuple[Tensor, float]:
    """The loss of TRL's own trainers, and the reference point that its kto takes."""
    if config.loss == "kto":
        from trl.trainer.kto_trainer import KTOTrainer

        judge = Judge(log_probs_AT, live_AT, beta=config.beta, loss_type="kto", calculate_KL=True)
        judge.desirable_weight, judge.undesirable_weight = (
            config.desirable_weight,
            config.undesirable_weight,
        )  # type: ignore[attr-defined]
        judge._compute_kl_logps = lambda model, batch: judge.log_probs_AT.detach().sum(1)  # type: ignore[attr-defined]
        batch = {
            **inputs(live_AT),
            "label": torch.tensor([True, False]).repeat(PAIRS),
            "ref_logps": reference_A,
        }
        loss = KTOTrainer._compute_loss(judge, judge, {**batch, "ref_KL_logps": reference_A}, False)  # type: ignore[arg-type]
        return loss, judge._metrics["train"]["kl"][0]
    sums_A = (log_probs_AT * live_AT).sum(1)
    means_A = sums_A / live_AT.sum(1)
    if config.loss == "orpo":
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer

        judge = Judge(log_probs_AT, live_AT, beta=config.beta)
        losses = ORPOTrainer.odds_ratio_loss(judge, means_A[::2], means_A[1::2])[0]  # type: ignore[arg-type]
        return -means_A[
            ::2
        ].mean() - losses.mean(), 0.0  # with the mean over answers where TRL takes that over tokens
    if config.loss in ("simpo", "cdpo"):
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        of_judge = {"loss_type": "simpo", "simpo_gamma": config.margin}
        scores_A = means_A
        if config.loss == "cdpo":
            of_judge, scores_A = (
                {"loss_type": "sigmoid", "label_smoothing": config.label_smoothing},
                sums_A - reference_A,
            )
        judge = Judge(log_probs_AT, live_AT, beta=config.beta, **of_judge)
        return CPOTrainer.cpo_loss(judge, scores_A[::2], scores_A[1::2])[0].mean(), 0.0  # type: ignore[arg-type]
    from trl.trainer.dpo_trainer import DPOTrainer

    kind = (
        "ipo" if config.loss == "ipo" else "sigmoid_norm" if config.length_normalized else "sigmoid"
    )
    judge = Judge(halves(log_probs_AT), halves(live_AT), beta=config.beta, loss_types=[kind])
    references = {"ref_chosen_logps": reference_A[::2], "ref_rejected_logps": reference_A[1::2]}
    loss = DPOTrainer._compute_loss(judge, judge, {**inputs(halves(live_AT)), **references}, False)  # type: ignore[arg-type]
    return loss, 0.0


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


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: f"{config.loss}-{config.beta}-{config.desirable_weight}"
)
def test_loss_and_gradient_are_those_of_trl_on_200_pairs(
    config: Dpo, tokens: tuple[Tensor, Tensor, Tensor]
) -> None:
    log_probs_AT, live_AT, reference_A = tokens
    first, second = (log_probs_AT.clone().requires_grad_() for _ in range(2))
    expected, point = of_trl(config, first, live_AT, reference_A)
    found = ours(config, second, live_AT, reference_A, point)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    [of_theirs], [of_ours] = (
        torch.autograd.grad(expected, first),
        torch.autograd.grad(found, second),
    )
    assert float((of_theirs - of_ours).norm() / of_theirs.norm()) < 1e-6


@pytest.mark.parametrize("loss", ["dpo", "ipo", "cdpo", "simpo", "orpo", "kto"])
def test_a_batch_in_parts_has_the_sum_of_the_whole(
    loss: str, tokens: tuple[Tensor, Tensor, Tensor]
) -> None:
    log_probs_AT, live_AT, reference_A = tokens
    config = of(loss, sft_weight=0.0 if loss == "orpo" else 0.3)
    answers = [
        (log_probs_AT * live_AT).sum(1),
        reference_A,
        live_AT.sum(1).to(log_probs_AT),
        torch.tensor([1, -1] * PAIRS),
    ]
    parts = [
        Answers(*(values[a:b] for values in answers))
        for a, b in ((0, 2), (2, 134), (134, 134), (134, 400))
    ]
    whole = loss_sum(config, Answers(*answers), 0.5)
    assert float(sum(loss_sum(config, part, 0.5) for part in parts)) == pytest.approx(
        float(whole), rel=1e-12
    )


def test_the_sft_term_is_the_mean_loss_of_each_chosen_answer(
    tokens: tuple[Tensor, Tensor, Tensor],
) -> None:
    log_probs_AT, live_AT, _ = tokens
    means_A = (log_probs_AT * live_AT).sum(1) / live_AT.sum(1)
    without, with_term = (ours(of("dpo", sft_weight=weight), *tokens) for weight in (0.0, 0.5))
    assert float(with_term - without) == pytest.approx(-0.5 * float(means_A[::2].mean()))


def test_odds_of_an_answer_that_is_certain_are_finite() -> None:
    certain = torch.zeros(1, requires_grad=True)
    odds = log_odds(certain)
    odds.backward()  # type: ignore[no-untyped-call]
    assert (
        torch.isfinite(odds).all()
        and certain.grad is not None
        and torch.isfinite(certain.grad).all()
    )
