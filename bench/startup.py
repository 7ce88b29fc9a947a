"""Commands that should feel instant, and a cached run with many runs before it.

    python bench/startup.py                                  about 3 minutes

Wall time in a home with a tiny pipeline, with 0, 100 and 1,000 newer runs of other artifacts, none
of which is the run that the cached one equals. A bare `python -c pass` stands beside them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import common
from common import TTRAIN, Cost, Table

LIMITS_SECONDS = {"--help": 0.3, "config show": 0.5, "plan": 1.0, "status": 1.0, "cached run": 0.5}
RUNS_BEFORE = (100, 1000)
MOST_OF_NO_RUNS = 1.15


def compare_commands(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Each command in a process of its own."""
    common.use_test_support()
    from support.pipeline_home import Cli, write_corpus

    write_corpus(directory / "data")
    settings = [*Cli(directory, directory / "data").settings, "tracking.enabled=false"]
    run_full = [*TTRAIN, "pipeline", "run", "full", "--engine", "none", *settings]
    homes = {number: directory / f"home-{number}" for number in (0, *RUNS_BEFORE)}
    common.run(run_full, {"TTRAIN_HOME": str(homes[0])})
    for number in RUNS_BEFORE:
        shutil.copytree(homes[0], homes[number], copy_function=shutil.copy2)
        common.copy_runs(homes[number], number)

    def side(command: list[str], home: Path = homes[0]) -> Callable[[], Cost]:
        def measure() -> Cost:
            cost, output = common.run(command, {"TTRAIN_HOME": str(home)}, directory)
            assert command != run_full or "everything is cached" in output, output
            return cost

        return measure

    sides = {
        "python -c pass": side([sys.executable, "-c", "pass"]),
        "--help": side([*TTRAIN, "--help"]),
        "config show": side([*TTRAIN, "config", "show"]),
        "plan": side([*TTRAIN, "pipeline", "plan", "full", *settings]),
        "status": side([*TTRAIN, "pipeline", "status"]),
        "cached run": side(run_full),
        **{
            f"cached run, {number:,} runs before": side(run_full, homes[number])
            for number in RUNS_BEFORE
        },
    }
    costs = table.interleave(sides, options.rounds, warmups=1)
    seconds = {name: common.median(rounds, "wall") for name, rounds in costs.items()}
    for name, value in seconds.items():
        table.value(f"s, {name}", value, most=LIMITS_SECONDS.get(name.split(",")[0], 0))
    for number in RUNS_BEFORE:
        name = f"cached run, {number:,} runs before"
        table.ratio(
            f"s, {name}, none before", seconds[name], seconds["cached run"], most=MOST_OF_NO_RUNS
        )


if __name__ == "__main__":
    common.main(str(__doc__), {"commands": compare_commands}, rounds=7)
