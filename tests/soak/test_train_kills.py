"""A training that is killed at random points, also while it saves, and on two ranks.

`make soak` runs it; TTRAIN_SOAK_KILLS says how many kills. Each try is a fork of this process, which has torch loaded.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import random
import select
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparing import curve
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, CPU, WatchedTask, make_trainer, settings_of_training, tiny_model
from torch import nn

from ttrain.core.hashing import sha256_file
from ttrain.errors import ArtifactError, RankLost
from ttrain.train import checkpoint
from ttrain.train.callbacks import Callback, MetricsFile, StepRecord
from ttrain.train.checkpoint import Checkpoints
from ttrain.train.checkpoint_format import list_checkpoints
from ttrain.train.distributed import Ranks
from ttrain.train.early_stopping import EarlyStopping
from ttrain.train.optim import Optimizers
from ttrain.train.trainer import Cadence, TrainerOptions

pytestmark = pytest.mark.soak
STEPS, ROWS, ROWS_PER_STEP = 40, 45, 6  # five epochs and a third; two of them end in the middle of a step
CADENCE = Cadence(log=3, checkpoint=2, validate=5)  # windows of the curve lie across checkpoints
CHAIN = 10
LOST, STEPPED, SAVED = 3, b"s", b"w"
FAST, TREE = TrainerOptions(), TrainerOptions(reduction="tree")  # with the latter any number of ranks gives the same bits


@cache
def numbers() -> dict[bytes, int]:
    """The number of a row by its tokens, so that what is noted is what the model was given."""
    ids = NumberedRows(ROWS).batch(range(ROWS)).input_ids_BT
    return {ids[row].tobytes(): row for row in range(ROWS)}


class NotingOptimizers(Optimizers):
    """Notes the rows of each update of the weights in a file, which each try appends to."""

    def __init__(self, inner: Optimizers, path: Path) -> None:
        super().__init__(inner.optimizers, inner.names)
        self.path, self.rows = path, list[int]()
        self.done = 0

    def note(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def step(self) -> None:
        super().step()
        self.done += 1
        self.note({"step": self.done, "rows": self.rows})
        self.rows = []


class NotingTask(WatchedTask):
    """Language modelling that notes which rows it trains on."""

    def __init__(self, config: Any, model: nn.Module, path: Path) -> None:
        super().__init__(config, model)
        self.path = path

    def build_optimizer(self, model: nn.Module) -> Optimizers:
        self.noting = NotingOptimizers(super().build_optimizer(model), self.path)
        return self.noting

    def train_step(self, model: nn.Module, batch: Any, device: torch.device) -> Any:
        if batch.live_tokens:  # else it fills a rank's place
            self.noting.rows += [numbers()[row.tobytes()] for row in batch.input_ids_BT]
        return super().train_step(model, batch, device)


class Marks(Callback):
    """Tells the killer what has just happened."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def step_end(self, record: StepRecord) -> None:
        os.write(self.pipe, STEPPED)

    def saved(self, step: int) -> None:
        os.write(self.pipe, SAVED)


def train(root: Path, ranks: Ranks, pipe: int, how: TrainerOptions, number: int = 0) -> None:
    """Begin or continue the training whose place is `root`, to its end; it is try `number`."""
    torch.seed()  # the state of the random numbers is another in each try, and must not matter
    config = settings_of_training(tokens=STEPS * ROWS_PER_STEP * 16)
    model, heldout = tiny_model(dropout=0.1), NumberedRows(8)
    task = NotingTask(config, model, root / f"rows-{number:03d}.{ranks.rank}.jsonl")
    trainer = make_trainer(
        config, model, NumberedRows(ROWS), rows_per_device=2, directory=root / "checkpoints", task=task, ranks=ranks,
        how=how, cadence=CADENCE, validation=[heldout.batch([0, 1, 2, 3]), heldout.batch([4, 5, 6, 7])],
        callbacks=[MetricsFile(root / "metrics.jsonl"), EarlyStopping(1000), Marks(pipe)],
    )  # fmt: skip
    task.noting.done = trainer.first
    task.noting.note({"begins": trainer.first})
    assert trainer.fit().stop_reason == "completed"


@dataclass
class Try:
    """One try to train to the end, on one or more ranks, each a fork of this process."""

    root: Path
    world: int = 1
    how: TrainerOptions = FAST
    number: int = 0
    processes: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pipe, theirs = os.pipe()
        store = self.root / f"store-{time.time_ns()}"
        fork = multiprocessing.get_context("fork")
        self.processes = [fork.Process(target=self._begin, args=(rank, store, theirs)) for rank in range(self.world)]
        for process in self.processes:
            process.start()
        os.close(theirs)

    def _begin(self, rank: int, store: Path, pipe: int) -> None:
        status = 1
        try:
            os.close(self.pipe)
            torch.set_num_threads(1)
            if self.world > 1:
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=self.world)
            train(self.root, Ranks(rank, self.world, CPU) if self.world > 1 else ALONE, pipe, self.how, self.number)
            status = 0
        except BaseException as error:
            lost = isinstance(error, RankLost) or "gloo" in str(error)
            status = LOST if lost else status
            if not lost:
                traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def marks(self, mark: bytes, count: int) -> bool:
        """Wait for so many of these marks; whether they came before the end."""
        while count:
            select.select([self.pipe], [], [])
            read = os.read(self.pipe, 1)
            if not read:
                return False
            count -= read == mark
        return True

    def end(self, seconds: float = 60, *, by_force: bool = False) -> list[int | None]:
        """The exit codes. Who needs longer is ended, which only `by_force` is as it should be."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in self.processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        os.close(self.pipe)
        assert by_force or not late, f"{len(late)} of {self.world} ranks did not end within {seconds} s"
        return [process.exitcode for process in self.processes]


# --- what lies on the disk ----------------------------------------------------------------------------------------------


def writing(root: Path) -> set[tuple[str, int, int]]:
    """The checkpoints that are, or were, being written: name, inode and the time of their last change."""
    there = set()
    for path in (root / "checkpoints").glob(".writing-*"):
        with contextlib.suppress(FileNotFoundError):  # it has got its name
            status = path.stat()
            there.add((path.name, status.st_ino, status.st_ctime_ns))
    return there


def whole_steps(root: Path) -> list[int]:
    """Steps of the checkpoints from which a run can continue. All that have their name must be whole."""
    steps = []
    for path in list_checkpoints(root / "checkpoints"):
        try:
            steps.append(checkpoint.read(path).step)
        except ArtifactError:
            assert path.name.startswith(".writing-"), f"{path} has its name but is torn"
    return sorted(steps)


def notes(root: Path) -> dict[int, list[dict[str, Any]]]:
    """What the ranks of each try noted, where it lived to begin."""
    tries: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(root.glob("rows-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if lines:
            tries.setdefault(int(path.name[5:8]), []).extend(lines)
    return tries


def consumed(root: Path) -> dict[int, list[int]]:
    """Rows of each step that went into the final weights: a try undoes the steps after its beginning."""
    steps: dict[int, list[int]] = {}
    for lines in notes(root).values():
        begin = lines[0]["begins"]
        assert begin <= max(steps, default=0), f"a try begins at {begin}, and nobody made the steps before it"
        steps = {step: rows for step, rows in steps.items() if step <= begin}
        for line in lines:
            if "step" in line:
                steps.setdefault(line["step"], []).extend(line["rows"])
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return steps


def left(root: Path) -> dict[str, Any]:
    """All that a training leaves, but for times."""
    files = [path for path in sorted((root / "checkpoints").rglob("*")) if path.is_file()]
    return {
        "files": {str(path.relative_to(root)): sha256_file(path) for path in files if path.name != checkpoint.STATE},
        "states": [checkpoint.read(path).state | {"world": 1} for path in list_checkpoints(root / "checkpoints")],
        "curve": curve(root / "metrics.jsonl"),
        "rows": {step: sorted(rows) for step, rows in consumed(root).items()},
    }


# --- kills --------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What the kills met."""

    kills: int = 0
    saving: int = 0  # fell into the write of a checkpoint
    torn: int = 0  # a torn checkpoint lies there, which the next try has to pass over
    unnamed: int = 0  # a whole one that has no name yet, from which the next try continues
    runs: int = 0  # runs that came to their end
    longest: int = 0  # kills in one run


def never_killed(root: Path, how: TrainerOptions) -> dict[str, Any]:
    """What an undisturbed run leaves; every row is in it once an epoch.

    It runs in this process, so that what it imports is there for all forks, which takes each of them a second otherwise.
    """
    root.mkdir()
    nobody = os.open(os.devnull, os.O_WRONLY)
    train(root, ALONE, nobody, how)
    os.close(nobody)
    seen = [0] * ROWS
    for step, rows in sorted(consumed(root).items()):
        for row in rows:
            seen[row] += 1
        epochs = step * ROWS_PER_STEP / ROWS
        assert {*seen} <= {math.floor(epochs), math.ceil(epochs)}, f"after step {step}: {seen}"
    assert sum(seen) == STEPS * ROWS_PER_STEP
    assert whole_steps(root)[-1] == STEPS
    return left(root)


def seconds_of_a_write(root: Path) -> float:
    """How long a checkpoint like the newest one under `root` takes to be written here."""
    ours = Checkpoints(root / "timed", files=dict)
    snapshot = checkpoint.read(list_checkpoints(root / "checkpoints")[-1])
    began = time.monotonic()
    for step in range(1, 6):
        ours.save(replace(snapshot, step=step))
    ours.close()
    return (time.monotonic() - began) / 5


def kill(attempt: Try, chance: random.Random, tally: Tally, write_seconds: float) -> bool:
    """Kill one rank or all at a random point, while it saves if too few kills met that; False where it was done before."""
    root = attempt.root
    before, steps = writing(root), whole_steps(root)
    aimed = 2 * tally.saving <= tally.kills
    mark, count = (SAVED, chance.randint(1, 2)) if aimed else (STEPPED, chance.randint(0, 4))
    attempt.marks(mark, count)
    deadline = time.monotonic() + 2 * write_seconds
    while aimed and not writing(root) - before and time.monotonic() < deadline:
        pass
    time.sleep(chance.uniform(0, write_seconds if aimed else 0.05))
    victims = [attempt.processes[0]]
    if attempt.world > 1:
        victims = chance.choice([attempt.processes, attempt.processes[:1], attempt.processes[1:]])
    for victim in victims:
        victim.kill()
    # Who waits for a rank to join waits long; that is the launching process's to end, as here.
    codes = attempt.end(30) if count else attempt.end(2, by_force=True)
    assert {*codes} <= {0, -9, LOST}, f"a rank ended otherwise: {codes}"
    if codes[0] == 0:  # it is rank 0 that saves
        return False
    tally.kills += 1
    tally.saving += bool(writing(root) - before)
    now = whole_steps(root)
    assert max(now, default=0) >= max(steps, default=0), "what was durable is gone"
    if writing(root):
        whole = any(path.name.startswith(".writing-") for path in list_checkpoints(root / "checkpoints"))
        tally.unnamed += whole
        tally.torn += not whole
    return True


def soak(root: Path, kills: int, chance: random.Random, worlds: Sequence[int], how: TrainerOptions) -> Tally:
    """Runs with ten kills each, each then finished, until there were enough, and half as many in a write, which on a busy
    machine take several times as many in all; all runs leave what an undisturbed one leaves."""
    expected, tally = never_killed(root / "alone", how), Tally()
    write_seconds = seconds_of_a_write(root / "alone")
    while tally.kills < kills or (2 * tally.saving < kills and tally.kills < 10 * kills):
        place = root / f"run-{tally.runs}"
        place.mkdir()
        chain = 0
        while chain < min(CHAIN, kills):
            durable = max(whole_steps(place), default=0)
            if not kill(Try(place, chance.choice(worlds), how, chain), chance, tally, write_seconds):
                break
            lines = notes(place).get(chain, [{"begins": durable}])
            assert {line["begins"] for line in lines if "begins" in line} == {durable}, "not the newest whole checkpoint"
            chain += 1
        last = Try(place, chance.choice(worlds), how, chain + 1)
        assert last.end() == [0] * last.world
        assert left(place) == expected
        tally.runs, tally.longest = tally.runs + 1, max(tally.longest, chain)
    return tally


def test_any_number_of_kills_leaves_the_same_weights_and_no_row_is_lost_or_repeated(tmp_path: Path) -> None:
    kills = int(os.environ.get("TTRAIN_SOAK_KILLS", "5"))
    tally = soak(tmp_path, kills, random.Random(17), [1], FAST)
    print(f"training: {tally}")
    assert 2 * tally.saving >= kills


def test_kills_of_one_rank_or_of_all_leave_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Each try draws whether one rank or two go on; `TREE` makes the bits the same."""
    kills = -(-int(os.environ.get("TTRAIN_SOAK_KILLS", "5")) // 4)
    tally = soak(tmp_path, kills, random.Random(23), [1, 2, 2, 2], TREE)
    print(f"training on one and two ranks: {tally}")
