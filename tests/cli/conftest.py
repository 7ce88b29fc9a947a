"""The commands in this process, in a directory of its own."""

from pathlib import Path

import pytest
from support.data_commands import Run, in_process


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    return in_process(capsys)
