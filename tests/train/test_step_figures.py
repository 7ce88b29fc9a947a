"""Figures that stay on the device until a logging step: the same training, and no step waits for the device."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import copies, distance
from support.tiny_data import NumberedRows
from support.tiny_trainers import (
    Recorder,
    WatchedTask,
    make_trainer,
    settings_of_training,
    tiny_model,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ttrain.config import Optim
from ttrain.train import losses
from ttrain.train.checkpoint import Snapshot
from ttrain.train.step_figures import NonFinite
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence, Speed

DEFERRED = Speed(defer=True)
EVERY_FIVE = Cadence(log=5, checkpoint=5)


def trainer_of(
    how: Speed,
    directory: Path | None = None,
    *,
    kind: Any = "muon",
    spoilt: Any = (),
    cadence: Cadence = EVERY_FIVE,
    **changes: Any,
) -> tuple[Trainer, Recorder]:
    config = settings_of_training(
        **{"tokens": 10 * 96, "optim": Optim(kind=kind, lr=1e-2), **changes}
    )
    model, recorder, rows = tiny_model(layers=1), Recorder(), NumberedRows(13)
    task = WatchedTask(config, model, lambda passes: math.inf if passes in spoilt else 1.0)
    trainer = make_trainer(
        config,
        model,
        rows,
        rows_per_device=3,
        how=how,
        task=task,
        callbacks=[recorder],
        cadence=cadence,
        directory=directory,
        validation=[rows.batch([n]) for n in range(3)],
    )
    return trainer, recorder


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_deferred_figures_are_those_of_a_training_that_reads_every_step(
    kind: Any, tmp_path: Path
) -> None:
    found = []
    for name, how in (("read", Speed()), ("deferred", DEFERRED)):
        trainer, recorder = trainer_of(how, tmp_path / name, kind=kind)
        result = trainer.fit()
        assert (trainer._deferred is None) is (name == "read")
        events = sorted(
            (name, *map(str, rest))
            for name, *rest in recorder.events
            if name in ("start", "saved", "end")
        )
        found.append((result, copies(trainer.bare.state_dict()), recorder, events))
    (read, weights, first, events), (deferred, others, second, other_events) = found
    assert second.figures("loss") == pytest.approx(
        first.figures("loss"), rel=2e-4 if kind == "muon" else 1e-5
    )
    assert second.figures("grad_norm") == pytest.approx(first.figures("grad_norm"), rel=1e-2)
    assert distance(weights, others) < (1e-2 if kind == "muon" else 1e-4)
    assert events == other_events
    names = ("step", "stop_reason", "live_tokens", "skipped_steps")
    assert [getattr(read, name) for name in names] == [getattr(deferred, name) for name in names]
    assert (
        deferred.loss == pytest.approx(read.loss, rel=2e-4) and deferred.validation_loss is not None
    )


class Reads(TorchDispatchMode):
    """Counts the values that the host asks of the device, as `.item()` and `float()` do; on a GPU each would wait for it."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            Reads.count += 1
        return function(*args, **(kwargs or {}))


def test_no_step_between_two_logging_steps_reads_a_value_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU the loss alone asks how many tokens have a target, which it does not ask elsewhere."""
    monkeypatch.setattr(losses, "live_rows", lambda labels: torch.arange(len(labels)))
    monkeypatch.setattr(Reads, "count", 0)
    counts = {}
    for name, how in (("read", Speed()), ("deferred", DEFERRED)):
        trainer, _ = trainer_of(how, kind="muon", cadence=Cadence(log=5, checkpoint=100))
        step, counts[name] = trainer._train_step, []

        def counted(*given: Any, step: Any = step, name: str = name) -> Any:
            before = Reads.count
            with Reads():
                result = step(*given)
            counts[name].append(Reads.count - before)
            return result

        monkeypatch.setattr(trainer, "_train_step", counted)
        trainer.fit()
    assert min(counts["read"]) > 0, "the counter counts"
    assert counts["deferred"][1:4] == [0] * 3 and counts["deferred"][5:9] == [0] * 4


def test_a_step_that_is_not_finite_is_skipped_though_it_is_seen_later() -> None:
    found = []
    for how in (Speed(), DEFERRED):
        trainer, recorder = trainer_of(
            how, kind="adamw", nonfinite="skip", spoilt=(5, 15)
        )  # of steps 3 and 8
        result = trainer.fit()
        found.append(
            (
                result.skipped_steps,
                recorder.figures("skipped_steps"),
                copies(trainer.bare.state_dict()),
            )
        )
    assert found[0][:2] == found[1][:2]
    assert found[1][0] == 2
    assert distance(found[0][2], found[1][2]) < 1e-4


def test_the_run_ends_with_the_weights_before_the_step_and_names_its_rows(tmp_path: Path) -> None:
    errors, snapshots = [], list[Snapshot]()
    for name, how in (("read", Speed()), ("deferred", DEFERRED)):
        trainer, _ = trainer_of(how, tmp_path / name, kind="adamw", nonfinite="stop", spoilt=(15,))
        with pytest.raises(NonFinite) as error:
            trainer.fit()
        newest = trainer.checkpoints.newest() if trainer.checkpoints else None
        assert newest is not None
        errors.append((error.value.step, error.value.rows))
        snapshots.append(newest)
    assert errors[0] == errors[1] and errors[1][0] == 8
    assert [snapshot.step for snapshot in snapshots] == [7, 7]
    assert distance(*(dict(snapshot.weights) for snapshot in snapshots)) < 1e-5
    names = ("rows", "optimizers")
    assert [snapshots[0].state[name] for name in names] == [
        snapshots[1].state[name] for name in names
    ]
