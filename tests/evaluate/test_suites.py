"""Suites: what they say is checked by name, they count by the bytes of their files, and each model has its own."""

from pathlib import Path
from typing import Any

import pytest
from support.planned_homes import remember_modules

from ttrain.config import Settings
from ttrain.config.loading import load
from ttrain.engine import planner as plan
from ttrain.engine.input_files import data_files
from ttrain.errors import UsageError
from ttrain.evaluate import suites
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import EVALUATE, EVALUATE_CHAMPION

ROW = '{"question": "1 + 1 =", "choices": ["2", "3"], "answer": 0}\n'
SUITE = "tasks:\n  sums: {kind: choices, file: sums.jsonl, shots: 1, shots_file: shots/shots.jsonl}\n  prose: {kind: text}\n"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write(tmp_path / "mine")


def write(directory: Path, suite: str = SUITE, row: str = ROW) -> Path:
    (directory / "shots").mkdir(parents=True)
    (directory / "sums.jsonl").write_text(row)
    (directory / "shots" / "shots.jsonl").write_text(ROW)
    (directory / "mine.yaml").write_text(suite)
    return directory / "mine.yaml"


def settings(*overrides: str) -> Settings:
    return load(overrides, environment={}).settings


CHOICES = {"kind": "choices", "file": "x"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "tasks is missing"),
    ({"task": {}}, "task is not a setting there"),
    (
        {"tasks": {"a b": {"kind": "text"}}},
        'a task is called "a b"; take letters, digits, _, - and ., such as poems-2',
    ),
    (
        {"tasks": {"a": {"file": "x"}}},
        "tasks.a is without a kind, which must be one of text, chats, pairs, choices",
    ),
    (
        {"tasks": {"a": {"kind": "chooses"}}},
        "tasks.a is of kind chooses, but must be of one of 'text', 'chats'",
    ),
    ({"tasks": {"a": {"kind": "choices"}}}, "tasks.a.choices.file is missing"),
    ({"tasks": {"a": {**CHOICES, "shot": 1}}}, "tasks.a.choices.shot is not a setting there"),
    (
        {"tasks": {"a": {**CHOICES, "shots": -1}}},
        "tasks.a.choices.shots is -1 but must be at least 0",
    ),
    (
        {"tasks": {"a": {**CHOICES, "template": "x"}}},
        "tasks.a.choices.template is 'x' but must be text that matches",
    ),
    (
        {"tasks": {"a": {"kind": "text", "stride": 300}}},
        "stride is 300 but must not exceed row_length 256",
    ),
]


def test_what_is_wrong_is_named_with_its_task_and_a_cure() -> None:
    for tree, said in WRONG:
        with pytest.raises(UsageError) as caught:
            suites.checked(tree, "mine.yaml")
        assert str(caught.value).startswith("mine.yaml: ") and said in str(caught.value), tree


def test_the_suites_that_ship_read_no_file_but_themselves_and_are_named_where_there_is_none(
    tmp_path: Path,
) -> None:
    for loaded in map(suites.load, suites.names()):
        assert suites.files_of(loaded) == [loaded.file]
    with pytest.raises(UsageError, match="there is no suite 'heldot'; did you mean heldout"):
        suites.load("heldot")
    with pytest.raises(
        UsageError,
        match=r"there is no suite file .*; create it, or use one of chinese, english, heldout",
    ):
        suites.load(str(tmp_path / "none.yaml"))


def test_the_files_of_a_suite_lie_beside_it_and_one_that_is_missing_is_named(written: Path) -> None:
    names = ["mine.yaml", "sums.jsonl", "shots/shots.jsonl"]
    assert suites.files_of(suites.load(str(written))) == [written.parent / name for name in names]
    (written.parent / "sums.jsonl").unlink()
    with pytest.raises(
        UsageError, match=r"sums\.file is sums\.jsonl, but there is no file .*mine/sums\.jsonl"
    ):
        suites.files_of(suites.load(str(written)))


def key(store: ArtifactStore, *overrides: str) -> str:
    return plan.key_of(plan.ingredients_of(EVALUATE, settings(*overrides), store, {}))


def test_a_suite_counts_by_the_bytes_of_all_its_files_and_by_the_models_it_is_for(
    tmp_path: Path, written: Path
) -> None:
    remember_modules(tmp_path / "home")
    store = ArtifactStore(tmp_path / "home")
    plain, whole = key(store), key(store, f"evaluate.suites={written}")
    moved = write(tmp_path / "elsewhere")
    assert whole == key(store, f"evaluate.suites={moved}") != plain
    other_rows = write(tmp_path / "rows", row=ROW.replace("1 + 1", "2 + 0"))
    other_tasks = write(tmp_path / "tasks", suite=SUITE.replace("shots: 1", "shots: 2"))
    keys = {
        plain,
        whole,
        key(store, f"evaluate.suites.sft={written}"),
        key(store, f"evaluate.suites.lora={written}"),
    }
    keys |= {key(store, f"evaluate.suites={path}") for path in (other_rows, other_tasks)}
    assert len(keys) == 6


def test_a_suite_that_cannot_be_used_is_told_with_the_plan(written: Path) -> None:
    (written.parent / "sums.jsonl").unlink()
    for stage in (EVALUATE, EVALUATE_CHAMPION):
        with pytest.raises(UsageError, match=r"sums\.file is sums\.jsonl"):
            data_files(stage, settings(f"evaluate.suites.sft={written}"))
    told = r"heldout: chats\.file is chats, but the model's own run held out no chats; set it to a file"
    with pytest.raises(UsageError, match=told):
        data_files(EVALUATE, settings("evaluate.suites=heldout", "lora.start_from=pretrain"))
    assert set(data_files(EVALUATE, settings("evaluate.suites=heldout"))) == {
        "suites-base",
        "suites-sft",
        "suites-lora",
    }
