"""`ttrain data` and `ttrain tokenizer`: JSON that adds up, exit codes, only what is new tokenized, nothing raw shown."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.data_commands import Run, chat, documents, texts, train, write

from ttrain.data.encoder import Encoder
from ttrain.reports.summary import key_figures


def assert_adds_up(value: dict[str, Any]) -> None:
    assert value["rows"] == value["kept"] + sum(value["skipped"].values()) + sum(value["rejected"].values())


UNUSABLE = {
    "truncated.jsonl.gz": (gzip.compress(b"\n".join([b'{"text": "a"}'] * 9))[:-9], "truncated"),
    "blank.jsonl": (b"\n \r\n\n", "no rows are left of 0"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_file_that_cannot_be_used_is_named_and_does_not_hide_the_others(run: Run, tmp_path: Path, name: str) -> None:
    data, reason = UNUSABLE[name]
    (tmp_path / name).write_bytes(data)
    before = documents(tmp_path / "good.jsonl", 3).read_bytes()
    done = run("data", "check", name, "good.jsonl", "--json")
    bad, good = done.json
    assert done.code == 1
    assert_adds_up(bad)
    assert name in bad["error"] and reason in bad["error"]
    assert bad["error"] in done.err and len(done.err.splitlines()) == 1
    assert (good["file"], good["kept"], "error" in good) == ("good.jsonl", 3, False)
    assert run("data", "shard", name, "--tokenizer", "nowhere", "--out", "out").code in (1, 2)
    assert not (tmp_path / "out" / "train").exists()
    refused = run("data", "check", "good.jsonl", "--rejected", str(tmp_path / "good.jsonl"))
    assert refused.code == 2 and "--rejected" in refused.err
    assert (tmp_path / "good.jsonl").read_bytes() == before, "the quarantine never takes the place of an input"


def test_a_missing_file_is_a_mistake_of_the_command(run: Run, tmp_path: Path) -> None:
    documents(tmp_path / "good.jsonl", 3)
    done = run("data", "check", "good.jsonl", "gone.jsonl", "--json")
    assert done.code == 2
    assert [(value["file"], value["rows"], "error" in value) for value in done.json] == [
        ("good.jsonl", 3, False), ("gone.jsonl", 0, True),
    ]  # fmt: skip
    assert run("data", "check", "gone.jsonl", "--json").json["error"].startswith("FILE is 'gone.jsonl'")
    assert run("data", "shard", "gone.jsonl", "--tokenizer", "t", "--out", "out").code == 2


def test_one_percent_of_bad_rows_pass_and_one_more_does_not(run: Run, tmp_path: Path) -> None:
    rows = [{"text": one} for one in texts(990)]
    write(tmp_path / "some.jsonl", [*rows, *[{"body_text": 1, "id": 2}] * 10])
    write(tmp_path / "more.jsonl", [*rows, *[{"body_text": 1, "id": 2}] * 11])
    assert run("data", "check", "some.jsonl", "--json").code == 0
    done = run("data", "check", "more.jsonl", "--json")
    assert done.code == 1
    assert "11 of 1001 rows are bad" in done.json["error"] and "more.jsonl:991" in done.json["error"]
    assert done.json["keys_seen"]["text"] == 990 and done.json["keys_seen"]["id"] > 0
    assert run("data", "check", "more.jsonl", "reading.rejected_fraction=0.02").code == 0


def test_the_kind_is_said_and_can_be_set(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [chat(one, one) for one in texts(5)])
    write(tmp_path / "b.jsonl", [{"instruction": one, "output": one, "text": one} for one in texts(5)])
    documents(tmp_path / "c.jsonl", 5)
    done = run("data", "check", "a.jsonl", "b.jsonl", "c.jsonl", "--json")
    assert [value["kind"] for value in done.json] == ["chats", "chats", "documents"]
    assert run("data", "check", "b.jsonl", "--kind", "documents", "--json").json["kept"] == 5
    write(tmp_path / "d.jsonl", [{**chat(one, one), "poem": one} for one in texts(5)])
    assert run("data", "check", "d.jsonl", "reading.text_field=poem", "--json").json["kind"] == "documents"
    done = run("data", "shard", "a.jsonl", "c.jsonl", "--tokenizer", "t", "--out", "out")
    assert done.code == 2
    assert "a.jsonl holds chats but c.jsonl documents; shard them apart, or set --kind" in done.err.replace("\n", " ")


# --- what is measured


def test_statistics_of_a_file_count_scripts_lengths_and_duplicates(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "abc 12"}, {"text": "東京abc!"}, {"text": "москва"}, {"text": "abc 12"}, b"["])
    done = run("data", "check", "a.jsonl", "--json", "reading.rejected_fraction=1")
    value = done.json
    assert done.code == 0
    assert (value["documents"], value["duplicates"], value["bytes"]) == (4, 1, 6 + 10 + 12 + 6)
    assert value["letters"] == 3 + 5 + 6 + 3
    assert value["scripts"] == {"Latin": 9 / 17, "Cyrillic": 6 / 17, "Han": 2 / 17}
    assert [value["lengths"][name] for name in ("mean", "min", "50 %", "99 %", "max")] == [8.5, 6, 6, 12, 12]
    out = run("data", "check", "a.jsonl", "reading.rejected_fraction=1").out
    assert "Latin 52.9%, Cyrillic 35.3%, Han 11.8%" in " ".join(out.split())


def test_a_trained_tokenizer_says_what_it_read(run: Run, tmp_path: Path) -> None:
    documents(tmp_path / "a.jsonl", 300)
    write(tmp_path / "b.jsonl", [*({"text": one} for one in texts(197, 4)), b"{", {"text": 1}, {"text": ""}])
    done = train(run, "a.jsonl", "b.jsonl", "--out", "tok", "tokenizer.max_documents=200")
    value, encoder = done.json, Encoder(tmp_path / "tok")
    assert done.code == 0
    assert (value["vocab_size"], value["documents"], value["documents_seen"]) == (330, 200, 497) and len(encoder) == 330
    assert value["rows"]["first_rejected"][0].startswith("b.jsonl:198: ") and sum(value["rows"]["rejected"].values()) == 2
    assert_adds_up(value["rows"])
    assert [file["name"] for file in value["files"]] == ["a.jsonl", "b.jsonl"]
    assert 10**7 < value["peak_memory_bytes"] < 10**10
    assert json.loads((tmp_path / "tok" / "run" / "summary.json").read_bytes()) == value
    assert value["tokenizer_digest"] == encoder.digest
    taken = train(run, "a.jsonl", "--out", "taken", "tokenizer.existing=tok")
    assert taken.code == 0 and taken.json["vocab_size"] == 330 and taken.json["bytes_per_token"] > 1


def test_bad_documents_or_none_end_the_training_and_leave_nothing(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [*({"text": one} for one in texts(50)), b"{"])
    write(tmp_path / "b.jsonl", [{"poem": one} for one in texts(5)])
    for name, expected in (("a.jsonl", "a.jsonl:51"), ("b.jsonl", "'text'")):
        done = train(run, name, "--out", "tok")
        assert done.code == 1 and expected in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]
    assert train(run, "b.jsonl", "--out", "tok", "reading.text_field=poem").code == 0
    done = train(run, "b.jsonl", "--out", "tok", "reading.text_field=poem")
    assert done.code == 2 and "--out is tok, which is not empty" in done.err


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
        ["tokenizer", "train", "a.jsonl", "--out", "tok", "tokenizer.vocab_size=300"],
        ["data", "check", "a.jsonl"],
        ["data", "shard", "a.jsonl", "--tokenizer", "tok", "--out", "out"],
        ["data", "show", "out"],
    ]
    code = COMMANDS.format(commands=commands)
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"heavy: []" in done.stdout
    assert b"\x1b" not in done.stdout + done.stderr and done.stderr == b""


def test_texts_of_answers_that_are_not_read_are_counted_and_printed(run: Run, tok: Path, tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "4", "thinking": "2 and 2.", "reasoning_content": "2"}
    rows = [{"messages": [{"role": "user", "content": f"{n} + 2?"}, turn]} for n in range(3)]
    write(tmp_path / "chats.jsonl", rows)
    assert run("data", "check", "chats.jsonl", "--json").json["unread_keys"] == {"thinking": 3}
    assert re.search(r"not read: chats.jsonl +rows *\nthinking +3", run("data", "check", "chats.jsonl").out)
    command = ("data", "shard", "chats.jsonl", "--tokenizer", tok, "--out", "chats")
    for _ in range(2):  # the second reads the counts of the blocks
        assert re.search("unread keys +3: thinking 3", run(*command).out)
    made = run(*command, "--json").json
    assert made["rows"]["unread_keys"] == {"thinking": 3}
    assert made["rows"]["with_reasoning"] == 3
    figures = key_figures("shards-sft", {**made, "rows": {"train": made["rows"]}})
    assert "; not read: 'thinking' in 3 rows" in figures


PAIR = {"prompt": "How far is 東京?", "chosen": "Far away.", "rejected": "\x1b[31mNear."}


def test_pairs_are_validated_sharded_counted_and_shown_part_by_part(run: Run, tok: Path, tmp_path: Path) -> None:
    bad = {"prompt": "Q", "chosen": "same", "rejected": "same"}
    rated = {"prompt": "Q", "completion": "yes", "label": False}
    rows = [PAIR, rated, bad, *({**PAIR, "prompt": f"Question {n}"} for n in range(300))]
    write(tmp_path / "pairs.jsonl", rows)
    validated = run("data", "check", "pairs.jsonl", "--json").json
    assert (validated["kind"], validated["kept"]) == ("pairs", 302)
    [reason] = validated["rejected"]
    assert reason == "'chosen' and 'rejected' are equal; write two different answers, or leave the row out"
    made = run(
        "data", "shard", "pairs.jsonl", "--tokenizer", tok, "--out", "out", "reading.heldout_fraction=0.2", "--json"
    ).json
    assert_adds_up(made["rows"])
    assert made["kind"] == "pairs" and made["heldout"]["rows"] + made["train"]["rows"] == 302
    counts = run("data", "show", "out", "--tokenizer", tok, "--json").json["counts"]
    assert counts["pairs"] + counts["rated_answers"] == made["train"]["rows"]
    shown = run("data", "show", "out", "--tokenizer", tok, "--row-length", "64", "--rows", "300")
    assert shown.code == 0
    assert "-- prompt of pair 0 of the row" in shown.out and "-- rejected of pair 1 of the row" in shown.out
    assert "\x1b[31mNear" not in shown.out
