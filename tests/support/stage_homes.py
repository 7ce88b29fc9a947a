"""A home from which stages can run, and a tokenizer, for the tests of one file."""

import pytest
from support.tiny_data import make_tokenizer
from support.tiny_stages import Home

from ttrain.data.encoder import Encoder


@pytest.fixture(scope="module")
def stage_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home.make(tmp_path_factory.mktemp("stages") / "home")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
