"""Files to shards: the same from any number of workers, what is there is not made again, every row is accounted for."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.shard_sets import ALL, build, digests, rows_of, write_lines
from support.tiny_data import LINES

from ttrain.config import Reading
from ttrain.data import blocks
from ttrain.data.assembly import ShardSetResult
from ttrain.data.blocks import BlockRecipe
from ttrain.data.encoder import Encoder
from ttrain.data.records import TOO_LONG, TextDocument, content_hash
from ttrain.data.sharding import Here, Processes
from ttrain.data.shards import ShardSet
from ttrain.errors import ArtifactError
from ttrain.stages.shards import heldout_hashes, heldout_records, recipe_of


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


def test_every_document_comes_back_in_order_with_the_ids_of_the_tokenizer(
    tmp_path: Path, recipe: BlockRecipe, tokenizer: Path
) -> None:
    rows = rows_of(300)
    built = build(tmp_path / "out", [write_lines(tmp_path / "a.jsonl", rows)], recipe)
    assert texts_in(tmp_path / "out", tokenizer) == [row["text"] for row in rows]
    encoder, found = Encoder(tokenizer, fast=False), ShardSet(tmp_path / "out" / "train")
    ids = [[encoder.bos_id, *ids, encoder.eos_id] for ids in encoder.encode([row["text"] for row in rows])]
    assert [found.row(n)[0].tolist() for n in range(len(found))] == ids
    assert built.parts["train"]["tokens"] == sum(map(len, ids))
    assert built.parts["train"]["bytes"] == sum(len(row["text"].encode()) for row in rows)
    assert built.blocks > 5
    assert_adds_up(built, 300)


def test_one_and_three_workers_and_no_compression_or_any_leave_the_same_files(tmp_path: Path, recipe: BlockRecipe) -> None:
    plain = write_lines(tmp_path / "a.jsonl", rows_of(300))
    packed = tmp_path / "a.bin"
    packed.write_bytes(b"".join(gzip.compress(part) for part in (plain.read_bytes()[:5000], plain.read_bytes()[5000:])))
    reading = Reading(heldout_fraction=0.1)
    sample = Reading(heldout_fraction=0, limit=30)
    for workers in (1, 3):
        with Processes(workers) as pool:
            build(tmp_path / str(workers), [plain], recipe, reading, pool=pool)
            build(tmp_path / f"sample-{workers}", [plain], recipe, sample, pool=pool)
    build(tmp_path / "packed", [packed], recipe, reading, pool=Here())
    expected = digests(tmp_path / "1")
    assert len(expected) > 10
    assert [digests(tmp_path / name) for name in ("3", "packed")] == [expected] * 2
    assert digests(tmp_path / "sample-1") == digests(tmp_path / "sample-3")


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


FEW_HELD_OUT = Reading(heldout_fraction=1e-9)  # of so few rows none by its hash


def by_hash(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as their hashes are ordered: of the first ones, which are held out of a set without held-out rows."""
    return sorted(rows, key=lambda row: content_hash(TextDocument(row["text"])))


@pytest.mark.parametrize("deduplicate", [True, False])
def test_the_one_row_that_was_held_out_is_not_learnt_where_another_one_is_the_lowest_later(
    tmp_path: Path, recipe: BlockRecipe, tokenizer: Path, deduplicate: bool
) -> None:
    lowest, held_before, *others = by_hash(rows_of(12))
    reading = FEW_HELD_OUT.model_copy(update={"deduplicate": deduplicate})
    first = write_lines(tmp_path / "a.jsonl", [*others[:6], held_before, held_before])
    build(tmp_path / "first", [first], recipe, reading)
    assert heldout_records(tmp_path / "first") == [held_before]
    second = write_lines(tmp_path / "b.jsonl", [lowest, *others[6:]])
    known = heldout_hashes(tmp_path / "first")
    built = build(tmp_path / "both", [first, second], recipe, reading, earlier_heldout=known)
    assert texts_in(tmp_path / "both", tokenizer) == [row["text"] for row in others]
    assert heldout_records(tmp_path / "both") == [lowest]
    left_out = 1 if deduplicate else 2
    expected = {"stands in the held-out part": left_out, **({"duplicate": 1} if deduplicate else {})}
    assert built.tallies["train"].skipped == Counter(expected)
    assert built.to_json()["of_earlier_heldout"] == left_out
    assert built.tallies["train"].rows == 13
    assert built.tallies["train"].kept == sum(part["rows"] for part in built.parts.values())


def test_a_row_that_is_held_out_anyway_stays_held_out_though_an_earlier_set_has_it(
    tmp_path: Path, recipe: BlockRecipe
) -> None:
    """By its hash, or as the lowest."""
    path = write_lines(tmp_path / "a.jsonl", rows_of(100))
    for name, reading in (("lowest", FEW_HELD_OUT), ("hashed", Reading(heldout_fraction=0.1))):
        build(tmp_path / name, [path], recipe, reading)
        known = heldout_hashes(tmp_path / name)
        built = build(tmp_path / f"{name} again", [path], recipe, reading, earlier_heldout=known)
        assert len(known) == (1 if name == "lowest" else built.parts["heldout"]["rows"]) > 0
        assert digests(tmp_path / f"{name} again") == digests(tmp_path / name)
        assert not built.tallies["train"].skipped


def test_the_last_row_that_may_be_learnt_is_not_held_out(tmp_path: Path, recipe: BlockRecipe, tokenizer: Path) -> None:
    lowest, held_before, other = by_hash(rows_of(3))
    build(tmp_path / "first", [write_lines(tmp_path / "a.jsonl", [other, held_before])], recipe, FEW_HELD_OUT)
    known, second = heldout_hashes(tmp_path / "first"), write_lines(tmp_path / "b.jsonl", [held_before, lowest])
    build(tmp_path / "second", [second], recipe, FEW_HELD_OUT, earlier_heldout=known)
    assert texts_in(tmp_path / "second", tokenizer) == [lowest["text"]]
    assert heldout_records(tmp_path / "second") == [held_before]


def test_a_set_made_without_an_earlier_held_out_one_does_not_speak_of_it(tmp_path: Path, recipe: BlockRecipe) -> None:
    path, empty = write_lines(tmp_path / "a.jsonl", rows_of(100)), np.zeros((0, 2), np.uint64)
    alone = build(tmp_path / "1", [path], recipe, FEW_HELD_OUT)
    beside_none = build(tmp_path / "2", [path], recipe, FEW_HELD_OUT, earlier_heldout=empty)
    assert "of_earlier_heldout" not in alone.to_json() and beside_none.to_json()["of_earlier_heldout"] == 0
    assert digests(tmp_path / "1") == digests(tmp_path / "2")


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
