"""From the start of a training stage to its first step, against a bare process that only imports what it needs.

    python bench/stage_start.py

Three sides, interleaved, medians: the stage forked from the server that has the libraries loaded, as from the second
training stage of a pipeline on; the same stage in a fresh process; and `python -c` with the imports of torch and of the
Llama class alone. The model has size S (hidden 512, 8 layers, 6400 entries), a step is one row of 512 tokens. The clock runs
from the call that builds the stage to the line that logs its first step; the time of the second step is taken off, so that
all counts that a first step has and others have not. `--ranks 2` starts two.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import common

from ttrain.config import Settings
from ttrain.pipeline import launch, processes
from ttrain.pipeline.observer import StageObserver
from ttrain.stages import PRETRAIN, SHARDS_PRETRAIN, TOKENIZER, Stage
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

ROUNDS = 5
LIMIT_SECONDS = 2.0
IMPORTS = "import torch; from transformers.models.llama.modeling_llama import LlamaForCausalLM"


class Clock(StageObserver):
    """Watches a stage and notes when its steps were logged."""

    def __init__(self) -> None:
        super().__init__()
        self.began = time.perf_counter()
        self.logged_at: dict[int, float] = {}

    def logged(self, stage: Stage, line: str) -> None:
        if found := re.search(r"step (\d+)/", line):
            self.logged_at.setdefault(int(found[1]), time.perf_counter() - self.began)

    @property
    def seconds(self) -> float:
        """To the first step."""
        return 2 * self.logged_at[1] - self.logged_at[2]


class Pipeline:
    """A store with a tokenizer and shards, on which any number of models can begin to be trained."""

    def __init__(self, directory: Path, text: Path, ranks: int) -> None:
        self.store, self.text, self.ranks, self.seed = ArtifactStore(directory / "home"), text, ranks, 0
        settings = self.settings()
        self.inputs: dict[str, Artifact] = {}
        self.inputs["tokenizer"] = launch.build(TOKENIZER, settings, self.store, {}, Clock()).artifact
        self.inputs["shards"] = launch.build(SHARDS_PRETRAIN, settings, self.store, self.inputs, Clock()).artifact

    def settings(self, **runtime: Any) -> Settings:
        return Settings.model_validate({
            "data": {"pretrain": str(self.text), "tokenizer": str(self.text)},
            "tokenizer": {"vocab_size": 6400},
            "model": {"hidden_size": 512, "layers": 8, "heads": 8, "max_length": 512},
            "pretrain": {
                "optim": {"kind": "adamw"}, "tokens": 2 * 512 * self.ranks, "tokens_per_step": 512 * self.ranks,
                "row_length": 512, "validation_rows": 1, "seed": self.seed,
            },
            "runtime": {
                "rows_per_device": 1, "log_every_steps": 1, "devices": self.ranks, "checkpoint_every_steps": 100, **runtime,
            },
        })  # fmt: skip

    def first_step(self, **runtime: Any) -> float:
        """Seconds to the first step of a new model."""
        self.seed += 1
        clock = Clock()
        launch.build(PRETRAIN, self.settings(**runtime), self.store, self.inputs, clock)
        return clock.seconds


def imports() -> float:
    """Seconds of a bare process that imports torch and the Llama class."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], env=processes.environment_of(Settings()), check=True)
    return time.perf_counter() - began


def main() -> int:
    """Print the table; 1 where the limit was passed."""
    parser = common.parser(str(__doc__))
    parser.set_defaults(rounds=ROUNDS)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    table = common.Table()
    with common.workplace() as directory:
        pipeline = Pipeline(directory, common.material(options, directory, megabytes=4), options.ranks)
        first = pipeline.first_step()  # its server has to load the libraries
        sides = {
            "forked": lambda: pipeline.first_step(),
            "fresh": lambda: pipeline.first_step(fork_server=False),
            "imports": imports,
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, side in sides.items():
                seconds[name].append(side())
    ours, fresh, bare = (median(seconds[name]) for name in sides)
    spread = ", ".join(f"{value:.2f}" for value in sorted(seconds["forked"]))
    print(f"first stage of the pipeline, whose server loads the libraries: {first:.2f} s; later ones: {spread} s")
    table.add("to the first step, against imports alone", f"{ours:.2f} s", f"{bare:.2f} s", ours / bare)
    table.add("to the first step, forked against fresh", f"{ours:.2f} s", f"{fresh:.2f} s", ours / fresh)
    table.claim(f"under {LIMIT_SECONDS:g} s after the first of a pipeline", ours < LIMIT_SECONDS)
    return int(table.failed)


if __name__ == "__main__":
    sys.exit(main())
