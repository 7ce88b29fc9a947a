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
from ttrain.tracking import mlflow_mirror

# Collecting the tests loads torch, Prefect and MLflow; looking for garbage among what stays took half of its 14 s, twice.
gc.disable()

# Whose fixtures several folders use.
FIXTURES = (
    "support.planned_homes",
    "support.tiny_stages",
    "support.champion_sets",
    "support.artifact_home",
    "support.web",
    "support.outage_proxy",
)
pytest.register_assert_rewrite(*FIXTURES)  # before other modules import them

# Two workers on two cores, each in one thread: threads that wait for a core that another one has take three times as long.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
# Before anything imports MLflow: it would write an installation id into the user's ~/.config. No server of the user's.
os.environ |= mlflow_client.ENVIRONMENT
os.environ.pop("MLFLOW_TRACKING_URI", None)
# The processes of stages find `support`, too, whatever server forks them: one of its own, with torch, takes 5 s of CPU.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)
# Homes and databases are written with fsync, which waits for a disk for milliseconds each time and for memory not at all.
MEMORY = Path("/dev/shm")
HOMES_BYTES = 4 << 30  # 0.2 GB of them are there at once; the rest is for the tests' own memory
has_room = (
    MEMORY.is_dir()
    and min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) > HOMES_BYTES
)
if has_room and "TMPDIR" not in os.environ and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# Modules are compiled once, not in each of some hundred processes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell without job control starts what it puts into the background with SIGINT ignored, and so would be what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        action="store_true",
        help="of each file, run the first of the selected tests only",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Not in the process that only hands tests to its workers: they wait for it, and it would load torch for nothing."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        # Some thousand commands are called in process, and building the tree of all of them takes 0.1 s each time.
        typer.main.get_command = functools.cache(typer.main.get_command)
        for name in FIXTURES:
            config.pluginmanager.import_plugin(name)


# Makes the finished home that others wait for, where it is not there yet.
FIRST = "test_lineage_pipeline.py"


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != FIRST)
    if not config.getoption("--sample"):
        return
    first = {item.path: item for item in reversed(items)}
    config.hook.pytest_deselected(items=[item for item in items if first[item.path] is not item])
    items[:] = [item for item in items if first[item.path] is item]


def pytest_collection_finish() -> None:
    """Leave out what the modules hold, in this process and in its forks, whenever garbage is looked for."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        100_000
    )  # of the default, 700, looking for garbage takes a tenth of the time of tests of training
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none. Undo what tests leave in the process: torch's threads, whose sums have
    other last bits, and an ignored hang-up."""
    if item.get_closest_marker("gpu") is not None:
        from torch import cuda

        if not cuda.is_available():
            pytest.skip("no CUDA device")
    torch: Any = sys.modules.get("torch")
    if torch and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    if (
        signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    ):  # under nohup, or after a command that was stopped here
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def add_database(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """Give a home a copied database of MLflow: migrating takes 1 s, copying and claiming 10 ms."""
    migrated = tmp_path_factory.mktemp("migrated")
    mlflow_mirror.prepare(migrated)

    def add(home: Path) -> None:
        mlflow_client.database_of(home).parent.mkdir(parents=True)
        shutil.copy(mlflow_client.database_of(migrated), mlflow_client.database_of(home))

    return add


@pytest.fixture
def tracked_home(
    tmp_path: Path, add_database: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A home with such a database."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    add_database(tmp_path / "home")
    return tmp_path / "home"
