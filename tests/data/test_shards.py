"""Shards: open Arrow files; after a kill, damage or new files, the result of one run."""

import itertools
import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.shard_sets import build, digests, make_or_die, rows_of, write_lines
from support.tiny_data import write_shards

from ttrain.config import Reading
from ttrain.data.blocks import BlockRecipe
from ttrain.data.pool import Processes
from ttrain.data.shards import ShardSet
from ttrain.errors import StageFailed


@pytest.mark.parametrize(("vocab", "dtype"), [(65536, pa.uint16()), (65537, pa.uint32())])
def test_a_shard_opens_with_arrow_alone(tmp_path: Path, vocab: int, dtype: pa.DataType) -> None:
    rows = [([0, vocab - 1], [False, True]), ([1, 2, 3], [True, False, True])]
    index = write_shards(tmp_path, rows, kind="chats", vocab_size=vocab)
    table = pa.ipc.open_stream(pa.memory_map(str(tmp_path / index["shards"][0]["file"]))).read_all()
    assert table.schema.field("tokens").type == pa.large_list(dtype)
    assert table.to_pydict() == {"tokens": [ids for ids, _ in rows], "live": [[0, 1], [1, 0, 1]]}


class FourBlocks(Processes):
    def map(self, function: Any, tasks: Any) -> Any:
        yield from super().map(function, itertools.islice(tasks, 4))
        raise KeyboardInterrupt


class Killing(Processes):
    def map(self, function: Any, tasks: Any) -> Any:
        return super().map(make_or_die, tasks)


def test_finished_blocks_are_kept_and_new_files_alone_encoded(
    tmp_path: Path, recipe: BlockRecipe
) -> None:
    a, b, c = (write_lines(tmp_path / f"{seed}.jsonl", rows_of(100, seed)) for seed in range(3))
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "out", [a, c], recipe, pool=FourBlocks(1))
    assert not (tmp_path / "out" / "train" / "index.json").exists()
    first = build(tmp_path / "out", [a, c], recipe)
    before = digests(tmp_path / "out")
    assert first.encoded_blocks == first.blocks - 4 > 4
    more = build(tmp_path / "out", [a, b, c], recipe)
    assert more.encoded_blocks == more.blocks - first.blocks
    assert more.blocks == len(list((tmp_path / "out" / "train").glob("*.arrow")))
    build(tmp_path / "fresh", [a, b, c], recipe)
    assert digests(tmp_path / "fresh") == digests(tmp_path / "out")
    assert build(tmp_path / "out", [a, c], recipe).encoded_blocks == 0
    assert digests(tmp_path / "out") == before


def test_a_killed_worker_is_reported(tmp_path: Path, recipe: BlockRecipe) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(60))
    with pytest.raises(StageFailed, match=r"runtime\.workers"):
        build(tmp_path / "out", [path], recipe, pool=Killing(2))
    assert build(tmp_path / "out", [path], recipe).parts["train"]["rows"] == 60
    assert multiprocessing.active_children() == []


def test_assembly_ends_anywhere(
    tmp_path: Path, recipe: BlockRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file operation of the assembly is once the last one of its process."""
    a = write_lines(tmp_path / "a.jsonl", rows_of(40)[:25])
    b = write_lines(tmp_path / "b.jsonl", [*rows_of(40)[15:], b"{"])
    reading = Reading(heldout_fraction=0.1)
    build(tmp_path / "lent", [b], recipe, reading)
    lending = replace(recipe, reuse=(str(tmp_path / "lent"),))
    build(tmp_path / "whole", [a, b], lending, reading)
    expected, ended = digests(tmp_path / "whole"), 0
    build(tmp_path / "start", [a], recipe, reading)
    for last in range(1, 200):
        output = tmp_path / f"out{last}"
        shutil.copytree(tmp_path / "start", output)
        left = iter(range(last))

        def counting(original: Any, left: Any = left) -> Any:
            def call(*arguments: Any, **more: Any) -> Any:
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return original(*arguments, **more)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "link", counting(os.link))
            for name in ("rename", "replace", "unlink"):
                patch.setattr(Path, name, counting(getattr(Path, name)))
            try:
                build(output, [a, b], lending, reading)
            except KeyboardInterrupt:
                ended += 1
            else:
                break
        if (output / "train" / "index.json").exists():
            assert len(ShardSet(output / "train").lengths)
        build(output, [a, b], lending, reading)
        assert digests(output) == expected
    assert ended > 15


def test_a_damaged_shard_is_made_again(tmp_path: Path, recipe: BlockRecipe) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(100))
    build(tmp_path / "out", [path], recipe)
    expected = digests(tmp_path / "out")
    victim, lost, cut, *_ = sorted((tmp_path / "out" / "train").glob("*.arrow"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    lent = build(tmp_path / "new", [path], replace(recipe, reuse=(str(tmp_path / "out"),)))
    assert (lent.encoded_blocks, digests(tmp_path / "new")) == (1, expected)
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[:-8])
    # The block of a lost link is still there.
    assert build(tmp_path / "out", [path], recipe).encoded_blocks == 2
    assert digests(tmp_path / "out") == expected
