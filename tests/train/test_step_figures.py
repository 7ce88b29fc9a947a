"""Figures that stay on the device until a logging step: the same training, and no step waits for
the device."""

import math
from pathlib import Path
from typing import Any

import pytest
from support.comparing import copies, distance
from support.tiny_data import NumberedRows
from support.tiny_trainers import Recorder, WatchedTask, make_trainer, tiny_model
from support.tiny_trainers import settings_of_training as settings_of

from ttrain.config import Optim
from ttrain.train import checkpoint
from ttrain.train.step_figures import NonFinite
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence, Speed

READ, DEFERRED = Speed(), Speed(defer=True)


def trainer_of(
    how: Speed, directory: Path | None = None, kind: Any = "adamw", spoilt: Any = (), **changes: Any
) -> tuple[Trainer, Recorder]:
    config = settings_of(tokens=10 * 96, optim=Optim(kind=kind, lr=1e-2), **changes)
    model, recorder, rows = tiny_model(layers=1), Recorder(), NumberedRows(13)
    task = WatchedTask(config, model, lambda passes: math.inf if passes in spoilt else 1.0)
    options: dict[str, Any] = {"rows_per_device": 3, "how": how, "task": task}
    options |= {"callbacks": [recorder], "cadence": Cadence(log=5, checkpoint=5)}
    if directory:
        options |= {"directory": directory, "validation": [rows.batch([n]) for n in range(3)]}
    return make_trainer(config, model, rows, **options), recorder


@pytest.mark.parametrize(("kind", "rel", "limit"), [("adamw", 1e-5, 1e-4), ("muon", 2e-4, 1e-2)])
def test_deferred_figures_are_the_same(kind: str, rel: float, limit: float, tmp_path: Path) -> None:
    (read, first), (deferred, second) = (
        trainer_of(how, tmp_path / str(how.defer), kind=kind) for how in (READ, DEFERRED)
    )
    assert read.deferred is None and deferred.deferred is not None
    expected, result = read.fit(), deferred.fit()
    assert second.figures("loss") == pytest.approx(first.figures("loss"), rel=rel)
    assert second.figures("grad_norm") == pytest.approx(first.figures("grad_norm"), rel=1e-2)
    assert distance(copies(read.bare.state_dict()), copies(deferred.bare.state_dict())) < limit
    assert sorted(first.events) == sorted(second.events)
    names = ("step", "stop_reason", "live_tokens", "skipped_steps")
    assert [getattr(expected, name) for name in names] == [getattr(result, name) for name in names]
    assert result.loss == pytest.approx(expected.loss, rel=2e-4)
    assert result.validation_loss is not None


def test_a_step_that_is_not_finite_is_skipped_though_it_is_read_later() -> None:
    results = []
    for how in (READ, DEFERRED):
        trainer, recorder = trainer_of(how, nonfinite="skip", spoilt=(5, 15))  # of steps 3 and 8
        skipped = trainer.fit().skipped_steps
        weights = copies(trainer.bare.state_dict())
        results.append((skipped, recorder.figures("skipped_steps"), weights))
    assert results[0][:2] == results[1][:2]
    assert results[1][0] == 2
    assert distance(results[0][2], results[1][2]) < 1e-4


def test_a_run_ends_with_the_weights_before_the_step_and_names_its_rows(tmp_path: Path) -> None:
    errors, snapshots = [], []
    for how in (READ, DEFERRED):
        trainer, _ = trainer_of(how, tmp_path / str(how.defer), nonfinite="stop", spoilt=(15,))
        with pytest.raises(NonFinite) as error:
            trainer.fit()
        snapshots.append(checkpoint.read(tmp_path / str(how.defer) / "step-00000007"))
        errors.append((error.value.step, error.value.rows))
    assert errors[0] == errors[1] and errors[1][0] == 8
    read, deferred = snapshots
    assert distance(dict(read.weights), dict(deferred.weights)) < 1e-5
    for name in ("rows", "optimizers"):
        assert read.state[name] == deferred.state[name]
