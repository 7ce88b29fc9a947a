"""A finished run, copies of it, and empty homes for the tests of this folder."""

import hashlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from support.paths import ROOT, TESTS
from support.pipeline_home import Cli, write_corpus
from support.planned_homes import remember_modules
from support.waiting import wait_until


def digest_of_the_code() -> str:
    """Of the package's files, the libraries' versions, and the settings and corpus of the run."""
    files = [TESTS / "support" / "pipeline_home.py", ROOT / "constraints.txt"]
    for name in ("ttrain", "flows", "tasks", "configs"):
        files += sorted(path for path in (ROOT / name).rglob("*") if path.suffix != ".pyc")
    contents = b"".join(path.read_bytes() for path in files if path.is_file())
    return hashlib.sha256(contents + sys.version.encode()).hexdigest()[:16]


@pytest.fixture(scope="session")
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A home in which the whole pipeline ran once; tests do not change its artifacts.

    It is a copy of one that all workers and sessions share, made again when code, libraries or
    settings have changed; `--cache-clear` removes it.
    """
    homes = request.config.cache.mkdir("finished-homes")  # type: ignore[union-attr]
    shared = homes / digest_of_the_code()
    output = shared / "output.txt"
    with FileLock(homes / "lock"):
        if not output.exists():
            for old in homes.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            write_corpus(shared / "data")
            text = Cli(shared / "home", shared / "data")("pipeline", "run", "full")
            output.write_text(text, encoding="utf-8")
            # Its Prefect server ends, and removes a file of its database.
            wait_until(lambda: not (shared / "home/prefect/prefect.db-wal").exists())
        home = shutil.copytree(shared / "home", tmp_path_factory.mktemp("finished") / "home")
    cli = Cli(home, shared / "data")
    cli.first_output = output.read_text(encoding="utf-8")
    return cli


@pytest.fixture
def copy_of(finished: Cli, tmp_path: Path) -> Callable[..., Cli]:
    def copy(name: str = "copy") -> Cli:
        data = shutil.copytree(finished.data, tmp_path / name / "data")
        return Cli(shutil.copytree(finished.home, tmp_path / name / "home"), data)

    return copy


@pytest.fixture
def fresh(tmp_path: Path) -> Cli:
    """A home that holds no more than the digests of the modules, and the corpus."""
    write_corpus(tmp_path / "data")
    remember_modules(tmp_path / "home")
    return Cli(tmp_path / "home", tmp_path / "data")
