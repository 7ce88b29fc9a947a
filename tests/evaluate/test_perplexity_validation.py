"""The validation loss of a training is what anybody computes from the model that it leaves and the held-out records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_stages import Home, run_here, stage_settings
from support.tiny_trainers import score_of
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ttrain.config import Settings, SftConfig
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.stages import sft

ROW_LENGTH = 160
Piece = tuple[Sequence[int], Sequence[bool]]  # ids, and which of them are targets


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A pretraining and an SFT that were validated on all that was held out."""
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
    results["sft"] = run_here(sft, SftConfig(sft=settings.sft), paths["sft"], inputs, settings.runtime)
    shards = {"pretrain": home.documents.path, "sft": home.chats.path}
    return SimpleNamespace(paths=paths, results=results, settings=settings, shards=shards)


def records(directory: Path) -> list[Any]:
    names = [shard["records"] for shard in json.loads((directory / "heldout" / "index.json").read_text())["shards"]]
    return [json.loads(line) for name in names for line in (directory / "heldout" / name).read_text().splitlines()]


def pieces_of_documents(encoder: Encoder, directory: Path) -> Iterator[Piece]:
    """A document is cut every 32 tokens; a target is any but its first."""
    for text in encoder.encode([record["text"] for record in records(directory)]):
        document = [encoder.bos_id, *text, encoder.eos_id]
        for start in range(0, len(document) - 1, 32):
            ids = document[start : start + 33]  # the last one is a target only
            yield ids, [False] + [True] * (len(ids) - 1)


def pieces_of_chats(encoder: Encoder, directory: Path) -> Iterator[Piece]:
    for record in records(directory):
        ids, live = encode_chat(encoder, [Message(**turn) for turn in record["messages"]])
        assert len(ids) <= ROW_LENGTH
        yield ids, live


@pytest.mark.parametrize(("stage", "pieces"), [("pretrain", pieces_of_documents), ("sft", pieces_of_chats)])
def test_the_validation_loss_is_that_of_each_held_out_record_alone_under_transformers(
    trained: Any, stage: str, pieces: Any
) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained.paths[stage] / "model").eval()
    found = list(pieces(Encoder(trained.paths[stage] / "model"), trained.shards[stage]))
    total, count = 0.0, 0
    for ids, live in found:
        targets = torch.tensor([token if is_target else -100 for token, is_target in zip(ids, live, strict=True)])
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        total += float(F.cross_entropy(logits[:-1], targets[1:], reduction="sum", ignore_index=-100))
        count += sum(live[1:])
    assert count > 200
    assert trained.results[stage]["validation_loss"] == pytest.approx(total / count, rel=1e-6)
    nats, tokens = score_of(model, found, ROW_LENGTH, ROW_LENGTH)
    assert (tokens, nats / tokens) == (count, pytest.approx(total / count, rel=1e-6)), "an evaluation says the same"
