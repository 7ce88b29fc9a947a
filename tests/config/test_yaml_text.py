"""How values are written in YAML, and names of settings from other libraries."""

from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused, settings_file

from ttrain.config import Settings
from ttrain.config.loading import load

COUNTS = {"1M": 10**6, "1.5m": 1_500_000, "250k": 250_000, "2e6": 2_000_000}


def settings_of(*overrides: str, files: Any = ()) -> Settings:
    return load(overrides, files=files, environment={}).settings


def test_counts_are_read_as_people_write_them() -> None:
    counts = {text: settings_of(f"pretrain.tokens={text}").pretrain.tokens for text in COUNTS}
    assert counts == COUNTS
    for text in ("M", "1.5", "1e999999999", "0k"):
        assert "pretrain.tokens" in refused(f"pretrain.tokens={text}")


def test_a_key_that_yaml_takes_for_a_boolean_is_a_name(tmp_path: Path) -> None:
    text = "notify: {on: [failed], command: [tell]}\nruntime: {guards: off, compile: off}"
    settings = settings_of(files=[settings_file(tmp_path, text)])
    assert settings.notify.on == ("failed",)
    assert (settings.runtime.guards, settings.runtime.compile) == ("off", False)


def test_a_time_of_day_is_hour_and_minute_without_quotes(tmp_path: Path) -> None:
    path = settings_file(tmp_path, "nightly:\n  deadline: 6:30\n")
    for settings in (settings_of(files=[path]), settings_of("nightly.deadline=6:30")):
        assert settings.nightly.deadline == "06:30"
    for time in ("25:00", "6:30:10", "soon"):
        assert "nightly.deadline" in refused(f"nightly.deadline={time}")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"a: [", "YAML"),
        (b"sft: {lr: 1, lr: 2}", "line 1, column 7"),
        (b"sft: !!python/object/apply:os.system [id]", "constructor"),
        (b"sft:\n  a: \xff", "0xff"),
    ],
)
def test_a_wrong_file_is_answered_in_one_line(text: bytes, part: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(text)
    message = refused(files=[path])
    assert part in message and str(path) in message and "\n" not in message


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("SFT.Learning-Rate", "'sft.optim.lr'?"),
        ("sft.batch_size", "'sft.tokens_per_step'? (in tokens: rows x row_length)"),
        ("output_dir", "TTRAIN_HOME=DIR"),  # which no setting decides
        ("resume_from_checkpoint", "same command"),
    ],
)
def test_a_setting_of_another_library_is_answered_with_ours(name: str, advice: str) -> None:
    message = refused(f"{name}=1")
    assert f"'{name}'" in message and advice in message
