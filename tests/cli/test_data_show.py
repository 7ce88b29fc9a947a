"""`ttrain data show`: tokens that are trained on are underlined, control characters are escaped."""

import json
from pathlib import Path

from cli.conftest import Shard
from rich.cells import cell_len
from support.data_commands import ESCAPES, Run

from ttrain.core.terminal import escaped
from ttrain.data import inspect
from ttrain.data.encoder import Encoder
from ttrain.data.shards import ShardSet
from ttrain.store.artifacts import ArtifactStore

SHOW = ("data", "show", "out", "--rows", "1000", "--row-length")
PAIR = {"prompt": "How far is 東京?", "chosen": "Far away.", "rejected": "\x1b[31mNear."}


def test_every_token_of_the_loss_is_underlined_once(run: Run, tok: Path, talks: ShardSet) -> None:
    shown = run(*SHOW, "48", "--json").json
    rows, encoder = shown["rows"], Encoder(tok)
    packed = inspect.rows_of(talks, encoder, 48)
    assert shown["kind"] == "chats" and shown["counts"] == json.loads(json.dumps(packed.counts()))
    live = sum((talks.row(number)[1] != 0).sum() for number in range(len(talks)))
    assert sum(sum(row["live"]) for row in rows) == live
    for row in rows:
        assert len(row["ids"]) == len(row["live"]) == len(row["segments"]) == len(row["pieces"])
        assert encoder.pad_id not in row["ids"]
    assert max(max(row["segments"]) for row in rows) > 0
    pairs = [pair for row in rows for pair in zip(row["pieces"], row["live"], strict=True)]
    width = sum(cell_len(escaped(piece)) for piece, is_live in pairs if is_live)
    lines = run(*SHOW, "48").out.splitlines()
    assert sum(line.count("^") for line in lines if not line.strip(" ^")) == width
    assert any(line.startswith("-- record 1 ") for line in lines)


def test_pairs_are_shown_part_by_part(run: Run, shard: Shard) -> None:
    rated = {"prompt": "Q", "completion": "yes", "label": False}
    shard([PAIR, rated, *({**PAIR, "prompt": f"Question {n}"} for n in range(30))], "pairs")
    shown = run(*SHOW, "64").out
    titles = {line[:19] for line in shown.splitlines()}
    assert {"-- prompt of pair 0", "-- rejected of pair"} <= titles and "\x1b" not in shown


def test_control_characters_do_not_reach_the_terminal(run: Run, talks: ShardSet) -> None:
    out, as_json = (run("data", "show", "out", *more).out for more in ((), ("--json",)))
    assert not set(out + as_json) & set("\x1b\x07\x9b\u202e")
    assert ESCAPES in "".join(json.loads(as_json)["rows"][0]["pieces"])
    assert all(shown in out for shown in ("\\x1b[31mred", "\\x07bell", "\\x9b1m", "\\u202e"))


def test_a_stage_is_its_newest_artifact_with_tokenizer(
    run: Run, tmp_path: Path, talks: ShardSet
) -> None:
    assert run("data", "show", "out/train").code == 0
    store = ArtifactStore(tmp_path / "home")
    manifest = {"inputs": {}, "ingredients": {}, "result": {}}
    store.publish("shards-sft", "1" * 64, tmp_path / "out", manifest)
    tokenizer = store.path("tokenizer", "0" * 64)
    shown = run("data", "show", "shards-sft", "--json").json
    assert shown["shards"] == str(store.path("shards-sft", "1" * 64) / "train")
    assert shown["tokenizer"] == str(tokenizer)
    tokenizer.rename(tmp_path / "moved")
    done = run("data", "show", "shards-sft")
    assert done.code == 2 and talks.index["tokenizer"][:12] in done.err
