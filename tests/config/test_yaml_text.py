"""How values are written in YAML, and names of settings from other libraries."""

from pathlib import Path

import pytest
from support.refusals import refused, settings_file

from ttrain.config import flatten
from ttrain.config.loading import load

COUNTS = {"1M": 10**6, "1.5m": 1_500_000, "250k": 250_000, "2e6": 2_000_000}
WRONG = {"pretrain.tokens": "M 1.5 1e999999999 0k", "nightly.deadline": "25:00 6:30:10 soon"}


def test_counts_and_times_are_read_as_people_write_them() -> None:
    for key, texts in {"pretrain.tokens": COUNTS, "nightly.deadline": {"6:30": "06:30"}}.items():
        for text, value in texts.items():
            tree = load([f"{key}={text}"], files=(), environment={}).settings.model_dump()
            assert dict(flatten(tree))[key] == value
        for text in WRONG[key].split():
            assert key in refused(f"{key}={text}")


def test_keys_and_values_that_yaml_takes_for_others_are_read(tmp_path: Path) -> None:
    text = "notify: {on: [failed], command: [tell]}\nruntime: {guards: off, compile: off}\n"
    path = settings_file(tmp_path, text + "nightly:\n  deadline: 6:30\n")
    settings = load(files=[path], environment={}).settings
    assert settings.notify.on == ("failed",) and settings.nightly.deadline == "06:30"
    assert (settings.runtime.guards, settings.runtime.compile) == ("off", False)


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
