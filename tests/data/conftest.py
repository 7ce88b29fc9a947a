"""A small tokenizer and the recipes of shards that it encodes; a folder of data files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hostile_rows import READING
from support.tiny_data import make_tokenizer
from support.web import Site, served

from ttrain.data.blocks import BlockRecipe
from ttrain.tasks.shards import recipe_of


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def recipes(tokenizer: Path) -> dict[str, BlockRecipe]:
    return {kind: recipe_of(READING, tokenizer, kind) for kind in ("documents", "chats", "pairs")}


@pytest.fixture(scope="session")
def recipe(recipes: dict[str, BlockRecipe]) -> BlockRecipe:
    return recipes["documents"]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with served(Site({})) as opened:
        yield opened
