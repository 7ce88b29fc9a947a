"""Steps that are measured before any data is read."""

from pathlib import Path

import numpy as np
import pytest

from ttrain.config.loading import load
from ttrain.data.packing import IGNORE
from ttrain.doctor import timing
from ttrain.train import timing as steps
from ttrain.train.memory_rows import made_up_rows


@pytest.mark.parametrize("stage", ["pretrain", "lora"])
def test_a_training_is_measured_where_nothing_is_there_yet(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "SECONDS", 0.01)
    small = ["model.hidden_size=32", "model.layers=1", "model.heads=2"]
    settings = load([*small, "runtime.threads=1"]).settings
    config = getattr(settings, stage).resolved(100)
    measured = timing.measure_stage(stage, config, settings, {}, tmp_path)
    assert measured is not None and 0 < measured.row < measured.step


def test_of_made_up_chats_the_second_half_of_each_record_counts() -> None:
    batch = made_up_rows(3, 8, 100, "chats").batch([2])
    assert np.array_equal(batch.segments_BT[0], [0, 0, 0, 0, 1, 1, 1, 1])
    assert np.array_equal(batch.positions_BT[0], [0, 1, 2, 3, 0, 1, 2, 3])
    counts = batch.labels_BT[0] != IGNORE
    assert np.array_equal(counts, [0, 0, 1, 1, 0, 0, 1, 1])
    assert np.array_equal(batch.labels_BT[0][counts][:1], batch.input_ids_BT[0][3:4])
