"""A finished run, copies of it, and empty homes for the tests of this folder."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from filelock import FileLock
from support.paths import ROOT, TESTS
from support.pipeline_home import Cli, write_corpus
from support.planned_homes import remember_modules


def digest_of_the_code() -> str:
    """Of all files of the package, of the libraries' versions, and of the settings and the corpus of the run."""
    files = [
        path
        for name in ("ttrain", "flows", "tasks", "configs")
        for path in (ROOT / name).rglob("*")
    ]
    files = [path for path in files if path.is_file() and path.suffix != ".pyc"]
    digest = hashlib.sha256(sys.version.encode())
    for path in (*sorted(files), TESTS / "support" / "pipeline_home.py"):
        digest.update(f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    libraries = sorted(path.name for place in sys.path for path in Path(place).glob("*.dist-info"))
    digest.update(repr(libraries).encode())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="session")
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A home in which the whole pipeline ran once, through Prefect and MLflow. Tests do not change its artifacts.

    It is a copy of the one that all workers and sessions share. That is made again when code, libraries or settings changed;
    `--cache-clear` removes it.
    """
    homes = request.config.cache.mkdir("finished-homes")  # type: ignore[union-attr]
    made = homes / digest_of_the_code()
    said = made / "said.txt"
    with FileLock(homes / "lock"):
        if not said.exists():
            for old in homes.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            write_corpus(made / "data")
            said.write_text(
                Cli(made / "home", made / "data").through_prefect_here("pipeline", "run", "full"),
                encoding="utf-8",
            )
        home = shutil.copytree(made / "home", tmp_path_factory.mktemp("finished") / "home")
    cli = Cli(home, made / "data")
    cli.first_output = said.read_text(encoding="utf-8")
    return cli


@pytest.fixture
def copy_of(finished: Cli, tmp_path: Path) -> Callable[..., Cli]:
    def copy(name: str = "copy") -> Cli:
        shutil.copytree(finished.data, tmp_path / name / "data")
        shutil.copytree(finished.home, tmp_path / name / "home")
        return Cli(tmp_path / name / "home", tmp_path / name / "data")

    return copy


MAKE_DATABASE = """
import asyncio
from prefect.server.database import provide_database_interface
asyncio.run(provide_database_interface().create_db())
"""


@pytest.fixture(scope="session")
def prefect_database(request: pytest.FixtureRequest) -> Path:
    """Prefect's own database without runs, which takes 13 s to make: once for each version of Prefect."""
    folder = request.config.cache.mkdir("prefect-databases") / version("prefect")  # type: ignore[union-attr]
    path = folder / "prefect.db"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not path.exists():
            with tempfile.TemporaryDirectory() as temporary:
                environment = {**os.environ, "PREFECT_HOME": temporary}
                subprocess.run([sys.executable, "-c", MAKE_DATABASE], env=environment, check=True)
                shutil.copy(Path(temporary) / "prefect.db", path.with_suffix(".tmp"))
                path.with_suffix(".tmp").rename(path)
    return path


@pytest.fixture
def empty(tmp_path: Path) -> Cli:
    """An empty home but for the digests of the modules, and the corpus."""
    write_corpus(tmp_path / "data")
    remember_modules(tmp_path / "home")
    return Cli(tmp_path / "home", tmp_path / "data")


@pytest.fixture
def fresh(empty: Cli, prefect_database: Path) -> Cli:
    """The same with Prefect's database."""
    (empty.home / "prefect").mkdir()
    shutil.copy(prefect_database, empty.home / "prefect")
    return empty
