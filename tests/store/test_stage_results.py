"""Results of stages as those who read an artifact get them."""

from dataclasses import fields
from pathlib import Path

from support.tiny_stages import Home, stage_settings

from ttrain.store.results import TrainingResult

ONLY_WITH_AUTO = {"by_rule"}


def test_a_training_writes_every_value_that_its_result_has(tmp_path: Path) -> None:
    figures = Home.make(tmp_path / "home").pretrain(stage_settings(2), tmp_path / "out")
    assert {each.name for each in fields(TrainingResult)} - figures.keys() == ONLY_WITH_AUTO
    assert TrainingResult.of(figures).steps == 2
