"""A home from which stages can run, and a tokenizer, for the tests of one file."""

from __future__ import annotations

import pytest
from support.doubles import Home, make_tokenizer

from ttrain.data.encoder import Encoder


@pytest.fixture(scope="module")
def stage_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A store that holds a tokenizer, shards of documents and shards of chats."""
    return Home.make(tmp_path_factory.mktemp("stages") / "home")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """The smallest tokenizer that trains."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
