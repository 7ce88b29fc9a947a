"""What tracking costs: a training step with it and without, also while its server is away; many runs listed and compared.

    python bench/tracking.py                    both
    python bench/tracking.py --only steps --rounds 5
    python bench/tracking.py --only compare --runs 100 --steps 1000

steps: one pretraining of a small model without tracking, with the home's own database, and with a server that is well, is
dead, hangs, or answers 500. Each training has a seed of its own, so that none is cached. The median of a training's own step
times is compared, in each round, with that of the training without tracking.

compare: runs with three curves of one value a step, in the home's files and its database; all of them listed and compared,
and their curves read, in a fresh process, as a command does it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sqlite3
import statistics
from pathlib import Path
from typing import Any

import common
import train_common
from common import Cost, Table

LEAST_OF_UNTRACKED, MOST_SECONDS = 0.99, 2.0
WARM_STEPS = 5
SERVER_MODES = ("well", "dead", "hanging", "error")
MODEL = (
    "model.hidden_size=256", "model.layers=4", "model.heads=4", "pretrain.tokens_per_step=2048", "pretrain.row_length=128",
    "runtime.rows_per_device=8", "runtime.log_every_steps=1", "runtime.checkpoint_every_steps=1000",
)  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--tokens", type=int, default=200_000, help="of each training")
    parser.add_argument("--runs", type=int, default=100, help="that are compared")
    parser.add_argument("--steps", type=int, default=1000, help="of each run that is compared")


def compare_steps(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """A step without tracking against one with it."""
    common.use_test_support()
    from support.outage_proxy import Proxy, mlflow_server
    from support.pipeline_home import Cli, write_corpus

    write_corpus(directory / "data")
    settings = [*Cli(directory, directory / "data").settings, *MODEL, f"pretrain.tokens={options.tokens}"]
    train_common.artifacts(directory, settings, "tokenizer", "shards-pretrain")
    seeds = itertools.count(1000)

    def train(address: str, enabled: bool) -> Cost:
        words = [f"pretrain.seed={next(seeds)}", f"tracking.enabled={str(enabled).lower()}"]
        cost = train_common.stage("pretrain", directory, [*settings, *words], MLFLOW_TRACKING_URI=address)
        return Cost(cost.wall, cost.cpu, cost.memory, {"step": statistics.median(cost.result["step_seconds"][WARM_STEPS:])})

    (directory / "server").mkdir()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(mlflow_server(directory / "server"))
        sides = {"off": lambda: train("", False), "own database": lambda: train("", True)}
        for mode in SERVER_MODES:
            proxy = Proxy(url)
            proxy.mode = mode
            stack.callback(proxy.close)
            sides[f"a server: {mode}"] = lambda address=proxy.url: train(address, True)
        costs = table.interleave(sides, options.rounds)
    steps = {name: [cost.result["step"] for cost in rounds] for name, rounds in costs.items()}
    for name in list(steps)[1:]:
        ratio = statistics.median(off / on for off, on in zip(steps["off"], steps[name], strict=True))
        medians = (1000 * statistics.median(steps[side]) for side in ("off", name))
        table.ratio(f"ms of a step without tracking, {name}", *medians, value=ratio, least=LEAST_OF_UNTRACKED)


def compare_runs(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """All runs listed and compared, and their curves read, in a process of its own."""
    home = directory / "many"
    fill(home, options.runs, options.steps)

    costs = table.interleave({"read": lambda: common.measure(read_runs, home)}, options.rounds)["read"]
    points = {cost.result["points"] for cost in costs}
    table.check(f"{max(points):,} points read", points == {options.runs * options.steps})
    seconds = common.median(costs, "seconds")
    table.value(f"s, {options.runs} runs of {options.steps} steps", seconds, most=MOST_SECONDS)
    table.value("MB of the process", common.median(costs, "memory"))


def fill(home: Path, runs: int, steps: int) -> None:
    """Runs on record and in MLflow; their curves stand in the files of the stages, and are written into the database itself:
    MLflow takes 0.3 s for 1000 points."""
    common.use_test_support()
    from support.recorded_homes import Made, make_run, rows_of

    os.environ.pop("MLFLOW_TRACKING_URI", None)
    for number in range(runs):
        stage = Made("pretrain", [2.0, 1.0], key=f"{number:064x}")
        make_run(home, f"full-20261121-{number:06d}-1a2b4", [stage], tracked=True, number=number)
        lines = (f"{json.dumps(row)}\n" for row in rows_of([1 / step for step in range(1, steps + 1)], 0.0))
        (home / "store" / "pretrain" / stage.key / "run" / "metrics.jsonl").write_text("".join(lines))
    with contextlib.closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as db, db:
        children = [row[0] for row in db.execute("SELECT run_uuid FROM tags WHERE key = 'ttrain.stage'")]
        for child, key in itertools.product(children, ("loss", "lr", "tokens")):
            db.execute("DELETE FROM metrics WHERE run_uuid = ? AND key = ?", (child, key))
            rows = [(child, key, 512.0 * step if key == "tokens" else 1 / step, 1000 * step, step, 0)
                    for step in range(1, steps + 1)]  # fmt: skip
            columns = "run_uuid, key, value, timestamp, step, is_nan"
            db.executemany(f"INSERT INTO metrics ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows)
            last = "UPDATE latest_metrics SET step = ?, value = ? WHERE run_uuid = ? AND key = ?"
            db.execute(last, (steps, rows[-1][2], child, key))


def read_runs(home: str) -> dict[str, Any]:
    """List and compare all runs, and read their curves; imports count, as they do for a command."""

    def read() -> dict[str, int]:
        from ttrain import tracking
        from ttrain.reports import compare
        from ttrain.store import runs

        views = tracking.read_runs(Path(home), [str(run["run"]) for run in runs.history(Path(home))])
        compare.compare(views)
        return {"points": sum(len(view.curve("pretrain", "loss")) for view in views)}

    cost = common.timed(read)
    return {**cost.result, "seconds": cost.wall}


if __name__ == "__main__":
    common.main(str(__doc__), {"steps": compare_steps, "compare": compare_runs}, rounds=5, options=options)
