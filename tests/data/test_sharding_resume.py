"""Sharding after a kill, an altered file or other inputs: finished blocks are reused, and the result is that of one run."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.shard_sets import ALL, BLOCK, build, digests, make_or_die, rows_of, write_lines

from ttrain.config import Reading
from ttrain.data import sharding
from ttrain.data.blocks import BlockRecipe
from ttrain.data.built_blocks import DataFile
from ttrain.data.encoder import Encoder, EncoderDiffers
from ttrain.data.sharding import Here, Processes
from ttrain.data.shards import ShardSet
from ttrain.errors import ArtifactError, StageFailed


def test_a_new_file_alone_is_encoded_and_one_that_is_gone_takes_its_shards_along(
    tmp_path: Path, recipe: BlockRecipe
) -> None:
    a, b, c = (write_lines(tmp_path / f"{name}.jsonl", rows_of(100, seed)) for seed, name in enumerate("abc"))
    first = build(tmp_path / "out", [a, c], recipe)
    before = digests(tmp_path / "out")
    assert first.encoded_blocks == first.blocks
    more = build(tmp_path / "out", [a, b, c], recipe)
    assert (more.encoded_blocks, more.blocks) == (
        more.blocks - first.blocks,
        len(list((tmp_path / "out" / "train").glob("*.arrow"))),
    )
    again = build(tmp_path / "out", [a, c], recipe)
    assert again.encoded_blocks == 0
    assert digests(tmp_path / "out") == before
    build(tmp_path / "fresh", [a, b, c], recipe)
    build(tmp_path / "out", [a, b, c], recipe)
    assert digests(tmp_path / "fresh") == digests(tmp_path / "out")


def test_another_output_lends_its_blocks_and_is_not_changed(tmp_path: Path, recipe: BlockRecipe) -> None:
    a, b = (write_lines(tmp_path / f"{name}.jsonl", rows_of(100, seed)) for seed, name in enumerate("ab"))
    build(tmp_path / "old", [a, a], recipe)
    lent = {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()}
    new = build(tmp_path / "new", [b, a], replace(recipe, reuse=(str(tmp_path / "old"),)))
    build(tmp_path / "plain", [b, a], recipe)
    assert 0 < new.encoded_blocks < new.blocks
    assert digests(tmp_path / "new") == digests(tmp_path / "plain")
    assert {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()} == lent


def test_a_known_file_is_not_even_opened(tmp_path: Path, recipe: BlockRecipe) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(60))
    files = {"train": [DataFile(str(path), path.name, digest="its digest")]}
    sharding.build(tmp_path / "out", files, recipe, ALL, block_bytes=BLOCK, pool=Here())
    expected = digests(tmp_path / "out")
    path.unlink()
    built = sharding.build(tmp_path / "out", files, recipe, ALL, block_bytes=BLOCK, pool=Here())
    assert (built.encoded_blocks, digests(tmp_path / "out")) == (0, expected)


def test_an_appended_file_keeps_its_old_blocks(tmp_path: Path, recipe: BlockRecipe) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(200))
    first = build(tmp_path / "out", [path], recipe)
    with path.open("ab") as file:
        file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows_of(20, seed=9)))
    more = build(tmp_path / "out", [path], recipe)
    assert more.encoded_blocks <= 1 + more.blocks - first.blocks < more.blocks // 2


def test_a_difference_between_the_encoders_makes_all_anew_with_the_slow_one(
    tmp_path: Path, recipe: BlockRecipe, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(200))
    build(tmp_path / "good", [path], recipe)
    calls = Counter[str]()

    def check(self: Encoder, texts: Sequence[str]) -> None:
        calls[self.kind] += 1
        if self.kind == "fastokens" and calls["fastokens"] == 3:
            raise EncoderDiffers("as if")

    monkeypatch.setattr(Encoder, "check", check)
    built = build(tmp_path / "out", [path], recipe)
    assert calls["fastokens"] == 3, "the third block finds it"
    assert (built.encoder, built.encoded_blocks) == ("tokenizers", built.blocks)
    assert digests(tmp_path / "out") == digests(tmp_path / "good")


def test_a_killed_build_keeps_its_finished_blocks_and_shows_no_half_one(tmp_path: Path, recipe: BlockRecipe) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(800))
    build(tmp_path / "whole", [path], recipe)
    code = f"""
from pathlib import Path
from ttrain.config import Reading
from ttrain.data.built_blocks import DataFile
from ttrain.data.blocks import BlockRecipe
from ttrain.data.sharding import Here, build
files = {{"train": [DataFile({str(path)!r}, "a.jsonl")]}}
recipe = {replace(recipe, heldout_fraction=ALL.heldout_fraction, seed=ALL.seed)!r}
build(Path({str(tmp_path / "out")!r}), files, recipe, Reading(heldout_fraction=0), block_bytes={BLOCK}, pool=Here())
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    done = tmp_path / "out" / "run" / "blocks"
    while len(list(done.glob("*.json"))) < 8 and process.poll() is None:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = len(list(done.glob("*.json")))
    assert 8 <= finished < 60
    assert not (tmp_path / "out" / "train" / "index.json").exists()
    built = build(tmp_path / "out", [path], recipe)
    assert built.encoded_blocks == built.blocks - finished
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.endswith(".tmp")]


def test_a_killed_worker_is_told_and_the_work_goes_on_with_the_same_command(tmp_path: Path, recipe: BlockRecipe) -> None:
    path, environment = write_lines(tmp_path / "a.jsonl", rows_of(60)), dict(os.environ)

    class Killing(Processes):
        def map(self, function: Any, tasks: Any) -> Any:
            return super().map(make_or_die, tasks)

    with pytest.raises(StageFailed, match=r"killed.*runtime\.workers"):
        build(tmp_path / "out", [path], recipe, pool=Killing(2))
    assert build(tmp_path / "out", [path], recipe).parts["train"]["rows"] == 60
    assert multiprocessing.active_children() == []
    assert dict(os.environ) == environment, "what the workers need is not left behind"


def test_files_of_others_in_the_output_are_left_alone(tmp_path: Path, recipe: BlockRecipe) -> None:
    build(tmp_path / "out", [write_lines(tmp_path / "a.jsonl", rows_of(30))], recipe)
    mine = tmp_path / "out" / "train" / "notes.jsonl"
    mine.write_text("mine")
    build(tmp_path / "out", [write_lines(tmp_path / "b.jsonl", rows_of(30, seed=2))], recipe)
    assert mine.read_text() == "mine"


def test_putting_together_can_end_anywhere_and_the_next_run_mends_it(
    tmp_path: Path, recipe: BlockRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file operation of the assembly is once the last one of its process."""
    rows = rows_of(40)
    a, b = write_lines(tmp_path / "a.jsonl", rows[:25]), write_lines(tmp_path / "b.jsonl", [*rows[15:], b"{"])
    reading = Reading(heldout_fraction=0.1)
    build(tmp_path / "lent", [b], recipe, reading)
    lending = replace(recipe, reuse=(str(tmp_path / "lent"),))
    build(tmp_path / "whole", [a, b], lending, reading)
    expected, ended = digests(tmp_path / "whole"), 0
    build(tmp_path / "start", [a], recipe, reading)
    for last in range(1, 200):
        output = tmp_path / f"out{last}"
        shutil.copytree(tmp_path / "start", output)
        made = 0

        def counting(original: Any, last: int = last) -> Any:
            def call(*arguments: Any, **more: Any) -> Any:
                nonlocal made
                made += 1
                if made > last:
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
        with pytest.raises(ArtifactError) if not (output / "train" / "index.json").exists() else contextlib.nullcontext():
            assert len(ShardSet(output / "train").lengths)
        build(output, [a, b], lending, reading)
        assert digests(output) == expected
    assert ended > 15


def test_a_shard_that_was_altered_cut_or_lost_is_made_again_and_never_lent(tmp_path: Path, recipe: BlockRecipe) -> None:
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
    assert build(tmp_path / "out", [path], recipe).encoded_blocks == 3
    assert digests(tmp_path / "out") == expected
    shutil.copytree(tmp_path / "out", tmp_path / "copy", copy_function=shutil.copyfile)  # other times, the same bytes
    assert build(tmp_path / "copy", [path], recipe).encoded_blocks == 0
