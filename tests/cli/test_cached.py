"""A pipeline that has nothing to do: what it says, what it loads, what it writes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from support.paths import ROOT
from support.planned_homes import House

from ttrain.core.files import read_json

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "pyarrow",
    "numpy",
    "prefect",
    "mlflow",
    "sqlalchemy",
    "filelock",
)
MARK = "§§"  # no control: those are escaped
# Two commands. After each: what was loaded by then, and which files it had opened for writing; then all paths of the home.
RUN = f"""
import json, os, sys
from pathlib import Path
written = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        written.append(str(arguments[0]))
sys.addaudithook(watch)
from ttrain.cli.main import main
for words in (["pipeline", "plan", "full", "sft.optim.lr=3e-4"], ["pipeline", "run", "full"]):
    written.clear()
    try:
        main([*words, *sys.argv[1:]])
    except SystemExit as ended:
        assert not ended.code, ended.code
    found = [sorted(set({HEAVY!r}) & sys.modules.keys()), written]
    print({MARK!r} + json.dumps([*found, sorted(map(str, Path(os.environ["TTRAIN_HOME"]).rglob("*")))]) + {MARK!r})
"""


def test_a_plan_and_a_cached_pipeline_load_nothing_heavy_and_write_no_more_than_a_record(
    built: House,
) -> None:
    def paths(found: Iterable[Path]) -> set[Path]:
        return {
            path for path in found if path.is_relative_to(home) and path.parent != home / "cache"
        }

    home = built.store.root
    before = paths(home.rglob("*"))
    environment = {**os.environ, "TTRAIN_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", RUN, *built.files]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    planned, of_plan, cached, of_run, _ = done.stdout.split(MARK)
    heavy, _, after = json.loads(of_plan)
    assert "sft.optim.lr" in planned and heavy == [] and paths(map(Path, after)) == before
    heavy, written, _ = json.loads(of_run)
    assert "everything is cached" in cached and heavy == []
    (record,) = (home / "runs").glob("*.json")
    assert {path.parent for path in paths(map(Path, written))} <= {record.parent}
    assert (read_json(record)["outcome"], len(read_json(record)["stages"])) == ("cached", 8)
