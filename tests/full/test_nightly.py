"""Nights on a real store, with real training, a real MLflow and real kills."""

import itertools
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.nights import NAME, add_similar_documents
from support.pipeline_home import Cli, load_stages

from ttrain.nightly.records import NightRecord, Nights
from ttrain.store.registry import Registry

NONE = ("--engine", "none")


def nights(cli: Cli) -> list[NightRecord]:
    return list(Nights(cli.home, NAME).newest_first())


def champion(cli: Cli) -> str | None:
    found = Registry(cli.home).champion(NAME)
    return found.version if found else None


def night(cli: Cli, *overrides: str, code: int = 0) -> str:
    return cli.here("pipeline", "run", "nightly", *NONE, *overrides, code=code)


def files_of(one: NightRecord) -> list[str]:
    return [Path(file["location"]).name for file in one.frozen.files["pretrain"]]


def manifest_of(cli: Cli, version: str, stage: str) -> Any:
    artifact = cli.home / "store" / stage / Registry(cli.home).find(NAME, version).keys[stage]
    return json.loads((artifact / "manifest.json").read_bytes())


@pytest.fixture(scope="module")
def house(finished: Cli, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A pipeline whose first night found all its stages finished by an ordinary run, and became champion."""
    root = tmp_path_factory.mktemp("nights")
    shutil.copytree(finished.data, root / "data")
    shutil.copytree(finished.home, root / "home")
    cli = Cli(root / "home", root / "data")
    load_stages()
    cli.first_output = cli.here("pipeline", "run", "nightly", *NONE)
    return cli


@pytest.fixture(scope="module")
def second(house: Cli) -> Cli:
    add_similar_documents(house, "docs-3", 3)
    house.output = house.here("pipeline", "run", "nightly", *NONE)  # type: ignore[attr-defined]
    add_similar_documents(house, "docs-4", 4)
    return house


@pytest.fixture
def copy(second: Cli, tmp_path: Path) -> Callable[[], Cli]:
    def copied() -> Cli:
        shutil.copytree(second.data, tmp_path / "data")
        shutil.copytree(second.home, tmp_path / "home")
        return Cli(tmp_path / "home", tmp_path / "data")

    return copied


def test_the_first_night_makes_the_first_champion(house: Cli) -> None:
    first = nights(house)[-1]
    assert (first.name, first.outcome, first.is_open) == ("night-000001", "promoted", False)
    assert files_of(first) == ["docs-1.jsonl", "docs-2.jsonl"]
    assert "there is no champion yet" in house.first_output and "promoted" in house.first_output


def test_a_night_trains_on_what_is_new_is_compared_and_promotes(second: Any) -> None:
    found = nights(second)[0]
    assert (found.name, found.outcome, files_of(found)) == (
        "night-000002",
        "promoted",
        ["docs-3.jsonl"],
    )
    decision = found.data["decision"]
    assert decision["promote"] and decision["difference"] == pytest.approx(
        decision["champion"] - decision["challenger"]
    )
    registered = Registry(second.home).find(NAME, "2")
    assert registered.decision == decision
    assert (
        found.data["keys"].items() <= registered.keys.items()
        and {"pretrain", "sft"} <= found.data["keys"].keys()
    )
    assert "champion" in second.output and "the challenger: -" in second.output
    outcomes = {stage["name"]: stage["outcome"] for stage in second.runs()[0]["stages"]}
    assert {outcomes[name] for name in ("shards-pretrain", "pretrain", "evaluate")} == {"completed"}
    assert (champion(second), found.data["version"]) == ("2", "2")
    assert outcomes["replay"] == "completed" and "of 1 earlier set" in second.output
    pages = [page.read_text() for page in second.home.glob("mlflow/**/report.html")]
    assert sum("night-000002: promoted: better by" in page for page in pages) == 1, (
        "the page in MLflow has the decision"
    )
    tracked = {name for (name,) in second.rows("mlflow", "select name from runs")}
    assert {"night-000001", "night-000002"} <= tracked and not any(
        name.startswith("nightly-") for name in tracked
    )


def test_the_challenger_continues_the_champion_s_base_with_its_tokenizer(second: Any) -> None:
    first, found = (Registry(second.home).find(NAME, version) for version in ("1", "2"))
    assert first.keys["tokenizer"] == found.keys["tokenizer"]
    assert first.members["tokenizer"].version == found.members["tokenizer"].version == "1"
    taken = manifest_of(second, "2", "base-model")["ingredients"]["files"]["weights"]
    weights = manifest_of(second, "1", "pretrain")["files"]["model/model.safetensors"]
    assert weights["sha256"] in [file["sha256"] for file in taken]


def test_a_night_reads_a_sample_of_all_documents_that_the_champion_has_learnt(second: Any) -> None:
    keys = Registry(second.home).find(NAME, "2").keys
    rows = manifest_of(second, "2", "pretrain")["result"]["rows"]
    assert rows["rows_of_source_1"] > 0 and rows["epoch"] == round(rows["rows_of_source_0"] / 0.95)
    first = Registry(second.home).find(NAME, "1").keys["shards-pretrain"]
    assert manifest_of(second, "2", "replay")["inputs"]["learnt-0000"]["key"] == first
    learnt = (f"shards-pretrain/{first}", f"shards-pretrain/{keys['shards-pretrain']}")
    assert nights(second)[0].learnt_shards("pretrain") == learnt


def test_both_are_measured_on_the_same_held_out_data_of_all_nights(second: Any) -> None:
    new, old = (
        manifest_of(second, "2", stage)["inputs"] for stage in ("evaluate", "evaluate-champion")
    )
    same = {name for name in new if new[name]["content"] == old[name]["content"]}
    assert same >= {"documents", "chats", "domain"} and not same & {"base", "sft", "lora"}
    heldout = manifest_of(second, "2", "heldout")["result"]
    assert heldout["records"] > heldout["new"] > 0
    night = nights(second)[0].data
    records = {text["name"]: text["records"] for text in night["texts"]}
    assert night["heldout_nights"] == ["night-000001", "night-000002"]
    assert [records[name] for name in night["heldout_nights"]] == heldout["nights"]
    assert all(text["champion"] is not None and not text["lost"] for text in night["texts"])
    counted = manifest_of(second, "2", "shards-pretrain")["result"]["train"]["rows"]
    assert night["learnt"]["documents"] == counted > 0 < night["learnt"]["replayed_tokens"]


def test_a_plan_shows_what_the_next_night_reads_and_changes_nothing(second: Any) -> None:
    before = [one.data for one in nights(second)]
    planned = json.loads(second.in_process("pipeline", "plan", "nightly", "--json"))
    assert planned["near_duplicates"] == {"similarity": 0.8, "earlier_sets": 2}
    assert planned["champion"] == "2" and [
        Path(name).name for name in planned["files"]["pretrain"]
    ] == ["docs-4.jsonl"]
    assert {stage["name"] for stage in planned["stages"]} >= {
        "shards-pretrain",
        "replay",
        "pretrain",
        "evaluate-champion",
    }
    without = json.loads(
        second.in_process("pipeline", "plan", "nightly", "--json", "nightly.replay=0")
    )
    assert "replay" not in {stage["name"] for stage in without["stages"]}
    assert [one.data for one in nights(second)] == before
    assert "leave it out" in second.here("pipeline", "plan", "nightly", "--only", "sft", code=2)


RECORDS = 4  # begun, its run, decided with the held-out set, closed
POINTS = [
    pytest.param(
        number, when, marks=[] if (number, when) == (3, "after") else [pytest.mark.long]
    )  # the sample: one
    for number in range(1, RECORDS + 1)
    for when in ("before", "after")
]


def killed(cli: Cli, number: int, when: str) -> int | None:
    """How a night ends that is killed at that rename of its record; of the registry: store/test_model_registry."""
    replace, renames = Path.replace, itertools.count(1)

    def dying(path: Path, target: Path) -> Path:
        is_fatal = Path(target).name.startswith("night-") and next(renames) == number
        if is_fatal and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = replace(path, target)
        if is_fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def run() -> None:
        Path.replace = dying  # type: ignore[assignment,method-assign]  # this process ends with the night
        night(cli)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture
def before_second(copy: Callable[[], Cli]) -> Cli:
    cli = copy()
    (cli.data / "docs-4.jsonl").unlink()
    (cli.home / "nightly" / NAME / "night-000002.json").unlink()
    Registry(cli.home).rollback(NAME)
    assert champion(cli) == "1"
    return cli


@pytest.mark.soak
@pytest.mark.parametrize(("number", "when"), POINTS)
def test_a_kill_between_any_two_writes_leads_to_the_same_end(
    before_second: Cli, number: int, when: str
) -> None:
    cli = before_second
    assert killed(cli, number, when) == -signal.SIGKILL
    night(cli)
    night(cli)
    outcomes = [one.outcome for one in nights(cli)]
    assert outcomes == ["nothing-new", "promoted", "promoted"]
    assert champion(cli) == "2" and nights(cli)[1].data["version"] == "2"
    assert [one.version for one in Registry(cli.home).sets(NAME)] == [
        "2",
        "1",
    ]  # nothing is registered twice


@pytest.mark.long
@pytest.mark.soak
def test_the_kills_reach_every_write_of_a_record(before_second: Cli) -> None:
    assert killed(before_second, RECORDS + 1, "before") == 0


ON_CHAMPION = (
    "pretrain.schedule.kind=infinite",
    "nightly.chats=new",
    "nightly.sft_base=champion",
    "nightly.lora_base=champion",
)


@pytest.mark.long
@pytest.mark.soak
def test_a_champion_that_was_changed_by_hand_meanwhile_is_not_replaced(
    copy: Callable[[], Cli],
) -> None:
    cli = copy()
    assert "the champion, version 2, is warmed up again" in night(
        cli, *ON_CHAMPION, "nightly.deadline_hours=0.0001"
    )
    Registry(cli.home).promote(NAME, "1")
    said = night(cli, *ON_CHAMPION)
    assert "version 1 became champion during the night" in said and champion(cli) == "1"
    assert nights(cli)[0].outcome == "kept"
    keys, before = (
        Registry(cli.home).find(NAME, version).keys
        for version in (nights(cli)[0].data["version"], "2")
    )
    assert (keys["sft"], keys["lora"]) == (before["sft"], before["lora"]), "no chat was new"
    assert keys["pretrain"] != before["pretrain"]
