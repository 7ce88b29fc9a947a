"""Wall time of commands that should feel instant, against their limits.

    .venv/bin/python bench/startup.py            after `make run`, in the same directory

Interleaved rounds, medians. A bare `python -c pass` of the same interpreter stands beside them, to judge the machine by.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

TTRAIN = [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()"]
COMMANDS = {
    "python -c pass": ([sys.executable, "-c", "pass"], None),
    "ttrain --help": ([*TTRAIN, "--help"], 0.3),
    "ttrain config show": ([*TTRAIN, "config", "show"], 0.5),
    "ttrain pipeline plan full": ([*TTRAIN, "pipeline", "plan", "full"], 1.0),
    "ttrain pipeline run full (all cached)": ([*TTRAIN, "pipeline", "run", "full"], 1.0),
    "ttrain pipeline status": ([*TTRAIN, "pipeline", "status"], 1.0),
}
ROUNDS = 7


def main() -> int:
    """Print the table; 1 where a limit was passed."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, (command, _limit) in COMMANDS.items():
            began = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds[name].append(time.perf_counter() - began)
            if "all cached" in name and "everything is cached" not in done.stdout:
                print("run `ttrain pipeline run full` first: this measures the second run")
                return 2
    failed = False
    for name, (_, limit) in COMMANDS.items():
        median = statistics.median(seconds[name])
        failed |= limit is not None and median > limit
        print(f"{name:<40} {median:6.3f} s{f'   limit {limit} s' if limit else ''}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
