"""A pipeline that has nothing to do: what it loads, what it writes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from support.paths import ROOT
from support.planned_homes import House

from ttrain.core.files import read_json

HEAVY = "torch transformers tokenizers peft pyarrow numpy prefect mlflow sqlalchemy filelock"
MARK = "§§"  # no control: those are escaped
# Two commands. After each: heavy modules, files opened for writing, paths of the home.
RUN = f"""
import json, os, sys
from pathlib import Path
written = []
def watch(event, arguments):
    flags = arguments[2] if event == "open" else 0
    if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
        written.append(str(arguments[0]))
sys.addaudithook(watch)
from ttrain.cli.main import main
for words in (["pipeline", "plan", "full", "sft.optim.lr=3e-4"], ["pipeline", "run", "full"]):
    written.clear()
    try:
        main([*words, *sys.argv[1:]])
    except SystemExit as ended:
        assert not ended.code, ended.code
    heavy = sorted(set({HEAVY!r}.split()) & sys.modules.keys())
    paths = sorted(map(str, Path(os.environ["TTRAIN_HOME"]).rglob("*")))
    print({MARK!r} + json.dumps([heavy, written, paths]) + {MARK!r})
"""


def test_a_plan_and_a_cached_run_load_nothing_heavy_and_write_only_a_record(built: House) -> None:
    home = built.store.root

    def without_cache(paths: Iterable[Path]) -> set[Path]:
        within = (path for path in paths if path.is_relative_to(home))
        return {path for path in within if path.parent != home / "cache"}

    before = without_cache(home.rglob("*"))
    environment = {**os.environ, "TTRAIN_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", RUN, *built.files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    planned, of_plan, _, of_run, _ = done.stdout.split(MARK)
    heavy, _, paths = json.loads(of_plan)
    assert "sft.optim.lr" in planned and heavy == []
    assert without_cache(map(Path, paths)) == before
    heavy, written, _ = json.loads(of_run)
    assert heavy == []
    (record,) = (home / "runs").glob("*.json")
    assert {path.parent for path in without_cache(map(Path, written))} <= {record.parent}
    assert (read_json(record)["outcome"], len(read_json(record)["stages"])) == ("cached", 8)
