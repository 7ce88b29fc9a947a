"""Commands that should feel instant, a cached run with many runs before it, and a stage from its start to its first step.

    python bench/startup.py                                  everything, about 4 minutes
    python bench/startup.py --only commands --rounds 2

commands: wall time in a home with a tiny pipeline, with 0, 100 and 1,000 newer runs of other artifacts, none of which is the
run that the cached one equals. A bare `python -c pass` stands beside them.

stage: a model of size S (hidden 512, 8 layers, 6400 entries), a step of one row of 512 tokens. The stage is forked from
the server that has the libraries loaded, as from the second training stage of a pipeline on, or runs in a fresh process; the
peer is `python -c` with the imports of torch and of the Llama class. The clock runs from the call that builds the stage to
the end of its first step, less the time of its second step.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import common
import train_common
from common import TTRAIN, Cost, Table
from train_common import Size

LIMITS_SECONDS = {"--help": 0.3, "config show": 0.5, "plan": 1.0, "status": 1.0, "cached run": 0.5}
RUNS_BEFORE, MOST_OF_NO_RUNS = (100, 1000), 1.15
MOST_FIRST_STEP_SECONDS = 2.0
SIZE = Size(512, 8, 512, rows_per_step=1, warmup_steps=1, measured_steps=1)
IMPORTS = "import torch; from transformers.models.llama.modeling_llama import LlamaForCausalLM"


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
        **{f"cached run, {number:,} runs before": side(run_full, homes[number]) for number in RUNS_BEFORE},
    }
    costs = table.interleave(sides, options.rounds, warmups=1)
    seconds = {name: common.median(rounds, "wall") for name, rounds in costs.items()}
    for name, value in seconds.items():
        table.value(f"s, {name}", value, most=LIMITS_SECONDS.get(name.split(",")[0], 0))
    for number in RUNS_BEFORE:
        name = f"cached run, {number:,} runs before"
        table.ratio(f"s, {name}, none before", seconds[name], seconds["cached run"], most=MOST_OF_NO_RUNS)


def compare_stage(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Stages of a new seed each, so that none is cached."""
    from ttrain.config import Settings
    from ttrain.config.loading import load
    from ttrain.pipeline import launch, processes
    from ttrain.stages import PRETRAIN, SHARDS_PRETRAIN, TOKENIZER, Stage
    from ttrain.store.artifacts import ArtifactStore
    from ttrain.store.layout import Artifact

    text = common.write_text(options, directory, megabytes=4)
    words = [f"data.pretrain={text}", f"tokenizer.vocab_size={common.VOCAB_SIZE}",
             *train_common.training("pretrain", SIZE, SIZE.steps)]  # fmt: skip
    observer = Mock(**{"stop_signal.return_value": 0, "at_once.return_value": False})
    store, inputs, seeds = ArtifactStore(directory / "stage-home"), dict[str, Artifact](), itertools.count(1)

    def build(stage: Stage, *changes: str) -> Artifact:
        settings = load([*words, f"pretrain.seed={next(seeds)}", *changes], environment={}).settings
        return launch.build(stage, settings, store, inputs, observer).artifact

    def first_step(*changes: str) -> Cost:
        began = time.time()
        (_, first), (_, second) = train_common.read_curve(build(PRETRAIN, *changes).path)["stamps"]
        return Cost(2 * first - second - began, cpu=0.0)

    inputs["tokenizer"] = build(TOKENIZER)
    inputs["shards"] = build(SHARDS_PRETRAIN)
    table.value("s to the first step, the first stage of a pipeline", first_step().wall)
    sides = {
        "forked": first_step,
        "fresh process": lambda: first_step("runtime.fork_server=false"),
        "imports": lambda: common.run([sys.executable, "-c", IMPORTS], processes.environment_of(Settings()))[0],
    }
    costs = table.interleave(sides, options.rounds)
    forked, fresh, imports = (common.median(costs[side], "wall") for side in sides)
    table.ratio("s to the first step, fresh process, imports alone", fresh, imports)
    table.ratio("s to the first step, forked, imports alone", forked, imports)
    table.value("s to the first step, forked", forked, most=MOST_FIRST_STEP_SECONDS)


if __name__ == "__main__":
    PARTS = {"commands": compare_commands, "stage": compare_stage}
    common.main(str(__doc__), PARTS, rounds=7, options=common.text_options)
