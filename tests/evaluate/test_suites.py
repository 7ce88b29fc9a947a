"""Suites: a wrong setting is named, and a key has the bytes of all files that a suite reads."""

from pathlib import Path
from typing import Any

import pytest
from support.planned_homes import remember_modules

from ttrain.config import Settings
from ttrain.config.loading import load
from ttrain.engine import planner
from ttrain.engine.input_files import data_files
from ttrain.errors import UsageError
from ttrain.evaluate import suites
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import EVALUATE, EVALUATE_CHAMPION

ROW = '{"question": "1 + 1 =", "choices": ["2", "3"], "answer": 0}\n'
SUITE = """
tasks:
  sums: {kind: choices, file: sums.jsonl, shots: 1, shots_file: shots.jsonl}
  prose: {kind: text}
"""
CHOICES = {"kind": "choices", "file": "x"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "tasks is missing"),
    ({"task": {}}, "task is"),
    ({"tasks": {"a b": {"kind": "text"}}}, "a b"),
    ({"tasks": {"a": {"file": "x"}}}, "tasks.a is without a kind"),
    ({"tasks": {"a": {"kind": "chooses"}}}, "tasks.a is of kind chooses"),
    ({"tasks": {"a": {**CHOICES, "shots": -1}}}, "tasks.a.choices.shots is -1"),
    ({"tasks": {"a": {**CHOICES, "template": "x"}}}, "tasks.a.choices.template is 'x'"),
    ({"tasks": {"a": {"kind": "text", "stride": 300}}}, "stride is 300 .* row_length 256"),
]


def write(directory: Path, suite: str = SUITE, row: str = ROW) -> Path:
    directory.mkdir()
    (directory / "sums.jsonl").write_text(row)
    (directory / "shots.jsonl").write_text(ROW)
    (directory / "mine.yaml").write_text(suite)
    return directory / "mine.yaml"


def settings(*overrides: str) -> Settings:
    return load(overrides, environment={}).settings


@pytest.mark.parametrize(("tree", "error"), WRONG)
def test_a_wrong_setting_is_named_with_its_task(tree: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=f"^mine.yaml: .*{error}"):
        suites.checked(tree, "mine.yaml")


def test_the_suites_that_ship_read_no_file_but_themselves_and_are_suggested() -> None:
    for loaded in map(suites.load, suites.names()):
        assert suites.files_of(loaded) == [loaded.file]
    with pytest.raises(UsageError, match=r"'heldot'.* heldout"):
        suites.load("heldot")


def test_the_files_of_a_suite_lie_beside_it_and_a_missing_one_is_named(tmp_path: Path) -> None:
    suite = write(tmp_path / "mine")
    files = [suite.parent / name for name in ("mine.yaml", "sums.jsonl", "shots.jsonl")]
    assert suites.files_of(suites.load(str(suite))) == files
    files[1].unlink()
    for stage in (EVALUATE, EVALUATE_CHAMPION):
        with pytest.raises(UsageError, match=r"sums\.file.*mine/sums\.jsonl"):
            data_files(stage, settings(f"evaluate.suites.sft={suite}"))


def test_the_key_has_the_files_and_models_of_suites(tmp_path: Path) -> None:
    remember_modules(tmp_path / "home")
    store = ArtifactStore(tmp_path / "home")

    def key(*overrides: str) -> str:
        ingredients = planner.ingredients_of(EVALUATE, settings(*overrides), store, {})
        return planner.key_of(ingredients)

    suite, moved = write(tmp_path / "mine"), write(tmp_path / "moved")
    changed_rows = write(tmp_path / "rows", row=ROW.replace("1 + 1", "2 + 0"))
    changed_tasks = write(tmp_path / "tasks", suite=SUITE.replace("shots: 1", "shots: 2"))
    assert key(f"evaluate.suites={suite}") == key(f"evaluate.suites={moved}")
    different = (f"={suite}", f".sft={suite}", f".lora={suite}")
    different = (*different, f"={changed_rows}", f"={changed_tasks}")
    keys = {key(), *(key(f"evaluate.suites{value}") for value in different)}
    assert len(keys) == 6


def test_a_held_out_part_that_no_model_has_is_refused_with_the_plan() -> None:
    with pytest.raises(UsageError, match=r"chats\.file"):
        data_files(EVALUATE, settings("evaluate.suites=heldout", "lora.start_from=pretrain"))
    files = data_files(EVALUATE, settings("evaluate.suites=heldout"))
    assert set(files) == {"suites-base", "suites-sft", "suites-lora"}
