"""Scores of texts: every token once, after what its window shows, whatever the batch, the ranks and the architecture."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_data import VOCAB
from support.tiny_trainers import CPU, in_ranks, score_of, sequence, tiny_model
from torch import nn
from torch.nn import functional as F

from ttrain.config import Lora
from ttrain.data.packing import IGNORE
from ttrain.evaluate import perplexity
from ttrain.evaluate.token_losses import TokenLosses, plain_parts
from ttrain.model import adapters
from ttrain.train.distributed import Ranks

# Whose logits are the head's output and nothing else, one of them of our own.
PLAIN: tuple[dict[str, Any], ...] = ({}, {"kind": "gpt2"}, {"kind": "qwen3", "tie_embeddings": True}, {"kind": "moyun"})
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


# --- scores -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_a_longer_text_costs_what_each_token_costs_after_its_window(stride: int) -> None:
    """Each token on its own, after just the context that its window shows."""
    model, length = tiny_model().eval(), 16
    ids, live = sequence(3, 40)
    nats = 0.0
    for t in range(1, 40):
        if not live[t]:
            continue
        end = length + 1 if t <= length else min(40, length + 1 + stride * -(-(t - length) // stride))
        context = ids[max(0, end - length - 1) : t]
        with torch.no_grad():
            logs = model(torch.tensor([context])).logits[0, -1].double().log_softmax(-1)
        nats -= float(logs[ids[t]])
    assert score_of(model, [(ids, live)], length, stride).nats == pytest.approx(nats, rel=1e-6)


def many() -> list[perplexity.Tokens]:
    return [sequence(seed, 3 + 7 * seed % 60) for seed in range(24)]


def scored(model: nn.Module, **more: Any) -> list[perplexity.Score]:
    return perplexity.score_each(model, many(), length=24, stride=12, device=CPU, progress=lambda done, total: None, **more)


def test_no_score_depends_on_the_batch_nor_on_the_other_texts() -> None:
    model = tiny_model(init_std=0.3)
    alone = [score_of(model, [one], 24, 12).nats for one in many()]
    for batch_tokens in (100, 4096):
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

    results = in_ranks(3, tmp_path, work)
    assert [found for found, _ in results] == [expected] * 3
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
    assert perplexity.batch_slices([10, 10, 9, 8, 8], 100, 20) == [slice(0, 3), slice(3, 5)], "like lengths, once enough"
    assert perplexity.batch_slices([10, 10, 9, 8, 8], 100, 50) == [slice(0, 5)]
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
    check_costs(model)
    assert (plain_parts(model, rows_and_labels()[0]) is not None) == (options in PLAIN), "the head alone where that is right"


def check_costs(model: nn.Module) -> torch.Tensor:
    """Compare each token's cost with the logits of the whole model, which are returned."""
    ids, labels = rows_and_labels()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits.double()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORE)
    found = TokenLosses(model)(ids, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected[labels.flatten() != IGNORE], rtol=1e-5, atol=1e-6)
    return logits


@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_tokens_under_an_adapter_cost_what_its_logits_say(kind: str) -> None:
    config = Lora.model_validate({"kind": kind, "rank": 2, "virtual_tokens": 3, "row_length": 64, "tokens_per_step": 256})
    model = adapters.attach(tiny_model(init_std=0.5), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    logits = check_costs(model.eval())
    if kind == "prefix":
        with torch.no_grad():
            bare = model.get_base_model()(input_ids=rows_and_labels()[0]).logits.double()
        assert not torch.allclose(bare, logits), "the prefix is seen"


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
    ids, _ = rows_and_labels()
    assert TokenLosses(tiny_model().eval())(ids, torch.full_like(ids, IGNORE)).shape == (0,)
