"""The database and the files of a home: made quietly, in any path, linked, copied, moved; real MLflow."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.paths import ROOT
from support.recorded_homes import Made, make_run
from support.tracked_stores import files_of, only

from ttrain.tracking.client import artifacts_of, database_of
from ttrain.tracking.mlflow_mirror import prepare

A, B = "full-20261121-100000-0001a", "full-20261121-110000-0002b"


@pytest.fixture
def odd_home(
    tmp_path: Path, add_database: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    add_database(home := tmp_path / "a home #1 50%")
    return home


def test_a_fresh_home_is_made_quietly_and_keeps_everything_under_itself(tmp_path: Path) -> None:
    code = (
        "import pathlib; from ttrain.tracking.mlflow_mirror import Mirror, TrackedRun\n"
        "run = TrackedRun('r', 'r', 'x', 1.0, 'FINISHED', params={'a': 1}, files={'a/b.txt': 'hello'})\n"
        "assert Mirror(pathlib.Path('home')).push(run)"
    )
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout + done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert {"mlflow.db", "mlflow.lock", "artifacts"} <= {
        path.name for path in (tmp_path / "home" / "mlflow").iterdir()
    }
    assert (tmp_path / "home" / "mlflow").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["a sister", "itself/inner"])
def test_a_home_that_was_moved_or_copied_keeps_its_files_in_itself(
    odd_home: Path, tmp_path: Path, place: str
) -> None:
    make_run(odd_home, A, [Made("pretrain", [3.0])], tracked=True)
    new = (odd_home if "inner" in place else tmp_path) / place
    shutil.copytree(odd_home, tmp_path / "between")
    shutil.copytree(tmp_path / "between", new)
    shutil.rmtree(odd_home / "mlflow" / "artifacts")  # what still named it would be missing
    prepare(new)
    for run in (only(new, A), only(new, f"{A}/pretrain")):
        assert run.info.artifact_uri.startswith(f"{artifacts_of(new)}/") and files_of(run)
    make_run(new, B, [Made("sft", [2.0])], number=1, tracked=True)
    assert only(new, B).info.artifact_uri.startswith(f"{artifacts_of(new)}/")
    before = database_of(new).read_bytes()
    prepare(new)
    assert database_of(new).read_bytes() == before, "once"
