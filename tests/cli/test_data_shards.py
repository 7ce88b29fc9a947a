"""`ttrain data shard` and `show`: only what is new is tokenized, nothing is overwritten, nothing raw is shown."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from support.data_commands import ESCAPES, Run, documents, shard, texts, write

from ttrain.core.terminal import escaped
from ttrain.data import inspect, tokenizer
from ttrain.data.encoder import Encoder, open_tokenizer
from ttrain.data.shards import ShardSet
from ttrain.store.artifacts import ArtifactStore


def test_figures_are_those_of_the_shards_and_of_an_independent_count(run: Run, tmp_path: Path, tok: Path) -> None:
    lines = texts(80)
    write(tmp_path / "a.jsonl", [*({"text": one} for one in lines), {"text": ""}, {"text": lines[0]}])
    made = shard(run, tok, "a.jsonl", "--out", "out", "reading.heldout_fraction=0.2")
    encoder = Encoder(tok, fast=False)
    assert made["rows"] == {"rows": 82, "kept": 80, "skipped": {"empty text": 1, "duplicate": 1}, "rejected": {}}
    assert made["documents"] == 80 == made["train"]["rows"] + made["heldout"]["rows"] and made["heldout"]["rows"] > 5
    assert made["tokens"] == sum(len(ids) + 2 for ids in encoder.encode(lines))
    assert made["bytes"] == sum(len(one.encode()) for one in lines)
    assert made["bytes_per_token"] == made["bytes"] / made["tokens"]
    assert made["tokenizer_digest"] == encoder.digest == ShardSet(tmp_path / "out" / "train").index["tokenizer"]


def test_a_limit_takes_exactly_so_many_distinct_rows(run: Run, tmp_path: Path, tok: Path) -> None:
    documents(tmp_path / "a.jsonl", 100)
    assert shard(run, tok, "a.jsonl", "--out", "b", "reading.limit=7", "reading.rounds=3")["documents"] == 21
    assert shard(run, tok, "a.jsonl", "--out", "c", "reading.limit=7", "reading.sample=head")["documents"] == 7
    rows = ShardSet(tmp_path / "c" / "train")
    assert [Encoder(tok).decode(rows.row(number)[0].tolist()) for number in range(7)] == texts(100)[:7]
    assert run("data", "shard", "a.jsonl", "--tokenizer", tok, "--out", "d", "reading.limit=0").code == 2


def test_too_many_bad_rows_leave_no_set_but_what_was_made_is_used_again(run: Run, tmp_path: Path, tok: Path) -> None:
    write(tmp_path / "a.jsonl", [*({"text": one} for one in texts(50)), b"{"])
    done = run("data", "shard", "a.jsonl", "--tokenizer", tok, "--out", "out", "--json")
    assert done.code == 1 and "a.jsonl: 1 of 51 rows are bad" in done.err and "a.jsonl:51" in done.err
    assert done.json["rows"]["rejected"] and "error" in done.json
    assert run("data", "show", "out").code == 2
    assert [json.loads(line)["line"] for line in Path(done.json["quarantine"]).read_bytes().splitlines()] == [51]
    again = run("data", "shard", "a.jsonl", "--tokenizer", tok, "--out", "out", "--json", "reading.rejected_fraction=0.02")
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


def test_every_learnt_token_is_underlined_once_in_the_packed_rows(
    run: Run, tmp_path: Path, tok: Path, talks: list[dict[str, Any]]
) -> None:
    done = run("data", "show", "out", "--rows", "1000", "--row-length", "48", "--json")
    rows = done.json["rows"]
    encoder, found = Encoder(tok), ShardSet(tmp_path / "out" / "train")
    learnt = sum((found.row(number)[1] != 0).sum() for number in range(len(found)))
    assert sum(sum(row["live"]) for row in rows) == learnt
    assert all(len({len(row[key]) for key in ("ids", "live", "segments", "pieces")}) == 1 for row in rows)
    assert max(max(row["segments"]) for row in rows) > 0
    assert not any(encoder.pad_id in row["ids"] for row in rows)
    out = run("data", "show", "out", "--rows", "1000", "--row-length", "48").out
    pieces = [escaped(piece) for row in rows for piece, live in zip(row["pieces"], row["live"], strict=True) if live]
    assert sum(line.count("^") for line in out.splitlines() if not line.strip(" ^")) == sum(map(cell_len, pieces))
    assert "-- record 1 of the row" in out


def test_documents_go_on_in_the_next_row(run: Run, tmp_path: Path, tok: Path) -> None:
    documents(tmp_path / "a.jsonl", 10)
    shard(run, tok, "a.jsonl", "--out", "docs")
    rows = run("data", "show", "docs", "--rows", "1000", "--row-length", "32", "--json").json["rows"]
    stream = ShardSet(tmp_path / "docs" / "train")
    assert sum(sum(row["live"]) for row in rows) == stream.tokens - len(stream)
    ids = [number for row in rows for number, live in zip(row["ids"], row["live"], strict=True) if live]
    firsts = set(stream.starts.tolist())
    assert ids == [number for place, number in enumerate(stream.stream(0, stream.tokens).tolist()) if place not in firsts]


def test_control_characters_of_the_data_do_not_reach_the_terminal(
    run: Run, tmp_path: Path, talks: list[dict[str, Any]], tok: Path
) -> None:
    out, as_json = (run("data", "show", "out", *more).out for more in ((), ("--json",)))
    assert not set(out + as_json) & set("\x1b\x07\x9b\u202e")
    assert ESCAPES in "".join(json.loads(as_json)["rows"][0]["pieces"])
    assert all(shown in out for shown in ("\\x1b[31mred", "\\x07bell", "\\x9b1m", "\\u202e"))
    write(tmp_path / "a.jsonl", [{ESCAPES: 1}, {"messages": [{"role": ESCAPES, "content": "a"}]}, ESCAPES.encode()])
    (tmp_path / ESCAPES).write_bytes((tmp_path / "a.jsonl").read_bytes())
    for more in (("--kind", "chats"), (ESCAPES,), ("--json", ESCAPES)):
        done = run("data", "check", "a.jsonl", *more)
        assert done.code == 1 and not set(done.out + done.err) & set("\x1b\x07\x9b\u202e")
    done = run("data", "shard", "a.jsonl", "--kind", "documents", "--tokenizer", tok, "--out", "of-bad")
    assert done.code == 1 and "1b[31mred" in done.err and not set(done.out + done.err) & set("\x1b\x07\x9b\u202e")


def test_the_tokenizer_is_found_by_its_digest_and_another_is_refused(
    run: Run, tmp_path: Path, tok: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents(tmp_path / "a.jsonl", 5)
    shutil.copytree(tok, tmp_path / "mine")
    tokenizer.save(tokenizer.train(texts(30, 9), 330), tmp_path / "other")
    shard(run, tmp_path / "mine", "a.jsonl", "--out", "out")
    assert run("data", "show", "out/train").code == 0
    refused = run("data", "show", "out", "--tokenizer", "other")
    assert refused.code == 1 and Encoder(tmp_path / "other").digest[:12] in refused.err
    (tmp_path / "mine").rename(tmp_path / "moved")
    assert run("data", "show", "out").code == 2
    assert run("data", "show", "out", "--tokenizer", "moved").code == 0
    store = ArtifactStore(tmp_path / "home")
    for key, name in enumerate(("moved", "other")):
        store.publish("tokenizer", str(key) * 64, tmp_path / name, {"inputs": {}, "ingredients": {}, "result": {}})
    found = run("data", "show", "out", "--json").json["tokenizer"]
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
