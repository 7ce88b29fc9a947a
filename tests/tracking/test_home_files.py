"""The database and the files of a home: made quietly, in any path, copied; real MLflow."""

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
PUSH = """
import pathlib
from ttrain.tracking.mlflow_mirror import Mirror, TrackedRun
run = TrackedRun("r", "r", "x", 1.0, "FINISHED", params={"a": 1}, files={"a/b.txt": "hello"})
assert Mirror(pathlib.Path("home")).push(run)
"""


def test_a_fresh_home_is_made_quietly_and_keeps_everything_under_itself(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", PUSH]
    output = subprocess.check_output(
        command, cwd=tmp_path, env=environment, stderr=subprocess.STDOUT
    )
    assert output == b""
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    folder = tmp_path / "home" / "mlflow"
    assert {"mlflow.db", "mlflow.lock", "artifacts"} <= {path.name for path in folder.iterdir()}
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["a sister", "a home #1 50%/inner"])
def test_a_copied_home_keeps_its_files_in_itself(
    add_database: Callable[[Path], None],
    tmp_path: Path,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    old, new = tmp_path / "a home #1 50%", tmp_path / place
    add_database(old)
    make_run(old, A, [Made("pretrain", [3.0])], tracked=True)
    shutil.copytree(old, tmp_path / "between")
    shutil.copytree(tmp_path / "between", new)
    shutil.rmtree(old / "mlflow" / "artifacts")  # what still named it would be missing
    prepare(new)
    for run in (only(new, A), only(new, f"{A}/pretrain")):
        assert run.info.artifact_uri.startswith(f"{artifacts_of(new)}/") and files_of(run)
    make_run(new, B, [Made("sft", [2.0])], number=1, tracked=True)
    assert only(new, B).info.artifact_uri.startswith(f"{artifacts_of(new)}/")
    before = database_of(new).read_bytes()
    prepare(new)
    assert database_of(new).read_bytes() == before, "once"
