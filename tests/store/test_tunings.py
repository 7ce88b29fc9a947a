"""What tuning remembers: private, bounded, and ignored with a line where it is damaged."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from ttrain.core.files import read_json
from ttrain.store import tunings
from ttrain.store.tunings import Choice

CHOICE = Choice(8, "masked", 1024, False)
SUBJECT = {"processor": "a CPU", "device": "cpu", "model": "M", "parameters": 5, "row_length": 16}


def test_a_choice_is_recalled_for_the_same_subject_alone_and_its_file_is_private(tmp_path: Path) -> None:
    tunings.remember(tmp_path, SUBJECT, CHOICE, 1.25)
    tuning = tunings.recall(tmp_path, dict(reversed(SUBJECT.items())))
    assert tuning is not None and (tuning.choice, tuning.gain) == (CHOICE, 1.25)
    assert tunings.recall(tmp_path, {**SUBJECT, "row_length": 32}) is None
    tunings.remember(tmp_path, {**SUBJECT, "processor": "another"}, CHOICE, 2.0)
    assert [tuning.gain for tuning in tunings.of_machine(tmp_path, "a CPU")] == [1.25]
    assert stat.S_IMODE((tmp_path / tunings.FILE).stat().st_mode) == 0o600
    assert str(tuning).endswith("loss_chunk_tokens=1024 compile=false, 1.25 times the speed of the settings")


def test_a_damaged_file_is_ignored_with_a_line_and_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / tunings.FILE
    path.parent.mkdir()
    for text in (b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b" " * 1_000_001):
        path.write_bytes(text)
        caplog.clear()
        assert tunings.recall(tmp_path, SUBJECT) is None and "is ignored" in caplog.text
    tunings.remember(tmp_path, SUBJECT, CHOICE, 1.0)
    caplog.clear()
    assert tunings.recall(tmp_path, SUBJECT) is not None and not caplog.text


DAMAGE: list[dict[str, Any]] = [
    {"choice": {**vars(CHOICE), "rows_per_device": 0}},
    {"choice": {**vars(CHOICE), "rows_per_device": True}},
    {"choice": {**vars(CHOICE), "attention": "eager"}},
    {"choice": {**vars(CHOICE), "compile": "no"}},
    {"choice": {**vars(CHOICE), "more": 1}},
    {"choice": None},
    {"gain": "NaN"},
    {"subject": {**SUBJECT, "row_length": 17}},
    {"another": 1},
]


def test_a_damaged_entry_is_ignored_and_the_others_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tunings.remember(tmp_path, SUBJECT, CHOICE, 1.0)
    tunings.remember(tmp_path, {**SUBJECT, "processor": "another"}, CHOICE, 2.0)
    entries = read_json(tmp_path / tunings.FILE)
    (key,) = (key for key, entry in entries.items() if entry["gain"] == 1.0)
    for damage in DAMAGE:
        caplog.clear()
        (tmp_path / tunings.FILE).write_text(json.dumps({**entries, key: {**entries[key], **damage}}))
        assert [tuning.gain for tuning in tunings.read(tmp_path).values()] == [2.0], damage
        assert "1 of its 2 entries are damaged" in caplog.text


def test_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunings, "ENTRIES", 3)
    for number in range(5):
        tunings.remember(tmp_path, {**SUBJECT, "row_length": number}, CHOICE, float(number))
    assert sorted(tuning.gain for tuning in tunings.read(tmp_path).values()) == [2.0, 3.0, 4.0]


def test_a_home_that_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    tunings.remember(tmp_path, SUBJECT, CHOICE, 1.0)
    assert "cannot be remembered" in caplog.text
