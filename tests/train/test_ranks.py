"""Two ranks equal one: processes of their own, over gloo."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.comparing import digest, distance
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, Recorder, WatchedTask, in_ranks, make_trainer, tiny_model
from support.tiny_trainers import settings_of_training as settings_of

from ttrain.errors import RankLost
from ttrain.model import factory
from ttrain.train.distributed import Ranks
from ttrain.train.snapshots import copy_tensors
from ttrain.train.training_options import Cadence

STEPS = 4
CONFIG, FP16 = settings_of(tokens=STEPS * 96), settings_of(tokens=STEPS * 96, precision="fp16")
WIDE = settings_of(tokens=STEPS * 256, tokens_per_step=256, row_length=64)
UNEVEN = [60, 5, 30, 2, 1, 64, 8, 3, 17, 40, 2, 9, 11]
OVERFLOW, STOP = "fp16 that overflows on one rank", "a stop that one rank was asked for"
# name: options of `fit`; steps have six rows unless `config` says otherwise
AS_ONE: dict[str, dict[str, Any]] = {
    "odd number of micro-batches": {"rows_per_device": 2, "dropout": 0.1},
    "a rank without rows": {"rows_per_device": 6},
    "last step of one row": {"rows_per_device": 2, "total_rows": 19},
    "uneven targets": {"rows_per_device": 1, "live": UNEVEN, "config": WIDE},
}
CASES = AS_ONE | {
    OVERFLOW: {"rows_per_device": 2, "config": FP16, "spoilt_rank": 1},
    STOP: {"rows_per_device": 2, "config": settings_of(tokens=8 * 96), "stop_rank": 1},
}


def fit(
    directory: Path,
    ranks: Ranks,
    config: Any = CONFIG,
    live: list[int] | None = None,
    dropout: float = 0.0,
    spoilt_rank: int | None = None,
    stop_rank: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train on this rank, and return its figures."""
    rows, is_spoilt = NumberedRows(13, config.row_length, live), spoilt_rank == ranks.rank
    model = tiny_model(seed=1 + 7 * ranks.rank, dropout=dropout)  # rank 0's weights count
    recorder = Recorder()
    options |= {"callbacks": [recorder], "cadence": Cadence(log=1, checkpoint=100), "ranks": ranks}
    options |= {"directory": directory / "checkpoints"} if stop_rank else {}
    options |= {"stop_after": 3} if stop_rank == ranks.rank else {}
    task = WatchedTask(config, model, lambda n: math.inf if is_spoilt and n == 2 else 1.0)
    validation = [rows.batch(numbers) for numbers in (range(6), range(6, 11), range(11, 13))]
    trainer = make_trainer(config, model, rows, task=task, validation=validation, **options)
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

    def work(ranks: Ranks) -> dict[str, Any]:
        return {name: fit(root / name, ranks, **options) for name, options in CASES.items()}

    results = in_ranks(2, root / "ranks", work)
    return root, {name: [rank[name] for rank in results] for name in CASES}


@pytest.mark.parametrize("name", AS_ONE)
def test_two_ranks_equal_one(two: Any, tmp_path: Path, name: str) -> None:
    root, results = two
    first, alone = results[name][0], fit(tmp_path, ALONE, **CASES[name])
    assert len(first["losses"]) == STEPS
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert first["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert first["validation"] == pytest.approx(alone["validation"], rel=1e-5)
    assert first["live"] == alone["live"]
    weights = (load_file(path / "weights.safetensors") for path in (tmp_path, root / name))
    assert distance(*weights) < 1e-4


def test_both_ranks_have_the_same_bits_and_rank_0_alone_calls_callbacks(two: Any) -> None:
    for name, (first, second) in two[1].items():
        assert first["events"] > 0 == second["events"], name
        for figure in ("digest", "step", "reason", "skipped", "scale", "live", "validation"):
            assert first[figure] == second[figure], (name, figure)


def test_both_ranks_follow_the_overflow_and_the_stop_of_one(two: Any) -> None:
    root, results = two
    for rank in results[OVERFLOW]:
        assert (rank["skipped"], rank["scale"], rank["step"]) == (1, 2.0**15, STEPS)
    assert [(rank["reason"], rank["step"]) for rank in results[STOP]] == [("interrupted", 3)] * 2
    assert [path.name for path in (root / STOP / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_a_rank_that_fails_takes_the_other_with_it(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        def end(passes: int) -> float:
            if passes == 2 and not ranks.first:
                os._exit(8)  # without a word
            return 1.0

        task = WatchedTask(CONFIG, model := tiny_model(), end)
        options: dict[str, Any] = {"rows_per_device": 3, "ranks": ranks, "task": task}
        with pytest.raises(RankLost) as lost:
            make_trainer(CONFIG, model, NumberedRows(13), **options).fit()
        (tmp_path / "message").write_text(str(lost.value))
        os._exit(7)  # the other one does not come to leave

    with pytest.raises(AssertionError):
        in_ranks(2, tmp_path / "ranks", work)
    assert (tmp_path / "message").read_text().startswith("another rank ended while rank 0 was")
