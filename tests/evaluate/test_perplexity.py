"""Scores of texts: every token once, after what its window shows, whatever the batch, the ranks and the architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_data import VOCAB
from support.tiny_trainers import CPU, in_ranks, score_of, sequence, tiny_model
from torch import nn
from torch.nn import functional as F

from ttrain.config import Lora
from ttrain.data.packing import IGNORE
from ttrain.evaluate import perplexity
from ttrain.evaluate.perplexity import windows
from ttrain.evaluate.token_losses import TokenLosses, plain_parts
from ttrain.model import adapters
from ttrain.train.distributed import Ranks

LENGTHS = st.integers(1, 12).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))
# Whose logits are the head's output and nothing else, one of them of our own.
PLAIN: tuple[dict[str, Any], ...] = (
    {}, {"kind": "gpt2"}, {"kind": "qwen3", "tie_embeddings": True}, {"kind": "moyun"}, {"kind": "phi"}, {"kind": "olmo2"},
)  # fmt: skip
# A soft cap, and scales.
OTHERS: tuple[dict[str, Any], ...] = (
    {"kind": "gemma2"}, {"kind": "granite", "fields": {"logits_scaling": 3.0}}, {"kind": "cohere"},
)  # fmt: skip


class Uniform(nn.Module):
    """Finds every one of `vocab` tokens equally likely; notes the shapes that it is given."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.shapes: list[tuple[int, int]] = []

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        self.shapes.append((input_ids.shape[0], input_ids.shape[1]))
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.vocab))


# --- windows ------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 60), LENGTHS)
def test_every_token_after_the_first_is_scored_once_with_the_tokens_before_it(tokens: int, sizes: tuple[int, int]) -> None:
    length, stride = sizes
    scored: list[int] = []
    for window in windows(tokens, length, stride):
        assert 1 <= window.inputs <= length
        assert 0 <= window.start < window.first < window.end <= tokens
        for token in range(window.first, window.end):
            assert token - window.start >= min(token, length - stride + 1), "all but the first window score their end"
            scored.append(token)
    assert scored == list(range(1, tokens))


@settings(deadline=None)
@given(st.lists(st.integers(1, 50)), st.integers(1, 200), st.integers(1, 100))
def test_batches_hold_every_window_once_within_the_limit(lengths: list[int], most: int, enough: int) -> None:
    lengths.sort(reverse=True)
    batches = perplexity.batch_slices(lengths, most, enough)
    assert [length for batch in batches for length in lengths[batch]] == lengths
    for batch in batches:
        rows, widest = batch.stop - batch.start, lengths[batch.start]
        assert rows == 1 or rows * widest <= most
        for row in range(1, rows):
            assert row * widest < enough or lengths[batch.start + row] >= 0.9 * widest
        if batch.stop < len(lengths):
            full, unlike = (rows + 1) * widest > most, lengths[batch.stop] < 0.9 * widest
            assert full or (rows * widest >= enough and unlike), "it ends for a reason"


# --- scores -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_a_longer_text_costs_what_each_token_costs_after_its_window(stride: int) -> None:
    """Each token on its own, after just the context that its window shows."""
    model, length = tiny_model().eval(), 16
    ids, live = sequence(3, 50)
    nats = 0.0
    for t in range(1, 50):
        if not live[t]:
            continue
        end = length + 1 if t <= length else min(50, length + 1 + stride * -(-(t - length) // stride))
        context = ids[max(0, end - length - 1) : t]
        with torch.no_grad():
            logs = model(torch.tensor([context])).logits[0, -1].double().log_softmax(-1)
        nats -= float(logs[ids[t]])
    assert score_of(model, [(ids, live)], length, stride).nats == pytest.approx(nats, rel=1e-6)


def many() -> list[perplexity.Tokens]:
    return [sequence(seed, 3 + 7 * seed % 60) for seed in range(40)]


def each(model: nn.Module, sequences: Sequence[perplexity.Tokens], **more: Any) -> list[float]:
    return [score_of(model, [one], 24, 12, **more).nats for one in sequences]


def scored(model: nn.Module, **more: Any) -> list[perplexity.Score]:
    return perplexity.score_each(model, many(), length=24, stride=12, device=CPU, progress=lambda done, total: None, **more)


def test_no_score_depends_on_the_batch_nor_on_the_other_texts() -> None:
    model = tiny_model(init_std=0.3)
    alone = each(model, many())
    for batch_tokens in (1, 100, 4096):
        found = scored(model, batch_tokens=batch_tokens)
        assert [one.nats for one in found] == pytest.approx(alone, rel=1e-6), batch_tokens
        assert [one.tokens for one in found] == [sum(live) for _, live in many()]
    assert [one.nats for one in scored(tiny_model(init_std=0.3, seed=2))] != pytest.approx(alone, rel=1e-3)


def test_scores_are_the_same_to_the_last_bit_on_any_number_of_ranks(tmp_path: Path) -> None:
    model = tiny_model()
    expected = scored(model, batch_tokens=100)

    def work(ranks: Ranks) -> tuple[list[perplexity.Score], int]:
        progress: list[int] = []
        found = perplexity.score_each(
            model, many(), length=24, stride=12, device=CPU, batch_tokens=100, ranks=ranks,
            progress=lambda done, total: progress.append(total),
        )  # fmt: skip
        return found, len(progress)

    for world in (2, 3):
        results = in_ranks(world, tmp_path / str(world), work)
        assert [found for found, _ in results] == [expected] * world
        batches = [count for _, count in results]
        assert max(batches) - min(batches) <= 1 and min(batches) > 3, "each has its share"


def test_scoring_switches_dropout_off_and_leaves_the_model_as_it_was() -> None:
    sequences = [sequence(1, 40)]
    model = tiny_model(dropout=0.5).train()
    assert score_of(model, sequences, 24, 12) == score_of(model, sequences, 24, 12)
    assert model.training
    model(input_ids=torch.tensor([sequences[0][0]])).logits.sum().backward()
    score_of(model.eval(), sequences, 24, 12)
    assert not model.training


def test_windows_of_like_length_share_a_batch_and_those_without_a_live_token_are_left_out() -> None:
    lengths = [2, 9, 2, 9, 2, 9, 30]
    sequences = [(list(range(9, 9 + length)), [False] + [True] * (length - 1)) for length in lengths]
    sequences.append((list(range(50)), [False] * 50))
    model = Uniform(64)
    score_of(model, sequences, 100, 100, batch_tokens=24)
    assert model.shapes == [(1, 29), (3, 8), (3, 1)]
    assert score_of(model, [([5], [True]), ([], [])], 4, 2) == (0.0, 0)


# --- costs of tokens ----------------------------------------------------------------------------------------------------


def rows_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(9, VOCAB, (3, 20), generator=generator)
    labels = torch.randint(9, VOCAB, (3, 20), generator=generator)
    return ids, labels.masked_fill(torch.rand(3, 20, generator=generator) < 0.5, IGNORE)


@pytest.mark.parametrize("options", [*PLAIN, *OTHERS], ids=lambda options: options.get("kind", "llama"))
def test_tokens_cost_what_the_logits_of_the_whole_model_say(options: dict[str, Any]) -> None:
    model = tiny_model(**{"hidden_size": 32, "init_std": 0.5, **options}).eval()
    ids, labels = rows_and_labels()
    with torch.no_grad():
        logits = model(input_ids=ids).logits.double()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORE)
    found = TokenLosses(model)(ids, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected[labels.flatten() != IGNORE], rtol=1e-5, atol=1e-6)
    assert (plain_parts(model, ids) is not None) == (options in PLAIN), "the head alone is used where that is right"


@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_tokens_under_an_adapter_cost_what_its_logits_say(kind: str) -> None:
    config = Lora.model_validate({"kind": kind, "rank": 2, "virtual_tokens": 3, "row_length": 64, "tokens_per_step": 256})
    model = adapters.attach(tiny_model(init_std=0.5), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    ids, labels = rows_and_labels()
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits.double()
        bare = model.get_base_model()(input_ids=ids).logits.double() if kind == "prefix" else None
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORE)
    found = TokenLosses(model)(ids, labels).double()
    torch.testing.assert_close(found, expected[labels.flatten() != IGNORE], rtol=1e-5, atol=1e-6)
    assert bare is None or not torch.allclose(bare, logits), "the prefix is seen"


def test_a_model_in_bf16_is_scored_from_its_logits_in_fp32() -> None:
    model = tiny_model(init_std=0.5).eval().bfloat16()
    ids, labels = rows_and_labels()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert logits.dtype == torch.bfloat16
    live = labels.flatten() != IGNORE
    expected = F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="none", ignore_index=IGNORE)[live]
    torch.testing.assert_close(TokenLosses(model)(ids, labels).double(), expected, rtol=0.03, atol=0.03)
    in_bf16 = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORE)[live]
    assert TokenLosses(model)(ids, labels).double().sub(expected).abs().mean() < in_bf16.double().sub(expected).abs().mean()


def test_no_label_costs_nothing() -> None:
    ids, labels = rows_and_labels()
    assert TokenLosses(tiny_model().eval())(ids, torch.full_like(labels, IGNORE)).shape == (0,)
