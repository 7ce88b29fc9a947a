"""Fixtures that several files share."""

import functools
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer.main

from ttrain.tracking import client as mlflow_client

# Collecting the tests loads torch, Prefect and MLflow; garbage collection took half of its 14 s.
gc.disable()

# Modules whose fixtures several folders use.
NAMES = ("planned_homes", "tiny_stages", "artifact_home", "web")
FIXTURES = [f"support.{name}" for name in NAMES]
pytest.register_assert_rewrite(*FIXTURES)  # before other modules import them

# Two workers on two cores, each with one thread: with more, threads wait and take 3 x as long.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
# Before anything imports MLflow, which would write an installation id into the user's ~/.config.
os.environ |= mlflow_client.ENVIRONMENT
os.environ.pop("MLFLOW_TRACKING_URI", None)
# The processes of stages find `support`, too, whatever server forks them.
PATHS = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, PATHS))
# Homes and databases are written with fsync: milliseconds each time on a disk, none in memory.
MEMORY = Path("/dev/shm")
HOMES_BYTES = 4 << 30  # 0.2 GB of homes at once; the rest is for the tests' own memory
if MEMORY.is_dir() and "TMPDIR" not in os.environ:
    free = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available)
    if free > HOMES_BYTES and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# Modules are compiled once, not in each of some hundred processes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell without job control starts background processes with SIGINT ignored; tests pass that on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of each file, run the first of the selected tests only"
    parser.addoption("--sample", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Load fixtures, but not in the process that only hands tests to its workers."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        # Some thousand commands are called in process; building the tree of them takes 0.1 s.
        typer.main.get_command = functools.cache(typer.main.get_command)
        for name in FIXTURES:
            config.pluginmanager.import_plugin(name)


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--sample"):
        return
    first = {item.path: item for item in reversed(items)}
    config.hook.pytest_deselected(items=[item for item in items if first[item.path] is not item])
    items[:] = [item for item in items if first[item.path] is item]


def pytest_collection_finish() -> None:
    """Exclude the modules from garbage collection, in this process and in its forks."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)  # with the default, 700, a tenth of the time of tests of training
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU where there is none; undo changes of the process.

    With more of torch's threads sums have other last bits.
    """
    if item.get_closest_marker("gpu") is not None:
        from torch import cuda

        if not cuda.is_available():
            pytest.skip("no CUDA device")
    torch: Any = sys.modules.get("torch")
    if torch and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    # Under nohup, or after a command that was stopped here.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def add_database(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """Give a home a copied database of MLflow: migrating takes 1 s, copying and claiming 10 ms."""
    migrated = tmp_path_factory.mktemp("migrated")
    mlflow_client.open_client(mlflow_client.own_uri(migrated), migrated)

    def add(home: Path) -> None:
        mlflow_client.database_of(home).parent.mkdir(parents=True)
        shutil.copy(mlflow_client.database_of(migrated), mlflow_client.database_of(home))

    return add


@pytest.fixture
def tracked_home(tmp_path: Path, add_database: Callable[[Path], None]) -> Path:
    """A home with such a database."""
    add_database(tmp_path / "home")
    return tmp_path / "home"
