"""What a pipeline costs that has nothing to do: wall and CPU time of the command, with a history of many runs, and the
digest of an input of 10 GB that did not change.

    .venv/bin/python bench/cached.py             makes a tiny pipeline of its own first, about 20 s
    .venv/bin/python bench/cached.py --gigabytes 1 --rounds 3

Interleaved rounds, medians; a bare `python -c pass` stands beside them, to judge the machine by. The input of 10 GB is a
sparse file: its bytes are read once, for its digest, but take no place on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ttrain.core.hashing import DigestCache

TTRAIN = [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()"]
TINY = [
    *("tokenizer.vocab_size=400", "model.hidden_size=32", "model.layers=2", "model.heads=2", "model.max_length=128"),
    *(f"{stage}.{name}" for stage in ("pretrain", "sft", "lora") for name in ("row_length=64", "tokens_per_step=512")),
    *("pretrain.tokens=5120", "evaluate.row_length=64", "evaluate.stride=32", "evaluate.new_tokens=4"),
    *("runtime.threads=1", "runtime.rows_per_device=4"),
]
LIMIT_SECONDS = 0.5  # of a cached pipeline
LIMIT_STAT_SECONDS = 0.001  # of an unchanged file, whatever its size
RUNS = (0, 100, 1000)


def write_data(directory: Path) -> list[str]:
    """Documents and chats; returns the settings that name them."""
    chat = [{"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "A sequence of items."}]
    lines = {
        "pretrain": [{"text": f"Sentence number {number} of a text without any news. " * 4} for number in range(300)],
        "sft": [{"messages": [{**chat[0], "content": f"What is list {number}?"}, chat[1]]} for number in range(150)],
        "lora": [{"messages": [{**chat[0], "content": f"What is tuple {number}?"}, chat[1]]} for number in range(150)],
    }
    for name, rows in lines.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.{name}={directory / name}.jsonl" for name in lines]


def multiply_runs(home: Path, count: int) -> None:
    """That many newer runs with other artifacts, so that none of them is the one that the cached run equals."""
    runs = home / "runs"
    first = min(path for path in runs.glob("*.json") if json.loads(path.read_bytes())["outcome"] == "completed")
    record = json.loads(first.read_bytes())
    for stage in record["stages"]:
        stage["key"] = stage["key"][::-1]
    for number in range(count):
        name = f"full-2099{number // 1440 + 1:04d}-{number % 1440:06d}-0000"
        (runs / f"{name}.json").write_text(json.dumps({**record, "run": name}, indent=1, sort_keys=True))


def measured(command: list[str], environment: dict[str, str]) -> tuple[float, float, str]:
    """Wall seconds, CPU seconds and standard output."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def time_commands(directory: Path, rounds: int) -> bool:
    """The table of commands; whether a limit was passed."""
    settings = [*write_data(directory), *TINY]
    run = [*TTRAIN, "pipeline", "run", "full", "--engine", "none", "tracking.enabled=false", *settings]
    homes = {count: directory / f"home-{count}" for count in RUNS}
    mine = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # as it is installed
    measured(run, {**mine, "TTRAIN_HOME": str(homes[0])})
    for count in RUNS[1:]:
        shutil.copytree(homes[0], homes[count], copy_function=shutil.copy2)
        multiply_runs(homes[count], count)
    sides = {"python -c pass": ([sys.executable, "-c", "pass"], mine)}
    for count, home in homes.items():
        sides[f"cached pipeline, {count} runs before"] = (run, {**mine, "TTRAIN_HOME": str(home)})
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (command, environment) in sides.items():
            wall, cpu, printed = measured(command, environment)
            assert "cached" not in name or "everything is cached" in printed, printed
            found[name].append((wall, cpu))
    print(f"load {os.getloadavg()[0]:.1f}")
    failed = False
    for name, costs in found.items():
        wall, cpu = (statistics.median(values) for values in zip(*costs, strict=True))
        limit = LIMIT_SECONDS if "cached" in name else None
        failed |= limit is not None and wall > limit
        print(f"{name:<36} {wall:6.3f} s  {cpu:6.3f} CPU s{f'   limit {limit} s' if limit else ''}")
    return failed


def time_digest(directory: Path, gigabytes: float) -> bool:
    """An unchanged file, for the first time and then as the next process finds it; whether the limit was passed."""
    path, where = directory / "sparse.jsonl", directory / "digests.json"
    with path.open("wb") as file:
        file.truncate(int(gigabytes * 1e9))
    os.utime(path, (10**9, 10**9))
    first = DigestCache(where)
    began = time.perf_counter()
    first.file(path)
    read = time.perf_counter() - began
    first.save()
    again = DigestCache(where)
    began = time.perf_counter()
    again.file(path)
    looked = time.perf_counter() - began
    print(f"digest of {gigabytes:g} GB, for the first time   {read:9.3f} s")
    print(f"digest of {gigabytes:g} GB, unchanged            {looked:9.6f} s   limit {LIMIT_STAT_SECONDS} s")
    return looked > LIMIT_STAT_SECONDS


def main() -> int:
    """Print both tables; 1 where a limit was passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        failed = [time_commands(directory, asked.rounds), time_digest(directory, asked.gigabytes)]
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
