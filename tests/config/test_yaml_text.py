"""How values are written in YAML, in files, variables and on the command line, and what of it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.refusals import refused, settings_file

from ttrain.config import Night
from ttrain.config.loading import load
from ttrain.errors import UsageError

COUNTS = {"1M": 10**6, "1.5m": 1_500_000, "250k": 250_000, "2e6": 2_000_000, "1_000_000": 10**6}


def test_counts_are_read_as_people_write_them() -> None:
    read = {
        text: load([f"pretrain.tokens={text}"], environment={}).settings.pretrain.tokens
        for text in COUNTS
    }
    assert read == COUNTS
    for text in ("M", "1.5", "1e999999999", "0k"):
        with pytest.raises(UsageError, match=r"pretrain\.tokens"):
            load([f"pretrain.tokens={text}"], environment={})


def test_a_key_that_yaml_takes_for_a_boolean_is_a_name_in_files_and_on_the_command_line(
    tmp_path: Path,
) -> None:
    written = "notify: {on: [failed], command: [tell]}"
    path = tmp_path / "mine.yaml"
    path.write_text(written, encoding="utf-8")
    assert load([], files=[path], environment={}).settings.notify.on == ("failed",)
    assert load(["notify={on: [kept]}"], environment={}).settings.notify.on == ("kept",)
    words = settings_file(tmp_path, "runtime: {guards: off, tune: off, compile: off}")
    runtime = load([], files=[words], environment={}).settings.runtime
    assert (runtime.guards, runtime.tune, runtime.compile) == ("off", "off", False)
    assert (
        load(["runtime.deterministic=on"], environment={}).settings.runtime.deterministic is True
    )  # a value still is one


def test_a_time_of_day_is_hour_and_minute_without_quotes_and_nothing_else(tmp_path: Path) -> None:
    for written in ("06:30", "22:30", "6:30"):
        files = [settings_file(tmp_path, f"nightly:\n  deadline: {written}\n")]
        for loaded in (
            load([], files=files, environment={}),
            load([f"nightly.deadline={written}"], environment={}),
        ):
            assert loaded.settings.nightly.deadline == written.rjust(5, "0")
    assert load(["runtime.night.start=23:05"], environment={}).settings.runtime.night == Night(
        start="23:05"
    )
    for wrong in ("25:00", "6:30:10", "soon"):
        with pytest.raises(
            UsageError,
            match=r"nightly\.deadline.*must be a time of day as hour:minute, from 00:00 to 23:59",
        ):
            load([f"nightly.deadline={wrong}"], environment={})


WRONG: dict[str, tuple[str | bytes, str]] = {
    "an open list": ("a: [", "not valid YAML"),
    "a number for a name": ("1: 2", "mapping"),
    "one setting twice": ("sft: {lr: 1, lr: 2}", "line 1, column 7: 'lr' is given twice"),
    "a tag of Python's": (
        "sft: !!python/object/apply:os.system [id]",
        "could not determine a constructor for the tag",
    ),
    "no UTF-8": (b"sft:\n  a: \xff", "can't decode byte 0xff"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_wrong_is_answered_in_one_line(
    text: str | bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refused(files=[path])
    assert message in said and str(path) in said
    assert "\n" not in said and len(said) < 700
