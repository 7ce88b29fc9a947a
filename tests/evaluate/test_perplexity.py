"""Scores of texts: every token once, after the context that its window shows, whatever the batch,
the ranks and the architecture.

The validation loss of a training is that score of its final model on the held-out records.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.evaluated_models import Uniform, quiet
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
TIED = {"kind": "qwen3", "tie_embeddings": True}
PLAIN: tuple[dict[str, Any], ...] = ({}, {"kind": "gpt2"}, TIED, {"kind": "moyun"})
# A soft cap, and scales.
GRANITE = {"kind": "granite", "fields": {"logits_scaling": 3.0}}
SCALED: tuple[dict[str, Any], ...] = ({"kind": "gemma2"}, GRANITE, {"kind": "cohere"})
SEQUENCES = [sequence(seed, 3 + 7 * seed % 60) for seed in range(24)]
ROW_LENGTH = 160


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_a_longer_text_costs_what_each_token_costs_after_its_window(stride: int) -> None:
    """Each token on its own, after just the context that its window shows."""
    model = tiny_model().eval()
    length = 16
    ids, live = sequence(3, 40)
    nats = 0.0
    for t in (t for t in range(1, 40) if live[t]):
        end = min(40, length + 1 + stride * -(-max(0, t - length) // stride))
        context = ids[max(0, end - length - 1) : t]
        with torch.no_grad():
            logs = model(torch.tensor([context])).logits[0, -1].double().log_softmax(-1)
        nats -= float(logs[ids[t]])
    assert score_of(model, [(ids, live)], length, stride).nats == pytest.approx(nats, rel=1e-6)


def scored(model: nn.Module, progress: Any = quiet, **options: Any) -> list[perplexity.Score]:
    return perplexity.score_each(
        model, SEQUENCES, length=24, stride=12, device=CPU, progress=progress, **options
    )


def test_no_score_depends_on_the_batch_nor_on_the_other_texts() -> None:
    model = tiny_model(init_std=0.3)
    separate = [score_of(model, [tokens], 24, 12).nats for tokens in SEQUENCES]
    for batch_tokens in (100, 4096):
        scores = scored(model, batch_tokens=batch_tokens)
        assert [score.nats for score in scores] == pytest.approx(separate, rel=1e-6), batch_tokens
        assert [score.tokens for score in scores] == [sum(live) for _, live in SEQUENCES]
    of_another = [score.nats for score in scored(tiny_model(init_std=0.3, seed=2))]
    assert of_another != pytest.approx(separate, rel=1e-3)


def test_scores_are_the_same_to_the_last_bit_on_any_number_of_ranks(tmp_path: Path) -> None:
    model = tiny_model()

    def work(ranks: Ranks) -> tuple[list[perplexity.Score], int]:
        done: list[int] = []
        scores = scored(model, lambda *counts: done.append(1), batch_tokens=100, ranks=ranks)
        return scores, len(done)

    scores, batches = zip(*in_ranks(3, tmp_path, work), strict=True)
    assert list(scores) == [scored(model, batch_tokens=100)] * 3
    assert max(batches) - min(batches) <= 1, "each has its share"
    assert min(batches) > 3


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
    sequences = [(list(range(length)), [False] + [True] * (length - 1)) for length in lengths]
    sequences.append((list(range(50)), [False] * 50))
    model = Uniform(64)
    score_of(model, sequences, 100, 100, batch_tokens=24)
    assert model.shapes == [(1, 29), (3, 8), (3, 1)]
    by_enough = {20: [slice(0, 3), slice(3, 5)], 50: [slice(0, 5)]}  # like lengths, once enough
    for enough, slices in by_enough.items():
        assert perplexity.batch_slices([10, 10, 9, 8, 8], 100, enough) == slices
    assert score_of(model, [([5], [True]), ([], [])], 4, 2) == (0.0, 0)


def rows_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(9, VOCAB, (3, 20), generator=generator)
    labels = torch.randint(9, VOCAB, (3, 20), generator=generator)
    return ids, labels.masked_fill(torch.rand(3, 20, generator=generator) < 0.5, IGNORE)


def losses_of(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    labels = labels_BT.flatten()
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), labels, reduction="none")
    return losses[labels != IGNORE]


@pytest.mark.parametrize(
    "options", [*PLAIN, *SCALED], ids=lambda options: options.get("kind", "llama")
)
def test_tokens_cost_what_the_logits_of_the_complete_model_say(options: dict[str, Any]) -> None:
    model = tiny_model(**{"hidden_size": 32, "init_std": 0.5, **options}).eval()
    check_costs(model)
    uses_the_head_alone = plain_parts(model, rows_and_labels()[0]) is not None
    assert uses_the_head_alone == (options in PLAIN)


def check_costs(model: nn.Module) -> torch.Tensor:
    ids, labels = rows_and_labels()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits.double()
    costs = TokenLosses(model)(ids, labels)
    assert costs.dtype == torch.float32
    torch.testing.assert_close(costs.double(), losses_of(logits, labels), rtol=1e-5, atol=1e-6)
    return logits


@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_tokens_under_an_adapter_cost_what_its_logits_say(kind: str) -> None:
    sizes = {"rank": 2, "virtual_tokens": 3, "row_length": 64, "tokens_per_step": 256}
    config = Lora.model_validate({"kind": kind, **sizes})
    model = adapters.attach(tiny_model(init_std=0.5), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    logits = check_costs(model.eval())
    if kind == "prefix":
        with torch.no_grad():
            bare = model.get_base_model()(input_ids=rows_and_labels()[0]).logits.double()
        assert not torch.allclose(bare, logits), "the prefix counts"


def test_a_model_in_bf16_is_scored_from_its_logits_in_fp32() -> None:
    model = tiny_model(init_std=0.5).eval().bfloat16()
    ids, labels = rows_and_labels()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert logits.dtype == torch.bfloat16
    exact = losses_of(logits.double(), labels)
    costs = TokenLosses(model)(ids, labels).double()
    torch.testing.assert_close(costs, exact, rtol=0.03, atol=0.03)
    in_bf16 = losses_of(logits, labels).double()
    assert (costs - exact).abs().mean() < (in_bf16 - exact).abs().mean()


def test_no_label_costs_nothing() -> None:
    ids, _ = rows_and_labels()
    assert TokenLosses(tiny_model().eval())(ids, torch.full_like(ids, IGNORE)).shape == (0,)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("trained")
    home = Home.make(root / "home")
    tree = stage_settings().model_dump(mode="json")
    rows = {"validation_rows": 1000, "row_length": ROW_LENGTH, "tokens_per_step": 4 * ROW_LENGTH}
    tree["pretrain"] |= {**rows, "row_length": 32, "tokens": 8 * ROW_LENGTH}
    tree["sft"] |= rows
    tree["model"]["max_length"] = ROW_LENGTH
    settings = Settings.model_validate(tree)
    results = {"pretrain": home.pretrain(settings, root / "pretrain")}
    inputs = {"base": root / "pretrain", "shards": home.chats.path}
    results["sft"] = run_here(sft, settings, root / "sft", inputs, settings.runtime)
    shards = {"pretrain": home.documents.path, "sft": home.chats.path}
    return SimpleNamespace(root=root, results=results, shards=shards)


def pieces_of_documents(encoder: Encoder, directory: Path) -> Iterator[perplexity.Tokens]:
    """A document is cut every 32 tokens; a target is any but its first."""
    for text in encoder.encode([record["text"] for record in heldout_records(directory)]):
        document = [encoder.bos_id, *text, encoder.eos_id]
        for start in range(0, len(document) - 1, 32):
            ids = document[start : start + 33]  # the last one is a target only
            yield ids, [False] + [True] * (len(ids) - 1)


def pieces_of_chats(encoder: Encoder, directory: Path) -> Iterator[perplexity.Tokens]:
    for record in heldout_records(directory):
        ids, live = encode_chat(encoder, [Message(**turn) for turn in record["messages"]])
        assert len(ids) <= ROW_LENGTH
        yield ids, live


@pytest.mark.parametrize(
    ("stage", "pieces_of"), [("pretrain", pieces_of_documents), ("sft", pieces_of_chats)]
)
def test_the_validation_loss_is_that_of_each_held_out_record_alone_under_transformers(
    trained: Any, stage: str, pieces_of: Any
) -> None:
    directory = trained.root / stage / "model"
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    pieces = list(pieces_of(Encoder(directory), trained.shards[stage]))
    nats = []
    for ids, live in pieces:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[:, :-1].double()
        targets = torch.where(torch.tensor(live), torch.tensor(ids), IGNORE)
        nats += losses_of(logits, targets[1:]).tolist()
    assert len(nats) > 200
    loss = pytest.approx(sum(nats) / len(nats), rel=1e-6)
    assert trained.results[stage]["validation_loss"] == loss
    total, count = score_of(model, pieces, ROW_LENGTH, ROW_LENGTH)
    assert (count, total / count) == (len(nats), loss)
