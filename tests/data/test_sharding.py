"""Files to shards: the same from any number of workers, what is there is not made again, every row is accounted for."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import gzip
import json
import multiprocessing
import os
import random
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

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.doubles import LINES, documents, make_tokenizer
from support.kill_points import die

from ttrain.config import Reading
from ttrain.core.hashing import sha256_file
from ttrain.data import blocks, sharding
from ttrain.data.assembly import DataFile, ShardSetResult
from ttrain.data.blocks import BlockRecipe
from ttrain.data.encoder import Encoder, EncoderDiffers
from ttrain.data.records import TOO_LONG
from ttrain.data.sharding import Here, Processes
from ttrain.data.shards import ShardSet
from ttrain.errors import ArtifactError, StageFailed
from ttrain.stages.shards import heldout_records, recipe_of

ALL = Reading(heldout_fraction=0.0)
BLOCK = 4096


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return directory


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    lines = (row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def rows_of(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [{"text": f"{seed}.{n} {text}"} for n, text in enumerate(documents(count, seed))]


def build(
    output: Path,
    files: Sequence[Path],
    recipe: BlockRecipe,
    reading: Reading = ALL,
    *,
    heldout: Sequence[Path] = (),
    **more: Any,
) -> ShardSetResult:
    recipe = replace(recipe, heldout_fraction=reading.heldout_fraction, seed=reading.seed)
    roles = {"train": files, **({"heldout": heldout} if heldout else {})}
    given = {role: [DataFile(str(path), path.name) for path in paths] for role, paths in roles.items()}
    return sharding.build(output, given, recipe, reading, **{"block_bytes": BLOCK, "pool": Here(), **more})


def digests(output: Path) -> dict[str, str]:
    found = {}
    for part in ("train", "heldout"):
        for path in sorted((output / part).iterdir()):
            found[f"{part}/{path.name}"] = sha256_file(path)
    return found


def texts_in(output: Path, tokenizer: Path, part: str = "train") -> list[str]:
    encoder, found = Encoder(tokenizer), ShardSet(output / part)
    return [encoder.decode(found.row(n)[0].tolist()) for n in range(len(found))]


def assert_adds_up(built: ShardSetResult, rows: int) -> None:
    """rows = kept + skipped + rejected, in all and for each file, and what is kept is in the shards."""
    for counts in (*(tally.to_json() for tally in built.tallies.values()), *built.files):
        assert counts["rows"] == counts["kept"] + sum(counts["skipped"].values()) + sum(counts["rejected"].values())
    assert sum(tally.rows for tally in built.tallies.values()) == rows
    kept = sum(tally.kept for tally in built.tallies.values())
    assert kept == built.parts["train"]["rows"] + built.parts["heldout"]["rows"]
    assert sum(file["tokens"] for file in built.files) == sum(part["tokens"] for part in built.parts.values())


@pytest.fixture(scope="module")
def recipe(tokenizer: Path) -> BlockRecipe:
    return recipe_of(ALL, tokenizer, "documents")


def test_every_document_comes_back_in_order_with_the_ids_of_the_tokenizer(
    tmp_path: Path, recipe: BlockRecipe, tokenizer: Path
) -> None:
    rows = rows_of(300)
    built = build(tmp_path / "out", [write_lines(tmp_path / "a.jsonl", rows)], recipe)
    assert texts_in(tmp_path / "out", tokenizer) == [row["text"] for row in rows]
    encoder, found = Encoder(tokenizer, fast=False), ShardSet(tmp_path / "out" / "train")
    ids = [encoder.document(ids) for ids in encoder.encode([row["text"] for row in rows])]
    assert [found.row(n)[0].tolist() for n in range(len(found))] == ids
    assert built.parts["train"]["tokens"] == sum(map(len, ids))
    assert built.parts["train"]["bytes"] == sum(len(row["text"].encode()) for row in rows)
    assert built.blocks > 5
    assert_adds_up(built, 300)


def test_one_two_and_three_workers_and_no_compression_or_any_leave_the_same_files(
    tmp_path: Path, recipe: BlockRecipe
) -> None:
    plain = write_lines(tmp_path / "a.jsonl", rows_of(300))
    packed = tmp_path / "a.bin"
    packed.write_bytes(b"".join(gzip.compress(part) for part in (plain.read_bytes()[:5000], plain.read_bytes()[5000:])))
    reading = Reading(heldout_fraction=0.1)
    for number, workers in enumerate((1, 2, 3)):
        with Processes(workers) as pool:
            build(tmp_path / str(number), [plain], recipe, reading, pool=pool)
    build(tmp_path / "packed", [packed], recipe, reading, pool=Here())
    expected = digests(tmp_path / "0")
    assert len(expected) > 10
    assert [digests(tmp_path / name) for name in ("1", "2", "packed")] == [expected] * 3


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


def test_of_equal_rows_the_first_stays_wherever_the_others_stand(
    tmp_path: Path, recipe: BlockRecipe, tokenizer: Path
) -> None:
    rows = rows_of(150)
    a = write_lines(tmp_path / "a.jsonl", [*rows[:100], rows[3], rows[99]])
    b = write_lines(tmp_path / "b.jsonl", [rows[5], *rows[100:], rows[120]])
    built = build(tmp_path / "out", [a, b], recipe)
    assert texts_in(tmp_path / "out", tokenizer) == [row["text"] for row in rows]
    assert (built.duplicates, built.tallies["train"].skipped) == (4, Counter(duplicate=4))
    assert_adds_up(built, 154)
    kept = build(tmp_path / "all", [a, b], recipe, Reading(heldout_fraction=0, deduplicate=False))
    assert (kept.duplicates, kept.parts["train"]["rows"]) == (4, 154)
    alone = build(tmp_path / "out", [b], recipe)  # what was a duplicate is none any more
    assert texts_in(tmp_path / "out", tokenizer) == [row["text"] for row in (rows[5], *rows[100:])]
    assert alone.encoded_blocks == 0
    twice = build(tmp_path / "twice", [b, b], recipe, Reading(heldout_fraction=0, deduplicate=False))
    assert twice.parts["train"]["rows"] == 104
    assert len(texts_in(tmp_path / "twice", tokenizer)) == 104


def test_held_out_rows_are_the_same_in_whatever_files_and_order_they_come(
    tmp_path: Path, recipe: BlockRecipe, tokenizer: Path
) -> None:
    rows, reading = rows_of(400), Reading(heldout_fraction=0.1)
    one = write_lines(tmp_path / "one.jsonl", rows)
    built = build(tmp_path / "1", [one], recipe, reading)
    mixed = list(rows)
    random.Random(1).shuffle(mixed)
    parts = [write_lines(tmp_path / f"{n}.jsonl", mixed[n::3]) for n in range(3)]
    build(tmp_path / "3", parts, recipe, reading)
    more = write_lines(tmp_path / "more.jsonl", rows_of(200, seed=7))
    build(tmp_path / "more", [one, more], recipe, reading)
    heldout, train = set(texts_in(tmp_path / "1", tokenizer, "heldout")), set(texts_in(tmp_path / "1", tokenizer))
    assert 20 < len(heldout) < 60
    assert heldout == set(texts_in(tmp_path / "3", tokenizer, "heldout"))
    assert heldout <= set(texts_in(tmp_path / "more", tokenizer, "heldout"))
    assert not heldout & train
    assert heldout | train == {row["text"] for row in rows}
    assert {record["text"] for record in heldout_records(tmp_path / "1")} == heldout
    assert_adds_up(built, 400)


def test_held_out_rows_keep_what_is_said_of_them_and_are_no_others_for_it(
    tmp_path: Path, recipe: BlockRecipe, tokenizer: Path
) -> None:
    rows = [{**row, "source": f"s{n % 2}", "lang": "en", "url": "u", "more": {}} for n, row in enumerate(rows_of(200))]
    rows[0] |= {"source": "x" * 65, "lang": 3}
    reading = Reading(heldout_fraction=0.1)
    build(tmp_path / "1", [write_lines(tmp_path / "a.jsonl", rows)], recipe, reading)
    build(tmp_path / "2", [write_lines(tmp_path / "b.jsonl", rows_of(200))], recipe, reading)
    said = {row["text"]: {key: row[key] for key in ("text", "source", "lang")} for row in rows[1:]}
    said[rows[0]["text"]] = {"text": rows[0]["text"]}
    found = heldout_records(tmp_path / "1")
    assert found == [said[record["text"]] for record in found]
    assert [record["text"] for record in heldout_records(tmp_path / "2")] == [record["text"] for record in found]


def test_where_nothing_is_held_out_one_row_and_its_copies_are(tmp_path: Path, recipe: BlockRecipe, tokenizer: Path) -> None:
    rows, reading = rows_of(12), Reading(heldout_fraction=0.001, deduplicate=False)
    built = build(tmp_path / "out", [write_lines(tmp_path / "a.jsonl", [*rows, *rows])], recipe, reading, block_bytes=600)
    held, train = texts_in(tmp_path / "out", tokenizer, "heldout"), texts_in(tmp_path / "out", tokenizer)
    assert len(held) == 1
    assert held[0] not in train
    assert len(train) == 22
    assert [record["text"] for record in heldout_records(tmp_path / "out")] == held
    assert built.tallies["train"].skipped == Counter({"stands in the held-out part": 1})


@pytest.mark.parametrize("deduplicate", [True, False])
def test_what_a_named_held_out_file_holds_is_never_learnt(
    tmp_path: Path, recipe: BlockRecipe, tokenizer: Path, deduplicate: bool
) -> None:
    rows, others = rows_of(100), rows_of(20, seed=3)
    train = write_lines(tmp_path / "a.jsonl", rows)
    heldout = write_lines(tmp_path / "b.jsonl", [rows[7], *others, rows[50], rows[7]])
    reading = Reading(heldout_fraction=0.3, deduplicate=deduplicate)
    built = build(tmp_path / "out", [train], recipe, reading, heldout=[heldout])
    expected = [row["text"] for row in (rows[7], *others, rows[50], *([] if deduplicate else [rows[7]]))]
    assert texts_in(tmp_path / "out", tokenizer, "heldout") == expected
    assert [record["text"] for record in heldout_records(tmp_path / "out")] == expected
    assert texts_in(tmp_path / "out", tokenizer) == [row["text"] for n, row in enumerate(rows) if n not in (7, 50)]
    assert built.tallies["train"].skipped == Counter({"stands in the held-out part": 2})
    assert_adds_up(built, 123)


def test_a_reservoir_takes_exactly_as_many_distinct_rows_from_all_over_the_input(
    tmp_path: Path, recipe: BlockRecipe, tokenizer: Path
) -> None:
    rows = rows_of(600)
    path = write_lines(tmp_path / "a.jsonl", [*rows, *rows[:50]])
    found = {}
    for name, limit, rounds, seed in (("a", 30, 1, 1), ("b", 30, 5, 1), ("c", 30, 1, 2), ("d", 9999, 1, 1)):
        reading = Reading(heldout_fraction=0, limit=limit, rounds=rounds, seed=seed)
        built = build(tmp_path / name, [path], recipe, reading)
        assert_adds_up(built, 650)
        found[name] = texts_in(tmp_path / name, tokenizer)
    assert [len(set(found[name])) for name in "abcd"] == [len(found[name]) for name in "abcd"] == [30, 150, 30, 600]
    assert set(found["a"]) < set(found["b"])
    assert found["a"] != found["c"]
    place = {row["text"]: n for n, row in enumerate(rows)}
    assert max(place[text] for text in found["b"]) > 540
    assert min(place[text] for text in found["b"]) < 60
    with Processes(2) as pool:
        build(tmp_path / "two", [path], recipe, Reading(heldout_fraction=0, limit=30), pool=pool)
    assert digests(tmp_path / "two") == digests(tmp_path / "a")


def test_the_head_is_the_first_rows_and_the_rest_is_not_read(tmp_path: Path, recipe: BlockRecipe, tokenizer: Path) -> None:
    rows = rows_of(600)
    path = write_lines(tmp_path / "a.jsonl", [rows[0], *rows])
    built = build(tmp_path / "out", [path], recipe, Reading(heldout_fraction=0, limit=20, rounds=2, sample="head"))
    assert texts_in(tmp_path / "out", tokenizer) == [row["text"] for row in rows[:40]]
    assert built.blocks < 6
    assert_adds_up(built, built.tallies["train"].rows)


def test_bad_rows_are_named_by_file_and_line_across_blocks(tmp_path: Path, recipe: BlockRecipe) -> None:
    rows: list[Any] = rows_of(300)
    for line, bad in ((1, b"{"), (150, b'{"text": 5}'), (299, b"\xff")):
        rows.insert(line - 1, bad)
    rows.insert(200, b"  ")
    rows.append(b'{"text": ' + b"[" * 400 + b"]" * 400 + b"}")  # deeper than orjson writes
    first, second = (write_lines(tmp_path / f"{name}.jsonl", rows) for name in "ab")
    built = build(tmp_path / "out", [first, second], recipe)
    found = [json.loads(line) for line in (tmp_path / "out" / "run" / "rejected.jsonl").read_bytes().splitlines()]
    wanted = [(str(path), line) for path in (first, second) for line in (1, 150, 300, 305)]
    assert [(row["file"], row["line"]) for row in found] == wanted
    assert "'text'" in found[1]["reason"]
    assert built.tallies["train"].first_rejected[0].startswith(f"{first}:1: not valid JSON")
    assert_adds_up(built, 608)


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
    path = write_lines(tmp_path / "a.jsonl", rows_of(1500))
    build(tmp_path / "whole", [path], recipe)
    code = f"""
from pathlib import Path
from ttrain.config import Reading
from ttrain.data.assembly import DataFile
from ttrain.data.blocks import BlockRecipe
from ttrain.data.sharding import Here, build
files = {{"train": [DataFile({str(path)!r}, "a.jsonl")]}}
recipe = {replace(recipe, heldout_fraction=ALL.heldout_fraction, seed=ALL.seed)!r}
build(Path({str(tmp_path / "out")!r}), files, recipe, Reading(heldout_fraction=0), block_bytes={BLOCK}, pool=Here())
"""
    made: list[int] = []
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", code])
        done = tmp_path / "out" / "run" / "blocks"
        goal = (made[-1] if made else 0) + 8
        while len(list(done.glob("*.json"))) < goal and process.poll() is None:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        made.append(len(list(done.glob("*.json"))))
    assert made[0] < made[1] < 90
    assert not (tmp_path / "out" / "train" / "index.json").exists()
    built = build(tmp_path / "out", [path], recipe)
    assert built.encoded_blocks == built.blocks - made[-1]
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.endswith(".tmp")]


def test_a_killed_worker_is_told_and_the_work_goes_on_with_the_same_command(tmp_path: Path, recipe: BlockRecipe) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(60))

    class Killing(Processes):
        def map(self, function: Any, tasks: Any) -> Any:
            return super().map(die, tasks)

    with pytest.raises(StageFailed, match=r"killed.*runtime\.workers"):
        build(tmp_path / "out", [path], recipe, pool=Killing(2))
    with Processes(2) as pool:
        assert build(tmp_path / "out", [path], recipe, pool=pool).parts["train"]["rows"] == 60
    assert multiprocessing.active_children() == []


def test_a_file_that_vanished_from_the_output_is_made_again(tmp_path: Path, recipe: BlockRecipe) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(100))
    build(tmp_path / "out", [path], recipe)
    expected = digests(tmp_path / "out")
    victims = sorted((tmp_path / "out" / "train").glob("*.arrow"))
    victims[0].unlink()
    victims[1].write_bytes(victims[1].read_bytes()[:-8])
    assert build(tmp_path / "out", [path], recipe).encoded_blocks == 2
    assert digests(tmp_path / "out") == expected


def test_files_of_others_in_the_output_are_left_alone(tmp_path: Path, recipe: BlockRecipe) -> None:
    build(tmp_path / "out", [write_lines(tmp_path / "a.jsonl", rows_of(30))], recipe)
    mine = tmp_path / "out" / "train" / "notes.jsonl"
    mine.write_text("mine")
    build(tmp_path / "out", [write_lines(tmp_path / "b.jsonl", rows_of(30, seed=2))], recipe)
    assert mine.read_text() == "mine"


def test_blocks_end_with_lines_and_hold_every_byte_once_whatever_the_size(tmp_path: Path) -> None:
    chance = random.Random(3)
    recipe = BlockRecipe("documents", "text", 0.0, 10**6, tokenizer="", tokenizer_digest="", template="", code="")
    for size in (1024, 1500, 5000, 10**6):
        lines = [bytes(chance.choices(b"abc \r\\", k=chance.choice([0, 1, 30, 3000]))) for _ in range(60)]
        lines[0] = b'{"text": "no plain text"}'
        data = b"\n".join(lines) + (b"\n" if size % 2 else b"")
        plain, packed = tmp_path / "plain", tmp_path / "packed"
        plain.write_bytes(data)
        packed.write_bytes(gzip.compress(data))
        cuts = [list(blocks.cut(str(path), 0, size, recipe)) for path in (plain, packed)]
        pieces = [[blocks.read(block, 10**6) for block in cut] for cut in cuts]
        assert pieces[0] == pieces[1]
        assert b"".join(pieces[0]) == data
        assert all(piece.endswith(b"\n") for piece in pieces[0][:-1])
        assert all(len(piece) >= size for piece in pieces[0][:-1])
        assert [(b.start, b.end) for b in cuts[0]] == [(b.start, b.end) for b in cuts[1]]


def test_a_line_beyond_the_limit_is_one_rejected_row_and_its_neighbours_stay(
    tmp_path: Path, recipe: BlockRecipe, tokenizer: Path
) -> None:
    rows = [
        json.dumps({"text": LINES[0]}).encode(),
        b'{"text": "' + b"x" * 50_000 + b'"}',
        json.dumps({"text": LINES[1]}).encode(),
    ]
    small = replace(recipe, max_line_bytes=2048)
    path = write_lines(tmp_path / "a.jsonl", rows)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for name, source in (("plain", path), ("packed", packed)):
        for size in (1024, 10**6):
            out = tmp_path / f"{name}{size}"
            built = build(out, [source], small, block_bytes=size)
            assert texts_in(out, tokenizer) == list(LINES[:2])
            assert built.tallies["train"].rejected == Counter({TOO_LONG.format(2048): 1})
            assert json.loads((out / "run" / "rejected.jsonl").read_text())["line"] == 2
            assert_adds_up(built, 3)


def test_chats_keep_their_masks_through_selection(tmp_path: Path, tokenizer: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} {LINES[n % 6]}"}]}
        for n in range(120)
    ]
    path = write_lines(tmp_path / "a.jsonl", [*chats, *chats[::3]])
    built = build(tmp_path / "out", [path], recipe_of(ALL, tokenizer, "chats"))
    found, encoder = ShardSet(tmp_path / "out" / "train"), Encoder(tokenizer)
    assert (len(found), built.duplicates) == (120, 40)
    for n in range(120):
        ids, live = found.row(n)
        assert live is not None
        answer = encoder.decode(ids[live.astype(bool)].tolist())
        assert answer == f"{n} {LINES[n % 6]}"
        assert ids[np.flatnonzero(live)[-1]] == encoder.end_id


def test_putting_together_can_end_anywhere_and_the_next_run_mends_it(
    tmp_path: Path, recipe: BlockRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file operation of the assembly is once the last one of its process."""
    rows = rows_of(80)
    a, b = write_lines(tmp_path / "a.jsonl", rows[:50]), write_lines(tmp_path / "b.jsonl", [*rows[30:], b"{"])
    reading = Reading(heldout_fraction=0.1)
    build(tmp_path / "lent", [b], recipe, reading)
    lending = replace(recipe, reuse=(str(tmp_path / "lent"),))
    build(tmp_path / "whole", [a, b], lending, reading)
    expected, ended = digests(tmp_path / "whole"), 0
    for last in range(1, 200):
        output = tmp_path / f"out{last}"
        build(output, [a], recipe, reading)
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


def test_parquet_gives_the_shards_of_the_same_rows_as_json_lines(tmp_path: Path, recipe: BlockRecipe) -> None:
    rows = rows_of(300)
    table = pa.table({"text": [row["text"] for row in rows], "when": [datetime.date(2026, 1, 1)] * 300, "n": range(300)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    built = build(tmp_path / "parquet", [tmp_path / "a.parquet"], recipe)
    build(tmp_path / "lines", [write_lines(tmp_path / "a.jsonl", rows)], recipe)
    streams = [ShardSet(tmp_path / name / "train") for name in ("parquet", "lines")]
    assert streams[0].stream(0, streams[0].tokens).tolist() == streams[1].stream(0, streams[1].tokens).tolist()
    assert built.blocks > 2
    assert_adds_up(built, 300)


def test_a_parquet_column_of_bytes_is_text_where_it_is_utf8_and_no_other_type_is(
    tmp_path: Path, recipe: BlockRecipe
) -> None:
    values = {
        "bytes": pa.array(["é".encode(), b"\xff", b"good"]),
        "dates": pa.array([datetime.datetime(2026, 1, 1)] * 3),
        "decimals": pa.array([decimal.Decimal("1.5")] * 3),
    }
    found = {}
    for name, column in values.items():
        pq.write_table(pa.table({"text": column}), tmp_path / f"{name}.parquet")
        found[name] = build(tmp_path / name, [tmp_path / f"{name}.parquet"], recipe)
        assert_adds_up(found[name], 3)
    assert [built.tallies["train"].kept for built in found.values()] == [2, 0, 0]
    assert all("'text'" in reason for built in found.values() for reason in built.tallies["train"].rejected)


def test_a_limit_counts_what_is_learnt_beside_a_named_held_out_file(tmp_path: Path, recipe: BlockRecipe) -> None:
    rows = rows_of(300)
    train = write_lines(tmp_path / "a.jsonl", rows)
    heldout = write_lines(tmp_path / "b.jsonl", rows[:150])
    for sample in ("head", "reservoir"):
        reading = Reading(heldout_fraction=0.1, limit=100, sample=sample)
        built = build(tmp_path / sample, [train], recipe, reading, heldout=[heldout])
        assert (built.parts["train"]["rows"], built.parts["heldout"]["rows"]) == (100, 150)


def test_a_limited_set_has_a_held_out_row_too(tmp_path: Path, recipe: BlockRecipe, tokenizer: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(300))
    for limit in (10, 50):
        built = build(tmp_path / f"{limit}", [path], recipe, Reading(heldout_fraction=1e-9, limit=limit, sample="head"))
        assert (built.parts["train"]["rows"], built.parts["heldout"]["rows"]) == (limit - 1, 1)
        held = texts_in(tmp_path / f"{limit}", tokenizer, "heldout")
        assert [record["text"] for record in heldout_records(tmp_path / f"{limit}")] == held


def test_a_head_taken_by_several_workers_leaves_nothing_else(tmp_path: Path, recipe: BlockRecipe) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(3000))
    reading = Reading(heldout_fraction=0.1, limit=20, sample="head")
    build(tmp_path / "one", [path], recipe, reading)
    with Processes(3) as pool:
        build(tmp_path / "three", [path], recipe, reading, pool=pool)
    one, three = (sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*")) for n in ("one", "three"))
    assert one == three


def test_a_shard_that_was_altered_is_made_again_and_never_lent(tmp_path: Path, recipe: BlockRecipe) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(100))
    build(tmp_path / "out", [path], recipe)
    expected = digests(tmp_path / "out")
    victim = sorted((tmp_path / "out" / "train").glob("*.arrow"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    lent = build(tmp_path / "new", [path], replace(recipe, reuse=(str(tmp_path / "out"),)))
    assert (lent.encoded_blocks, digests(tmp_path / "new")) == (1, expected)
    assert build(tmp_path / "out", [path], recipe).encoded_blocks == 1
    assert digests(tmp_path / "out") == expected
    shutil.copytree(tmp_path / "out", tmp_path / "copy", copy_function=shutil.copyfile)  # other times, the same bytes
    assert build(tmp_path / "copy", [path], recipe).encoded_blocks == 0


def test_other_special_tokens_are_another_recipe_and_never_share_a_name(
    tmp_path: Path, recipe: BlockRecipe, tokenizer: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(50))
    build(tmp_path / "out", [path], recipe)
    before = digests(tmp_path / "out")
    shutil.copytree(tokenizer, tmp_path / "swapped")
    config = json.loads((tmp_path / "swapped" / "tokenizer_config.json").read_text())
    config["bos_token"], config["eos_token"] = config["eos_token"], config["bos_token"]
    (tmp_path / "swapped" / "tokenizer_config.json").write_text(json.dumps(config))
    swapped = recipe_of(ALL, tmp_path / "swapped", "documents")
    built = build(tmp_path / "out", [path], swapped)
    assert built.encoded_blocks == built.blocks
    assert not {name for name in digests(tmp_path / "out") if name.endswith(".arrow")} & set(before)
    first = ShardSet(tmp_path / "out" / "train").row(0)[0]
    assert (first[0], first[-1]) == (3, 2)
    with pytest.raises(ArtifactError, match="made with the tokenizer"):
        ShardSet(tmp_path / "out" / "train", Encoder(tokenizer).digest)
