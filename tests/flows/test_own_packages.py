"""A user's own packages `flows` and `tasks` and ttrain's do not meet, wherever they are and whoever imports first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

CODE = """
import flows.mine, tasks
assert (flows.mine.NAME, tasks.NAME) == ("my flow", "my tasks")
{ours}
from ttrain.cli.main import main
main(["pipeline", "plan", "full", "--json"])
"""
OURS = "import ttrain.flows.deployments, ttrain.tasks.stage; assert flows.__file__ != ttrain.flows.__file__"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Prefect user's folder, with packages of these names."""
    for name in ("flows", "tasks"):
        (tmp_path / name).mkdir()
    (tmp_path / "flows" / "__init__.py").write_text("")
    (tmp_path / "flows" / "mine.py").write_text("NAME = 'my flow'\n")
    (tmp_path / "tasks" / "__init__.py").write_text("NAME = 'my tasks'\n")
    return tmp_path


@pytest.mark.parametrize(
    ("where", "ours"), [("in the working directory", OURS), ("installed", "")], ids=["flows", "command"]
)
def test_own_flows_and_tasks_are_not_shadowed_and_shadow_nothing(folder: Path, where: str, ours: str) -> None:
    """ttrain is imported as it is installed."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    cwd, path = (folder, "") if where == "in the working directory" else (elsewhere, str(folder))
    environment = {**os.environ, "TTRAIN_HOME": str(folder / "home"), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(ours=ours)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"pipeline": "full"' in done.stdout


def test_no_module_of_ours_has_those_names() -> None:
    """In the checkout `flows` and `tasks` are at the top; ttrain/flows and ttrain/tasks are links to them."""
    for name in ("flows", "tasks"):
        assert (ROOT / "ttrain" / name).resolve() == ROOT / name
