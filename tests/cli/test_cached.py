"""A pipeline that has nothing to do: what it says, what it loads, what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT
from support.planned_homes import House

from ttrain.core.files import read_json

HEAVY = (
    "torch", "transformers", "tokenizers", "peft", "pyarrow", "numpy", "prefect", "mlflow", "sqlalchemy", "filelock",
    "vl_convert",
)  # fmt: skip
# The command, and then what it had loaded and which files it had opened for writing.
RUN = f"""
import json, os, sys
written = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        written.append(str(arguments[0]))
sys.addaudithook(watch)
from ttrain.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(json.dumps([sorted(set({HEAVY!r}) & sys.modules.keys()), written]))
"""


def run(house: House, *arguments: str) -> tuple[str, list[str], list[Path]]:
    """(what it printed, the heavy libraries that it had loaded, the files that it wrote)."""
    environment = {**os.environ, "TTRAIN_HOME": str(house.store.root), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN, *arguments, *house.files],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    heavy, written = json.loads(last)
    return "\n".join(said), heavy, [path for path in map(Path, written) if path.is_relative_to(house.store.root)]


def test_a_cached_pipeline_loads_nothing_heavy_and_writes_its_record_alone(built: House) -> None:
    said, heavy, written = run(built, "pipeline", "run", "full")
    assert "everything is cached" in said
    assert heavy == []
    (record,) = (built.store.root / "runs").glob("*.json")
    assert {path.parent for path in written} <= {record.parent, built.store.root / "cache"}
    assert (read_json(record)["outcome"], len(read_json(record)["stages"])) == ("cached", 8)


def test_a_plan_loads_nothing_heavy_either_and_leaves_the_home_as_it_was(built: House) -> None:
    def paths() -> list[Path]:
        return sorted(path for path in built.store.root.rglob("*") if path.parent.name != "cache")

    before = paths()
    said, heavy, _ = run(built, "pipeline", "plan", "full", "sft.optim.lr=3e-4")
    assert "sft.optim.lr" in said and heavy == [] and paths() == before
