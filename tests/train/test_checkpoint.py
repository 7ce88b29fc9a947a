"""Checkpoints: whatever is torn, flipped, swapped or lost, the newest whole one is found, or the
damage is named."""

import dataclasses
import json
import logging
import math
import os
import pickle
import random
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import FILES, checkpoints, is_snapshot, names, snapshot, steps, write
from support.tiny_data import NumberedRows
from support.tiny_trainers import make_trainer, settings_of_training, tiny_model

from ttrain.core.hashing import sha256_file
from ttrain.errors import ArtifactError
from ttrain.train import checkpoint
from ttrain.train.checkpoint import Checkpoints, Snapshot, SnapshotBuffers
from ttrain.train.checkpoint_format import with_digest
from ttrain.train.trainer import COMPLETED, INTERRUPTED, Trainer
from ttrain.train.training_options import Cadence


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def change_a_digit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[next((at for at, byte in enumerate(data) if chr(byte).isdigit()), 0)] ^= 1
    path.write_bytes(data)


# Of the file of step 8; the second path is the same file of step 4.
Damage = Callable[[Path, Path], object]
DAMAGES: dict[str, Damage] = {
    "truncated": lambda path, other: path.write_bytes(path.read_bytes()[:-1]),
    "lost": lambda path, other: path.unlink(),
    "another digit": lambda path, other: change_a_digit(path),  # JSON that still parses
    "the other's": lambda path, other: shutil.copyfile(other, path),
    "a directory": lambda path, other: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Damage
) -> None:
    write(tmp_path, 4, 8)
    old, new = (tmp_path / f"step-0000000{step}" / name for step in (4, 8))
    damage(new, old)
    with caplog.at_level(logging.WARNING, logger="ttrain"):
        assert is_snapshot(checkpoints(tmp_path).newest(), 4)
    assert f"the checkpoint file {new} is damaged: " in caplog.text
    assert str(old) not in caplog.text
    shutil.rmtree(old.parent)
    with pytest.raises(ArtifactError, match=f"every checkpoint .* file {new} is damaged"):
        checkpoints(tmp_path).newest()


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_of_a_checkpoint_is_seen(tmp_path: Path, name: str) -> None:
    write(tmp_path, 4)
    path = tmp_path / "step-00000004" / name
    data = path.read_bytes()
    # 13 and 8 have no common factor, so every bit of a byte has its turn.
    for place in range(0, 8 * len(data), 13):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(ArtifactError, match=str(path)):
            checkpoint.read(path.parent)
    path.write_bytes(data)
    assert is_snapshot(checkpoint.read(path.parent), 4)


def test_a_state_that_is_of_another_step_or_does_not_list_a_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 4, 8)
    (tmp_path / "step-00000008").rename(tmp_path / "step-00000009")
    with pytest.raises(ArtifactError, match=r"step-00000009/state\.json"):
        checkpoint.read(tmp_path / "step-00000009")
    path = tmp_path / "step-00000004"
    change_state(path, lambda files: files.pop("optimizer.safetensors"))
    with pytest.raises(ArtifactError, match=r"optimizer\.safetensors.*state\.json"):
        checkpoint.read(path)


def change_state(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = json.loads((path / "state.json").read_bytes())
    del state["sha256"]
    change(state["files"])
    (path / "state.json").write_text(json.dumps(with_digest(state)))


def test_a_run_whose_checkpoints_are_damaged_or_gone_does_not_start_over(tmp_path: Path) -> None:
    write(tmp_path, 4)
    path = tmp_path / "step-00000004" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    def fit() -> None:
        options: dict[str, Any] = {"directory": tmp_path, "start": Snapshot(2, {}, {}, {})}
        make_trainer(settings_of_training(), tiny_model(), NumberedRows(20), **options).fit()

    with pytest.raises(ArtifactError, match=r"optimizer\.safetensors"):
        fit()
    shutil.rmtree(path.parent)
    with pytest.raises(ArtifactError, match=f"{tmp_path / 'latest'} names is gone"):
        fit()


def test_a_directory_without_checkpoints_is_a_start(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "none").newest() is None
    assert checkpoints(tmp_path / "none").best() is None
    (tmp_path / "step-of-somebody").mkdir()
    (tmp_path / ".writing-00000004").mkdir()
    assert checkpoints(tmp_path).newest() is None


def test_a_damaged_checkpoint_makes_room_for_whole_ones(tmp_path: Path) -> None:
    write(tmp_path, 4, 8)
    (tmp_path / "step-00000008" / "config.json").unlink()
    ours = checkpoints(tmp_path, keep=2)
    assert is_snapshot(ours.newest(), 4)
    ours.save(snapshot(6))
    ours.close()
    assert steps(tmp_path) == [4, 6]


@pytest.mark.parametrize("seed", range(2))
def test_exactly_these_stay_and_the_best_has_the_smallest_metric(tmp_path: Path, seed: int) -> None:
    """Against sets: the newest `keep`, every `keep_every`, the permanent, and the argmin of all
    metrics."""
    dice = random.Random(seed)
    keep, keep_every = dice.randint(1, 3), dice.choice((0, 8))
    options: dict[str, Any] = {"keep": keep, "keep_every": keep_every, "permanent": frozenset({6})}
    ours, logged, retained = checkpoints(tmp_path, **options), dict[int, float](), set[int | None]()
    for step in range(2, 34, 2):
        numbers = [round(dice.random(), 1) for _ in range(6)]
        metric = dice.choice((None, math.nan, math.inf, -math.inf, *numbers))
        ours.save(snapshot(step), metric=metric)
        ours.wait()
        if metric is not None and math.isfinite(metric):
            logged[step] = metric
        best = min(logged, key=lambda at: (logged[at], at), default=None)
        retained.add(step)
        every = {at for at in retained if keep_every and at % keep_every == 0}
        retained &= {*sorted(retained)[-keep:], *every, 6, best}
        assert steps(tmp_path) == sorted(retained)
        assert json.loads((tmp_path / "latest").read_bytes())["step"] == step
        best_snapshot = ours.best()
        assert (best_snapshot and best_snapshot.step) == best
        if best is not None:
            assert is_snapshot(best_snapshot, best)
            pointer = json.loads((tmp_path / "best").read_bytes())
            assert pointer == {"step": best, "metric": logged[best]}
        if dice.random() < 0.3:  # a new process
            ours.close()
            ours = checkpoints(tmp_path, **options)
            assert is_snapshot(ours.newest(), step)
    ours.close()
    assert not [name for name in names(tmp_path) if name.startswith(".")]


METRICS = {4: 0.3, 8: 0.1, 12: 0.2, 16: 0.4}
WEIGHTS, STATE = (f"step-00000008/{name}" for name in ("model.safetensors", "state.json"))
BEST_DAMAGES: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "no pointer": (lambda at: (at / "best").unlink(), 8, ""),
    "a wrong pointer": (lambda at: (at / "best").write_text('{"step": 4, "metric": 0.0}'), 8, ""),
    "a torn pointer": (lambda at: (at / "best").write_text('{"step": '), 8, "best is damaged; "),
    "no best": (lambda at: shutil.rmtree(at / "step-00000008"), 12, "of step 8, is gone"),
    "damaged weights": (lambda at: zero(at / WEIGHTS), 12, f"{WEIGHTS} is damaged"),
    "a damaged state": (lambda at: zero(at / STATE), 12, "of step 8, is gone"),
}


@pytest.mark.parametrize("name", BEST_DAMAGES)
def test_the_best_is_found_whatever_its_pointer_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    damage, best, warning = BEST_DAMAGES[name]
    write(tmp_path, 4, 8, 12, 16, metrics=METRICS, keep=9)
    damage(tmp_path)
    with caplog.at_level(logging.WARNING, logger="ttrain"):
        assert is_snapshot(checkpoints(tmp_path).best(), best)
    assert bool(caplog.text) == bool(warning)
    assert warning in caplog.text


def test_final_names_the_last_step_and_named_steps_stay(tmp_path: Path) -> None:
    config, permanent = settings_of_training(tokens=5 * 96), frozenset({1, 2})
    cadence = Cadence(checkpoint=100, checkpoint_steps=permanent)

    def trainer(stop_after: int | None) -> Trainer:
        options: dict[str, Any] = {"cadence": cadence, "stop_after": stop_after}
        rows = NumberedRows(20)
        run = make_trainer(config, tiny_model(), rows, directory=tmp_path, **options)
        run.checkpoints = checkpoints(tmp_path, keep=1, permanent=permanent)
        return run

    assert trainer(3).fit().stop_reason == INTERRUPTED
    assert steps(tmp_path)[:2] == [1, 2] and not (tmp_path / "final").exists()
    assert trainer(None).fit().stop_reason == COMPLETED
    assert json.loads((tmp_path / "final").read_bytes()) == {"step": 5}
    assert {1, 2, 5} <= {*steps(tmp_path)}
    checkpoints(tmp_path).begin()
    assert not (tmp_path / "final").exists(), "a training that continues has no end yet"


def test_what_the_writer_raises_reaches_the_trainer(tmp_path: Path) -> None:
    def refuse() -> dict[str, bytes]:
        raise OSError(28, "No space left on device")

    config = settings_of_training(tokens=96)
    trainer = make_trainer(config, tiny_model(), NumberedRows(52), directory=tmp_path)
    assert trainer.checkpoints is not None
    trainer.checkpoints.files = refuse
    with pytest.raises(ArtifactError, match="No space"):
        trainer.fit()


def test_a_third_snapshot_waits_for_the_first_and_each_is_released(tmp_path: Path) -> None:
    held, released = threading.Event(), list[int]()
    ours = Checkpoints(tmp_path, files=lambda: {} if held.wait(10) else {"late": b""})

    def save(step: int) -> None:
        ours.save(dataclasses.replace(snapshot(step), release=lambda: released.append(step)))

    save(1)
    save(2)
    assert released == [], "two may be under way"
    threading.Timer(0.2, held.set).start()
    save(3)
    assert released[:1] == [1]
    ours.close()
    assert released == [1, 2, 3]


def test_a_snapshot_is_released_where_it_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    buffers, ours = SnapshotBuffers(sets=1), checkpoints(tmp_path / "file" / "checkpoints")
    for step in (1, 2):
        ours.save(buffers.take(step, {}, {}, {}))
        with pytest.raises(ArtifactError, match="a directory"):
            ours.wait()
    ours.save(buffers.take(3, {}, {}, {}))
    taken = buffers.take(4, {}, {}, {})  # waits until the writer has failed
    with pytest.raises(ArtifactError, match="a directory"):
        ours.save(taken)
    buffers.take(5, {}, {}, {})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness per thread")
def test_the_writer_gives_way_to_training(tmp_path: Path) -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    ours = Checkpoints(tmp_path, files=lambda: {"priority": b"%d" % priority()})
    ours.save(snapshot(1))
    ours.close()
    written = int((tmp_path / "step-00000001" / "priority").read_bytes())
    assert written > before or before == 19
    assert priority() == before


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("model.safetensors", lambda data, path: path.write_bytes(pickle.dumps(data))),
        ("optimizer.safetensors", torch.save),
    ],
)
def test_a_pickle_is_refused_and_not_run(tmp_path: Path, name: str, save: Any) -> None:
    """With digests that fit, as one who may write there would leave it."""
    write(tmp_path, 4)
    ran, path = tmp_path / "ran", tmp_path / "step-00000004" / name
    save(Malicious(ran), path)
    entry = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    change_state(path.parent, lambda files: files.update({name: entry}))
    with pytest.raises(ArtifactError, match=str(path)):
        checkpoints(tmp_path).newest()
    assert not ran.exists()
    pickle.loads(pickle.dumps(Malicious(ran)))
    assert ran.exists(), "the pickle does run where it is loaded"


def test_the_end_finishes_what_a_killed_writer_of_the_last_step_left(tmp_path: Path) -> None:
    """The run that continues there has no step to make, and writes no checkpoint."""
    write(tmp_path, 4, 8, 12, metrics={12: 0.5})
    whole = names(tmp_path)
    shutil.copytree(tmp_path / "step-00000008", tmp_path / "step-00000004")  # not pruned yet
    (tmp_path / "best").unlink()
    (tmp_path / "step-00000012").rename(tmp_path / ".writing-00000012")
    checkpoints(tmp_path).end(12)
    assert names(tmp_path) == sorted([*whole, "final"])
