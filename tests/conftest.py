"""Fixtures that several files share."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Whose fixtures several folders use.
pytest_plugins = ("support.planned_homes", "support.stage_homes", "support.hub", "support.mlflow_server")

# A shell without job control starts what it puts into the background with SIGINT ignored, and so would be what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="of each file, run the first of the selected tests only")


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--sample"):
        return
    first = {item.path: item for item in reversed(items)}
    config.hook.pytest_deselected(items=[item for item in items if first[item.path] is not item])
    items[:] = [item for item in items if first[item.path] is item]


@pytest.fixture(autouse=True)
def heeded_hangup() -> None:
    """Under nohup SIGHUP is ignored, and so it is after a command that was stopped in this process; children inherit it."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes in one thread, so that tests neither wait for each other's threads nor depend on the cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def threads_of_the_process() -> Iterator[None]:
    """What a file leaves of torch's threads moves no file after it: sums in two threads have other last bits."""
    torch: Any = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 0
    yield
    if torch:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def no_telemetry() -> Iterator[None]:
    """Before anything imports MLflow: it would write an installation id into the user's ~/.config."""
    from ttrain import tracking

    with pytest.MonkeyPatch.context() as patch:
        for name, value in tracking.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def migrated_database(tmp_path_factory: pytest.TempPathFactory, no_telemetry: None) -> Path:
    """MLflow's, of a home without runs: migrating takes 1 s."""
    from ttrain import tracking

    home = tmp_path_factory.mktemp("migrated")
    tracking.prepare(home)
    return tracking.database_of(home)


@pytest.fixture
def tracked_home(tmp_path: Path, migrated_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a database of MLflow, as a copied one: copying and claiming it takes 10 ms."""
    from ttrain import tracking

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    home = tmp_path / "home"
    tracking.database_of(home).parent.mkdir(parents=True)
    shutil.copy(migrated_database, tracking.database_of(home))
    tracking.repair_moved_home(home)
    return home
