"""Two ranks equal one: processes of their own, over gloo."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.comparing import digest, distance
from support.tiny_data import NumberedRows
from support.tiny_trainers import (
    ALONE,
    Recorder,
    WatchedTask,
    in_ranks,
    make_trainer,
    settings_of_training,
    tiny_model,
)

from ttrain.config import Training
from ttrain.errors import RankLost
from ttrain.model import factory
from ttrain.train.distributed import Ranks
from ttrain.train.snapshots import copy_tensors
from ttrain.train.training_options import Cadence

STEPS = 4
UNEVEN = [60, 5, 30, 2, 1, 64, 8, 3, 17, 40, 2, 9, 11]


def training(**changes: Any) -> Training:
    return settings_of_training(**{"tokens": STEPS * 96, **changes})


# name: options of `fit`; steps have six rows where nothing else is said
CASES: dict[str, dict[str, Any]] = {
    "odd number of micro-batches": {"rows_per_device": 2, "dropout": 0.1},
    "a rank without rows": {"rows_per_device": 6},
    "last step of one row": {"rows_per_device": 2, "total_rows": 19},
    "uneven targets": {
        "rows_per_device": 1,
        "live": UNEVEN,
        "config": training(tokens=STEPS * 256, tokens_per_step=256, row_length=64),
    },
    "fp16 that overflows on one rank": {
        "rows_per_device": 2,
        "config": training(precision="fp16"),
        "spoilt_rank": 1,
    },
    "a stop that one rank was asked for": {
        "rows_per_device": 2,
        "stop_rank": 1,
        "checkpoints": True,
        "config": training(tokens=8 * 96),
    },
}
AS_ONE = [name for name in CASES if "overflows" not in name and "stop" not in name]


def fit(
    directory: Path,
    ranks: Ranks,
    *,
    rows_per_device: int,
    config: Training | None = None,
    live: list[int] | None = None,
    dropout: float = 0.0,
    total_rows: int | None = None,
    spoilt_rank: int | None = None,
    stop_rank: int | None = None,
    checkpoints: bool = False,
) -> dict[str, Any]:
    """Train on this rank; returns what it saw."""
    config = config or training()
    rows = NumberedRows(13, config.row_length, live)
    model = tiny_model(
        seed=1 + 7 * ranks.rank, dropout=dropout
    )  # ranks begin with different weights: rank 0's count
    if ranks.world == 1:
        model = tiny_model(dropout=dropout)
    recorder = Recorder()
    spoilt = spoilt_rank == ranks.rank
    trainer = make_trainer(
        config,
        model,
        rows,
        rows_per_device=rows_per_device,
        total_rows=total_rows,
        ranks=ranks,
        callbacks=[recorder],
        directory=directory / "checkpoints" if checkpoints else None,
        cadence=Cadence(log=1, checkpoint=100),
        task=WatchedTask(config, model, lambda passes: math.inf if spoilt and passes == 2 else 1.0),
        validation=[rows.batch(some) for some in (range(6), range(6, 11), range(11, 13))],
        stop_after=3 if stop_rank == ranks.rank else None,
    )
    result = trainer.fit()
    weights = copy_tensors(factory.state(model))
    if ranks.first:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(weights, directory / "weights.safetensors")
    return {
        "digest": digest(weights),
        "losses": recorder.figures("loss"),
        "norms": recorder.figures("grad_norm"),
        "events": len(recorder.events),
        "step": result.step,
        "reason": result.stop_reason,
        "skipped": result.skipped_steps,
        "validation": result.validation_loss,
        "live": result.live_tokens,
        "scale": trainer.loss_scale.scale,
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(directory, {name: [rank 0, rank 1]}) of all the cases in two processes."""
    root = tmp_path_factory.mktemp("two")
    found = in_ranks(
        2,
        root / "ranks",
        lambda ranks: {name: fit(root / name, ranks, **options) for name, options in CASES.items()},
    )
    return root, {name: [rank[name] for rank in found] for name in CASES}


@pytest.mark.parametrize("name", AS_ONE)
def test_two_ranks_equal_one(two: Any, tmp_path: Path, name: str) -> None:
    root, found = two
    first, _ = found[name]
    alone = fit(tmp_path, ALONE, **CASES[name])
    assert len(first["losses"]) == STEPS
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert first["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert first["validation"] == pytest.approx(alone["validation"], rel=1e-5)
    assert first["live"] == alone["live"]
    weights = (load_file(path / "weights.safetensors") for path in (tmp_path, root / name))
    assert distance(*weights) < 1e-4


def test_the_weights_are_equal_to_the_bit_on_both_ranks_and_rank_0_alone_tells_its_callbacks(
    two: Any,
) -> None:
    for name, (first, second) in two[1].items():
        assert first["events"] > 0 == second["events"], name
        assert first["digest"] == second["digest"], name
        for figure in ("step", "reason", "skipped", "scale", "live", "validation"):
            assert first[figure] == second[figure], (name, figure)


def test_an_overflow_of_one_rank_is_skipped_and_a_stop_that_one_is_asked_for_is_followed_by_both(
    two: Any,
) -> None:
    root, found = two
    for rank in found["fp16 that overflows on one rank"]:
        assert (rank["skipped"], rank["scale"], rank["step"]) == (1, 2.0**15, STEPS)
    name = "a stop that one rank was asked for"
    assert [(rank["reason"], rank["step"]) for rank in found[name]] == [("interrupted", 3)] * 2
    assert [path.name for path in (root / name / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_a_rank_that_fails_takes_the_other_with_it(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        def end(passes: int) -> float:
            if passes == 2 and not ranks.first:
                os._exit(8)  # without a word
            return 1.0

        config, model = training(), tiny_model()
        task = WatchedTask(config, model, end)
        trainer = make_trainer(
            config, model, NumberedRows(13), rows_per_device=3, ranks=ranks, task=task
        )
        with pytest.raises(RankLost) as lost:
            trainer.fit()
        (tmp_path / "told").write_text(str(lost.value))
        os._exit(7)  # the other one does not come to leave

    with pytest.raises(AssertionError):
        in_ranks(2, tmp_path / "ranks", work)
    assert (tmp_path / "told").read_text().startswith("another rank ended while rank 0 was")
