"""Preference tuning: both answers of packed pairs in one pass, on any number of ranks."""
# Letters in names: B rows, T positions, A answers.

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import copies, distance, same
from support.tiny_data import VOCAB
from support.tiny_mixtures import tiny_moe
from support.tiny_trainers import ALONE, CPU, Recorder, in_ranks, make_trainer, tiny_model
from torch import Tensor
from torch.nn.functional import log_softmax

from ttrain.config import Optim, Schedule
from ttrain.config.training import Dpo
from ttrain.data.pair_rows import PairBatch, PairRows
from ttrain.data.preferences import CHOSEN, PROMPT, REJECTED
from ttrain.data.shards import Column, ShardSet, offsets_of, write_index, write_shard
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import NextTokenLoss
from ttrain.train.memory_rows import InMemoryRows
from ttrain.train.preference_tuning import PreferenceTuning, score_answers
from ttrain.train.training_options import Cadence

T = 48
SLIDING = {"kind": "mistral", "kv_heads": 1, "fields": {"sliding_window": 5}}
Pair = tuple[list[int], ...]  # prompt, chosen, rejected
BUDGET = {"tokens": 6 * 4 * T, "epochs": None, "tokens_per_step": 4 * T, "row_length": T}


def make_pairs(count: int) -> list[Pair]:
    """Prompts, chosen answers, which begin with 11, and rejected ones, which begin with 12."""
    generator = np.random.default_rng(0)

    def ids(most: int) -> list[int]:
        numbers: list[int] = generator.integers(13, VOCAB, generator.integers(1, most)).tolist()
        return numbers

    return [(ids(9), [11, *ids(6)], [12, *ids(6)]) for _ in range(count)]


def packed(directory: Path, pairs: Sequence[Pair], reference: Any = None) -> InMemoryRows:
    """The pairs in rows as a stage packs them; with a reference, its scores of the answers."""
    directory.mkdir(parents=True, exist_ok=True)
    sizes = np.array([[*map(len, pair)] for pair in pairs])
    parts = np.tile([PROMPT, CHOSEN, REJECTED], len(pairs))
    branches = np.repeat(parts, sizes.ravel()).astype(np.uint8)
    ids = np.concatenate([part for pair in pairs for part in pair])
    column = Column(ids, offsets_of(sizes.sum(1)), branches != PROMPT, branches)
    shard = {**write_shard(directory / "0.arrow", column, VOCAB), "bytes": 0, "group": 0}
    write_index(directory, kind="pairs", vocab_size=VOCAB, tokenizer="t", shards=[shard])
    rows = PairRows(ShardSet(directory), T, 0, 3)
    batch = rows.batch(range(len(rows)))
    assert isinstance(batch, PairBatch) and len(rows) < len(pairs)
    if reference is None:
        return InMemoryRows(batch)
    references = np.empty(2 * len(pairs))
    with torch.no_grad():
        scores_A, _ = score_answers(NextTokenLoss(reference).eval(), batch, CPU)
    references[batch.answer_ids_A] = scores_A.numpy()
    return InMemoryRows(batch, references)


def config_of(lr: float = 1e-2, eps: float = 1e-8, **changes: Any) -> Dpo:
    changes |= {"optim": Optim(lr=lr, weight_decay=0.0, eps=eps), **BUDGET}
    return Dpo(precision="fp32", schedule=Schedule(warmup_steps=2), **changes)


@pytest.mark.parametrize("options", [{}, {"kind": "gemma2"}, SLIDING], ids=str)
def test_packed_answers_score_as_each_alone(options: dict[str, Any], tmp_path: Path) -> None:
    model, pairs = tiny_model(**options).eval(), make_pairs(9)

    def alone(prompt: list[int], answer: list[int]) -> Tensor:
        ids = torch.tensor([prompt + answer])
        log_probs = log_softmax(model(input_ids=ids).logits[0, :-1], -1)
        return log_probs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0].sum()

    batch: Any = packed(tmp_path, pairs).whole
    answers = [(prompt, answer) for prompt, *both in pairs for answer in both]
    answers = [answers[number] for number in batch.answer_ids_A]
    assert len(answers) == 18
    weights_A = torch.linspace(-1, 1, len(answers), dtype=torch.float64)
    expected_A = torch.stack([alone(*answer) for answer in answers])
    scores_A, tokens_A = score_answers(NextTokenLoss(model), batch, CPU)
    assert float((scores_A - expected_A).abs().max()) < 1e-5
    assert tokens_A.tolist() == [len(answer) for _, answer in answers]
    named = dict(model.named_parameters())
    expected, gradients = (
        dict(zip(named, torch.autograd.grad((x * weights_A).sum(), [*named.values()]), strict=True))
        for x in (expected_A, scores_A)
    )
    assert distance(expected, gradients) < 1e-5


def test_two_ranks_and_other_micro_batches_take_the_steps_of_one(tmp_path: Path) -> None:
    rows = packed(tmp_path / "pairs", make_pairs(30), tiny_model())

    def train(ranks: Ranks, rows_per_device: int) -> list[dict[str, Tensor]]:
        states = []
        for changes in ({"loss": "dpo", "sft_weight": 0.2}, {"loss": "kto", "beta": 0.5}):
            model, config = tiny_model(), config_of(lr=1e-3, eps=1e-4, **changes)
            task = PreferenceTuning(config, model)
            options: dict[str, Any] = {"ranks": ranks, "rows_per_device": rows_per_device}
            make_trainer(config, model, rows, task=task, **options).fit()
            point = torch.tensor([1 + task.state()["reference_point"]])
            states.append(copies(dict(model.named_parameters())) | {"point": point})
        return states

    once = train(ALONE, 4)
    assert float(once[1]["point"]) > 1.0, "which has moved"
    others = [train(ALONE, 1)]
    for size in (1, 4):  # with four rows at a time one of two ranks has none, hence no target
        others += in_ranks(2, tmp_path / str(size), lambda ranks, size=size: train(ranks, size))
    for states in others:
        assert max(map(distance, once, states)) < 1e-5


def test_a_resumed_kto_has_the_reference_point_and_the_same_bits(tmp_path: Path) -> None:
    config = config_of(loss="kto", beta=0.5, desirable_weight=2.0, undesirable_weight=0.1)
    rows = packed(tmp_path / "pairs", make_pairs(20), tiny_model())

    def train(directory: Path, stop_after: int | None) -> tuple[Any, PreferenceTuning, Recorder]:
        model, recorder = tiny_model(), Recorder()
        task = PreferenceTuning(config, model)
        options: dict[str, Any] = {"directory": directory, "stop_after": stop_after}
        options |= {"callbacks": [recorder], "cadence": Cadence(log=1)}
        make_trainer(config, model, rows, task=task, **options).fit()
        return model, task, recorder

    straight, expected, recorder = train(tmp_path / "straight", None)
    points, ratios = recorder.figures("reference_point"), recorder.figures("kl_to_reference")
    assert points == pytest.approx([max(0.0, ratio) for ratio in ratios]) and len(points) == 6
    train(tmp_path / "resumed", 3)
    resumed, task, _ = train(tmp_path / "resumed", None)
    assert expected.state() == task.state() and expected.state()["reference_point"] > 0
    assert same(straight.state_dict(), resumed.state_dict())


def test_routers_add_their_balance_to_the_loss_of_a_step_alone(tmp_path: Path) -> None:
    model = tiny_moe("qwen3_moe", balance=0.5)
    task = PreferenceTuning(config_of(), model)
    rows = packed(tmp_path, make_pairs(9), tiny_model())
    batch: Any = rows.batch(range(len(rows)))
    step = task.train_step(task.build_model(), batch, CPU)
    preference = task.validation_step(task.build_model(), batch, CPU)
    assert float(step.parts["preference"]) == pytest.approx(float(preference.total), rel=1e-5)
    gap = float(step.total - step.parts["preference"])
    assert gap == pytest.approx(0.5 * float(step.parts["balance"]), rel=1e-5)
