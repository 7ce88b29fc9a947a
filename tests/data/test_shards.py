"""Shards: Arrow files that anyone can open, an index that counts right, and records that come back as they went in."""

from __future__ import annotations

import json
import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.tiny_data import write_shards

from ttrain.core.hashing import sha256_file
from ttrain.data.shards import Column, ShardSet
from ttrain.errors import ArtifactError

Record = tuple[list[int], list[bool]]


def some_records(count: int, *, vocab: int = 500, longest: int = 30) -> list[Record]:
    chance = random.Random(count)
    found = []
    for _ in range(count):
        ids = [chance.randrange(vocab) for _ in range(chance.randint(2, longest))]
        found.append((ids, [chance.random() < 0.5 for _ in ids]))
    return found


def write(
    path: Path, rows: list[Record], *, kind: str = "chats", tokens_per_shard: int = 10**6, vocab: int = 500, **more: Any
) -> dict[str, Any]:
    return write_shards(
        path, rows, kind=kind, vocab_size=vocab, tokenizer="t" * 64, tokens_per_shard=tokens_per_shard, **more
    )


@pytest.fixture(params=[100, 1], ids=str)
def layout(request: pytest.FixtureRequest) -> int:
    """Tokens of a shard: some in each, one record in each."""
    return int(request.param)


@pytest.mark.parametrize("kind", ["documents", "chats"])
def test_records_come_back_as_they_went_in_however_they_are_cut(tmp_path: Path, layout: int, kind: str) -> None:
    rows = some_records(50)
    write(tmp_path, rows, kind=kind, tokens_per_shard=layout)
    found = ShardSet(tmp_path)
    assert len(found) == 50
    for number, (ids, live) in enumerate(rows):
        stored, mask = found.row(number)
        assert stored.tolist() == ids
        assert (None if mask is None else mask.tolist()) == (None if kind == "documents" else live)
    assert found.lengths.tolist() == [len(ids) for ids, _ in rows]
    assert found.starts.tolist() == [0, *accumulate(len(ids) for ids, _ in rows)]


def test_the_stream_is_all_tokens_one_after_the_other(tmp_path: Path, layout: int) -> None:
    rows = some_records(40)
    write(tmp_path, rows, tokens_per_shard=layout)
    found, flat = ShardSet(tmp_path), [number for ids, _ in rows for number in ids]
    chance = random.Random(1)
    pairs = [sorted(chance.choices(range(len(flat) + 1), k=2)) for _ in range(40)]
    for start, end in [(0, len(flat)), (5, 5), (len(flat), len(flat)), *pairs]:
        assert found.stream(start, end).tolist() == flat[start:end]


@pytest.mark.parametrize("kind", ["documents", "chats"])
def test_the_index_counts_what_is_there(tmp_path: Path, layout: int, kind: str) -> None:
    rows = some_records(30)
    index = write(tmp_path, rows, kind=kind, tokens_per_shard=layout)
    tokens = sum(len(ids) for ids, _ in rows)
    live = sum(map(sum, (live for _, live in rows))) if kind == "chats" else tokens - len(rows)
    expected = {"kind": kind, "rows": 30, "tokens": tokens, "live_tokens": live, "bytes": 2 * tokens, "vocab_size": 500}
    assert {name: index[name] for name in expected} == expected
    assert json.loads((tmp_path / "index.json").read_text()) == index
    for name, whole in (("rows", 30), ("tokens", tokens)):
        assert sum(shard[name] for shard in index["shards"]) == whole
    assert {shard["file"]: shard["sha256"] for shard in index["shards"]} == {
        path.name: sha256_file(path) for path in tmp_path.glob("*.arrow")
    }
    assert all(shard["tokens"] < layout + 30 for shard in index["shards"])


@pytest.mark.parametrize(("vocab", "dtype"), [(500, pa.uint16()), (65536, pa.uint16()), (65537, pa.uint32())])
def test_a_shard_opens_with_arrow_alone_and_holds_the_smallest_type_that_fits(
    tmp_path: Path, vocab: int, dtype: pa.DataType
) -> None:
    rows = [([0, vocab - 1], [False, True]), ([1, 2, 3], [True, False, True])]
    index = write(tmp_path, rows, vocab=vocab)
    table = pa.ipc.open_stream(pa.memory_map(str(tmp_path / index["shards"][0]["file"]))).read_all()
    assert table.schema.field("tokens").type == pa.large_list(dtype)
    assert table.to_pydict() == {"tokens": [ids for ids, _ in rows], "live": [[0, 1], [1, 0, 1]]}


def test_a_folder_without_a_whole_index_holds_no_shards_and_one_without_records_is_whole(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"index\.json is missing"):
        ShardSet(tmp_path)
    write(tmp_path, [])
    assert len(ShardSet(tmp_path)) == len(ShardSet(tmp_path).stream(0, 0)) == 0, "without records it is empty"
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"index\.json is missing, damaged"):
        ShardSet(tmp_path)


def test_records_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    write(tmp_path, some_records(10))
    found = ShardSet(tmp_path)
    first, second = found.row(0)[0], found.row(1)[0]
    assert not first.flags.owndata
    assert first.__array_interface__["data"][0] + first.nbytes == second.__array_interface__["data"][0]
    assert not first.flags.writeable
    assert first.dtype == np.uint16


def test_documents_around_a_place_are_found_without_the_other_shards(tmp_path: Path, layout: int) -> None:
    rows = some_records(40)
    write(tmp_path, rows, kind="documents", tokens_per_shard=layout)
    starts = [0, *accumulate(len(ids) for ids, _ in rows)]
    found = ShardSet(tmp_path)
    expected = [(number, starts[number]) for number, (ids, _) in enumerate(rows) for _ in ids]
    for start, end in [(0, found.tokens), (7, 8), (3, 100), (found.tokens - 5, found.tokens), (4, 4)]:
        _, numbers, firsts, counts = (values.tolist() for values in found.ranges(np.array([start]), np.array([end])))
        by_record = zip(numbers, firsts, counts, strict=True)
        assert [(number, first) for number, first, count in by_record for _ in range(count)] == expected[start:end]
    bounds = np.sort(np.random.default_rng(0).integers(0, found.tokens + 1, (20, 2)), axis=1)
    alone = [found.ranges(start, end) for start, end in zip(bounds[:, :1], bounds[:, 1:], strict=True)]
    for place, column in enumerate(found.ranges(bounds[:, 0], bounds[:, 1])):
        assert column.tolist() == [value for one in alone for value in one[place].tolist()], "many at once"


def test_a_shard_that_was_cut_or_exchanged_is_refused_by_name(tmp_path: Path) -> None:
    first, second = write(tmp_path, some_records(20), tokens_per_shard=150)["shards"][:2]
    whole = (tmp_path / second["file"]).read_bytes()
    (tmp_path / first["file"]).write_bytes(whole)
    with pytest.raises(ArtifactError, match=rf"{first['file']} is damaged: its sha256 is"):
        ShardSet(tmp_path).row(0)
    (tmp_path / second["file"]).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtifactError, match=rf"{second['file']} is damaged"):
        ShardSet(tmp_path).row(first["rows"])


def test_a_weighted_source_can_be_opened_alone(tmp_path: Path) -> None:
    rows = some_records(30)
    index = write(tmp_path, rows, tokens_per_shard=1, groups=[0, 1] * 15 + [1], weights=[1.0, 3.0])
    assert len(index["shards"]) == 30
    found = ShardSet(tmp_path)
    assert found.weights == [1.0, 3.0]
    for group in (0, 1):
        assert [found.group(group).row(n)[0].tolist() for n in range(15)] == [ids for ids, _ in rows[group::2]]


def test_a_selection_of_records_keeps_ids_and_masks_together() -> None:
    column = Column(np.arange(9), np.array([0, 2, 2, 5, 9]), np.arange(9) % 2)
    some = column.select(np.array([False, True, True, False]))
    assert (some.tokens.tolist(), some.offsets.tolist(), some.live.tolist()) == ([2, 3, 4], [0, 0, 3], [0, 1, 0])
    assert len(column.select(np.zeros(4, bool))) == 0
