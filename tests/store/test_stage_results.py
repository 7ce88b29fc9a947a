"""Results of stages as those who read an artifact get them."""

from dataclasses import fields
from pathlib import Path

from support.tiny_stages import Home, stage_settings

from ttrain.store.results import PartCounts, ShardsResult, TrainingResult

ONLY_WITH_AUTO = {"by_rule"}


def test_a_training_writes_every_value_that_its_result_has(tmp_path: Path) -> None:
    figures = Home.make(tmp_path / "home").pretrain(stage_settings(2), tmp_path / "out")
    assert {each.name for each in fields(TrainingResult)} - figures.keys() == ONLY_WITH_AUTO
    assert TrainingResult.of(figures).steps == 2


def test_a_result_that_lacks_a_part_counts_nothing_there() -> None:
    tally = {"rows": 5, "kept": 2, "skipped": {"empty": 1}, "rejected": {"no text": 2}}
    made = ShardsResult.of({"train": {"rows": 2, "tokens": 9, "kind": "documents"}, "rows": {"train": tally}, "files": None})
    assert (made.train, made.heldout, made.files) == (PartCounts(rows=2, tokens=9), PartCounts(), ())
    assert made.row_counts["train"].left_out == 3
