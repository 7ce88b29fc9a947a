"""A home from which stages can run, and a tokenizer, for the tests of one file."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_data import make_tokenizer
from support.tiny_stages import Home, stage_settings

from ttrain.data.encoder import Encoder


@pytest.fixture(scope="module")
def stage_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A store that holds a tokenizer, shards of documents and shards of chats."""
    return Home.make(tmp_path_factory.mktemp("stages") / "home")


@pytest.fixture(scope="module")
def pretrained_base(stage_home: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model, as its stage leaves it."""
    output = tmp_path_factory.mktemp("base")
    stage_home.pretrain(stage_settings(2), output)
    return output


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """The smallest tokenizer that trains."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
