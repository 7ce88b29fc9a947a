"""FSDP2: parts of the model on each rank, the same training, the same checkpoints."""

from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.comparing import copies, distance, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import (
    ALONE,
    Held,
    Recorder,
    WatchedTask,
    in_ranks,
    make_trainer,
    settings_of_training,
    tiny_model,
)
from torch import nn

from ttrain.errors import UsageError
from ttrain.train.compiling import CompiledLayers
from ttrain.train.distributed import Ranks
from ttrain.train.training_options import Cadence, Speed

FSDP = Speed(parallel="fsdp")


def fit(
    ranks: Ranks,
    how: Speed,
    directory: Path,
    *,
    steps: int = 6,
    stop_after: int | None = None,
    layers: int = 2,
    rows_per_device: int = 2,
) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = settings_of_training(tokens=steps * 96)
    model, recorder, rows = tiny_model(layers=layers), Recorder(), NumberedRows(13)
    trainer = make_trainer(
        config,
        model,
        rows,
        rows_per_device=rows_per_device,
        ranks=ranks,
        how=how,
        task=WatchedTask(config, model),
        callbacks=[recorder],
        cadence=Cadence(log=1, checkpoint=100),
        directory=directory,
        stop_after=stop_after,
        validation=[rows.batch([n]) for n in range(3)],
    )
    held = sum(
        p.to_local().numel() if hasattr(p, "to_local") else p.numel()
        for p in trainer.bare.parameters()
    )
    result = trainer.fit()
    weights = copies(trainer.parallel.whole(trainer.weights.state()))
    others = Held(tiny_model(layers=layers, seed=2)).state()
    trainer.parallel.load(trainer.weights.state(), others)  # as after early stopping
    return {
        "weights": weights,
        "loaded": same(others, trainer.parallel.whole(trainer.weights.state())),
        "losses": recorder.figures("loss"),
        "norms": recorder.figures("grad_norm"),
        "held": held,
        "validation": result.validation_loss,
        "first": result.resumed_from_step,
        "compiled": trainer.model.compiled,
    }


def test_sharded_ranks_train_as_one_whole_model_does_and_pass_checkpoints_to_and_fro(
    tmp_path: Path,
) -> None:
    """Sharded to step 3 and whole to the end, and the other way round: as one run of a whole model."""
    straight = fit(ALONE, Speed(), tmp_path / "straight")
    begun_whole = fit(ALONE, Speed(), tmp_path / "whole", stop_after=3)

    def work(ranks: Ranks) -> list[dict[str, Any]]:
        return [
            fit(ranks, FSDP, tmp_path / "sharded", stop_after=3),
            fit(ranks, FSDP, tmp_path / "whole"),
        ]

    (begun, ended), (_, other) = in_ranks(2, tmp_path, work)
    assert begun["held"] < 0.6 * straight["held"], "a rank holds about half of the parameters"
    assert ended["validation"] == other["validation"]
    assert begun["loaded"] and ended["loaded"], "whole weights into the parts of each rank"
    for first, second in ((begun, fit(ALONE, Speed(), tmp_path / "sharded")), (begun_whole, ended)):
        assert second["first"] == 3
        assert [*first["losses"], *second["losses"]] == pytest.approx(straight["losses"], rel=1e-5)
        assert [*first["norms"], *second["norms"]] == pytest.approx(straight["norms"], rel=1e-3)
        assert second["validation"] == pytest.approx(straight["validation"], rel=1e-5)
        assert distance(straight["weights"], second["weights"]) < 1e-4


@pytest.mark.soak  # compiling takes 8 s
def test_sharded_layers_train_as_one_whole_model_does_compiled_or_where_they_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without inductor, whose code is another test's, and on one rank also without a compiled backward pass: each layer is
    compiled in place, within what gathers it. One layer and few shapes, since compiling takes most of the time."""
    size, compile_module = {"steps": 2, "layers": 1, "rows_per_device": 3}, nn.Module.compile

    def fail(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    def both(ranks: Ranks) -> list[dict[str, Any]]:
        found = []
        for backend in (fail, "aot_eager" if ranks.first else "eager"):
            monkeypatch.setattr(
                nn.Module, "compile", partialmethod(compile_module, backend=backend)
            )
            how = Speed(parallel="fsdp", compile=True)
            found.append(fit(ranks, how, tmp_path / f"{len(found)}", **size))
        return found

    whole = fit(ALONE, Speed(), tmp_path / "alone", **size)
    failed, compiled = in_ranks(2, tmp_path, both, seconds=240, compiles=True)[0]
    assert (whole["compiled"], failed["compiled"], compiled["compiled"]) == (False, False, True)
    for found in (failed, compiled):
        assert found["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(whole["norms"], rel=1e-4)
        assert found["validation"] == pytest.approx(whole["validation"], rel=1e-5)
        assert distance(whole["weights"], found["weights"]) < 1e-4, "under the same names, too"


def test_where_a_replica_cannot_be_compiled_none_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))

    def kept(ranks: Ranks) -> tuple[bool, bool]:
        layers = CompiledLayers(layer := nn.Linear(2, 2))
        attempt = Mock(side_effect=RuntimeError("no compiler here") if ranks.rank == 1 else None)
        found = layers.keep(attempt, ranks, sharded=False)
        with layers.used():
            return found, layer._compiled_call_impl is not None

    assert in_ranks(2, tmp_path, kept, compiles=True) == [(False, False)] * 2


def test_a_sharded_pass_that_ends_while_it_is_compiled_is_an_error_and_not_a_training_with_wrong_gradients() -> (
    None
):
    attempt = Mock(side_effect=RuntimeError("in the backward pass"))
    with pytest.raises(UsageError, match=r"backward pass.*runtime\.compile=false"):
        CompiledLayers(nn.Linear(2, 2)).keep(attempt, ALONE, sharded=True)
