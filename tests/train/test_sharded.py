"""FSDP2: parts of the model on each rank, the same training, the same checkpoints."""

from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import tiny_trainers
from support.comparing import copies, distance, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, Held, Recorder, in_ranks, tiny_model
from torch import nn

from ttrain.errors import UsageError
from ttrain.train.compiling import CompiledLayers
from ttrain.train.distributed import Ranks
from ttrain.train.training_options import Cadence, Speed

FSDP = Speed(parallel="fsdp")


def fit(ranks: Ranks, how: Speed, directory: Path, **options: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = tiny_trainers.settings_of_training(tokens=6 * 96)
    model, recorder, rows = tiny_model(), Recorder(), NumberedRows(13)
    options |= {"rows_per_device": 2, "directory": directory, "callbacks": [recorder]}
    options |= {"ranks": ranks, "how": how, "cadence": Cadence(log=1, checkpoint=100)}
    validation = [rows.batch([n]) for n in range(3)]
    trainer = tiny_trainers.make_trainer(config, model, rows, validation=validation, **options)
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.bare.parameters()]
    result = trainer.fit()
    weights = copies(trainer.parallel.whole(trainer.weights.state()))
    others = Held(tiny_model(seed=2)).state()
    trainer.parallel.load(trainer.weights.state(), others)  # as after early stopping
    return {
        "weights": weights,
        "loaded": same(others, trainer.parallel.whole(trainer.weights.state())),
        "losses": recorder.figures("loss"),
        "norms": recorder.figures("grad_norm"),
        "held": sum(part.numel() for part in parts),
        "validation": result.validation_loss,
        "first": result.resumed_from_step,
    }


def test_sharded_ranks_train_as_one_does_and_pass_checkpoints(tmp_path: Path) -> None:
    """Sharded to step 3 and whole to the end, and the other way round."""
    sharded, whole = tmp_path / "sharded", tmp_path / "whole"
    straight = fit(ALONE, Speed(), tmp_path / "straight")
    begun_whole = fit(ALONE, Speed(), whole, stop_after=3)

    def work(ranks: Ranks) -> list[dict[str, Any]]:
        return [fit(ranks, FSDP, sharded, stop_after=3), fit(ranks, FSDP, whole)]

    (begun, ended), (_, second_rank) = in_ranks(2, tmp_path, work)
    assert begun["held"] < 0.6 * straight["held"], "a rank holds about half of the parameters"
    assert ended["validation"] == second_rank["validation"]
    assert begun["loaded"] and ended["loaded"], "whole weights into the parts of each rank"
    for first, second in ((begun, fit(ALONE, Speed(), sharded)), (begun_whole, ended)):
        assert second["first"] == 3
        assert [*first["losses"], *second["losses"]] == pytest.approx(straight["losses"], rel=1e-5)
        assert [*first["norms"], *second["norms"]] == pytest.approx(straight["norms"], rel=1e-3)
        assert second["validation"] == pytest.approx(straight["validation"], rel=1e-5)
        assert distance(straight["weights"], second["weights"]) < 1e-4


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
