"""A finished run, copies of it, and empty homes for the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.pipeline_home import Cli, write_corpus


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A home in which the whole pipeline ran once, through Prefect and MLflow. Tests do not change its artifacts."""
    root = tmp_path_factory.mktemp("finished")
    write_corpus(root / "data")
    cli = Cli(root / "home", root / "data")
    cli.first_output = cli("pipeline", "run", "full")
    return cli


@pytest.fixture
def copy_of(finished: Cli, tmp_path: Path) -> Callable[..., Cli]:
    """A copied home with copied data, to change at will."""

    def copy(name: str = "copy") -> Cli:
        shutil.copytree(finished.data, tmp_path / name / "data")
        shutil.copytree(finished.home, tmp_path / name / "home")
        return Cli(tmp_path / name / "home", tmp_path / name / "data")

    return copy


@pytest.fixture
def fresh(tmp_path: Path) -> Cli:
    """An empty home, and the corpus."""
    write_corpus(tmp_path / "data")
    return Cli(tmp_path / "home", tmp_path / "data")
