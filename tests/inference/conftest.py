"""A small chat model, and a home for commands."""

from pathlib import Path

import pytest
from support.data_commands import Run, in_process
from support.tiny_models import speaker, write_model

from ttrain.inference.loading import LoadedModel


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(directory: Path) -> LoadedModel:
    return speaker(directory)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    return in_process(capsys)
