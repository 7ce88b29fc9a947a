"""A small chat model with a second head, and a home for commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file
from support.data_commands import Run, in_process
from support.tiny_models import speaker, write_model
from torch import nn

from ttrain.inference.loading import LoadedModel
from ttrain.store.model_files import SECOND_HEAD


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("model"))
    save_file(nn.Linear(16, len(speaker(directory).encoder)).state_dict(), directory / SECOND_HEAD)
    return directory


@pytest.fixture(scope="module")
def one(directory: Path) -> LoadedModel:
    return speaker(directory)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command line in this process, with a home of its own."""
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    return in_process(capsys)
