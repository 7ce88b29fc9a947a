"""Settings of pretraining that follow from others where they are `auto`."""

from __future__ import annotations

from typing import Any

import pytest

from ttrain.config import Settings, flatten, rules
from ttrain.config.loading import load

LARGE = ("model.layers=8",)  # a head of 0.16 of the layers' parameters


def followed(*given: str) -> dict[str, Any]:
    values = dict(flatten(load(list(given), environment={}).settings.model_dump()))
    return {key: values[key] for key in rules.KEYS}


def test_the_defaults_are_what_auto_makes_of_them() -> None:
    usual = dict(flatten(Settings().model_dump()))
    assert rules.automatic(usual) == {key: usual[key] for key in rules.KEYS}


def test_a_small_head_is_its_own_and_learns_twice_as_fast() -> None:
    assert followed(*LARGE) == {**followed(), rules.TIED: False, "pretrain.optim.head_lr": 8e-3}
    assert followed(*LARGE, "model.tie_embeddings=true") == followed()
    assert followed("model.tie_embeddings=false")["pretrain.optim.head_lr"] == 8e-3
    assert followed("tokenizer.vocab_size=1000")[rules.TIED] is False


def test_the_batch_follows_the_budget_and_rates_of_embedding_and_head_the_width() -> None:
    assert [followed(f"pretrain.tokens={tokens}")[rules.BATCH_KEY] for tokens in ("100k", "1M", "20M", "1B")] == [
        1024, 2048, 8192, 65536,
    ]  # fmt: skip
    wide = followed("model.hidden_size=512", "model.heads=8")
    assert (wide["pretrain.optim.embedding_lr"], wide["pretrain.optim.head_lr"]) == (0.02, 4e-3)
    assert wide["pretrain.optim.lr"] == followed()["pretrain.optim.lr"]


@pytest.mark.parametrize("given", ["pretrain.optim.kind=adamw", "pretrain.start_from=./model"])
def test_another_optimizer_and_a_model_that_exists_have_one_rate_and_usual_betas(given: str) -> None:
    found = followed(given)
    assert found[rules.BETAS_KEY] == (0.9, 0.95)
    assert found["pretrain.optim.embedding_lr"] is found["pretrain.optim.head_lr"] is None


def test_a_number_overrides_and_auto_gives_it_back() -> None:
    assert followed("pretrain.optim.head_lr=0.1", "pretrain.optim.betas=[0.9,0.99]")[rules.BETAS_KEY] == (0.9, 0.99)
    assert followed("pretrain.optim.head_lr=0.1", "pretrain.optim.head_lr=auto") == followed()
