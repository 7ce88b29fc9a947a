"""A user's own packages `flows` and `tasks` do not shadow those of ttrain, nor the reverse."""

import os
import subprocess
import sys
from pathlib import Path

from support.planned_homes import remember_modules

CODE = """
import flows.mine, tasks
assert (flows.mine.NAME, tasks.NAME) == ("my flow", "my tasks")
import ttrain.flows.full, ttrain.tasks.sft
assert flows.__file__ != ttrain.flows.__file__ and tasks.__file__ != ttrain.tasks.__file__
from ttrain.cli.main import main
main(["pipeline", "plan", "full", "--json"])
"""


def test_own_flows_and_tasks_are_not_shadowed_and_shadow_nothing(tmp_path: Path) -> None:
    for name in ("flows", "tasks"):
        (tmp_path / name).mkdir()
    (tmp_path / "flows" / "__init__.py").write_text("")
    (tmp_path / "flows" / "mine.py").write_text("NAME = 'my flow'\n")
    (tmp_path / "tasks" / "__init__.py").write_text("NAME = 'my tasks'\n")
    remember_modules(tmp_path / "home")
    environment = {**os.environ, "TTRAIN_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"pipeline": "full"' in done.stdout
