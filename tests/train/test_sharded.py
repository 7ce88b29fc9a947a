"""Any number of ranks, sharded ones too, takes the steps of one; averages of weights."""

from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support import tiny_trainers
from support.comparing import copies, digest, distance, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, PLAIN, Held, Recorder, WatchedTask, in_ranks, tiny_model
from torch import Tensor, nn

from ttrain.config import Optim, Schedule
from ttrain.errors import UsageError
from ttrain.train.averaging import MovingAverage
from ttrain.train.checkpoint import Snapshot
from ttrain.train.compiling import CompiledLayers
from ttrain.train.distributed import Ranks
from ttrain.train.optim import Optimizers
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence, Speed

FSDP = Speed(parallel="fsdp")
SCHEDULE = Schedule(kind="constant", warmup_steps=1, average=0.4)
LIVE = [16, 1, 7, 2, 16, 3, 11, 5, 1, 9, 4, 2, 13]
SIZES = {"tokens": 42 * 16, "tokens_per_step": 7 * 16, "optim": Optim(lr=1e-2, clip=1e9)}
CONFIG = tiny_trainers.settings_of_training(schedule=SCHEDULE, **SIZES)


def fit(ranks: Ranks, how: Speed = FSDP, **options: Any) -> dict[str, Any]:
    """13 rows, 7 a step, one a micro-batch; the sixth and last step has 5."""
    seed = 1 if how == FSDP else 1 + ranks.rank  # rank 0's weights count where all are whole
    model = tiny_model(seed=seed, dropout=0.1)
    task, recorder, rows = WatchedTask(CONFIG, model), Recorder(), NumberedRows(13, live=LIVE)
    options |= {"task": task, "callbacks": [recorder], "ranks": ranks, "how": how}
    options |= {"rows_per_device": 1, "total_rows": 40, "cadence": Cadence(log=1, checkpoint=100)}
    validation = [rows.batch([n]) for n in range(3)]
    trainer = tiny_trainers.make_trainer(CONFIG, model, rows, validation=validation, **options)
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.bare.parameters()]
    result, whole = trainer.fit(), trainer.parallel.whole
    weights = copies(whole(trainer.weights.state()))
    others = Held(tiny_model(seed=2)).state()
    trainer.parallel.load(trainer.weights.state(), others)  # as after early stopping
    assert task.optimizers is not None
    return {
        "weights": weights,
        "loaded": same(others, whole(trainer.weights.state())),
        "gradients": [whole(gradients) for gradients in task.optimizers.gradients],
        "losses": recorder.figures("loss"),
        "compiled": recorder.figures("compiled"),
        "norms": recorder.figures("grad_norm"),
        "rows": recorder.rows(),
        "held": sum(part.numel() for part in parts),
        "validation": result.validation_loss,
        "step": result.step,
        "first": result.resumed_from_step,
    }


def test_any_number_of_ranks_continues_one_run(tmp_path: Path) -> None:
    straight, place, stores = fit(ALONE, PLAIN), tmp_path / "checkpoints", tmp_path / "stores"
    begun = in_ranks(2, stores, lambda ranks: fit(ranks, PLAIN, directory=place, stop_after=2))[0]
    alone = fit(ALONE, PLAIN, directory=place, stop_after=1)
    assert (begun["first"], alone["first"], alone["step"]) == (0, 2, 3)
    three = in_ranks(3, stores, lambda ranks: fit(ranks, PLAIN, directory=place))
    for rank in three:
        assert digest(rank["weights"]) == digest(three[0]["weights"])
        # The weights are equal, and so are the gradients.
        assert distance(straight["gradients"][3], rank["gradients"][0]) < 1e-6
    assert (three[0]["first"], three[0]["step"]) == (3, 6)
    assert three[0]["losses"] == pytest.approx(straight["losses"][3:], rel=1e-5)
    assert begun["rows"] | alone["rows"] | three[0]["rows"] == straight["rows"]
    consumed = np.concatenate([straight["rows"][step] for step in sorted(straight["rows"])])
    for epoch in range(3):
        assert sorted(consumed[epoch * 13 : epoch * 13 + 13]) == list(range(13))


def test_sharded_ranks_train_as_one_does_and_pass_checkpoints(tmp_path: Path) -> None:
    """Sharded to step 3 and whole to the end, and the other way round; with an average."""
    sharded, whole = tmp_path / "sharded", tmp_path / "whole"
    straight = fit(ALONE, PLAIN)
    begun_whole = fit(ALONE, PLAIN, directory=whole, stop_after=3)

    def work(ranks: Ranks) -> list[dict[str, Any]]:
        return [fit(ranks, directory=sharded, stop_after=3), fit(ranks, directory=whole)]

    (begun, ended), (_, second_rank) = in_ranks(2, tmp_path, work)
    assert begun["held"] < 0.6 * straight["held"], "a rank holds about half of the parameters"
    assert ended["validation"] == second_rank["validation"]
    assert begun["loaded"] and ended["loaded"], "whole weights into the parts of each rank"
    for first, second in ((begun, fit(ALONE, PLAIN, directory=sharded)), (begun_whole, ended)):
        assert second["first"] == 3
        assert [*first["losses"], *second["losses"]] == pytest.approx(straight["losses"], rel=1e-5)
        assert [*first["norms"], *second["norms"]] == pytest.approx(straight["norms"], rel=1e-3)
        assert second["validation"] == pytest.approx(straight["validation"], rel=1e-5)
        assert distance(straight["weights"], second["weights"]) < 1e-4


def test_where_compiling_fails_training_continues_eagerly_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **_: compiler(module, backend=broken))
    caplog.set_level("WARNING", "ttrain")
    eager = fit(ALONE, PLAIN)
    fallen = fit(ALONE, Speed(compile=True))
    assert "torch.compile" in caplog.text
    assert {*fallen["compiled"]} == {0.0}, "a number, since trackers take numbers alone"
    assert fallen["losses"] == eager["losses"]
    assert same(fallen["weights"], eager["weights"])


def test_all_replicas_are_compiled_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))

    def keep(ranks: Ranks) -> tuple[bool, bool]:
        layers = CompiledLayers(layer := nn.Linear(2, 2))
        attempt = Mock(side_effect=RuntimeError("no compiler here") if ranks.rank == 1 else None)
        layers.keep(attempt, ranks, sharded=False)
        with layers.used():
            return layers.any, layer._compiled_call_impl is not None

    assert in_ranks(2, tmp_path, keep, compiles=True) == [(False, False)] * 2


def test_a_sharded_pass_that_ends_while_it_is_compiled_is_an_error() -> None:
    """Training would continue with wrong gradients."""
    attempt = Mock(side_effect=RuntimeError("in the backward pass"))
    with pytest.raises(UsageError, match=r"backward pass.*runtime\.compile=false"):
        CompiledLayers(nn.Linear(2, 2)).keep(attempt, ALONE, sharded=True)


AVERAGED = tiny_trainers.settings_of_training(schedule=SCHEDULE, tokens=8 * 96)
ROWS = NumberedRows(60)
VALIDATION = [ROWS.batch([0, 1])]


def trainer_of(directory: Path, **options: Any) -> Trainer:
    return tiny_trainers.make_trainer(AVERAGED, tiny_model(), ROWS, directory=directory, **options)


def newest(trainer: Trainer) -> Snapshot:
    snapshot = trainer.checkpoints.newest() if trainer.checkpoints else None
    assert snapshot
    return snapshot


def averaged_steps(state: dict[str, Tensor]) -> set[int]:
    return {int(value) for name, value in state.items() if name.startswith("averaged|")}


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Any, list[Any]]:
    """A finished trainer, its result, and the weights after each step of its optimizers."""
    step, weights = Optimizers.step, list[dict[str, Tensor]]()

    def watched(optimizers: Optimizers) -> None:
        step(optimizers)
        names = optimizers.names
        weights.append({names[p]: p.detach().double().clone() for p in optimizers.parameters})

    options: dict[str, Any] = {"validation": VALIDATION, "cadence": Cadence(validate=1)}
    trainer = trainer_of(tmp_path_factory.mktemp("averaged"), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizers, "step", watched)
        return trainer, trainer.fit(), weights


def test_model_validation_and_checkpoint_hold_the_average_over_all_steps(averaged: Any) -> None:
    trainer, result, weights = averaged
    expected = weights[0]
    for number, tensors in enumerate(weights):
        kept = (1 + number) / (10 + number)  # the first steps count less
        expected = {name: kept * expected[name] + (1 - kept) * tensors[name] for name in expected}
    names = trainer.optimizers.names
    final = {names[p]: p.detach() for p in trainer.optimizers.parameters}
    assert distance(expected, final) < 1e-6 < 1e-3 < distance(weights[-1], final)
    assert result.validation_loss == trainer.model.measure(VALIDATION)[0]
    snapshot = newest(trainer)
    assert same(dict(snapshot.weights), trainer.weights.state())
    iterates = {name for name in snapshot.optimizer if name.startswith("iterate|")}
    assert iterates == {f"iterate|{name}" for name in names.values()}
    assert averaged_steps(dict(snapshot.optimizer)) == {trainer.steps}


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_half_life_is_a_share_of_the_steps_that_were_not_prevented(is_deferred: bool) -> None:
    weight = torch.zeros(1)
    average = MovingAverage({weight: "w"}, 0.5, 8)
    average.load_state({"iterate|w": torch.zeros(1), "averaged|w": torch.tensor(1000)})
    weight += 1
    for _ in range(4):
        average.update(torch.tensor(0.0) if is_deferred else None)
        if is_deferred:
            average.update(torch.tensor(1.0))
    assert int(average.state()["averaged|w"]) == 1004
    average.end()
    assert float(weight) == pytest.approx(0.5)


def test_a_training_that_was_stopped_ends_in_the_same_bits(averaged: Any, tmp_path: Path) -> None:
    whole = averaged[0]
    assert 0 < trainer_of(tmp_path, stop_after=3).fit().step < whole.steps
    second = trainer_of(tmp_path)
    assert second.first > 0
    second.fit()
    assert same(whole.weights.state(), second.weights.state())
    assert same(newest(whole).weights, newest(second).weights)
    assert same(newest(whole).optimizer, newest(second).optimizer)


def test_another_training_continues_the_average(averaged: Any) -> None:
    snapshot = newest(averaged[0])
    plateau = Snapshot(0, snapshot.weights, snapshot.optimizer, {})
    trainer = tiny_trainers.make_trainer(AVERAGED, tiny_model(seed=3), ROWS, plateau=plateau)
    assert averaged_steps(dict(trainer.model.average.state())) == {averaged[0].steps}
