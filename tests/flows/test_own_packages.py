"""A user's own packages `flows` and `tasks` do not shadow those of ttrain, nor the reverse; plans
and runs in a user's notebook."""

import os
import subprocess
import sys
from pathlib import Path

from support.planned_homes import remember_modules

from ttrain import api
from ttrain.engine.graph import Graph, Planned
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import SFT

HOSTILE = "<script>alert(1)</script>"
CODE = """
import flows.mine, tasks
assert (flows.mine.NAME, tasks.NAME) == ("my flow", "my tasks")
import ttrain.flows.full, ttrain.tasks.sft
assert flows.__file__ != ttrain.flows.__file__ and tasks.__file__ != ttrain.tasks.__file__
from ttrain.cli.main import main
main(["pipeline", "plan", "full", "--json"])
"""


def test_own_flows_and_tasks_are_not_shadowed_and_shadow_nothing(tmp_path: Path) -> None:
    own = {"flows/__init__": "", "flows/mine": "'my flow'", "tasks/__init__": "'my tasks'"}
    for name, value in own.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(value and f"NAME = {value}\n")
    remember_modules(tmp_path / "home")
    environment = {**os.environ, "TTRAIN_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"pipeline": "full"' in done.stdout


def test_a_plan_and_a_run_are_escaped_tables(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    stages = [Planned(SFT, "run", (HOSTILE,), "a" * 64)]
    plan = api.Plan("full", api.Settings(), store, Graph(), stages)
    stage = {"name": "sft", "outcome": "failed", "seconds": 2.0, "error": HOSTILE}
    run = api.Run({"run": "full-1", "outcome": "failed", "stages": [stage], "metrics": {}}, store)
    for table in (plan._repr_html_(), run._repr_html_()):
        assert HOSTILE not in table and "&lt;script&gt;" in table and "sft" in table
