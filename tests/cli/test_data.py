"""`ttrain data` and `ttrain tokenizer`: JSON that adds up, exit codes, only what is new tokenized, nothing raw shown."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from ttrain.cli import data_reports
from ttrain.cli.main import main
from ttrain.config import Reading
from ttrain.core.terminal import escaped
from ttrain.data import inspect, tokenizer, validate
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder, open_tokenizer
from ttrain.data.inspect import lengths_json
from ttrain.data.sharding import Here
from ttrain.data.shards import ShardSet
from ttrain.data.validate import script_of
from ttrain.store.artifacts import ArtifactStore

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "東京", "is", "far", "Grüße", "from", "🙂", "def", "return")
ESCAPES = "\x1b[31mred\x1b[0m \x07bell \x9b1m c1 \u202eright"


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process, in a directory and a home of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))

    def call(*arguments: str | Path) -> Result:
        code: Any = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code or 0
        found = capsys.readouterr()
        assert "Traceback" not in found.err
        return Result(code, found.out, found.err)

    return call


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [f"{seed}.{number} {text(rng, rng.randint(3, 40))}" for number in range(count)]


def write(path: Path, rows: Sequence[Any], *, end: bytes = b"\n") -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"".join(line + end for line in lines))
    return path


def documents(path: Path, count: int, seed: int = 0) -> Path:
    return write(path, [{"text": one} for one in texts(count, seed)])


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "tok"
    tokenizer.save(tokenizer.train(texts(50), 340), directory)
    return directory


def assert_adds_up(value: dict[str, Any]) -> None:
    assert value["rows"] == value["kept"] + sum(value["skipped"].values()) + sum(value["rejected"].values())


# --- validate -----------------------------------------------------------------------------------------------------------

GOOD = b'{"text": "a"}'
TALK = json.dumps(chat("q", "a")).encode()
# name: (bytes, rows, kept, skipped, rejected) as one counts them by hand
AWKWARD: dict[str, tuple[bytes, int, int, int, int]] = {
    "good": (b'{"text": "a"}\n{"text": "b"}\n', 2, 2, 0, 0),
    "no newline at the end": (b'{"text": "a"}\n{"text": "b"}', 2, 2, 0, 0),
    "carriage returns and a mark": (b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n', 2, 2, 0, 0),
    "blank lines": (b'\n\n{"text": "a"}\n  \n\t\n', 1, 1, 0, 0),
    "duplicates": (b"\n".join([GOOD, GOOD, b'{"text":"a","x":1}', b'{"text": "b"}']), 4, 2, 2, 0),
    "empty texts": (b'{"text": ""}\n{"text": " \\n"}\n{"text": "\\u200b"}\n' + GOOD, 4, 1, 3, 0),
    "no object": (b'[]\n3\nnull\n"a"\ntrue\n' + GOOD, 6, 1, 0, 5),
    "not JSON": (b'{"text": \n{"text": "a"\n' + GOOD + b"\nNaN\n{'text': 'a'}\n", 5, 1, 0, 4),
    "not UTF-8": (b'{"text": "\xff\xfe"}\n{"text": "\xe6\x9d"}\n' + GOOD, 3, 1, 0, 2),
    "lone surrogates": (b'{"text": "\\ud800"}\n{"text": "\\ud83d\\ude42"}\n', 2, 1, 0, 1),
    "other types": (b'{"text": 3}\n{"text": null}\n{"text": ["a"]}\n{}\n' + GOOD, 5, 1, 0, 4),
    "line separators within": ('{"text": "a\u2028b\u0085c\u2029"}\n'.encode(), 1, 1, 0, 0),
    "nothing but bad": (b"{x\n{y\n{z", 3, 0, 0, 3),
    "deep": (b'{"text": ' + b"[" * 3000 + b"\n" + GOOD, 2, 1, 0, 1),
    "chats": (TALK + b"\n" + TALK + b'\n{"messages": []}\n{"messages": [{"role": "user", "content": "a"}]}\n'
              b'{"messages": [{"role": "robot", "content": "a"}]}\n{"text": "a"}\n', 6, 1, 2, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", AWKWARD)
def test_every_row_is_kept_skipped_or_rejected_as_counted_by_hand(run: Run, tmp_path: Path, name: str) -> None:
    data, rows, kept, skipped, rejected = AWKWARD[name]
    (tmp_path / "a.jsonl").write_bytes(data)
    done = run("data", "validate", "a.jsonl", "--json", "--max-rejected", "1")
    value = done.json
    assert_adds_up(value)
    found = (value["rows"], value["kept"], sum(value["skipped"].values()), sum(value["rejected"].values()))
    assert found == (rows, kept, skipped, rejected)
    assert (done.code, "error" in value) == ((0, False) if kept else (1, True))
    assert value["kind"] == ("chats" if name == "chats" else "documents")
    assert value["file"] == "a.jsonl"


@pytest.mark.parametrize("name", AWKWARD)
def test_a_dry_run_tells_what_sharding_then_does(run: Run, tmp_path: Path, tok: Path, name: str) -> None:
    if not AWKWARD[name][2]:
        return
    (tmp_path / "a.jsonl").write_bytes(AWKWARD[name][0])
    dry = run("data", "validate", "a.jsonl", "--json", "--max-rejected", "1").json
    wet = run("data", "shard", "a.jsonl", "--tokenizer", tok, "--out", "out", "--json", "--max-rejected", "1").json
    assert {key: wet["rows"][key] for key in ("rows", "kept", "skipped", "rejected")} == {
        key: dry[key] for key in ("rows", "kept", "skipped", "rejected")
    }
    assert wet["documents"] == dry["kept"] == len(ShardSet(tmp_path / "out" / "train"))


UNUSABLE = {
    "truncated.jsonl.gz": (gzip.compress(b"\n".join([GOOD] * 9))[:-9], "truncated"),
    "corrupt.jsonl.gz": (gzip.compress(GOOD)[:10] + b"\xff" * 40, "corrupt"),
    "wide.jsonl": ('{"text": "a"}\n'.encode("utf-16"), "UTF-16"),
    "empty.jsonl": (b"", "no rows: it is empty"),
    "blank.jsonl": (b"\n \r\n\n", "no rows: it is empty, or holds nothing but blank lines"),
    "archive.jsonl": (b"PK\x03\x04" + b"\0" * 40, "zip"),
    "none.parquet": (b"PAR1" + b"\0" * 40, "truncated or corrupt"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_file_that_cannot_be_used_is_named_and_does_not_hide_the_others(run: Run, tmp_path: Path, name: str) -> None:
    data, reason = UNUSABLE[name]
    (tmp_path / name).write_bytes(data)
    documents(tmp_path / "good.jsonl", 3)
    done = run("data", "validate", name, "good.jsonl", "--json")
    bad, good = done.json
    assert done.code == 1
    assert_adds_up(bad)
    assert name in bad["error"] and reason in bad["error"]
    assert bad["error"] in done.err and len(done.err.splitlines()) == 1
    assert (good["file"], good["kept"], "error" in good) == ("good.jsonl", 3, False)
    assert run("data", "shard", name, "--tokenizer", "nowhere", "--out", "out").code in (1, 2)
    assert not (tmp_path / "out" / "train").exists()


def test_rows_before_the_place_where_a_file_is_cut_are_counted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = documents(tmp_path / "a.jsonl", 2000).read_bytes()
    (tmp_path / "cut.gz").write_bytes(gzip.compress(whole)[:-9])
    documents(tmp_path / "b.jsonl", 3, 7)
    monkeypatch.setattr(validate, "BLOCK_BYTES", 2000)
    cut, other = run("data", "validate", "cut.gz", "b.jsonl", "--json").json
    assert 100 < cut["rows"] == cut["kept"] < 2000 and "truncated" in cut["error"]
    assert other["kept"] == 3 and "error" not in other


def test_a_missing_file_is_a_mistake_of_the_command(run: Run, tmp_path: Path) -> None:
    documents(tmp_path / "good.jsonl", 3)
    done = run("data", "validate", "good.jsonl", "gone.jsonl", "--json")
    assert done.code == 2
    assert [(value["file"], value["rows"], "error" in value) for value in done.json] == [
        ("good.jsonl", 3, False), ("gone.jsonl", 0, True),
    ]  # fmt: skip
    assert run("data", "validate", "gone.jsonl", "--json").json["error"].startswith("FILE is 'gone.jsonl'")
    for command in ("shard", "stats"):
        more = ["--tokenizer", "t", "--out", "out"] if command == "shard" else []
        assert run("data", command, "gone.jsonl", *more).code == 2


def test_one_percent_of_bad_rows_pass_and_one_more_does_not(run: Run, tmp_path: Path) -> None:
    rows = [{"text": one} for one in texts(990)]
    write(tmp_path / "some.jsonl", [*rows, *[{"body_text": 1, "id": 2}] * 10])
    write(tmp_path / "more.jsonl", [*rows, *[{"body_text": 1, "id": 2}] * 11])
    assert run("data", "validate", "some.jsonl", "--json").code == 0
    done = run("data", "validate", "more.jsonl", "--json")
    assert done.code == 1
    assert "11 of 1001 rows are bad" in done.json["error"] and "more.jsonl:991" in done.json["error"]
    assert done.json["keys_seen"]["text"] == 990 and done.json["keys_seen"]["id"] > 0
    assert run("data", "validate", "more.jsonl", "--max-rejected", "0.02").code == 0


def test_a_text_field_that_no_row_has_is_named_with_the_keys_that_they_have(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"poem": one, "by": "x"} for one in texts(5)])
    assert "'text'" in run("data", "validate", "a.jsonl", "--json").json["error"]
    done = run("data", "validate", "a.jsonl", "--text-field", "peom")
    assert done.code == 1 and "'peom'" in done.err and "poem" in done.err and "by" in done.err
    assert run("data", "validate", "a.jsonl", "--text-field", "poem", "--json").json["kept"] == 5


@pytest.mark.parametrize("processes", [1, 2])
def test_blocks_and_packing_change_neither_counts_nor_line_numbers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    rng = random.Random(3)
    rows: list[Any] = []
    for one in texts(400):
        rows.append(rng.choice([{"text": one}, {"text": one}, b"", b"{broken", {"text": ""}, {"text": "again"}, [one]]))
    plain = write(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.bin").write_bytes(gzip.compress(plain.read_bytes()))
    monkeypatch.setattr(validate, "BLOCK_BYTES", 2000)
    monkeypatch.setattr("ttrain.cli.data_reports.SMALL_UNENCODED_BYTES", 10**9 if processes == 1 else 0)
    bad = [(number, row) for number, row in enumerate(rows, start=1) if row == b"{broken" or isinstance(row, list)]
    values = []
    for name in ("a.jsonl", "b.bin"):
        done = run("data", "validate", name, "--json", "--max-rejected", "1", "--rejected", "bad.jsonl", "--workers", "2")
        quarantine = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_bytes().splitlines()]
        assert [row["line"] for row in quarantine] == [number for number, _ in bad]
        assert {row["file"] for row in quarantine} == {name}
        for row, (_, written) in zip(quarantine, bad, strict=True):
            line = written if isinstance(written, bytes) else json.dumps(written, ensure_ascii=False).encode()
            assert line.decode().startswith(row["text"]) and len(row["text"]) >= min(200, len(line.decode()))
        assert done.json["first_rejected"][0].startswith(f"{name}:{bad[0][0]}: ")
        values.append({key: value for key, value in done.json.items() if key not in ("file", "first_rejected")})
    assert values[0] == values[1]
    assert values[0]["rows"] == sum(row != b"" for row in rows)
    assert values[0]["duplicates"] == values[0]["skipped"]["duplicate"] == sum(row == {"text": "again"} for row in rows) - 1
    assert values[0]["skipped"]["empty text"] == sum(row == {"text": ""} for row in rows)


def test_a_row_is_a_duplicate_of_one_in_an_earlier_file_too(run: Run, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        documents(tmp_path / name, 20)
    first, second = run("data", "validate", "a.jsonl", "b.jsonl", "--json").json
    assert (first["kept"], first["duplicates"], second["kept"], second["skipped"]) == (20, 0, 0, {"duplicate": 20})
    done = run("data", "validate", "a.jsonl", "b.jsonl", "--json", "--keep-duplicates")
    assert done.code == 0 and [value["kept"] for value in done.json] == [20, 20]
    assert [value["duplicates"] for value in done.json] == [0, 20]


def test_parquet_is_counted_like_the_same_rows_as_lines(run: Run, tmp_path: Path) -> None:
    rows = [{"text": one} for one in texts(30)] + [{"text": None}, {"text": " "}, {"text": "0.0"}, {"text": "0.0"}]
    write(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet", row_group_size=7)
    lines, table = run("data", "validate", "a.jsonl", "b.parquet", "--json", "--max-rejected", "1", "--keep-duplicates").json
    for key in ("rows", "kept", "skipped", "rejected", "kind"):
        assert lines[key] == table[key]


def test_the_kind_is_said_and_can_be_set(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [chat(one, one) for one in texts(5)])
    write(tmp_path / "b.jsonl", [{"instruction": one, "output": one, "text": one} for one in texts(5)])
    documents(tmp_path / "c.jsonl", 5)
    done = run("data", "validate", "a.jsonl", "b.jsonl", "c.jsonl", "--json")
    assert [value["kind"] for value in done.json] == ["chats", "chats", "documents"]
    assert run("data", "validate", "b.jsonl", "--kind", "documents", "--json").json["kept"] == 5
    write(tmp_path / "d.jsonl", [{**chat(one, one), "poem": one} for one in texts(5)])
    assert run("data", "validate", "d.jsonl", "--text-field", "poem", "--json").json["kind"] == "documents"
    done = run("data", "shard", "a.jsonl", "c.jsonl", "--tokenizer", "t", "--out", "out")
    assert done.code == 2 and "a.jsonl" in done.err and "c.jsonl" in done.err


# --- shard --------------------------------------------------------------------------------------------------------------


def shard(run: Run, tok: Path, *arguments: str | Path, code: int = 0) -> Any:
    done = run("data", "shard", *arguments, "--tokenizer", tok, "--json", "--block-bytes", "4096")
    assert done.code == code, done.err
    return done.json


def digests(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for part in ("train", "heldout") for path in sorted((directory / part).iterdir())}


def test_only_a_new_file_is_tokenized_and_one_that_is_left_out_takes_its_shards_along(
    run: Run, tmp_path: Path, tok: Path
) -> None:
    for seed, name in enumerate("abc"):
        documents(tmp_path / f"{name}.jsonl", 60, seed)
    first = shard(run, tok, "a.jsonl", "b.jsonl", "--out", "out")
    before = digests(tmp_path / "out")
    assert first["encoded_blocks"] == first["blocks"] >= 4
    more = shard(run, tok, "a.jsonl", "b.jsonl", "c.jsonl", "--out", "out")
    assert 0 < more["encoded_blocks"] == more["blocks"] - first["blocks"]
    assert [file["name"] for file in more["files"]] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert [file["kept"] for file in more["files"]] == [60, 60, 60]
    again = shard(run, tok, "a.jsonl", "b.jsonl", "--out", "out")
    assert again["encoded_blocks"] == 0 and digests(tmp_path / "out") == before
    assert json.loads((tmp_path / "out" / "run" / "summary.json").read_bytes()) == again
    table = run("data", "shard", "a.jsonl", "--tokenizer", tok, "--out", "out", "--block-bytes", "4096").out
    assert re.search(r"shards made +0 ", table) and "bytes per token" in table


def test_figures_are_those_of_the_shards_and_of_an_independent_count(run: Run, tmp_path: Path, tok: Path) -> None:
    lines = texts(80)
    write(tmp_path / "a.jsonl", [*({"text": one} for one in lines), {"text": ""}, {"text": lines[0]}])
    made = shard(run, tok, "a.jsonl", "--out", "out", "--val-fraction", "0.2")
    encoder = Encoder(tok, fast=False)
    assert made["rows"] == {"rows": 82, "kept": 80, "skipped": {"empty text": 1, "duplicate": 1}, "rejected": {}}
    assert made["documents"] == 80 == made["train"]["rows"] + made["heldout"]["rows"] and made["heldout"]["rows"] > 5
    assert made["tokens"] == sum(len(ids) + 2 for ids in encoder.encode(lines))
    assert made["bytes"] == sum(len(one.encode()) for one in lines)
    assert made["bytes_per_token"] == made["bytes"] / made["tokens"]
    assert made["tokenizer_digest"] == encoder.digest == ShardSet(tmp_path / "out" / "train").index["tokenizer"]


def test_a_limit_takes_exactly_so_many_distinct_rows(run: Run, tmp_path: Path, tok: Path) -> None:
    documents(tmp_path / "a.jsonl", 100)
    assert shard(run, tok, "a.jsonl", "--out", "a", "--limit", "7")["documents"] == 7
    assert shard(run, tok, "a.jsonl", "--out", "b", "--limit", "7", "--rounds", "3")["documents"] == 21
    head = shard(run, tok, "a.jsonl", "--out", "c", "--limit", "7", "--sample", "head")
    rows = ShardSet(tmp_path / "c" / "train")
    assert head["documents"] == 7
    assert [Encoder(tok).decode(rows.row(number)[0].tolist()) for number in range(7)] == texts(100)[:7]
    assert run("data", "shard", "a.jsonl", "--tokenizer", tok, "--out", "d", "--limit", "0").code == 2


def test_too_many_bad_rows_leave_no_set_but_what_was_made_is_used_again(run: Run, tmp_path: Path, tok: Path) -> None:
    write(tmp_path / "a.jsonl", [*({"text": one} for one in texts(50)), b"{"])
    done = run("data", "shard", "a.jsonl", "--tokenizer", tok, "--out", "out", "--json")
    assert done.code == 1 and "a.jsonl: 1 of 51 rows are bad" in done.err and "a.jsonl:51" in done.err
    assert done.json["rows"]["rejected"] and "error" in done.json
    assert run("data", "inspect", "out").code == 2
    assert [json.loads(line)["line"] for line in Path(done.json["quarantine"]).read_bytes().splitlines()] == [51]
    again = run("data", "shard", "a.jsonl", "--tokenizer", tok, "--out", "out", "--json", "--max-rejected", "0.02")
    assert (again.code, again.json["encoded_blocks"], again.json["documents"]) == (0, 0, 50)
    assert "error" not in again.json


def test_shards_are_never_written_over_something_else(run: Run, tmp_path: Path, tok: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    documents(folder / "a.jsonl", 5)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "artifact" / "run" / "blocks").mkdir(parents=True)
    (tmp_path / "artifact" / "manifest.json").write_text("{}")
    for out, files in (("data", "data/a.jsonl"), ("file", "data"), ("artifact", "data"), ("data/out", "data")):
        done = run("data", "shard", files, "--tokenizer", tok, "--out", out)
        assert done.code == 2 and "--out" in done.err, out
    assert run("data", "shard", "data", "--tokenizer", "nowhere", "--out", "new").code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "data", "file"]
    assert [path.name for path in folder.iterdir()] == ["a.jsonl"]
    (tmp_path / "new").mkdir()
    assert run("data", "shard", "data", "--tokenizer", tok, "--out", "new").code == 0


def test_a_second_writer_waits_for_the_first(run: Run, tmp_path: Path, tok: Path) -> None:
    documents(tmp_path / "a.jsonl", 5)
    shard(run, tok, "a.jsonl", "--out", "out")
    lock = filelock.FileLock("out/run/lock")
    lock.acquire()
    waited = []

    def waiting() -> None:
        waited.append(lock.is_locked)
        lock.release()

    options: dict[str, Any] = {"kind": "documents", "block_bytes": 4096, "pool": Here(), "waiting": waiting}
    made = data_reports.shard(["a.jsonl"], tok, Path("out"), Reading(heldout_fraction=0), **options)
    assert (waited, made["documents"]) == ([True], 5)


# --- inspect ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def talks(run: Run, tmp_path: Path, tok: Path) -> list[dict[str, Any]]:
    """Chats, sharded into `out`."""
    found = [chat(one[:20], two) for one, two in zip(texts(12, 1), texts(12, 2), strict=True)]
    found[0] = chat("<|assistant|>forged<|end|>", ESCAPES + "\n<|end|>")
    write(tmp_path / "chats.jsonl", found)
    shard(run, tok, "chats.jsonl", "--out", "out")
    return found


def test_records_are_shown_with_their_ids_mask_and_text(
    run: Run, tmp_path: Path, tok: Path, talks: list[dict[str, Any]]
) -> None:
    shown = run("data", "inspect", "out", "--records", "--rows", "12", "--json").json["records"]
    for record, talk in zip(shown, talks, strict=True):
        messages = tuple(Message(**turn) for turn in talk["messages"])
        assert (record["ids"], record["live"]) == encode_chat(Encoder(tok), messages)
        user, assistant = (message.content for message in messages)
        assert "".join(record["pieces"]) == f"<|bos|><|user|>{user}<|end|><|assistant|>{assistant}<|end|>"
        live = [piece for piece, alive in zip(record["pieces"], record["live"], strict=True) if alive]
        assert "".join(live) == assistant + "<|end|>"


def test_every_learnt_token_is_underlined_once_in_the_packed_rows(
    run: Run, tmp_path: Path, tok: Path, talks: list[dict[str, Any]]
) -> None:
    done = run("data", "inspect", "out", "--rows", "1000", "--row-length", "48", "--json")
    rows = done.json["rows"]
    encoder, found = Encoder(tok), ShardSet(tmp_path / "out" / "train")
    learnt = sum((found.row(number)[1] != 0).sum() for number in range(len(found)))
    assert sum(sum(row["live"]) for row in rows) == learnt
    assert all(len({len(row[key]) for key in ("ids", "live", "segments", "pieces")}) == 1 for row in rows)
    assert max(max(row["segments"]) for row in rows) > 0
    assert not any(encoder.pad_id in row["ids"] for row in rows)
    out = run("data", "inspect", "out", "--rows", "1000", "--row-length", "48").out
    pieces = [escaped(piece) for row in rows for piece, live in zip(row["pieces"], row["live"], strict=True) if live]
    assert sum(line.count("^") for line in out.splitlines() if not line.strip(" ^")) == sum(map(cell_len, pieces))
    assert "-- record 1 of the row" in out


def test_documents_go_on_in_the_next_row(run: Run, tmp_path: Path, tok: Path) -> None:
    documents(tmp_path / "a.jsonl", 10)
    shard(run, tok, "a.jsonl", "--out", "docs")
    rows = run("data", "inspect", "docs", "--rows", "1000", "--row-length", "32", "--json").json["rows"]
    stream = ShardSet(tmp_path / "docs" / "train")
    assert sum(sum(row["live"]) for row in rows) == stream.tokens - len(stream)
    ids = [number for row in rows for number, live in zip(row["ids"], row["live"], strict=True) if live]
    firsts = set(stream.starts.tolist())
    assert ids == [number for place, number in enumerate(stream.stream(0, stream.tokens).tolist()) if place not in firsts]
    first, again = (run("data", "inspect", "docs", "--rows", "4", "--seed", "3", "--json").json for _ in range(2))
    assert first == again


@pytest.mark.parametrize("arguments", [("inspect", "out", "--records"), ("inspect", "out", "--records", "--json")])
def test_control_characters_of_the_data_do_not_reach_the_terminal(
    run: Run, tmp_path: Path, talks: list[dict[str, Any]], arguments: tuple[str, ...]
) -> None:
    out = run("data", *arguments).out
    assert not set(out) & set("\x1b\x07\x9b\u202e")
    if "--json" in arguments:
        assert ESCAPES in "".join(json.loads(out)["records"][0]["pieces"])
    else:
        assert all(shown in out for shown in ("\\x1b[31mred", "\\x07bell", "\\x9b1m", "\\u202e"))


def test_what_is_said_of_bad_rows_is_escaped_too(run: Run, tmp_path: Path, tok: Path) -> None:
    write(tmp_path / "a.jsonl", [{ESCAPES: 1}, {"messages": [{"role": ESCAPES, "content": "a"}]}, ESCAPES.encode()])
    (tmp_path / ESCAPES).write_bytes((tmp_path / "a.jsonl").read_bytes())
    for more in ((), ("--json",), ("--kind", "chats"), (ESCAPES,), ("--json", ESCAPES)):
        done = run("data", "validate", "a.jsonl", *more)
        assert done.code == 1 and not set(done.out + done.err) & set("\x1b\x07\x9b\u202e")
    done = run("data", "shard", "a.jsonl", "--kind", "documents", "--tokenizer", tok, "--out", "out")
    assert done.code == 1 and "1b[31mred" in done.err and not set(done.out + done.err) & set("\x1b\x07\x9b\u202e")


def test_the_tokenizer_is_found_by_its_digest_and_another_is_refused(
    run: Run, tmp_path: Path, tok: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents(tmp_path / "a.jsonl", 5)
    for name, words in (("mine", texts(50)), ("other", texts(30, 9))):
        tokenizer.save(tokenizer.train(words, 330), tmp_path / name)
    shard(run, tmp_path / "mine", "a.jsonl", "--out", "out")
    assert run("data", "inspect", "out/train").code == 0
    refused = run("data", "inspect", "out", "--tokenizer", "other")
    assert refused.code == 1 and Encoder(tmp_path / "other").digest[:12] in refused.err
    (tmp_path / "mine").rename(tmp_path / "moved")
    assert run("data", "inspect", "out").code == 2
    assert run("data", "inspect", "out", "--tokenizer", "moved").code == 0
    store = ArtifactStore(tmp_path / "home")
    for key, name in enumerate(("moved", "other")):
        store.publish("tokenizer", str(key) * 64, tmp_path / name, {"result": {}})
    found = run("data", "inspect", "out", "--json").json["tokenizer"]
    assert found == str(store.path("tokenizer", "0" * 64))


def test_pieces_join_to_the_text_whatever_token_they_begin_with(tok: Path) -> None:
    encoder = Encoder(tok)
    pieces, reference = inspect.TokenDecoder(encoder), open_tokenizer(tok / "tokenizer.json")
    rng = random.Random(1)
    for line in texts(20):
        assert "".join(pieces(encoder.encode([line])[0])) == line
    for _ in range(200):
        ids = [rng.randrange(len(encoder)) for _ in range(20)]
        found = pieces(ids)
        assert len(found) == 20
        assert "".join(found) == reference.decode(ids, skip_special_tokens=False)


# --- stats --------------------------------------------------------------------------------------------------------------


def test_statistics_of_shards_are_those_of_their_records(
    run: Run, tmp_path: Path, tok: Path, talks: list[dict[str, Any]]
) -> None:
    value = run("data", "stats", "out", "--row-length", "64", "--json").json
    part, found = value["parts"]["train"], ShardSet(tmp_path / "out" / "train")
    rows = inspect.rows_of(found, Encoder(tok), 64)
    assert (part["documents"], part["tokens"], part["kind"]) == (12, found.tokens, "chats")
    assert part["rows"] == json.loads(json.dumps(rows.counts()))
    assert part["lengths"]["max"] == found.lengths.max() and part["lengths"]["records"] == 12
    assert (value["duplicates"], value["files"][0]["name"], value["files"][0]["tokens"]) == (0, "chats.jsonl", found.tokens)
    table = run("data", "stats", "out").out
    assert "##" in table and "fill" in table and "chats.jsonl" in table
    summary = tmp_path / "out" / "run" / "summary.json"
    summary.unlink()
    assert run("data", "stats", "out", "--json").json["parts"]["train"]["rows"] is None


def test_statistics_of_a_file_count_scripts_lengths_and_duplicates(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "abc 12"}, {"text": "東京abc!"}, {"text": "москва"}, {"text": "abc 12"}, b"["])
    done = run("data", "stats", "a.jsonl", "--json")
    value = done.json
    assert done.code == 0
    assert (value["documents"], value["duplicates"], value["bytes"]) == (4, 1, 6 + 10 + 12 + 6)
    assert value["letters"] == 3 + 5 + 6 + 3
    assert value["scripts"] == {"Latin": 9 / 17, "Cyrillic": 6 / 17, "Han": 2 / 17}
    assert value["lengths"]["histogram"] == [[4, 7, 2], [8, 15, 2]]
    assert "by their script" in run("data", "stats", "a.jsonl").out


def test_lengths_agree_with_a_naive_count() -> None:
    lengths = np.random.default_rng(0).integers(1, 3000, 500)
    found = lengths_json(lengths, "tokens")
    assert sum(count for _, _, count in found["histogram"]) == 500
    for low, high, count in found["histogram"]:
        assert count == sum(low <= length <= high for length in lengths)
    in_order = sorted(lengths.tolist())
    assert found["percentiles"]["50"] == in_order[249] and found["percentiles"]["99"] == in_order[494]


def test_scripts_are_told_by_letters_alone() -> None:
    expected = {"a": "Latin", "Ａ": "Latin", "é": "Latin", "ﾊ": "Katakana", "漢": "Han", "あ": "Hiragana", "한": "Hangul",
                "ж": "Cyrillic", "λ": "Greek", "ש": "Hebrew", "ع": "Arabic", "अ": "Devanagari", "1": None, " ": None,
                "。": None, "🙂": None}  # fmt: skip
    assert {letter: script_of(letter) for letter in expected} == expected


# --- tokenizer ----------------------------------------------------------------------------------------------------------


def train(run: Run, *arguments: str | Path) -> Result:
    return run("tokenizer", "train", *arguments, "--vocab-size", "330", "--json")


def test_a_trained_tokenizer_says_what_it_read(run: Run, tmp_path: Path) -> None:
    documents(tmp_path / "a.jsonl", 300)
    write(tmp_path / "b.jsonl", [*({"text": one} for one in texts(197, 4)), b"{", {"text": 1}, {"text": ""}])
    done = train(run, "a.jsonl", "b.jsonl", "--out", "tok", "--max-lines", "200")
    value, encoder = done.json, Encoder(tmp_path / "tok")
    assert done.code == 0
    assert (value["vocab_size"], value["documents"], value["documents_seen"]) == (330, 200, 497) and len(encoder) == 330
    assert value["rows"]["first_rejected"][0].startswith("b.jsonl:198: ") and sum(value["rows"]["rejected"].values()) == 2
    assert_adds_up(value["rows"])
    assert [file["name"] for file in value["files"]] == ["a.jsonl", "b.jsonl"]
    assert all(1 < file["bytes_per_token"] < 6 for file in value["files"])
    assert 10**7 < value["peak_memory_bytes"] < 10**10
    assert json.loads((tmp_path / "tok" / "run" / "summary.json").read_bytes()) == value
    again = train(run, "a.jsonl", "b.jsonl", "--out", "again", "--max-lines", "200").json
    assert again["tokenizer_digest"] == value["tokenizer_digest"] == encoder.digest


def test_bad_documents_or_none_end_the_training_and_leave_nothing(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [*({"text": one} for one in texts(50)), b"{"])
    write(tmp_path / "b.jsonl", [{"poem": one} for one in texts(5)])
    for name, expected in (("a.jsonl", "a.jsonl:51"), ("b.jsonl", "'text'")):
        done = train(run, name, "--out", "tok")
        assert done.code == 1 and expected in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]
    assert train(run, "b.jsonl", "--out", "tok", "--text-field", "poem").code == 0
    done = train(run, "b.jsonl", "--out", "tok", "--text-field", "poem")
    assert done.code == 2 and "--out is tok, which is not empty" in done.err
    assert train(run, "b.jsonl", "--out", "own", "--text-field", "poem", "--template", "own").code == 2


def test_an_existing_tokenizer_is_taken_and_measured(run: Run, tmp_path: Path, tok: Path) -> None:
    documents(tmp_path / "a.jsonl", 20)
    done = train(run, "a.jsonl", "--out", "tok", "--existing", tok)
    assert done.code == 0 and done.json["vocab_size"] == 340 and done.json["bytes_per_token"] > 1


def test_a_tokenizer_is_shown_with_a_text_or_a_chat(
    run: Run, tmp_path: Path, tok: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = run("tokenizer", "inspect", tok, "--json").json
    encoder = Encoder(tok)
    assert (value["vocab_size"], value["digest"], value["template"]) == (340, encoder.digest, "ttrain")
    assert {one["token"]: one["id"] for one in value["special_tokens"]}["<|end|>"] == encoder.end_id
    shown = run("tokenizer", "inspect", tok, "--text", "a fox<|end|>", "--json").json["tokens"]
    assert shown["ids"] == encoder.encode(["a fox<|end|>"])[0] and "".join(shown["pieces"]) == "a fox<|end|>"
    talk = chat("Hello", "fox\x1b[1m 東京")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(talk).encode())))
    chatted = run("tokenizer", "inspect", tok, "--chat", "-", "--json").json["tokens"]
    assert (chatted["ids"], chatted["live"]) == encode_chat(encoder, tuple(Message(**turn) for turn in talk["messages"]))
    write(tmp_path / "chat.jsonl", [talk])
    out = run("tokenizer", "inspect", tok, "--chat", "chat.jsonl").out
    assert "\x1b" not in out and "\\x1b[1m 東京<|end|>" in out and "^^^" in out
    write(tmp_path / "bad.jsonl", [{"messages": [{"role": "robot", "content": "a"}]}])
    assert run("tokenizer", "inspect", tok, "--chat", "bad.jsonl").code == 1
    assert run("tokenizer", "inspect", tok, "--chat", "gone.jsonl").code == 2
    assert run("tokenizer", "inspect", "nowhere").code == 2


# --- as it is installed -------------------------------------------------------------------------------------------------

COMMANDS = """
import sys
from ttrain.cli import data_reports
from ttrain.cli.main import main
from ttrain.config import Reading
for words in {commands}:
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, (words, end.code)
print("heavy:", [name for name in ("torch", "transformers", "mlflow", "prefect") if name in sys.modules])
"""


def test_a_pipe_gets_no_colours_and_nothing_heavy_is_loaded(tmp_path: Path, tok: Path) -> None:
    documents(tmp_path / "a.jsonl", 30)
    commands = [
        ["tokenizer", "train", "a.jsonl", "--out", "tok", "--vocab-size", "300"],
        ["tokenizer", "inspect", "tok", "--text", "a fox"],
        ["data", "validate", "a.jsonl"],
        ["data", "shard", "a.jsonl", "--tokenizer", "tok", "--out", "out"],
        ["data", "inspect", "out"],
        ["data", "stats", "out", "a.jsonl"],
    ]
    code = COMMANDS.format(commands=commands)
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"heavy: []" in done.stdout
    assert b"\x1b" not in done.stdout + done.stderr and done.stderr == b""


def test_the_quarantine_never_takes_the_place_of_an_input(run: Run, tmp_path: Path) -> None:
    documents(tmp_path / "a.jsonl", 5)
    before = (tmp_path / "a.jsonl").read_bytes()
    refused = run("data", "validate", "a.jsonl", "--rejected", str(tmp_path / "a.jsonl"))
    assert refused.code == 2 and "--rejected" in refused.err
    assert (tmp_path / "a.jsonl").read_bytes() == before
