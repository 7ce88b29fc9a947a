"""Preference tuning: both answers of packed pairs in one pass, on any number of ranks, and what it learns.

Letters in names: B rows, T positions, A answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import copies, distance, same
from support.tiny_data import VOCAB
from support.tiny_mixtures import spread_routers, tiny_moe
from support.tiny_trainers import ALONE, CPU, in_ranks, make_trainer, tiny_model
from torch import Tensor
from torch.nn import functional as F

from ttrain.config import Optim, Schedule
from ttrain.config.training import Dpo
from ttrain.data.packing import IGNORE, Array, Batch, Counts, Rows
from ttrain.data.pair_rows import PairBatch, finished_pairs
from ttrain.errors import UsageError
from ttrain.train import leakage_check, losses
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import NextTokenLoss
from ttrain.train.losses import token_loss_sum
from ttrain.train.preference_tuning import PreferenceTuning, score_answers

T = 48
GOOD, BAD = 11, 12  # what chosen and rejected answers begin with: the preference that is planted


@dataclass(frozen=True)
class Pair:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def size(self) -> int:
        return len(self.prompt) - 1 + len(self.chosen) + len(self.rejected)


def make_pairs(count: int, seed: int = 0) -> list[Pair]:
    generator = np.random.default_rng(seed)

    def ids(most: int) -> list[int]:
        return [int(number) for number in generator.integers(13, VOCAB, generator.integers(1, most))]

    return [Pair(ids(9), [GOOD, *ids(6)], [BAD, *ids(6)]) for _ in range(count)]


class PairsInMemory(Rows):
    """Pairs packed one after the other, up to three a row; with a reference, the log-probabilities of its answers."""

    batch_type, row_length, pad_id = PairBatch, T, 0

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs, self.reference_A = pairs, None
        self._rows: list[list[int]] = [[]]
        for number, pair in enumerate(pairs):
            if len(self._rows[-1]) == 3 or sum(pairs[n].size for n in self._rows[-1]) + pair.size > T:
                self._rows.append([])
            self._rows[-1].append(number)

    reference_A: np.ndarray[Any, Any] | None

    def __len__(self) -> int:
        return len(self._rows)

    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        assert isinstance(batch, PairBatch)
        for row, line in zip(rows.tolist(), lines.tolist(), strict=True):
            at = 0
            for segment, number in enumerate(self._rows[row]):
                at = self._fill(self.pairs[number], number, batch, line, at, segment)

    def _fill(self, pair: Pair, number: int, batch: PairBatch, line: int, at: int, segment: int) -> int:
        common, last = pair.prompt[:-1], pair.prompt[-1:]
        branches = [
            (0, common, common, -1),
            (1, last + pair.chosen, pair.chosen, 0),
            (2, last + pair.rejected, pair.rejected, 1),
        ]
        for branch, ids, labels, side in branches:
            inputs = ids if side < 0 else ids[:-1]
            for place, token in enumerate(inputs):
                batch.input_ids_BT[line, at], batch.segments_BT[line, at] = token, segment
                batch.positions_BT[line, at] = place + (len(common) if branch else 0)
                batch.branches_BT[line, at] = branch
                batch.labels_BT[line, at] = labels[place] if side >= 0 else IGNORE
                batch.answers_BT[line, at] = 2 * number + side if side >= 0 else -1
                at += 1
        return at

    def finished(self, batch: Batch) -> Batch:
        assert isinstance(batch, PairBatch)
        pairs = finished_pairs(batch)
        return pairs if self.reference_A is None else replace(pairs, references_A=self.reference_A[pairs.answer_ids_A])

    def counts(self) -> Counts:
        return {"rows": len(self)}


def referenced(pairs: Sequence[Pair], model: Any) -> PairsInMemory:
    rows = PairsInMemory(pairs)
    batch, objective = rows.batch(range(len(rows))), NextTokenLoss(model, token_loss_sum).eval()
    assert isinstance(batch, PairBatch)
    with torch.no_grad():
        rows.reference_A = score_answers(objective, batch, CPU)[0].numpy()
    return rows


def config_of(**changes: Any) -> Dpo:
    values: dict[str, Any] = {
        "tokens": 12 * 4 * T, "epochs": None, "tokens_per_step": 4 * T, "row_length": T, "precision": "fp32",
        "optim": Optim(lr=1e-2, weight_decay=0.0), "schedule": Schedule(warmup_steps=2), **changes,
    }  # fmt: skip
    return Dpo(**values)


def alone(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """The log-probability of an answer in a row of its own, without a mask."""
    ids = torch.tensor([prompt + answer])
    log_probs = F.log_softmax(model(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    return log_probs[len(prompt) - 1 :].sum()


KINDS: list[dict[str, Any]] = [
    {}, {"kind": "qwen3", "kv_heads": 1}, {"kind": "gemma2"}, {"kind": "mistral", "fields": {"sliding_window": 5}}
]  # fmt: skip


@pytest.mark.parametrize("options", KINDS, ids=lambda options: options.get("kind", "llama"))
def test_packed_answers_have_the_log_probabilities_and_gradients_of_each_alone(options: dict[str, Any]) -> None:
    model, pairs = tiny_model(**options).eval(), make_pairs(9)
    rows = PairsInMemory(pairs)
    batch = rows.batch(range(len(rows)))
    assert isinstance(batch, PairBatch) and len(rows) < len(pairs)
    weights_A = torch.linspace(-1, 1, 2 * len(pairs), dtype=torch.float64)
    expected_A = torch.stack([alone(model, p.prompt, answer) for p in pairs for answer in (p.chosen, p.rejected)])
    named = dict(model.named_parameters())
    expected = torch.autograd.grad((expected_A * weights_A).sum(), list(named.values()))
    found_A, tokens_A = score_answers(NextTokenLoss(model, token_loss_sum), batch, CPU)
    found = torch.autograd.grad((found_A * weights_A).sum(), list(named.values()))
    assert float((found_A - expected_A).abs().max()) < 1e-5
    assert tokens_A.tolist() == [len(answer) for p in pairs for answer in (p.chosen, p.rejected)]
    assert distance(dict(zip(named, expected, strict=True)), dict(zip(named, found, strict=True))) < 1e-5


def test_gradients_that_are_computed_again_are_those_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> dict[str, Tensor]:
        model, rows = tiny_model(), PairsInMemory(make_pairs(9))
        found_A, _ = score_answers(NextTokenLoss(model, token_loss_sum, 7), rows.batch(range(len(rows))), CPU)  # type: ignore[arg-type]
        found_A.square().sum().backward()  # type: ignore[no-untyped-call]
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    kept = gradients()
    monkeypatch.setattr(losses, "KEPT_ENTRIES", 0)
    assert distance(kept, gradients()) < 1e-6


@pytest.mark.parametrize("kind", ["rwkv", "minimax"])
def test_a_model_that_no_mask_keeps_apart_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=r"answers of a pair apart|cannot be called|carries state"):
        leakage_check.check(NextTokenLoss(tiny_model(kind=kind), token_loss_sum), config_of(packing="none"), branches=True)


LOSSES: list[dict[str, Any]] = [{"loss": "dpo", "sft_weight": 0.2}, {"loss": "orpo"}, {"loss": "kto", "beta": 0.5}]


@pytest.mark.parametrize("options", LOSSES, ids=lambda options: options["loss"])
def test_two_ranks_and_other_micro_batches_take_the_steps_of_one(options: dict[str, Any], tmp_path: Path) -> None:
    def train(ranks: Ranks, rows_per_device: int) -> dict[str, Tensor]:
        model, config = tiny_model(), config_of(optim=Optim(lr=1e-3, weight_decay=0.0, eps=1e-4), **options)
        rows = referenced(make_pairs(60), model)
        task = PreferenceTuning(config, model)
        make_trainer(config, model, rows, task=task, ranks=ranks, rows_per_device=rows_per_device).fit()
        return copies(dict(model.named_parameters())) | {"point": torch.tensor([1 + task.state()["reference_point"]])}

    once = train(ALONE, 4)
    assert (float(once["point"]) > 1.0) == (options["loss"] == "kto") or options["loss"] != "kto"
    assert distance(once, train(ALONE, 1)) < 1e-5
    for found in in_ranks(2, tmp_path, lambda ranks: train(ranks, 1)):
        assert distance(once, found) < 1e-5


def test_a_resumed_kto_has_the_reference_point_and_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    config = config_of(loss="kto", beta=0.5, desirable_weight=2.0, undesirable_weight=0.1)
    original = tiny_model()
    rows = referenced(make_pairs(40), original)

    def train(directory: Path, stop_after: int | None) -> tuple[Any, PreferenceTuning]:
        model = tiny_model()
        task = PreferenceTuning(config, model)
        trainer = make_trainer(config, model, rows, task=task, directory=directory, stop_after=stop_after)
        trainer.fit()
        if trainer.checkpoints is not None:
            trainer.checkpoints.close()
        return model, task

    straight, expected = train(tmp_path / "straight", None)
    train(tmp_path / "resumed", 5)
    resumed, found = train(tmp_path / "resumed", None)
    assert expected.state() == found.state() and expected.state()["reference_point"] > 0
    assert same(straight.state_dict(), resumed.state_dict())


# --- mixtures of experts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "loss"), [("mixtral", "dpo"), ("glm4_moe", "kto")])
def test_routers_keep_their_balance_terms_in_whatever_micro_batches(kind: str, loss: str) -> None:
    """A row counts by its pairs, as in other trainings by its targets, so that the quotient is the mean over pairs."""
    model = spread_routers(tiny_moe(kind, balance=0.5, z_loss=0.1))
    rows, config = referenced(make_pairs(9), model), config_of(loss=loss)
    task = PreferenceTuning(config, model)
    module = task.build_model().train()

    def found(batches: list[list[int]]) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Tensor]]:
        parts, sums = dict[str, float](), dict[str, Tensor]()
        for numbers in batches:
            step = task.train_step(module, rows.batch(numbers), CPU)  # type: ignore[arg-type]
            step.total.backward()  # type: ignore[no-untyped-call]
            values = {name: float(value.detach()) for name, value in step.parts.items()}
            expected = values["preference"] + 0.5 * values["balance"] + 0.1 * values["z"]
            assert float(step.total.detach()) == pytest.approx(expected, rel=1e-6)
            parts = {name: parts.get(name, 0.0) + value for name, value in values.items()}
            sums = {name: sums.get(name, 0) + value.double() for name, value in step.sums.items()}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return gradients, parts, sums

    together, parts, sums = found([[*range(len(rows))]])
    apart, parts_apart, sums_apart = found([[number] for number in range(len(rows))])
    assert distance(together, apart) < 1e-5 and parts == pytest.approx(parts_apart, rel=1e-5)
    assert same({n: v for n, v in sums.items() if "load" in n}, {n: v for n, v in sums_apart.items() if "load" in n})
    assert parts["balance"] >= 9 * (2 if loss == "kto" else 1) * 2 * 0.99, "at least 1 for each of two layers and each loss"
    validated = task.validation_step(module, rows.batch(range(len(rows))), CPU)  # type: ignore[arg-type]
    assert float(validated.total) == pytest.approx(parts["preference"], rel=1e-5)
    assert "moe_max_load" in task.figures({name: value.tolist() for name, value in sums.items()})


def test_a_step_moves_the_biases_of_routers() -> None:
    model = spread_routers(tiny_moe("ernie4_5_moe"))
    rows, config = referenced(make_pairs(40), model), config_of()
    before = copies({name: tensor for name, tensor in model.state_dict().items() if name.endswith("correction_bias")})
    make_trainer(config, model, rows, task=PreferenceTuning(config, model)).fit()
    assert before and all(not torch.equal(before[name], model.state_dict()[name]) for name in before)
