"""`ttrain data check`: JSON that adds up, exit codes, nothing of the data raw on the terminal."""

import gzip
from pathlib import Path

import pytest
from support.data_commands import Run, chat, documents, texts, write

UNUSABLE = {
    "truncated.jsonl.gz": gzip.compress(b'{"text": "a"}\n' * 9)[:-9],
    "blank.jsonl": b"\n \r\n\n",
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_file_is_named_and_hides_no_others(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(UNUSABLE[name])
    before = documents(tmp_path / "good.jsonl", 3).read_bytes()
    done = run("data", "check", name, "good.jsonl", "--json")
    bad, good = done.json
    assert done.code == 1
    assert bad["rows"] == bad["kept"] + sum(bad["skipped"].values()) + sum(bad["rejected"].values())
    assert name in bad["error"]
    assert bad["error"] in done.err and len(done.err.splitlines()) == 1
    assert (good["file"], good["kept"], "error" in good) == ("good.jsonl", 3, False)
    refused = run("data", "check", "good.jsonl", "--rejected", tmp_path / "good.jsonl")
    assert refused.code == 2 and "--rejected" in refused.err
    assert (tmp_path / "good.jsonl").read_bytes() == before, "quarantine never overwrites an input"


def test_one_percent_of_bad_rows_pass_and_one_more_does_not(run: Run, tmp_path: Path) -> None:
    rows = [{"text": text} for text in texts(990)]
    write(tmp_path / "some.jsonl", [*rows, *[{"body_text": 1, "id": 2}] * 10])
    write(tmp_path / "more.jsonl", [*rows, *[{"body_text": 1, "id": 2}] * 11])
    assert run("data", "check", "some.jsonl", "--json").code == 0
    done = run("data", "check", "more.jsonl", "--json")
    assert done.code == 1 and "more.jsonl:991" in done.json["error"]
    assert done.json["keys_seen"]["text"] == 990 and done.json["keys_seen"]["id"] > 0
    assert run("data", "check", "more.jsonl", "reading.rejected_fraction=0.02").code == 0


def test_the_kind_is_detected_and_can_be_set(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [chat("q", "a") | {"poem": "a"}])
    write(tmp_path / "b.jsonl", [{"instruction": "q", "output": "a", "text": "b"}])
    documents(tmp_path / "c.jsonl", 5)
    done = run("data", "check", "a.jsonl", "b.jsonl", "c.jsonl", "--json")
    assert [report["kind"] for report in done.json] == ["chats", "chats", "documents"]
    assert run("data", "check", "b.jsonl", "--kind", "documents", "--json").json["kept"] == 1
    by_field = run("data", "check", "a.jsonl", "reading.text_field=poem", "--json")
    assert by_field.json["kind"] == "documents"


def test_statistics_count_scripts_lengths_and_duplicates(run: Run, tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("abc 12", "東京abc!", "москва", "abc 12")]
    write(tmp_path / "a.jsonl", [*rows, b"["])
    words = ("data", "check", "a.jsonl", "reading.rejected_fraction=1")
    report = run(*words, "--json").json
    assert (report["documents"], report["duplicates"], report["bytes"]) == (4, 1, 6 + 10 + 12 + 6)
    assert report["letters"] == 3 + 5 + 6 + 3
    assert report["scripts"] == {"Latin": 9 / 17, "Cyrillic": 6 / 17, "Han": 2 / 17}
    lengths = {"mean": 8.5, "min": 6, "50 %": 6, "99 %": 12, "max": 12}
    assert lengths.items() <= report["lengths"].items()
    assert "52.9%" in run(*words).out


def test_unread_texts_of_answers_are_counted_and_printed(run: Run, tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "4", "thinking": "2 and 2.", "reasoning_content": "2"}
    rows = [{"messages": [{"role": "user", "content": f"{n} + 2?"}, turn]} for n in range(3)]
    write(tmp_path / "chats.jsonl", rows)
    assert run("data", "check", "chats.jsonl", "--json").json["unread_keys"] == {"thinking": 3}
    table = run("data", "check", "chats.jsonl").out
    assert ["thinking", "3"] in [line.split() for line in table.splitlines()]
