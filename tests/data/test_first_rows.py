"""What the first rows of a file say about it, before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ttrain.config.data import Reading
from ttrain.data import first_rows
from ttrain.data.records import Kind
from ttrain.errors import UsageError

DOCUMENT, CHAT = {"text": "a"}, {"question": "q", "answer": "a"}
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


def written(path: Path, *rows: dict[str, Any] | str) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def error_of(setting: str, kind: Kind, *files: str) -> str:
    with pytest.raises(UsageError) as error:
        first_rows.check(setting, kind, files, Reading())
    return str(error.value)


def test_rows_of_another_kind_are_refused_with_the_setting_that_takes_them(tmp_path: Path) -> None:
    wrong: list[tuple[str, Kind, Any, str, str]] = [
        ("data.pretrain", "documents", CHAT, "is a chat (keys: question, answer)", "data.sft="),
        ("data.sft", "chats", PAIR, "is a pair of answers", "data.dpo="),
        ("data.sft_heldout", "chats", DOCUMENT, "is a document", "data.pretrain_heldout="),
    ]
    for setting, kind, row, actual, fix in wrong:
        path = written(tmp_path / "my.jsonl", "", row, row)
        message = error_of(setting, kind, path)
        assert f"{setting} needs {kind}, but {path}:2 {actual}" in message
        assert f"write {fix}{path}" in message


def test_rows_of_no_kind_are_refused_with_their_keys(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"Title": "t", "Body": "a long text"})
    message = error_of("data.pretrain", "documents", path)
    assert f"{path}:1 is none" in message and "(keys: Title, Body)" in message
    assert "reading.text_field=Body" in message


def test_what_the_stage_counts_is_left_to_it(tmp_path: Path) -> None:
    rows = [[CHAT, DOCUMENT, "{broken"], ["{broken"], [], [{"text": " "}], [{"text": 1}]]
    files = [written(tmp_path / f"{number}.jsonl", *part) for number, part in enumerate(rows)]
    first_rows.check("data.pretrain", "documents", files, Reading(rejected_fraction=1))


def test_a_few_rows_that_are_mostly_bad_or_none_are_refused(tmp_path: Path) -> None:
    empty = written(tmp_path / "b.jsonl")
    bad = written(tmp_path / "a.jsonl", CHAT, {"messages": 1}, "{broken")
    message = error_of("data.sft", "chats", bad)
    assert message.startswith(f"data.sft is {bad}, 2 of 3 rows are bad, such as {bad}:3: ")
    assert f"data.sft is {empty}, which has no rows" in error_of("data.sft", "chats", empty)
    first_rows.check("data.sft", "chats", [bad], Reading(rejected_fraction=0.8))
    good = written(tmp_path / "good.jsonl", *[CHAT] * 3)
    many = written(tmp_path / "many.jsonl", *["{broken"] * first_rows.ROWS, *[CHAT] * 50)
    for files in ([many], [bad, good], [empty, many]):
        first_rows.check("data.sft", "chats", files, Reading())
