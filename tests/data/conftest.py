"""A small tokenizer and the recipes of shards that it encodes; a folder of data files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hostile_rows import READING
from support.streamed_files import ROW
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
    """For each kind of record."""
    return {kind: recipe_of(READING, tokenizer, kind) for kind in ("documents", "chats", "pairs")}


@pytest.fixture(scope="session")
def recipe(recipes: dict[str, BlockRecipe]) -> BlockRecipe:
    return recipes["documents"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data files and others, at several depths."""
    for name in (
        "b.jsonl",
        "a.jsonl.gz",
        "deep/c.jsonl.zst",
        "deep/er/d.ndjson",
        "e.ndjson.gz",
        "f.parquet",
        "g.jsonl.bz2",
        "h.jsonl.xz",
        "[1] 文件?.jsonl",
        "notes.txt",
        "i.json",
        "j.jsonl.old",
        ".hidden.jsonl",
        ".hidden/k.jsonl",
        "deep/._l.jsonl",
        "m.jsonl/n.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(ROW)
    return tmp_path


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty server."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with served(Site({})) as opened:
        yield opened
