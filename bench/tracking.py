"""What tracking costs: a training step with it and without, also while its server is away; many runs listed and compared.

    python bench/tracking.py                    both
    python bench/tracking.py --only steps --rounds 5
    python bench/tracking.py --only compare --runs 100 --steps 1000

Steps: one pretraining of a small model, in interleaved rounds (each with its own seed, so that it is trained) without
tracking, with the home's own database, and with a server that is dead, hangs, and answers 500. Its own step times, as the
training measures them, are compared by their medians: a step without over a step with is at least 0.99.

Compare: runs with three curves of one value a step, in the home's own database; their names read, all of them compared, and
the curves of all of them read: under 2 s, in a fresh process, as a command does it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sqlite3
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

TESTS = Path(__file__).parent.parent / "tests"
LEAST, MOST_SECONDS = 0.99, 2.0
WARM_STEPS = 5
MODES = ("dead", "hanging", "error")
BIGGER = (
    "model.hidden_size=256",
    "model.layers=4",
    "model.heads=4",
    "pretrain.tokens_per_step=2048",
    "pretrain.row_length=128",
    "runtime.rows_per_device=8",
    "runtime.log_every_steps=1",
    "runtime.checkpoint_every_steps=1000",
)


def main() -> int:
    """The parts that are asked for; 1 where a limit was missed."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--only", choices=["steps", "compare"])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=200_000, help="that each training takes")
    options.add_argument("--runs", type=int, default=100)
    options.add_argument("--steps", type=int, default=1000, help="of each run that is compared")
    chosen = options.parse_args()
    sys.path.insert(0, str(TESTS))
    table = common.Table()
    with common.workplace() as place:
        if chosen.only != "compare":
            steps(table, place, chosen.rounds, chosen.tokens)
        if chosen.only != "steps":
            compare(table, place, chosen.runs, chosen.steps)
    return int(table.failed)


def steps(table: common.Table, place: Path, rounds: int, tokens: int) -> None:
    """A step without tracking against one with it."""
    from harness import Cli, write_corpus

    write_corpus(place / "data")
    cli = Cli(place / "home", place / "data")
    cli("pipeline", "run", "full", "--until", "shards-pretrain", "--engine", "none")
    found: dict[str, list[float]] = {}
    with _servers(place) as addresses:
        for number in range(rounds):
            for name, (address, enabled) in {"off": ("", False), "own database": ("", True), **addresses}.items():
                cli.environment["MLFLOW_TRACKING_URI"] = address
                seed = f"pretrain.seed={1000 + number * 10 + len(found)}"
                words = [*BIGGER, f"pretrain.tokens={tokens}", seed, f"tracking.enabled={str(enabled).lower()}"]
                began = time.perf_counter()
                cli("stage", "run", "pretrain", *words)
                seconds = _step_seconds(place / "home")
                found.setdefault(name, []).append(seconds)
                print(
                    f"  {name}: a step {1000 * seconds:.2f} ms, the command {time.perf_counter() - began:.1f} s", flush=True
                )
    off = statistics.median(found["off"])
    for name, seconds in found.items():
        if name != "off":
            on = statistics.median(seconds)
            what = f"step without tracking / with: {name}"
            table.add(what, f"{1000 * on:.2f} ms", f"{1000 * off:.2f} ms", off / on, least=LEAST)


def compare(table: common.Table, place: Path, runs: int, steps: int) -> None:
    """All runs read, compared, and their curves read, in a process of its own."""
    home = place / "many"
    fill(home, runs, steps)
    cost = common.measure(__file__, "compare", home, steps, PYTHONPATH=f"{TESTS.parent}:{TESTS}", MLFLOW_TRACKING_URI="")
    points, seconds = cost.found["points"], cost.found["seconds"]
    table.claim(f"{runs} runs of {steps} steps: {points} points of the curves read", points == runs * steps)
    table.add(
        "listed, compared and their curves read", f"{seconds:.2f} s", f"{MOST_SECONDS:.2f} s", seconds / MOST_SECONDS, most=1
    )
    print(f"{'':<54}  the whole process {cost.wall:.2f} s, {cost.memory:.0f} MB")


def fill(home: Path, runs: int, steps: int) -> None:
    """Runs on record and in MLflow, their curves written into the database itself: MLflow takes 0.3 s for 1000 points."""
    from recorded import Made, make_run

    os.environ.pop("MLFLOW_TRACKING_URI", None)
    for number in range(runs):
        made = Made("pretrain", [2.0, 1.0], key=f"{number:064x}")
        make_run(home, f"full-20261121-{number:06d}-1a2b4", [made], tracked=True, number=number)
    with contextlib.closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as db, db:
        children = [row[0] for row in db.execute("SELECT run_uuid FROM tags WHERE key = 'ttrain.stage'")]
        columns = "run_uuid, key, value, timestamp, step, is_nan"
        for child in children:
            for key in ("loss", "lr", "tokens"):
                db.execute("DELETE FROM metrics WHERE run_uuid = ? AND key = ?", (child, key))
                rows = [(child, key, 512.0 * step if key == "tokens" else 1 / step, 1000 * step, step, 0)
                        for step in range(1, steps + 1)]  # fmt: skip
                db.executemany(f"INSERT INTO metrics ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows)
                last = "UPDATE latest_metrics SET step = ?, value = ? WHERE run_uuid = ? AND key = ?"
                db.execute(last, (steps, rows[-1][2], child, key))


def _compare(home: str, steps: str) -> dict[str, Any]:
    """The side that is measured; imports count, as they do for a command."""
    began = time.perf_counter()
    from ttrain import runs, tracking
    from ttrain.pages import compare as pages

    names = [str(run["run"]) for run in runs.history(Path(home))]
    views = tracking.read_runs(Path(home), names)
    pages.compare(views)
    curves = [view.curve("pretrain", "loss") for view in views]
    return {"points": sum(map(len, curves)), "seconds": time.perf_counter() - began}


@contextlib.contextmanager
def _servers(place: Path) -> Iterator[dict[str, tuple[str, bool]]]:
    """A server through a proxy that is away, by the way in which it is."""
    from outages import Proxy, mlflow_server

    (place / "server").mkdir()
    with mlflow_server(place / "server") as url:
        proxies = {mode: Proxy(url) for mode in MODES}
        for mode, proxy in proxies.items():
            proxy.mode = mode
        yield {f"a server: {mode}": (proxy.url, True) for mode, proxy in proxies.items()}
        for proxy in proxies.values():
            proxy.close()


def _step_seconds(home: Path) -> float:
    """Median of a step's own time, of the training that ended last."""
    newest = max((home / "store" / "pretrain").glob("*/run/metrics.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    rows = [json.loads(line) for line in newest.read_text().splitlines()]
    return statistics.median(row["metrics"]["step_seconds"] for row in rows[WARM_STEPS:] if "step_seconds" in row["metrics"])


if __name__ == "__main__":
    if not common.requested_side({"compare": _compare}):
        sys.exit(main())
