"""Files to shards: the same from any number of workers, what is there is not made again, every row is accounted for."""

from __future__ import annotations

import datetime
import decimal
import gzip
import itertools
import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.chat_templates import CHATML, take
from support.shard_sets import ALL, build, digests, rows_of, texts_in, write_lines
from support.tiny_data import LINES

from ttrain.config import Reading
from ttrain.data import blocks
from ttrain.data.blocks import BlockRecipe
from ttrain.data.encoder import Encoder
from ttrain.data.json_rows import TOO_LONG
from ttrain.data.pool import Processes
from ttrain.data.records import TextDocument, content_hash
from ttrain.data.sharding import ShardSetResult
from ttrain.data.shards import ShardSet
from ttrain.errors import ArtifactError
from ttrain.tasks.shards import heldout_hashes, heldout_records, recipe_of


class Sets:
    """Files of rows, and sets of shards of them, each by its name below one directory."""

    def __init__(self, directory: Path, recipe: BlockRecipe) -> None:
        self.directory, self.recipe, self.encoder = (
            directory,
            recipe,
            Encoder(Path(recipe.tokenizer)),
        )

    def file(self, name: str, rows: Sequence[Any]) -> Path:
        return write_lines(self.directory / f"{name}.jsonl", rows)

    def build(
        self, name: str, files: Sequence[Path], reading: Reading = ALL, **more: Any
    ) -> ShardSetResult:
        return build(self.directory / name, files, more.pop("recipe", self.recipe), reading, **more)

    def train(self, name: str) -> ShardSet:
        return ShardSet(self.directory / name / "train")

    def texts(self, name: str, part: str = "train") -> list[str]:
        return texts_in(self.directory / name, self.recipe.tokenizer, part)

    def heldout(self, name: str) -> list[dict[str, Any]]:
        return list(heldout_records(self.directory / name))

    def rejected(self, name: str) -> list[dict[str, Any]]:
        return list(
            map(
                json.loads,
                (self.directory / name / "run" / "rejected.jsonl").read_bytes().splitlines(),
            )
        )

    def digests(self, name: str) -> dict[str, str]:
        return digests(self.directory / name)


@pytest.fixture
def sets(tmp_path: Path, recipe: BlockRecipe) -> Sets:
    return Sets(tmp_path, recipe)


def assert_adds_up(built: ShardSetResult, rows: int) -> None:
    """rows = kept + skipped + rejected, in all and for each file, and what is kept is in the shards."""
    for counts in (*(tally.to_json() for tally in built.tallies.values()), *built.files):
        assert counts["rows"] == counts["kept"] + sum(counts["skipped"].values()) + sum(
            counts["rejected"].values()
        )
    assert sum(tally.rows for tally in built.tallies.values()) == rows
    kept = sum(tally.kept for tally in built.tallies.values())
    assert kept == built.parts["train"]["rows"] + built.parts["heldout"]["rows"]
    assert sum(file["tokens"] for file in built.files) == sum(
        part["tokens"] for part in built.parts.values()
    )


def test_every_document_comes_back_in_order_with_the_ids_of_the_tokenizer(sets: Sets) -> None:
    rows = rows_of(300)
    built = sets.build("out", [sets.file("a", rows)])
    assert sets.texts("out") == [row["text"] for row in rows]
    encoder, found = Encoder(sets.encoder.directory, fast=False), sets.train("out")
    ids = [
        [encoder.bos_id, *ids, encoder.eos_id]
        for ids in encoder.encode([row["text"] for row in rows])
    ]
    assert [found.row(n)[0].tolist() for n in range(len(found))] == ids
    assert built.parts["train"]["tokens"] == sum(map(len, ids))
    assert built.parts["train"]["bytes"] == sum(len(row["text"].encode()) for row in rows)
    assert built.blocks > 5
    assert_adds_up(built, 300)


def test_the_weights_of_rows_are_beside_them_also_where_rows_are_left_out(sets: Sets) -> None:
    rows = rows_of(300)
    weighted = [{**row, "weight": 1 + number % 3} for number, row in enumerate(rows)]
    files = [
        sets.file("plain", rows),
        sets.file("weighted", weighted),
        sets.file("twice", [*weighted, *weighted[:50]]),
    ]
    recipe = replace(sets.recipe, heldout_fraction=0.1)
    for file in files:
        sets.build(file.stem, [file], recipe=recipe)
    assert sets.train("plain").row_weights is None
    expected = {row["text"]: row["weight"] for row in weighted}
    for name in ("weighted", "twice"):
        found = sets.train(name).row_weights
        assert found is not None and found.tolist() == [expected[text] for text in sets.texts(name)]
        assert ShardSet(sets.directory / name / "heldout").row_weights is None
    assert sets.train("weighted").index["tokens"] == sets.train("plain").index["tokens"]


def test_one_worker_and_two_and_no_compression_or_any_leave_the_same_files(sets: Sets) -> None:
    plain = sets.file("a", rows_of(300))
    packed = sets.directory / "a.jsonl.gz"
    packed.write_bytes(
        b"".join(
            gzip.compress(part) for part in (plain.read_bytes()[:5000], plain.read_bytes()[5000:])
        )
    )
    readings = {
        "all": Reading(heldout_fraction=0.1),
        "sample": Reading(heldout_fraction=0, limit=30),
        "head": Reading(heldout_fraction=0.1, limit=20, sample="head"),
    }
    for workers in (1, 2):
        with Processes(workers) as pool:
            for name, reading in readings.items():
                sets.build(f"{workers}/{name}", [plain], reading, pool=pool)
    sets.build("packed", [packed], readings["all"])
    assert len(sets.digests("1/all")) > 10
    assert sets.digests("packed") == sets.digests("1/all")
    for name in readings:
        assert sets.digests(f"1/{name}") == sets.digests(f"2/{name}")
    one, two = (sets.directory / "1", sets.directory / "2")
    names = [
        sorted(path.relative_to(folder) for path in folder.rglob("*")) for folder in (one, two)
    ]
    assert names[0] == names[1], "of a head, blocks that were made in vain are gone"


def test_ctrl_c_of_a_terminal_never_reaches_a_worker_which_would_show_a_traceback_while_it_loads() -> (
    None
):
    with Processes(2) as pool:
        assert (
            signal.SIGINT
            in pool.begin().submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result()
        )
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_of_equal_rows_the_first_stays_wherever_the_others_stand(sets: Sets) -> None:
    rows = rows_of(150)
    a = sets.file("a", [*rows[:100], rows[3], rows[99]])
    b = sets.file("b", [rows[5], *rows[100:], rows[120]])
    built = sets.build("out", [a, b])
    assert sets.texts("out") == [row["text"] for row in rows]
    assert (built.duplicates, built.tallies["train"].skipped) == (4, Counter(duplicate=4))
    assert_adds_up(built, 154)
    kept = sets.build("all", [a, b], Reading(heldout_fraction=0, deduplicate=False))
    assert (kept.duplicates, kept.parts["train"]["rows"]) == (4, 154)
    alone = sets.build("out", [b])  # what was a duplicate is none any more
    assert sets.texts("out") == [row["text"] for row in (rows[5], *rows[100:])]
    assert alone.encoded_blocks == 0
    twice = sets.build("twice", [b, b], Reading(heldout_fraction=0, deduplicate=False))
    assert twice.parts["train"]["rows"] == 104
    assert len(sets.texts("twice")) == 104


TENTH = Reading(heldout_fraction=0.1)


def test_held_out_rows_are_the_same_in_whatever_files_and_order_they_come(sets: Sets) -> None:
    rows = rows_of(200)
    one, more = sets.file("one", rows), sets.file("more", rows_of(100, seed=7))
    built = sets.build("1", [one], TENTH)
    mixed = random.Random(1).sample(rows, len(rows))
    sets.build("3", [sets.file(f"{n}", mixed[n::3]) for n in range(3)], TENTH)
    sets.build("more", [one, more], TENTH)
    heldout, train = set(sets.texts("1", "heldout")), set(sets.texts("1"))
    assert 10 < len(heldout) < 30 and not heldout & train
    assert heldout == set(sets.texts("3", "heldout")) <= set(sets.texts("more", "heldout"))
    assert heldout | train == {row["text"] for row in rows}
    assert {record["text"] for record in sets.heldout("1")} == heldout
    assert_adds_up(built, 200)


def test_held_out_rows_keep_what_is_said_of_them_and_are_no_others_for_it(sets: Sets) -> None:
    rows = [
        {**row, "source": f"s{n % 2}", "lang": "en", "url": "u", "more": {}}
        for n, row in enumerate(rows_of(100))
    ]
    rows[0] |= {"source": "x" * 65, "lang": 3}
    sets.build("1", [sets.file("a", rows)], TENTH)
    sets.build("2", [sets.file("b", rows_of(100))], TENTH)
    said = {row["text"]: {key: row[key] for key in ("text", "source", "lang")} for row in rows[1:]}
    said[rows[0]["text"]] = {"text": rows[0]["text"]}
    found = sets.heldout("1")
    assert found == [said[record["text"]] for record in found]
    assert [record["text"] for record in sets.heldout("2")] == [record["text"] for record in found]


def test_where_nothing_is_held_out_one_row_and_its_copies_are(sets: Sets) -> None:
    rows, reading = rows_of(12), Reading(heldout_fraction=0.001, deduplicate=False)
    built = sets.build("out", [sets.file("a", [*rows, *rows])], reading, block_bytes=600)
    held, train = sets.texts("out", "heldout"), sets.texts("out")
    assert len(held) == 1
    assert held[0] not in train
    assert len(train) == 22
    assert [record["text"] for record in sets.heldout("out")] == held
    assert built.tallies["train"].skipped == Counter({"stands in the held-out part": 1})


FEW_HELD_OUT = Reading(heldout_fraction=1e-9)  # of so few rows none by its hash


def by_hash(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as their hashes are ordered: of the first ones, which are held out of a set without held-out rows."""
    return sorted(rows, key=lambda row: content_hash(TextDocument(row["text"])))


@pytest.mark.parametrize("deduplicate", [True, False])
def test_the_one_row_that_was_held_out_is_not_learnt_after_another_is_lowest(
    sets: Sets, deduplicate: bool
) -> None:
    lowest, held_before, *others = by_hash(rows_of(12))
    reading = FEW_HELD_OUT.model_copy(update={"deduplicate": deduplicate})
    first = sets.file("a", [*others[:6], held_before, held_before])
    sets.build("first", [first], reading)
    assert sets.heldout("first") == [held_before]
    second = sets.file("b", [lowest, *others[6:]])
    known = heldout_hashes(sets.directory / "first")
    built = sets.build("both", [first, second], reading, earlier_heldout=known)
    assert sets.texts("both") == [row["text"] for row in others]
    assert sets.heldout("both") == [lowest]
    left_out = 1 if deduplicate else 2
    expected = {
        "stands in the held-out part": left_out,
        **({"duplicate": 1} if deduplicate else {}),
    }
    assert built.tallies["train"].skipped == Counter(expected)
    assert built.to_json()["of_earlier_heldout"] == left_out
    assert built.tallies["train"].rows == 13
    assert built.tallies["train"].kept == sum(part["rows"] for part in built.parts.values())


def test_a_row_that_is_held_out_anyway_stays_held_out_though_an_earlier_set_has_it(
    sets: Sets,
) -> None:
    path = sets.file("a", rows_of(100))
    for name, reading in (("lowest", FEW_HELD_OUT), ("hashed", Reading(heldout_fraction=0.1))):
        alone = sets.build(name, [path], reading)
        known = heldout_hashes(sets.directory / name)
        built = sets.build(f"{name} again", [path], reading, earlier_heldout=known)
        assert len(known) == (1 if name == "lowest" else built.parts["heldout"]["rows"]) > 0
        assert sets.digests(f"{name} again") == sets.digests(name)
        assert not built.tallies["train"].skipped
        assert "of_earlier_heldout" not in alone.to_json()
    beside_none = sets.build(
        "none", [path], FEW_HELD_OUT, earlier_heldout=np.zeros((0, 2), np.uint64)
    )
    assert beside_none.to_json()["of_earlier_heldout"] == 0 and sets.digests(
        "none"
    ) == sets.digests("lowest")


def test_the_last_row_that_may_be_learnt_is_not_held_out(sets: Sets) -> None:
    lowest, held_before, other = by_hash(rows_of(3))
    sets.build("first", [sets.file("a", [other, held_before])], FEW_HELD_OUT)
    known, second = heldout_hashes(sets.directory / "first"), sets.file("b", [held_before, lowest])
    sets.build("second", [second], FEW_HELD_OUT, earlier_heldout=known)
    assert sets.texts("second") == [lowest["text"]]
    assert sets.heldout("second") == [held_before]


@pytest.mark.parametrize("deduplicate", [True, False])
def test_what_a_named_held_out_file_holds_is_never_learnt(sets: Sets, deduplicate: bool) -> None:
    rows, others = rows_of(100), rows_of(20, seed=3)
    train = sets.file("a", rows)
    heldout = sets.file("b", [rows[7], *others, rows[50], rows[7]])
    reading = Reading(heldout_fraction=0.3, deduplicate=deduplicate)
    built = sets.build("out", [train], reading, heldout=[heldout])
    expected = [
        row["text"] for row in (rows[7], *others, rows[50], *([] if deduplicate else [rows[7]]))
    ]
    assert sets.texts("out", "heldout") == expected
    assert [record["text"] for record in sets.heldout("out")] == expected
    assert sets.texts("out") == [row["text"] for n, row in enumerate(rows) if n not in (7, 50)]
    assert built.tallies["train"].skipped == Counter({"stands in the held-out part": 2})
    assert_adds_up(built, 123)


def test_a_reservoir_takes_exactly_as_many_distinct_rows_from_all_over_the_input(
    sets: Sets,
) -> None:
    rows = rows_of(300)
    path = sets.file("a", [*rows, *rows[:50]])
    found = {}
    for name, limit, seed in (("a", 15, 1), ("b", 75, 1), ("c", 15, 2), ("d", 9999, 1)):
        reading = Reading(heldout_fraction=0, limit=limit, seed=seed)
        built = sets.build(name, [path], reading)
        assert_adds_up(built, 350)
        found[name] = sets.texts(name)
    assert (
        [len(set(found[name])) for name in "abcd"]
        == [len(found[name]) for name in "abcd"]
        == [15, 75, 15, 300]
    )
    assert set(found["a"]) < set(found["b"])
    assert found["a"] != found["c"]
    place = {row["text"]: n for n, row in enumerate(rows)}
    assert max(place[text] for text in found["b"]) > 270
    assert min(place[text] for text in found["b"]) < 30


def test_the_head_is_the_first_rows_and_the_rest_is_not_read(sets: Sets) -> None:
    rows = rows_of(300)
    path = sets.file("a", [rows[0], *rows])
    built = sets.build("out", [path], Reading(heldout_fraction=0, limit=40, sample="head"))
    assert sets.texts("out") == [row["text"] for row in rows[:40]]
    assert built.blocks < 6
    assert_adds_up(built, built.tallies["train"].rows)


def test_bad_rows_are_named_by_file_and_line_across_blocks(sets: Sets) -> None:
    rows: list[Any] = rows_of(300)
    for line, bad in ((1, b"{"), (150, b'{"text": 5}'), (299, b"\xff")):
        rows.insert(line - 1, bad)
    rows.insert(200, b"  ")
    rows.append(b'{"text": ' + b"[" * 400 + b"]" * 400 + b"}")  # deeper than orjson writes
    first, second = (sets.file(f"{name}", rows) for name in "ab")
    built = sets.build("out", [first, second])
    found = sets.rejected("out")
    wanted = [(str(path), line) for path in (first, second) for line in (1, 150, 300, 305)]
    assert [(row["file"], row["line"]) for row in found] == wanted
    assert "'text'" in found[1]["reason"]
    assert built.tallies["train"].first_rejected[0].startswith(f"{first}:1: not valid JSON")
    assert_adds_up(built, 608)


def test_the_records_of_a_block_are_encoded_in_groups_while_it_is_read(
    sets: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sets.file("rows", [{"text": f"fox {number}"} for number in range(6)])
    whole = sets.build("whole", [path])
    steps: list[str] = []

    def note(owner: Any, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *values: steps.append(name) or function(*values))

    note(blocks.sources, "content_hash")
    note(blocks, "encode_records")
    monkeypatch.setattr(blocks, "ENCODED_BYTES", 2 * blocks.RECORD_BYTES)
    grouped = sets.build("groups", [path])
    assert steps.index("encode_records") < 5 and steps.count("encode_records") > 2
    assert grouped.parts == whole.parts


def test_blocks_end_with_lines_and_hold_every_byte_once_whatever_the_size(tmp_path: Path) -> None:
    chance = random.Random(3)
    recipe = BlockRecipe(
        "documents", "text", 0.0, 10**6, tokenizer="", tokenizer_digest="", template="", code=""
    )
    for size in (1024, 1500, 5000, 10**6):
        lines = [
            bytes(chance.choices(b"abc \r\\", k=chance.choice([0, 1, 30, 3000]))) for _ in range(60)
        ]
        lines[0] = b'{"text": "no plain text"}'
        data = b"\n".join(lines) + (b"\n" if size % 2 else b"")
        plain, packed = tmp_path / "plain", tmp_path / "packed.gz"
        plain.write_bytes(data)
        packed.write_bytes(gzip.compress(data))
        cuts = [list(blocks.cut(str(path), 0, size, recipe)) for path in (plain, packed)]
        pieces = [[blocks.read(block) for block in cut] for cut in cuts]
        assert pieces[0] == pieces[1]
        assert b"".join(pieces[0]) == data
        assert all(piece.endswith(b"\n") for piece in pieces[0][:-1])
        assert all(len(piece) >= size for piece in pieces[0][:-1])
        assert [(b.start, b.end) for b in cuts[0]] == [(b.start, b.end) for b in cuts[1]]


def test_a_line_beyond_the_limit_is_one_rejected_row_and_its_neighbours_stay(sets: Sets) -> None:
    path = sets.file("a", [{"text": LINES[0]}, {"text": "x" * 50_000}, {"text": LINES[1]}])
    packed = sets.directory / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for number, (source, size) in enumerate(itertools.product((path, packed), (1024, 10**6))):
        built = sets.build(
            f"{number}",
            [source],
            recipe=replace(sets.recipe, max_line_bytes=2048),
            block_bytes=size,
        )
        assert sets.texts(f"{number}") == list(LINES[:2])
        assert built.tallies["train"].rejected == Counter({TOO_LONG.format(2048): 1})
        assert [row["line"] for row in sets.rejected(f"{number}")] == [2]
        assert_adds_up(built, 3)


def test_chats_keep_their_masks_through_selection(sets: Sets) -> None:
    pairs = [(f"{n}?", f"{n} {LINES[n % 6]}") for n in range(60)]
    chats = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in pairs
    ]
    path = sets.file("a", [*chats, *chats[::3]])
    built = sets.build("out", [path], recipe=recipe_of(ALL, sets.encoder.directory, "chats"))
    assert (len(sets.train("out")), built.duplicates) == (60, 20)
    for n, (_, answer) in enumerate(pairs):
        ids, live = sets.train("out").row(n)
        assert live is not None and sets.encoder.decode(ids[live.astype(bool)].tolist()) == answer
        assert ids[np.flatnonzero(live)[-1]] == sets.encoder.end_id


def test_parquet_gives_the_shards_of_the_same_rows_as_json_lines(sets: Sets) -> None:
    rows = rows_of(100)
    table = pa.table(
        {
            "text": [row["text"] for row in rows],
            "when": [datetime.date(2026, 1, 1)] * 100,
            "n": range(100),
        }
    )
    pq.write_table(table, sets.directory / "a.parquet", row_group_size=20)
    built = sets.build("parquet", [sets.directory / "a.parquet"])
    sets.build("lines", [sets.file("a", rows)])
    streams = [sets.train(name) for name in ("parquet", "lines")]
    assert (
        streams[0].stream(0, streams[0].tokens).tolist()
        == streams[1].stream(0, streams[1].tokens).tolist()
    )
    assert built.blocks > 2
    assert_adds_up(built, 100)


def test_a_parquet_column_of_bytes_is_text_where_it_is_utf8_and_no_other_type_is(
    sets: Sets,
) -> None:
    columns = {
        2: pa.array(["é".encode(), b"\xff", b"good"]),
        0: pa.array([decimal.Decimal("1.5")] * 3),
    }
    for kept, column in columns.items():
        path = sets.directory / f"{kept}.parquet"
        pq.write_table(pa.table({"text": column}), path)
        built = sets.build(f"{kept}", [path])
        assert_adds_up(built, 3)
        assert built.tallies["train"].kept == kept
        assert all("'text'" in reason for reason in built.tallies["train"].rejected)


def test_a_limit_counts_what_is_learnt_beside_held_out_rows(sets: Sets) -> None:
    rows = rows_of(150)
    train, heldout = sets.file("a", rows), sets.file("b", rows[:70])
    for sample in ("head", "reservoir"):
        reading = Reading(heldout_fraction=0.1, limit=50, sample=sample)
        built = sets.build(sample, [train], reading, heldout=[heldout])
        assert (built.parts["train"]["rows"], built.parts["heldout"]["rows"]) == (50, 70)
    built = sets.build("1", [train], Reading(heldout_fraction=1e-9, limit=50, sample="head"))
    assert (built.parts["train"]["rows"], built.parts["heldout"]["rows"]) == (49, 1)
    assert [record["text"] for record in sets.heldout("1")] == sets.texts("1", "heldout")


def test_files_without_a_row_make_an_empty_set_whatever_the_limit(sets: Sets) -> None:
    built = sets.build("1", [sets.file("a", [])], Reading(heldout_fraction=0.1, limit=5))
    assert (built.parts["train"]["rows"], built.parts["heldout"]["rows"], built.blocks) == (0, 0, 0)


def test_other_special_tokens_are_another_recipe_and_never_share_a_name(sets: Sets) -> None:
    path = sets.file("a", rows_of(50))
    sets.build("out", [path])
    before = sets.digests("out")
    other = sets.directory / "swapped"
    shutil.copytree(sets.encoder.directory, other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["bos_token"], config["eos_token"] = config["eos_token"], config["bos_token"]
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    built = sets.build("out", [path], recipe=recipe_of(ALL, other, "documents"))
    assert built.encoded_blocks == built.blocks
    assert not {name for name in sets.digests("out") if name.endswith(".arrow")} & set(before)
    first = sets.train("out").row(0)[0]
    assert (first[0], first[-1]) == (3, 2)
    with pytest.raises(ArtifactError, match="made with the tokenizer"):
        ShardSet(sets.directory / "out" / "train", sets.encoder.digest)


def test_a_chat_that_the_template_refuses_costs_its_row_and_takes_no_place_under_a_limit(
    sets: Sets, tmp_path: Path
) -> None:
    guard = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    )
    encoder = take(tmp_path / "own", guard + CHATML)
    talks = [[("user", f"Number {number}?"), ("assistant", str(number))] for number in range(9)]
    talks[4].insert(0, ("system", "Be brief."))
    rows: list[Any] = [
        {"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks
    ]
    path = sets.file("chats", [*rows[:7], {"messages": 1}, *rows[7:]])
    own = {
        "tokenizer": str(encoder.directory),
        "tokenizer_digest": encoder.digest,
        "template": "own",
    }
    recipe = replace(sets.recipe, kind="chats", **own)
    for name, reading, kept in (
        ("all", ALL, 8),
        ("limited", ALL.model_copy(update={"limit": 5}), 5),
    ):
        built = sets.build(name, [path], reading, recipe=recipe)
        assert_adds_up(built, 10)
        assert sum(tally.kept for tally in built.tallies.values()) == kept
        rejected = [(row["line"], row["reason"]) for row in sets.rejected(name)]
        assert [line for line, _ in rejected] == [5, 8]
        assert rejected[0][1].endswith(
            "does not render the turns system, user, assistant: no system turn"
        )
