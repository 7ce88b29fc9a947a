"""What the measurements of training share: sizes, stages as a user runs them, equal rows.

Each side is a process of its own. Ours is the command `ttrain stage run`, changed by settings
alone, and its speed is read from the wall times in its `run/metrics.jsonl`: all that lies between
two logged steps counts, data, callbacks and checkpoints too. The other sides note the wall time at
the end of each step. On every side the first steps are left out.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
from common import VOCAB_SIZE, Cost

CORES = os.cpu_count() or 1
SEEDS = itertools.count(1)
TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True)
class Size:
    """A model, the rows of one step, and the numbers of measured steps and of those before."""

    hidden: int
    layers: int
    row_length: int
    rows_per_step: int
    warmup_steps: int
    measured_steps: int
    vocab_size: int = VOCAB_SIZE
    head_width: int = 64

    @property
    def steps(self) -> int:
        return self.warmup_steps + self.measured_steps

    @property
    def tokens_per_step(self) -> int:
        return self.rows_per_step * self.row_length

    @property
    def heads(self) -> int:
        return max(1, self.hidden // self.head_width)

    @property
    def model(self) -> list[str]:
        """Settings of the model."""
        return [
            f"model.hidden_size={self.hidden}",
            f"model.layers={self.layers}",
            f"model.heads={self.heads}",
        ]

    @property
    def flops_per_token(self) -> int:
        """FLOPs of all matrices but the embedding, and unmasked attention.

        arXiv:2204.02311, appendix B.
        """
        inner = -(-(self.hidden * 8 // 3) // 32) * 32
        weights = (
            self.layers * (4 * self.hidden**2 + 3 * self.hidden * inner)
            + self.vocab_size * self.hidden
        )
        return 6 * weights + 12 * self.layers * self.hidden * self.row_length


SIZES = {
    "S": Size(512, 8, 512, rows_per_step=8, warmup_steps=2, measured_steps=16),
    "Q": Size(128, 4, 256, rows_per_step=8, warmup_steps=10, measured_steps=20, vocab_size=2048),
    "tiny": Size(64, 2, 64, rows_per_step=8, warmup_steps=2, measured_steps=4),
}


def options(parser: ArgumentParser) -> None:
    """The options of all measurements of training."""
    common.text_options(parser)
    parser.set_defaults(megabytes=4)
    parser.add_argument(
        "--steps", type=int, help="that are measured; default: as many as the size has"
    )


def resized(size: Size, steps: int | None) -> Size:
    """The size, measured over so many steps where a number is given."""
    return replace(size, measured_steps=steps) if steps else size


def allocator() -> dict[str, str]:
    """The variables that a stage's launcher sets, for a bare loop in the same environment."""
    from ttrain.config import Settings
    from ttrain.engine.processes import environment_of

    environment = environment_of(Settings())
    return {
        name: environment[name]
        for name in ("GLIBC_TUNABLES", "GOMP_SPINCOUNT")
        if name in environment
    }


def stage(
    name: str, directory: Path, settings: Sequence[str], *, keep: bool = False, **environment: str
) -> Cost:
    """Run a stage by its command; the result has its curve and its manifest.

    Memory is the peak of the process that trains, from its curve: it is no child of the command
    that could be waited for. Unless its artifact is to be kept, it has a seed of its own, so that
    it trains: the home's own MLflow would hand back what was trained before. The config.json of its
    model stays in `directory`/config, for the sides that are to have the same model.
    """
    seed = [] if keep else [f"{name}.seed={next(SEEDS)}"]
    command = [*common.TTRAIN, "stage", "run", name, "--json", *settings, *seed]
    cost, output = common.run(
        command, {"TTRAIN_HOME": str(directory / "home"), **environment}, directory
    )
    outcome = json.loads(output)
    if outcome["state"] != "completed" and not (keep and outcome["state"] == "cached"):
        raise RuntimeError(f"{name} was not run: it is {outcome['state']}")
    artifact = Path(outcome["path"])
    manifest = json.loads((artifact / "manifest.json").read_text())["result"]
    curve = read_curve(artifact)
    result = {**cost.result, **curve, "manifest": manifest, "artifact": str(artifact)}
    if (config := artifact / "model" / "config.json").exists():
        (directory / "config").mkdir(exist_ok=True)
        shutil.copy(config, directory / "config" / "config.json")
    if not keep:
        shutil.rmtree(artifact)
    return Cost(
        cost.wall, cost.cpu, max(curve["memory_bytes"], default=0.0) / common.MEGABYTE, result
    )


def read_curve(artifact: Path) -> dict[str, list[Any]]:
    """Stamps, seconds and memory by step, and validations of a curve.

    A stamp is (steps done, wall time), a validation (steps done, wall time, loss).
    """
    curve: dict[str, list[Any]] = {
        "stamps": [],
        "step_seconds": [],
        "memory_bytes": [],
        "validations": [],
    }
    path = artifact / "run" / "metrics.jsonl"
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        if "step_seconds" in line["metrics"]:
            curve["stamps"].append((line["step"], line["time"]))
            for name in ("step_seconds", "memory_bytes"):
                curve[name].append(line["metrics"][name])
        if "validation_loss" in line["metrics"]:
            curve["validations"].append(
                (line["step"], line["time"], line["metrics"]["validation_loss"])
            )
    return curve


def artifacts(
    directory: Path, settings: Sequence[str], *names: str, **environment: str
) -> list[str]:
    """Run stages whose artifacts stay; their directories."""
    return [
        stage(name, directory, settings, keep=True, **environment).result["artifact"]
        for name in names
    ]


def steps_per_second(cost: Cost, first: int) -> float:
    """Steps a second from the end of this step, or the next with a stamp, to that of the last."""
    stamps = [stamp for stamp in cost.result["stamps"] if stamp[0] >= first]
    begin, begun = stamps[0]
    end, ended = stamps[-1]
    return float((end - begin) / (ended - begun))


def median_rate(costs: Sequence[Cost], size: Size) -> float:
    """Median tokens a second of the rounds of a side, after the steps that do not count."""
    return size.tokens_per_step * statistics.median(
        steps_per_second(cost, size.warmup_steps) for cost in costs
    )


def training(section: str, size: Size, steps: int) -> list[str]:
    """Settings of a training stage of so many steps, as every side of a comparison has them.

    They are AdamW at a constant rate, and bf16 where the CPU has it.
    """
    learning = {
        "tokens": steps * size.tokens_per_step,
        "tokens_per_step": size.tokens_per_step,
        "row_length": size.row_length,
        "validation_rows": size.rows_per_step,
        "precision": "auto",
        "optim.kind": "adamw",
        "schedule.kind": "constant",
    }
    return [
        *size.model,
        *(f"{section}.{key}={value}" for key, value in learning.items()),
        f"runtime.rows_per_device={size.rows_per_step}",
        f"runtime.log_every_steps={size.warmup_steps}",
        # A run has 8 of them: in these few steps one after every two or six.
        "runtime.quick_validations=0",
    ]


def export(
    section: str, directory: Path, settings: Sequence[str], shards: str, tokenizer: str
) -> Path:
    """The batches of a stage, in its order, as arrays for the other sides; the rows' lengths."""
    import numpy as np

    from ttrain.config.loading import load
    from ttrain.data.encoder import Encoder
    from ttrain.tasks.common.rows import open_rows, order_of, validation_batches

    config = getattr(load(list(settings)).settings, section)
    encoder = Encoder(Path(tokenizer), fast=False)
    rows = open_rows(Path(shards) / "train", encoder, config)
    order = order_of(config, rows)
    if config.packing == "none":  # each row alone: its width is its own
        batches = [rows.batch([row]) for row in range(len(rows))]
    else:
        batches = [rows.batch(order.step_rows(step)) for step in range(order.steps)]
    output = directory / "rows"
    output.mkdir(exist_ok=True)
    heldout = open_rows(Path(shards) / "heldout", encoder, config, heldout=True)
    parts = {"train": batches, "heldout": validation_batches(heldout, config.validation_rows, 16)}
    for part, part_batches in parts.items():
        for name in ("input_ids", "labels", "positions", "segments"):
            arrays = [getattr(batch, f"{name}_BT") for batch in part_batches]
            widths = [((0, 0), (0, config.row_length - array.shape[1])) for array in arrays]
            arrays = [
                np.pad(array, width, constant_values=-100)
                for array, width in zip(arrays, widths, strict=True)
            ]
            np.save(output / f"{part}_{name}.npy", np.concatenate(arrays))
    np.save(output / "lengths.npy", rows.lengths())
    return output


def random_model(size: Size, *, ids: Any = TOKEN_IDS, **settings: Any) -> Any:
    """A model of ttrain with random weights."""
    from ttrain.config import Model
    from ttrain.model import factory

    model = Model(
        hidden_size=size.hidden,
        layers=size.layers,
        heads=size.heads,
        max_length=size.row_length,
        **settings,
    )
    return factory.build(
        model, vocab_size=size.vocab_size, ids=ids, stop_ids=[ids["eos_token_id"]], seed=1
    )


def random_batch(shape: tuple[int, int], documents: int, vocab_size: int, seed: int) -> Any:
    """Rows of random ids, each of so many documents of random lengths."""
    import numpy as np

    from ttrain.data.packing import Batch

    generator = np.random.default_rng(seed)
    length = shape[1]
    ids = generator.integers(3, vocab_size, shape)
    segments = np.zeros(shape, np.int64)
    for row in segments:
        row[generator.choice(np.arange(1, length), documents - 1, replace=False)] = 1
    segments = segments.cumsum(1)
    begins = np.maximum.accumulate(
        np.where(np.diff(segments, axis=1, prepend=-1) != 0, np.arange(length), 0), 1
    )
    return Batch(ids, np.roll(ids, -1, 1), np.arange(length) - begins, segments)
