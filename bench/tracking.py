"""What tracking costs: a training step with it and without, also while its server is away.

    python bench/tracking.py                          five rounds of six trainings
    python bench/tracking.py --rounds 1 --tokens 50000

One pretraining of a small model without tracking, with the home's own database, and with a server
that is well, is dead, hangs, or answers 500. Each training has a seed of its own, so that none is
cached. The median of a training's own step times is compared, in each round, with that of the
training without tracking.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from functools import partial
from pathlib import Path

import common
import train_common
from common import Cost, Table

LEAST_OF_UNTRACKED = 0.99
WARM_STEPS = 5
SERVER_MODES = ("well", "dead", "hanging", "error")
MODEL = (
    "model.hidden_size=256",
    "model.layers=4",
    "model.heads=4",
    "pretrain.tokens_per_step=2048",
    "pretrain.row_length=128",
    "runtime.rows_per_device=8",
    "runtime.log_every_steps=1",
    "runtime.checkpoint_every_steps=1000",
)


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--tokens", type=int, default=200_000, help="of each training")


def compare_steps(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """A step without tracking against one with it."""
    common.use_test_support()
    from support.outage_proxy import Proxy, mlflow_server
    from support.pipeline_home import Cli, write_corpus

    write_corpus(directory / "data")
    settings = [
        *Cli(directory, directory / "data").settings,
        *MODEL,
        f"pretrain.tokens={options.tokens}",
    ]
    train_common.artifacts(directory, settings, "tokenizer", "shards-pretrain")

    def train(address: str, enabled: str = "true") -> Cost:
        words = [*settings, f"tracking.enabled={enabled}"]
        return train_common.stage("pretrain", directory, words, MLFLOW_TRACKING_URI=address)

    (directory / "server").mkdir()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(mlflow_server(directory / "server"))
        sides = {"off": partial(train, "", "false"), "own database": partial(train, "")}
        for mode in SERVER_MODES:
            proxy = Proxy(url)
            proxy.mode = mode
            stack.callback(proxy.close)
            sides[f"a server: {mode}"] = partial(train, proxy.url)
        costs = table.interleave(sides, options.rounds)
    steps = {}
    for name, rounds in costs.items():
        curves = [cost.result["step_seconds"][WARM_STEPS:] for cost in rounds]
        steps[name] = [statistics.median(seconds) for seconds in curves]
    untracked = steps.pop("off")
    for name, tracked in steps.items():
        ratio = statistics.median(off / on for off, on in zip(untracked, tracked, strict=True))
        medians = (1000 * statistics.median(seconds) for seconds in (untracked, tracked))
        table.ratio(
            f"ms of a step without tracking, {name}",
            *medians,
            value=ratio,
            least=LEAST_OF_UNTRACKED,
        )


if __name__ == "__main__":
    common.main(str(__doc__), {"steps": compare_steps}, rounds=5, options=options)
