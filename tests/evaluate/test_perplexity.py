"""Scores of texts: every token once, after what its window shows, whatever the batch, the ranks and the architecture.

The validation loss of a training is that score of the model that it leaves, on the held-out records.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.evaluated_models import Uniform
from support.tiny_data import VOCAB
from support.tiny_stages import Home, run_here, stage_settings
from support.tiny_trainers import CPU, in_ranks, score_of, sequence, tiny_model
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ttrain.config import Lora, Settings
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE
from ttrain.evaluate import perplexity
from ttrain.evaluate.token_losses import TokenLosses, plain_parts
from ttrain.model import adapters
from ttrain.tasks import sft
from ttrain.tasks.shards import heldout_records
from ttrain.train.distributed import Ranks

# Whose logits are the head's output and nothing else, one of them of our own.
PLAIN: tuple[dict[str, Any], ...] = (
    {},
    {"kind": "gpt2"},
    {"kind": "qwen3", "tie_embeddings": True},
    {"kind": "moyun"},
)
# A soft cap, and scales.
OTHERS: tuple[dict[str, Any], ...] = (
    {"kind": "gemma2"},
    {"kind": "granite", "fields": {"logits_scaling": 3.0}},
    {"kind": "cohere"},
)


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_a_longer_text_costs_what_each_token_costs_after_its_window(stride: int) -> None:
    """Each token on its own, after just the context that its window shows."""
    model, length = tiny_model().eval(), 16
    ids, live = sequence(3, 40)
    nats = 0.0
    for t in range(1, 40):
        if not live[t]:
            continue
        end = (
            length + 1 if t <= length else min(40, length + 1 + stride * -(-(t - length) // stride))
        )
        context = ids[max(0, end - length - 1) : t]
        with torch.no_grad():
            logs = model(torch.tensor([context])).logits[0, -1].double().log_softmax(-1)
        nats -= float(logs[ids[t]])
    assert score_of(model, [(ids, live)], length, stride).nats == pytest.approx(nats, rel=1e-6)


def many() -> list[perplexity.Tokens]:
    return [sequence(seed, 3 + 7 * seed % 60) for seed in range(24)]


def scored(model: nn.Module, **more: Any) -> list[perplexity.Score]:
    return perplexity.score_each(
        model, many(), length=24, stride=12, device=CPU, progress=lambda done, total: None, **more
    )


def test_no_score_depends_on_the_batch_nor_on_the_other_texts() -> None:
    model = tiny_model(init_std=0.3)
    alone = [score_of(model, [one], 24, 12).nats for one in many()]
    for batch_tokens in (100, 4096):
        found = scored(model, batch_tokens=batch_tokens)
        assert [one.nats for one in found] == pytest.approx(alone, rel=1e-6), batch_tokens
        assert [one.tokens for one in found] == [sum(live) for _, live in many()]
    assert [one.nats for one in scored(tiny_model(init_std=0.3, seed=2))] != pytest.approx(
        alone, rel=1e-3
    )


def test_scores_are_the_same_to_the_last_bit_on_any_number_of_ranks(tmp_path: Path) -> None:
    model = tiny_model()
    expected = scored(model, batch_tokens=100)

    def work(ranks: Ranks) -> tuple[list[perplexity.Score], int]:
        progress: list[int] = []
        found = perplexity.score_each(
            model,
            many(),
            length=24,
            stride=12,
            device=CPU,
            batch_tokens=100,
            ranks=ranks,
            progress=lambda done, total: progress.append(total),
        )
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
    sequences = [
        (list(range(9, 9 + length)), [False] + [True] * (length - 1)) for length in lengths
    ]
    sequences.append((list(range(50)), [False] * 50))
    model = Uniform(64)
    score_of(model, sequences, 100, 100, batch_tokens=24)
    assert model.shapes == [(1, 29), (3, 8), (3, 1)]
    assert perplexity.batch_slices([10, 10, 9, 8, 8], 100, 20) == [slice(0, 3), slice(3, 5)], (
        "like lengths, once enough"
    )
    assert perplexity.batch_slices([10, 10, 9, 8, 8], 100, 50) == [slice(0, 5)]
    assert score_of(model, [([5], [True]), ([], [])], 4, 2) == (0.0, 0)


def rows_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(9, VOCAB, (3, 20), generator=generator)
    labels = torch.randint(9, VOCAB, (3, 20), generator=generator)
    return ids, labels.masked_fill(torch.rand(3, 20, generator=generator) < 0.5, IGNORE)


@pytest.mark.parametrize(
    "options", [*PLAIN, *OTHERS], ids=lambda options: options.get("kind", "llama")
)
def test_tokens_cost_what_the_logits_of_the_whole_model_say(options: dict[str, Any]) -> None:
    model = tiny_model(**{"hidden_size": 32, "init_std": 0.5, **options}).eval()
    check_costs(model)
    assert (plain_parts(model, rows_and_labels()[0]) is not None) == (options in PLAIN), (
        "the head alone where that is right"
    )


def check_costs(model: nn.Module) -> torch.Tensor:
    ids, labels = rows_and_labels()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits.double()
    expected = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORE
    )
    found = TokenLosses(model)(ids, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.double(), expected[labels.flatten() != IGNORE], rtol=1e-5, atol=1e-6
    )
    return logits


@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_tokens_under_an_adapter_cost_what_its_logits_say(kind: str) -> None:
    config = Lora.model_validate(
        {"kind": kind, "rank": 2, "virtual_tokens": 3, "row_length": 64, "tokens_per_step": 256}
    )
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
    expected = F.cross_entropy(
        logits.flatten(0, 1).double(), labels.flatten(), reduction="none", ignore_index=IGNORE
    )[live]
    torch.testing.assert_close(
        TokenLosses(model)(ids, labels).double(), expected, rtol=0.03, atol=0.03
    )
    in_bf16 = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORE
    )[live]
    assert (
        TokenLosses(model)(ids, labels).double().sub(expected).abs().mean()
        < in_bf16.double().sub(expected).abs().mean()
    )


def test_no_label_costs_nothing() -> None:
    ids, _ = rows_and_labels()
    assert TokenLosses(tiny_model().eval())(ids, torch.full_like(ids, IGNORE)).shape == (0,)


ROW_LENGTH = 160
Piece = tuple[Sequence[int], Sequence[bool]]  # ids, and which of them are targets


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("trained")
    home, tree = Home.make(root / "home"), stage_settings().model_dump(mode="json")
    rows = {"validation_rows": 1000, "row_length": ROW_LENGTH, "tokens_per_step": 4 * ROW_LENGTH}
    tree["pretrain"] |= {**rows, "row_length": 32, "tokens": 8 * ROW_LENGTH}
    tree["sft"] |= rows
    tree["model"]["max_length"] = ROW_LENGTH
    settings = Settings.model_validate(tree)
    paths = {"pretrain": root / "base", "sft": root / "sft"}
    results = {"pretrain": home.pretrain(settings, paths["pretrain"])}
    inputs = {"base": paths["pretrain"], "shards": home.chats.path}
    results["sft"] = run_here(sft, settings, paths["sft"], inputs, settings.runtime)
    shards = {"pretrain": home.documents.path, "sft": home.chats.path}
    return SimpleNamespace(paths=paths, results=results, settings=settings, shards=shards)


def pieces_of_documents(encoder: Encoder, directory: Path) -> Iterator[Piece]:
    """A document is cut every 32 tokens; a target is any but its first."""
    for text in encoder.encode([record["text"] for record in heldout_records(directory)]):
        document = [encoder.bos_id, *text, encoder.eos_id]
        for start in range(0, len(document) - 1, 32):
            ids = document[start : start + 33]  # the last one is a target only
            yield ids, [False] + [True] * (len(ids) - 1)


def pieces_of_chats(encoder: Encoder, directory: Path) -> Iterator[Piece]:
    for record in heldout_records(directory):
        ids, live = encode_chat(encoder, [Message(**turn) for turn in record["messages"]])
        assert len(ids) <= ROW_LENGTH
        yield ids, live


@pytest.mark.parametrize(
    ("stage", "pieces"), [("pretrain", pieces_of_documents), ("sft", pieces_of_chats)]
)
def test_the_validation_loss_is_that_of_each_held_out_record_alone_under_transformers(
    trained: Any, stage: str, pieces: Any
) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained.paths[stage] / "model").eval()
    found = list(pieces(Encoder(trained.paths[stage] / "model"), trained.shards[stage]))
    total, count = 0.0, 0
    for ids, live in found:
        targets = torch.tensor(
            [token if is_target else -100 for token, is_target in zip(ids, live, strict=True)]
        )
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        total += float(
            F.cross_entropy(logits[:-1], targets[1:], reduction="sum", ignore_index=-100)
        )
        count += sum(live[1:])
    assert count > 200
    assert trained.results[stage]["validation_loss"] == pytest.approx(total / count, rel=1e-6)
    nats, tokens = score_of(model, found, ROW_LENGTH, ROW_LENGTH)
    assert (tokens, nats / tokens) == (count, pytest.approx(total / count, rel=1e-6)), (
        "an evaluation says the same"
    )
