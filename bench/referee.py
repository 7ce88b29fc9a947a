"""Whether the verdicts of a sweep can be trusted, and the seconds that a plan foretells.

    python bench/referee.py               12 minutes on two cores with bf16
    python bench/referee.py --only time   the plan alone

same: 24 runs of the default model, with 0.2 M tokens, differ in their seed alone. Of 1,000 draws of
five of them against five others at most 7 % may be called different at the level of 5 %. 1,000
made-up sweeps draw the values of 12 changes without effect from them: the winner of the rounds may
be called better on its fresh seeds in 7 % of them.
known: sweeps of one change each: three large ones are decided rightly within five seeds, two
without effect are not decided. A trial takes at most 2 s beyond its stages.
time: the seconds that `plan --time` foretells, against the run's, with 1, 5 and 10 M parameters.
kills: the tests of a sweep that is killed ten times, and of two processes that share one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
from common import TTRAIN, Table

from ttrain.evaluate.statistics import t_test
from ttrain.experiments.rounds import Rounds
from ttrain.store import runs
from ttrain.store.replicates import values_by_seed

METRIC, LEVEL = "eval/bits_per_byte", 0.05
SETTINGS = (
    "data.sft=[]",  # the base model is judged
    "data.lora=[]",
    "pretrain.tokens=200000",
    "tracking.enabled=false",
    "runtime.threads=1",  # of each of two processes
)
SEEDS, CHANGES, DRAWS, PROCESSES = 5, 12, 1000, 2
LARGE = {
    "pretrain.optim.kind=adamw": "worse",
    "model.tie_embeddings=false": "better",  # at so few tokens; at 1.8 M worse, as the recipe says
    "pretrain.tokens_per_step=4096": "worse",
}
NULL = ("pretrain.optim.weight_decay=0.2", "pretrain.optim.eps=1e-9")
MOST_DIFFERENT, MOST_BETTER, MOST_OVERHEAD, MOST_OFF = 0.07, 0.07, 2.0, 0.1
SIZES = {"1m": 600_000, "5m": 150_000, "10m": 80_000}  # and tokens: half a minute each


def ttrain(directory: Path, *words: str) -> str:
    """The output of a command with a home of its own."""
    environment = {"TTRAIN_HOME": str(directory / "home")}
    _, output = common.run([*TTRAIN, *words], environment, directory)
    return output


def compare_same(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Runs of one setting against each other."""

    def train(seed: int) -> None:
        ttrain(directory, "pipeline", "run", "full", *SETTINGS, f"--seed={seed}", "--engine=none")

    train(1)  # with what all share
    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(train, range(2, options.runs + 1)))
    (by_seed,) = values_by_seed(directory / "home", METRIC).values()
    values = list(by_seed.values())
    chance = random.Random(1)
    different = sum(draw_differs(values, chance) for _ in range(DRAWS)) / DRAWS
    table.value(f"{len(values)} seeds of one setting: span of {METRIC}", max(values) - min(values))
    table.value("of draws of 5 against 5 called different", different, most=MOST_DIFFERENT)
    better = sum(winner_is_better(values, chance) for _ in range(DRAWS)) / DRAWS
    table.value("of winners of 12 null changes called better", better, most=MOST_BETTER)


def draw_differs(values: Sequence[float], chance: random.Random) -> bool:
    """Whether five of the values and five others are called different."""
    drawn = chance.sample(values, 2 * SEEDS)
    differences = [a - b for a, b in zip(drawn[:SEEDS], drawn[SEEDS:], strict=True)]
    return t_test(differences) < LEVEL


def winner_is_better(values: Sequence[float], chance: random.Random) -> bool:
    """Whether a made-up sweep of changes without effect calls one of them better."""
    drawn: dict[tuple[int, int], float] = {}
    while True:
        standing = Rounds(CHANGES + 1, SEEDS, drawn).standing()
        if not standing.wanted:
            break
        drawn |= {place: chance.choice(values) for place in standing.wanted}
    winner = standing.winner
    if winner is None:
        return False
    differences = [drawn[winner, seed] - drawn[0, seed] for seed in standing.seeds[winner]]
    return sum(differences) < 0 and t_test(differences) < LEVEL


def decide_known(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Sweeps of changes whose effect is known."""
    own = [setting.partition("=") for setting in SETTINGS]
    base = "".join(f"{name}: {value}\n" for name, _, value in own)
    (directory / "base.yaml").write_text(base, encoding="utf-8")
    trials, seconds = 0, 0.0
    for change in (*LARGE, *NULL):
        words = ("sweep", "full", change, "-c", "base.yaml", "--seeds", str(SEEDS))
        with ThreadPoolExecutor(PROCESSES) as pool:
            list(pool.map(lambda words: ttrain(directory, *words), [words] * PROCESSES))
        shown = json.loads(ttrain(directory, "sweep", "show", "--json"))
        trials += len(shown["trials"])
        seconds += sum(trial["seconds"] for trial in shown["trials"])
        seconds -= stage_seconds(directory / "home", shown["sweep"])
        row = shown["settings"][1]
        print(f"  {change}: {row['verdict']}, {row['difference']:+.3f}, {row['over_seeds']}")
        expected = LARGE.get(change, "not decided")
        table.check(
            f"{change} is {expected} after {len(row['seeds'])} seeds", row["verdict"] == expected
        )
    table.value("s a trial beyond its stages", seconds / trials, most=MOST_OVERHEAD)


def stage_seconds(home: Path, sweep: str) -> float:
    """Of the stages of a sweep's runs."""
    own = [run for run in runs.history(home) if run.get("sweep", {}).get("name") == sweep]
    return sum(stage.get("seconds") or 0 for run in own for stage in run["stages"])


def foretell(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """The plan's seconds of pretraining against those of the run."""
    for preset, tokens in SIZES.items():
        words = ("full", f"model.preset={preset}", f"pretrain.tokens={tokens}", "--until=pretrain")
        plan = json.loads(ttrain(directory, "pipeline", "plan", *words, "--time", "--json"))
        foretold = by_stage(plan["estimate"]["stages"], "stage")["pretrain"]
        ttrain(directory, "pipeline", "run", *words, "tracking.enabled=false")
        run = next(iter(runs.history(directory / "home")))
        actual = by_stage(run["stages"], "name")["pretrain"]
        off = abs(foretold / actual - 1)
        table.ratio(f"{preset}: s of pretraining, foretold; measured", foretold, actual)
        table.value(f"{preset}: off by", off, most=MOST_OFF)


def by_stage(entries: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """The seconds of each stage."""
    return {entry[name]: entry["seconds"] for entry in entries}


def kill(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """The tests of sweeps that are interrupted."""
    tests = Path(__file__).parent.parent / "tests" / "full" / "test_sweep.py"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "soak", str(tests)]
    _, output = common.run(command, {"TTRAIN_SOAK_KILLS": "100"}, tests.parents[2], check=False)
    table.check(
        f"killed ten times, and shared by two processes: {output.splitlines()[-1]}",
        " failed" not in output,
    )


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--runs", type=int, default=24, help="of one setting")


if __name__ == "__main__":
    common.main(
        str(__doc__),
        {"same": compare_same, "known": decide_known, "time": foretell, "kills": kill},
        options=options,
        default="same,known,time",
    )
