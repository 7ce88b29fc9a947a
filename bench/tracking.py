"""What tracking costs: a training step with it and without, also while its server is away; many runs listed and compared.

    python bench/tracking.py                    both
    python bench/tracking.py --only steps --rounds 5
    python bench/tracking.py --only compare --runs 100 --steps 1000

Steps: one pretraining of a small model without tracking, with the home's own database, and with a server that is well, is
dead, hangs, and answers 500. Each is trained once a round, with a seed that no other has, so that none comes from the cache;
who begins changes with the round. Compared is the median of a training's own step times, in each round with that of the
training without: the median over the rounds of "a step without / a step with" is at least 0.99.

Compare: runs with three curves of one value a step, in the home's files and its database; their names read, all of them
compared, and the curves of all of them read: under 2 s, in a fresh process, as a command does it. The peer reads the same
runs and curves with MLflow's own client, in the same rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common

TESTS = Path(__file__).parent.parent / "tests"
LEAST, MOST_SECONDS = 0.99, 2.0
WARM_STEPS = 5
MODES = ("well", "dead", "hanging", "error")
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
            compare(table, place, chosen.runs, chosen.steps, chosen.rounds)
    return int(table.failed)


def steps(table: common.Table, place: Path, rounds: int, tokens: int) -> None:
    """A step without tracking against one with it."""
    from support.pipeline_home import Cli, write_corpus

    write_corpus(place / "data")
    cli = Cli(place / "home", place / "data")
    cli("pipeline", "run", "full", "--until", "shards-pretrain", "--engine", "none")
    found: list[dict[str, float]] = []
    with _servers(place) as addresses:
        sides = [("off", "", False), ("own database", "", True), *((name, url, True) for name, url in addresses.items())]
        for number in range(rounds):
            found.append({})
            turn = number % len(sides)
            for name, address, enabled in sides[turn:] + sides[:turn]:
                cli.environment["MLFLOW_TRACKING_URI"] = address
                seed = 1000 + sum(map(len, found))
                words = [*BIGGER, f"pretrain.tokens={tokens}", f"pretrain.seed={seed}"]
                words += [f"tracking.enabled={str(enabled).lower()}"]
                command = cli.command("stage", "run", "pretrain", "--json", *words)
                began = time.perf_counter()
                done = subprocess.run(command, stdout=subprocess.PIPE, env=cli.environment, cwd=cli.data, check=True)
                wall, told = time.perf_counter() - began, json.loads(done.stdout)
                assert told["state"] == "completed", f"{name}: the training is {told['state']}, not new"
                seconds = found[-1][name] = _step_seconds(Path(told["path"]))
                print(f"  {name}: a step {1000 * seconds:.2f} ms, the command {wall:.1f} s", flush=True)
    off = statistics.median(one["off"] for one in found)
    for name, _, enabled in sides:
        if enabled:
            on = statistics.median(one[name] for one in found)
            ratio = statistics.median(one["off"] / one[name] for one in found)
            what = f"step without tracking / with: {name}"
            table.add(what, f"{1000 * on:.2f} ms", f"{1000 * off:.2f} ms", ratio, least=LEAST)


def compare(table: common.Table, place: Path, runs: int, steps: int, rounds: int) -> None:
    """All runs read, compared, and their curves read, in a process of its own."""
    home = place / "many"
    fill(home, runs, steps)

    def side(name: str) -> Callable[[], common.Cost]:
        return lambda: common.measure(__file__, name, home, PYTHONPATH=f"{TESTS.parent}:{TESTS}", MLFLOW_TRACKING_URI="")

    costs = common.interleave({"ours": side("compare"), "theirs": side("client")}, rounds)
    for name, found in costs.items():
        points = {cost.found["points"] for cost in found}
        table.claim(f"{runs} runs of {steps} steps, {name}: {max(points)} points read", points == {runs * steps})
    ours, theirs = (common.median(costs[name], "seconds") for name in costs)
    what = "listed, compared and their curves read"
    table.add(what, f"{ours:.2f} s", f"{MOST_SECONDS:.2f} s", ours / MOST_SECONDS, most=1)
    table.add("the same runs and curves, MLflow's client", f"{ours:.2f} s", f"{theirs:.2f} s", theirs / ours, least=1)
    cpu, wall, memory = (common.median(costs["ours"], figure) for figure in ("cpu", "wall", "memory"))
    print(f"{'':<54}  the whole process {wall:.2f} s, CPU {cpu:.2f} s, {memory:.0f} MB")


def fill(home: Path, runs: int, steps: int) -> None:
    """Runs on record and in MLflow; their curves stand in the files of the stages, and are written into the database itself,
    since MLflow takes 0.3 s for 1000 points."""
    from support.recorded_homes import Made, make_run, rows_of

    os.environ.pop("MLFLOW_TRACKING_URI", None)
    for number in range(runs):
        made = Made("pretrain", [2.0, 1.0], key=f"{number:064x}")
        make_run(home, f"full-20261121-{number:06d}-1a2b4", [made], tracked=True, number=number)
        lines = (f"{json.dumps(row)}\n" for row in rows_of([1 / step for step in range(1, steps + 1)], 0.0))
        (home / "store" / "pretrain" / made.key / "run" / "metrics.jsonl").write_text("".join(lines))
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


def _compare(home: str) -> dict[str, Any]:
    """The side that is measured; imports count, as they do for a command."""
    began = time.perf_counter()
    from ttrain import tracking
    from ttrain.reports import compare as pages
    from ttrain.store import runs

    names = [str(run["run"]) for run in runs.history(Path(home))]
    views = tracking.read_runs(Path(home), names)
    pages.compare(views)
    curves = [view.curve("pretrain", "loss") for view in views]
    return {"points": sum(map(len, curves)), "seconds": time.perf_counter() - began}


def _client(home: str) -> dict[str, Any]:
    """The peer: the same runs and curves, with their tokens, by MLflow's own client; nothing is compared."""
    began = time.perf_counter()
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    experiments = [one.experiment_id for one in client.search_experiments()]
    found = client.search_runs(experiments, max_results=50_000)
    stages = [run.info.run_id for run in found if run.data.tags.get("ttrain.stage") == "pretrain"]
    curves = [(client.get_metric_history(run, "loss"), client.get_metric_history(run, "tokens")) for run in stages]
    return {"points": sum(len(losses) for losses, _ in curves), "seconds": time.perf_counter() - began}


@contextlib.contextmanager
def _servers(place: Path) -> Iterator[dict[str, str]]:
    """Addresses of a server through a proxy, by the way in which it is away."""
    from support.outage_proxy import Proxy, mlflow_server

    (place / "server").mkdir()
    with mlflow_server(place / "server") as url:
        proxies = {mode: Proxy(url) for mode in MODES}
        for mode, proxy in proxies.items():
            proxy.mode = mode
        yield {f"a server: {mode}": proxy.url for mode, proxy in proxies.items()}
        for proxy in proxies.values():
            proxy.close()


def _step_seconds(artifact: Path) -> float:
    """Median of a step's own time, without the first ones."""
    rows = [json.loads(line) for line in (artifact / "run" / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["metrics"]["step_seconds"] for row in rows[WARM_STEPS:] if "step_seconds" in row["metrics"])


if __name__ == "__main__":
    if not common.requested_side({"compare": _compare, "client": _client}):
        sys.exit(main())
