"""Files to shards: the same from any number of workers, with every row accounted for."""

import datetime
import gzip
import itertools
import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
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

TENTH = Reading(heldout_fraction=0.1)
ONE_HELD_OUT = Reading(heldout_fraction=1e-9)  # of so few rows none by its hash
HELD_OUT = "stands in the held-out part"


class Sets:
    """Files of rows, and sets of shards of them, each by its name below one directory."""

    def __init__(self, directory: Path, recipe: BlockRecipe) -> None:
        self.directory = directory
        self.recipe = recipe
        self.encoder = Encoder(Path(recipe.tokenizer))

    def file(self, name: str, rows: Sequence[Any]) -> Path:
        return write_lines(self.directory / f"{name}.jsonl", rows)

    def build(self, name: str, files: list[Path], reading: Reading = ALL, **more: Any) -> Any:
        return build(self.directory / name, files, more.pop("recipe", self.recipe), reading, **more)

    def train(self, name: str = "out") -> ShardSet:
        return ShardSet(self.directory / name / "train")

    def texts(self, name: str = "out", part: str = "train") -> list[str]:
        return texts_in(self.directory / name, self.recipe.tokenizer, part)

    def heldout(self, name: str = "out") -> list[dict[str, Any]]:
        return list(heldout_records(self.directory / name))

    def known_heldout(self, name: str) -> Any:
        return heldout_hashes(self.directory / name)

    def rejected(self, name: str = "out") -> list[dict[str, Any]]:
        path = self.directory / name / "run" / "rejected.jsonl"
        return [json.loads(line) for line in path.read_bytes().splitlines()]

    def digests(self, name: str = "out") -> dict[str, str]:
        return digests(self.directory / name)


@pytest.fixture
def sets(tmp_path: Path, recipe: BlockRecipe) -> Sets:
    return Sets(tmp_path, recipe)


def texts_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [row["text"] for row in rows]


def part_rows(built: ShardSetResult) -> tuple[int, int]:
    return built.parts["train"]["rows"], built.parts["heldout"]["rows"]


def assert_adds_up(built: ShardSetResult, rows: int) -> None:
    """rows = kept + skipped + rejected, in all and in each file; what is kept is in the shards."""
    for counts in (*(tally.to_json() for tally in built.tallies.values()), *built.files):
        left_out = sum(counts["skipped"].values()) + sum(counts["rejected"].values())
        assert counts["rows"] == counts["kept"] + left_out
    assert sum(tally.rows for tally in built.tallies.values()) == rows
    assert sum(tally.kept for tally in built.tallies.values()) == sum(part_rows(built))
    tokens = sum(part["tokens"] for part in built.parts.values())
    assert sum(file["tokens"] for file in built.files) == tokens


def test_every_document_comes_back_in_order_with_the_ids_of_the_tokenizer(sets: Sets) -> None:
    rows = rows_of(300)
    built = sets.build("out", [sets.file("a", rows)])
    assert sets.texts() == texts_of(rows)
    encoder, shards = Encoder(sets.encoder.directory, fast=False), sets.train()
    ids = [[encoder.bos_id, *ids, encoder.eos_id] for ids in encoder.encode(texts_of(rows))]
    assert [shards.row(n)[0].tolist() for n in range(len(shards))] == ids
    assert built.parts["train"]["tokens"] == sum(map(len, ids))
    assert built.parts["train"]["bytes"] == sum(len(text.encode()) for text in texts_of(rows))
    assert built.blocks > 5
    assert_adds_up(built, 300)


def test_the_weights_of_rows_are_beside_them_also_where_rows_are_left_out(sets: Sets) -> None:
    rows = rows_of(300)
    weighted = [{**row, "weight": 1 + number % 3} for number, row in enumerate(rows)]
    recipe = replace(sets.recipe, heldout_fraction=0.1)
    files = {"plain": rows, "weighted": weighted, "twice": [*weighted, *weighted[:50]]}
    for name, lines in files.items():
        sets.build(name, [sets.file(name, lines)], recipe=recipe)
    assert sets.train("plain").row_weights is None
    expected = {row["text"]: row["weight"] for row in weighted}
    for name in ("weighted", "twice"):
        weights = sets.train(name).row_weights
        assert weights is not None
        assert weights.tolist() == [expected[text] for text in sets.texts(name)]
        assert ShardSet(sets.directory / name / "heldout").row_weights is None
    assert sets.train("weighted").index["tokens"] == sets.train("plain").index["tokens"]


def test_one_worker_and_two_and_no_compression_or_any_leave_the_same_files(sets: Sets) -> None:
    plain = sets.file("a", rows_of(300))
    packed, data = sets.directory / "a.jsonl.gz", plain.read_bytes()
    packed.write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))
    limited = Reading(heldout_fraction=0, limit=30)
    head = Reading(heldout_fraction=0.1, limit=20, sample="head")
    readings = {"all": TENTH, "sample": limited, "head": head}
    for workers in (1, 2):
        with Processes(workers) as pool:
            for name, reading in readings.items():
                sets.build(f"{workers}/{name}", [plain], reading, pool=pool)
    sets.build("packed", [packed], TENTH)
    assert len(sets.digests("1/all")) > 10
    assert sets.digests("packed") == sets.digests("1/all")
    for name in readings:
        assert sets.digests(f"1/{name}") == sets.digests(f"2/{name}")
    folders = (sets.directory / "1", sets.directory / "2")
    first, second = ({path.relative_to(folder) for path in folder.rglob("*")} for folder in folders)
    assert first == second, "of a head, blocks that were made in vain are gone"


def test_workers_block_ctrl_c_which_would_show_a_traceback_while_they_load() -> None:
    with Processes(2) as pool:
        mask = pool.begin().submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result()
    assert signal.SIGINT in mask
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_of_equal_rows_the_first_stays_wherever_the_others_stand(sets: Sets) -> None:
    rows = rows_of(150)
    a = sets.file("a", [*rows[:100], rows[3], rows[99]])
    b = sets.file("b", [rows[5], *rows[100:], rows[120]])
    built = sets.build("out", [a, b])
    assert sets.texts() == texts_of(rows)
    assert (built.duplicates, built.tallies["train"].skipped) == (4, Counter(duplicate=4))
    assert_adds_up(built, 154)
    all_kept = Reading(heldout_fraction=0, deduplicate=False)
    kept = sets.build("all", [a, b], all_kept)
    assert (kept.duplicates, kept.parts["train"]["rows"]) == (4, 154)
    alone = sets.build("out", [b])
    assert sets.texts() == texts_of([rows[5], *rows[100:]]), "no duplicate any more"
    assert alone.encoded_blocks == 0
    assert sets.build("twice", [b, b], all_kept).parts["train"]["rows"] == 104
    assert len(sets.texts("twice")) == 104


# --- the held-out part


def test_held_out_rows_are_the_same_in_whatever_files_and_order_they_come(sets: Sets) -> None:
    rows = rows_of(200)
    file, more = sets.file("one", rows), sets.file("more", rows_of(100, seed=7))
    built = sets.build("1", [file], TENTH)
    mixed = random.Random(1).sample(rows, len(rows))
    sets.build("3", [sets.file(f"{n}", mixed[n::3]) for n in range(3)], TENTH)
    sets.build("more", [file, more], TENTH)
    heldout, train = set(sets.texts("1", "heldout")), set(sets.texts("1"))
    assert 10 < len(heldout) < 30 and not heldout & train
    assert heldout == set(sets.texts("3", "heldout")) <= set(sets.texts("more", "heldout"))
    assert heldout | train == set(texts_of(rows))
    assert set(texts_of(sets.heldout("1"))) == heldout
    assert_adds_up(built, 200)


def test_held_out_rows_keep_their_labels_which_do_not_decide_what_is_held_out(sets: Sets) -> None:
    more = {"lang": "en", "url": "u", "more": {}}
    rows = [{**row, "source": f"s{n % 2}", **more} for n, row in enumerate(rows_of(100))]
    rows[0] |= {"source": "x" * 65, "lang": 3}
    sets.build("1", [sets.file("a", rows)], TENTH)
    sets.build("2", [sets.file("b", rows_of(100))], TENTH)
    kept = {row["text"]: {key: row[key] for key in ("text", "source", "lang")} for row in rows}
    kept[rows[0]["text"]] = {"text": rows[0]["text"]}
    records = sets.heldout("1")
    assert records == [kept[record["text"]] for record in records]
    assert texts_of(sets.heldout("2")) == texts_of(records)


def test_where_nothing_is_held_out_one_row_and_its_copies_are(sets: Sets) -> None:
    rows, reading = rows_of(12), Reading(heldout_fraction=0.001, deduplicate=False)
    built = sets.build("out", [sets.file("a", [*rows, *rows])], reading, block_bytes=600)
    held, train = sets.texts("out", "heldout"), sets.texts()
    assert (len(held), len(train)) == (1, 22) and held[0] not in train
    assert texts_of(sets.heldout()) == held
    assert built.tallies["train"].skipped == Counter({HELD_OUT: 1})


def by_hash(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first row is held out of a set without held-out rows."""
    return sorted(rows, key=lambda row: content_hash(TextDocument(row["text"])))


@pytest.mark.parametrize(("deduplicate", "left_out"), [(True, 1), (False, 2)])
def test_earlier_held_out_rows_are_left_out(sets: Sets, deduplicate: bool, left_out: int) -> None:
    lowest, held_before, *others = by_hash(rows_of(12))
    reading = ONE_HELD_OUT.model_copy(update={"deduplicate": deduplicate})
    files = [sets.file("a", [*others[:6], held_before, held_before])]
    sets.build("first", files, reading)
    assert sets.heldout("first") == [held_before]
    files.append(sets.file("b", [lowest, *others[6:]]))
    built = sets.build("both", files, reading, earlier_heldout=sets.known_heldout("first"))
    assert sets.texts("both") == texts_of(others)
    assert sets.heldout("both") == [lowest]
    tally = built.tallies["train"]
    assert tally.skipped == Counter({HELD_OUT: left_out, "duplicate": 2 - left_out})
    assert built.to_json()["of_earlier_heldout"] == left_out
    assert (tally.rows, tally.kept) == (13, sum(part_rows(built)))


def test_a_row_held_out_anyway_stays_held_out(sets: Sets) -> None:
    path = sets.file("a", rows_of(100))
    for name, reading in (("lowest", ONE_HELD_OUT), ("hashed", TENTH)):
        alone = sets.build(name, [path], reading)
        known = sets.known_heldout(name)
        built = sets.build(f"{name} again", [path], reading, earlier_heldout=known)
        assert len(known) == (1 if name == "lowest" else built.parts["heldout"]["rows"]) > 0
        assert sets.digests(f"{name} again") == sets.digests(name)
        assert not built.tallies["train"].skipped
        assert "of_earlier_heldout" not in alone.to_json()
    none = np.zeros((0, 2), np.uint64)
    built = sets.build("none", [path], ONE_HELD_OUT, earlier_heldout=none)
    assert built.to_json()["of_earlier_heldout"] == 0
    assert sets.digests("none") == sets.digests("lowest")


def test_the_last_row_that_may_be_trained_on_is_not_held_out(sets: Sets) -> None:
    lowest, held_before, another = by_hash(rows_of(3))
    sets.build("first", [sets.file("a", [another, held_before])], ONE_HELD_OUT)
    known, second = sets.known_heldout("first"), sets.file("b", [held_before, lowest])
    sets.build("second", [second], ONE_HELD_OUT, earlier_heldout=known)
    assert sets.texts("second") == [lowest["text"]]
    assert sets.heldout("second") == [held_before]


@pytest.mark.parametrize("deduplicate", [True, False])
def test_rows_of_a_held_out_file_are_not_trained_on(sets: Sets, deduplicate: bool) -> None:
    rows, others = rows_of(100), rows_of(20, seed=3)
    heldout = sets.file("b", [rows[7], *others, rows[50], rows[7]])
    reading = Reading(heldout_fraction=0.3, deduplicate=deduplicate)
    built = sets.build("out", [sets.file("a", rows)], reading, heldout=[heldout])
    expected = texts_of([rows[7], *others, rows[50], *([] if deduplicate else [rows[7]])])
    assert sets.texts("out", "heldout") == texts_of(sets.heldout()) == expected
    assert sets.texts() == texts_of([*rows[:7], *rows[8:50], *rows[51:]])
    assert built.tallies["train"].skipped == Counter({HELD_OUT: 2})
    assert_adds_up(built, 123)


# --- a limit


def test_a_reservoir_takes_distinct_rows_from_all_over(sets: Sets) -> None:
    rows = rows_of(300)
    path = sets.file("a", [*rows, *rows[:50]])
    texts = {}
    for name, limit, seed in (("a", 15, 1), ("b", 75, 1), ("c", 15, 2), ("d", 9999, 1)):
        reading = Reading(heldout_fraction=0, limit=limit, seed=seed)
        assert_adds_up(sets.build(name, [path], reading), 350)
        texts[name] = sets.texts(name)
    assert [len(texts[name]) for name in "abcd"] == [15, 75, 15, 300]
    assert [len(set(texts[name])) for name in "abcd"] == [15, 75, 15, 300]
    assert set(texts["a"]) < set(texts["b"])
    assert texts["a"] != texts["c"]
    places = [number for number, row in enumerate(rows) if row["text"] in texts["b"]]
    assert places[0] < 30 and places[-1] > 270


def test_the_head_is_the_first_rows_and_the_rest_is_not_read(sets: Sets) -> None:
    rows = rows_of(300)
    reading = Reading(heldout_fraction=0, limit=40, sample="head")
    built = sets.build("out", [sets.file("a", [rows[0], *rows])], reading)
    assert sets.texts() == texts_of(rows[:40])
    assert built.blocks < 6
    assert_adds_up(built, built.tallies["train"].rows)


def test_a_limit_counts_what_is_trained_on_beside_held_out_rows(sets: Sets) -> None:
    rows = rows_of(150)
    train, heldout = sets.file("a", rows), sets.file("b", rows[:70])
    for sample in ("head", "reservoir"):
        reading = Reading(heldout_fraction=0.1, limit=50, sample=sample)
        assert part_rows(sets.build(sample, [train], reading, heldout=[heldout])) == (50, 70)
    reading = ONE_HELD_OUT.model_copy(update={"limit": 50, "sample": "head"})
    assert part_rows(sets.build("1", [train], reading)) == (49, 1)
    assert texts_of(sets.heldout("1")) == sets.texts("1", "heldout")
    empty = sets.build("none", [sets.file("a", [])], Reading(heldout_fraction=0.1, limit=5))
    assert (*part_rows(empty), empty.blocks) == (0, 0, 0)


# --- bad rows, blocks and lines


def test_bad_rows_are_named_by_file_and_line_across_blocks(sets: Sets) -> None:
    rows: list[Any] = rows_of(300)
    for line, bad in ((1, b"{"), (150, b'{"text": 5}'), (299, b"\xff")):
        rows.insert(line - 1, bad)
    rows.insert(200, b"  ")
    rows.append(b'{"text": ' + b"[" * 400 + b"]" * 400 + b"}")  # deeper than orjson writes
    first, second = sets.file("a", rows), sets.file("b", rows)
    built = sets.build("out", [first, second])
    rejected = sets.rejected()
    places = [(row["file"], row["line"]) for row in rejected]
    assert places == [*itertools.product([str(first), str(second)], [1, 150, 300, 305])]
    assert "'text'" in rejected[1]["reason"]
    assert built.tallies["train"].first_rejected[0].startswith(f"{first}:1: not valid JSON")
    assert_adds_up(built, 608)


def test_records_are_encoded_in_groups(sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sets.file("rows", [{"text": f"fox {number}"} for number in range(6)])
    at_once = sets.build("at once", [path])
    steps: list[str] = []

    def note(owner: Any, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *values: steps.append(name) or function(*values))

    note(blocks.sources, "content_hash")
    note(blocks, "encode_records")
    monkeypatch.setattr(blocks, "ENCODED_BYTES", 2 * blocks.RECORD_BYTES)
    grouped = sets.build("groups", [path])
    assert steps.index("encode_records") < 5 and steps.count("encode_records") > 2
    assert grouped.parts == at_once.parts


@pytest.mark.parametrize("size", [1024, 1501, 5000, 10**6])
def test_blocks_hold_every_byte_once(tmp_path: Path, recipe: BlockRecipe, size: int) -> None:
    chance = random.Random(size)
    lengths = chance.choices([0, 1, 30, 3000], k=60)
    lines = [bytes(chance.choices(b"abc \r\\", k=length)) for length in lengths]
    lines[0] = b'{"text": "no plain text"}'
    data = b"\n".join(lines) + b"\n" * (size % 2)
    plain, packed = tmp_path / "plain", tmp_path / "packed.gz"
    plain.write_bytes(data)
    packed.write_bytes(gzip.compress(data))
    cuts = [list(blocks.cut(str(path), 0, size, recipe)) for path in (plain, packed)]
    pieces, unpacked = ([blocks.read(block) for block in cut] for cut in cuts)
    assert pieces == unpacked
    assert b"".join(pieces) == data
    assert all(piece.endswith(b"\n") and len(piece) >= size for piece in pieces[:-1])
    assert [(b.start, b.end) for b in cuts[0]] == [(b.start, b.end) for b in cuts[1]]


def test_a_line_beyond_the_limit_is_one_rejected_row_and_its_neighbours_stay(sets: Sets) -> None:
    plain = sets.file("a", [{"text": text} for text in (LINES[0], "x" * 50_000, LINES[1])])
    packed = sets.directory / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    recipe = replace(sets.recipe, max_line_bytes=2048)
    for path, size in itertools.product((plain, packed), (1024, 10**6)):
        name = f"{path.suffix} {size}"
        built = sets.build(name, [path], recipe=recipe, block_bytes=size)
        assert sets.texts(name) == list(LINES[:2])
        assert built.tallies["train"].rejected == Counter({TOO_LONG.format(2048): 1})
        assert [row["line"] for row in sets.rejected(name)] == [2]
        assert_adds_up(built, 3)


# --- other kinds of records, files and recipes


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def test_chats_keep_their_masks_through_selection(sets: Sets) -> None:
    answers = [f"{n} {LINES[n % 6]}" for n in range(60)]
    chats = [chat(("user", f"{n}?"), ("assistant", text)) for n, text in enumerate(answers)]
    recipe = recipe_of(ALL, sets.encoder.directory, "chats")
    built = sets.build("out", [sets.file("a", [*chats, *chats[::3]])], recipe=recipe)
    assert (len(sets.train()), built.duplicates) == (60, 20)
    for n, answer in enumerate(answers):
        ids, live = sets.train().row(n)
        assert live is not None and sets.encoder.decode(ids[live.astype(bool)].tolist()) == answer
        assert ids[np.flatnonzero(live)[-1]] == sets.encoder.end_id


def test_parquet_gives_the_shards_of_the_same_rows_as_json_lines(sets: Sets) -> None:
    rows, path = rows_of(100), sets.directory / "a.parquet"
    dates = [datetime.date(2026, 1, 1)] * 100
    table = pa.table({"text": texts_of(rows), "when": dates, "n": range(100)})
    pq.write_table(table, path, row_group_size=20)
    built = sets.build("parquet", [path])
    sets.build("lines", [sets.file("a", rows)])
    parquet, lines = (sets.train(name) for name in ("parquet", "lines"))
    assert parquet.stream(0, parquet.tokens).tolist() == lines.stream(0, lines.tokens).tolist()
    assert built.blocks > 2
    assert_adds_up(built, 100)


@pytest.mark.parametrize(
    ("kept", "values"), [(2, ["é".encode(), b"\xff", b"good"]), (0, [Decimal("1.5")] * 3)]
)
def test_parquet_bytes_are_text_where_utf8(sets: Sets, kept: int, values: list[Any]) -> None:
    path = sets.directory / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(values)}), path)
    built = sets.build("out", [path])
    assert_adds_up(built, 3)
    assert built.tallies["train"].kept == kept
    assert all("'text'" in reason for reason in built.tallies["train"].rejected)


def test_other_special_tokens_are_another_recipe_and_never_share_a_name(sets: Sets) -> None:
    path = sets.file("a", rows_of(50))
    sets.build("out", [path])
    before = sets.digests()
    swapped = sets.directory / "swapped"
    shutil.copytree(sets.encoder.directory, swapped)
    config = json.loads((swapped / "tokenizer_config.json").read_text())
    config["bos_token"], config["eos_token"] = config["eos_token"], config["bos_token"]
    (swapped / "tokenizer_config.json").write_text(json.dumps(config))
    built = sets.build("out", [path], recipe=recipe_of(ALL, swapped, "documents"))
    assert built.encoded_blocks == built.blocks
    assert not {name for name in sets.digests() if name.endswith(".arrow")} & set(before)
    first = sets.train().row(0)[0]
    assert (first[0], first[-1]) == (3, 2)
    with pytest.raises(ArtifactError, match="tokenizer"):
        ShardSet(sets.directory / "out" / "train", sets.encoder.digest)


@pytest.mark.parametrize(("limit", "kept"), [(None, 8), (5, 5)])
def test_a_chat_that_the_template_refuses(sets: Sets, limit: int | None, kept: int) -> None:
    guard = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    own = take(sets.directory / "own", guard + CHATML)
    talks = [[("user", f"Number {number}?"), ("assistant", str(number))] for number in range(9)]
    talks[4].insert(0, ("system", "Be brief."))
    rows = [chat(*talk) for talk in talks]
    path = sets.file("chats", [*rows[:7], {"messages": 1}, *rows[7:]])
    recipe = recipe_of(ALL, own.directory, "chats")
    built = sets.build("out", [path], ALL.model_copy(update={"limit": limit}), recipe=recipe)
    assert_adds_up(built, 10)
    assert sum(tally.kept for tally in built.tallies.values()) == kept
    rejected = sets.rejected()
    assert [row["line"] for row in rejected] == [5, 8]
    assert rejected[0]["reason"].endswith("turns system, user, assistant: no system")
