"""Nights on a real store, with real training, a real MLflow and real kills."""

import itertools
import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from support.nights import NAME, add_similar_documents
from support.pipeline_home import Cli, load_stages

from ttrain.nightly.records import NightRecord, Nights
from ttrain.store.registry import Registry

ON_CHAMPION = (
    "pretrain.schedule.kind=infinite",
    "nightly.chats=new",
    "nightly.sft_base=champion",
    "nightly.lora_base=champion",
)
RECORDS = 4  # begun, its run, decided with the held-out set, closed
SAMPLE = (3, "after")
POINTS = [
    pytest.param(*point, marks=[] if point == SAMPLE else [pytest.mark.long])
    for point in itertools.product(range(1, RECORDS + 1), ("before", "after"))
]


def nights(cli: Cli) -> list[NightRecord]:
    return list(Nights(cli.home, NAME).newest_first())


def champion(cli: Cli) -> str | None:
    registered = Registry(cli.home).champion(NAME)
    return registered.version if registered else None


def night(cli: Cli, *overrides: str) -> str:
    return cli.here("pipeline", "run", "nightly", "--engine", "none", *overrides)


def plan(cli: Cli, *overrides: str) -> Any:
    return json.loads(cli.in_process("pipeline", "plan", "nightly", "--json", *overrides))


def files_of(record: NightRecord) -> list[str]:
    return [Path(file["location"]).name for file in record.frozen.files["pretrain"]]


def manifest_of(cli: Cli, version: str, stage: str) -> Any:
    artifact = cli.home / "store" / stage / Registry(cli.home).find(NAME, version).keys[stage]
    return json.loads((artifact / "manifest.json").read_bytes())


@pytest.fixture(scope="module")
def first(finished: Cli, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A pipeline whose first night found all stages finished by a run, and became champion."""
    root = tmp_path_factory.mktemp("nights")
    data = shutil.copytree(finished.data, root / "data")
    cli = Cli(shutil.copytree(finished.home, root / "home"), data)
    load_stages()
    cli.first_output = night(cli)
    return cli


@pytest.fixture(scope="module")
def second(first: Cli) -> Cli:
    add_similar_documents(first, "docs-3", 3)
    first.output = night(first)  # type: ignore[attr-defined]
    add_similar_documents(first, "docs-4", 4)
    return first


@pytest.fixture
def copy(second: Cli, tmp_path: Path) -> Cli:
    data = shutil.copytree(second.data, tmp_path / "data")
    return Cli(shutil.copytree(second.home, tmp_path / "home"), data)


def test_the_first_night_makes_the_first_champion(first: Cli) -> None:
    record = nights(first)[-1]
    assert (record.name, record.outcome, record.is_open) == ("night-000001", "promoted", False)
    assert files_of(record) == ["docs-1.jsonl", "docs-2.jsonl"]
    assert "no champion" in first.first_output and "promoted" in first.first_output


def test_a_night_trains_on_what_is_new_is_compared_and_promotes(second: Any) -> None:
    record = nights(second)[0]
    assert (record.name, record.outcome) == ("night-000002", "promoted")
    assert files_of(record) == ["docs-3.jsonl"]
    decision = record.data["decision"]
    difference = decision["champion"] - decision["challenger"]
    assert decision["promote"] and decision["difference"] == pytest.approx(difference)
    registered = Registry(second.home).find(NAME, "2")
    assert registered.decision == decision
    assert record.data["keys"].items() <= registered.keys.items()
    assert {"pretrain", "sft"} <= record.data["keys"].keys()
    assert "champion" in second.output and "the challenger: -" in second.output
    assert (champion(second), record.data["version"]) == ("2", "2")
    outcomes = second.outcomes()
    built = {outcomes[name] for name in ("shards-pretrain", "pretrain", "evaluate", "replay")}
    assert built == {"completed"} and "of 1 earlier set" in second.output
    pages = [page.read_text() for page in second.home.glob("mlflow/**/report.html")]
    assert sum("night-000002: promoted: better by" in page for page in pages) == 1
    tracked = {name for (name,) in second.rows("mlflow", "select name from runs")}
    assert {"night-000001", "night-000002"} <= tracked
    assert not any(name.startswith("nightly-") for name in tracked)


def test_the_challenger_continues_the_champion_s_base_with_its_tokenizer(second: Any) -> None:
    before, after = (Registry(second.home).find(NAME, version) for version in ("1", "2"))
    assert before.keys["tokenizer"] == after.keys["tokenizer"]
    assert before.members["tokenizer"].version == after.members["tokenizer"].version == "1"
    files = manifest_of(second, "2", "base-model")["ingredients"]["files"]["weights"]
    weights = manifest_of(second, "1", "pretrain")["files"]["model/model.safetensors"]
    assert weights["sha256"] in [file["sha256"] for file in files]


def test_a_night_reads_a_sample_of_all_documents_that_the_champion_has_learnt(second: Any) -> None:
    rows = manifest_of(second, "2", "pretrain")["result"]["rows"]
    assert rows["rows_of_source_1"] > 0 and rows["epoch"] == round(rows["rows_of_source_0"] / 0.95)
    keys = [Registry(second.home).find(NAME, n).keys["shards-pretrain"] for n in ("1", "2")]
    assert manifest_of(second, "2", "replay")["inputs"]["learnt-0000"]["key"] == keys[0]
    shards = tuple(f"shards-pretrain/{key}" for key in keys)
    assert nights(second)[0].learnt_shards("pretrain") == shards


def test_both_are_measured_on_the_same_held_out_data_of_all_nights(second: Any) -> None:
    new = manifest_of(second, "2", "evaluate")["inputs"]
    old = manifest_of(second, "2", "evaluate-champion")["inputs"]
    same = {name for name in new if new[name]["content"] == old[name]["content"]}
    assert same >= {"documents", "chats", "domain"} and not same & {"base", "sft", "lora"}
    heldout = manifest_of(second, "2", "heldout")["result"]
    assert heldout["records"] > heldout["new"] > 0
    record = nights(second)[0].data
    records = {text["name"]: text["records"] for text in record["texts"]}
    assert record["heldout_nights"] == ["night-000001", "night-000002"]
    assert [records[name] for name in record["heldout_nights"]] == heldout["nights"]
    assert all(text["champion"] is not None and not text["lost"] for text in record["texts"])
    counted = manifest_of(second, "2", "shards-pretrain")["result"]["train"]["rows"]
    assert record["learnt"]["documents"] == counted > 0 < record["learnt"]["replayed_tokens"]


def test_a_plan_shows_what_the_next_night_reads_and_changes_nothing(second: Any) -> None:
    before = [record.data for record in nights(second)]
    planned = plan(second)
    assert planned["near_duplicates"] == {"similarity": 0.8, "earlier_sets": 2}
    assert planned["champion"] == "2"
    assert [Path(name).name for name in planned["files"]["pretrain"]] == ["docs-4.jsonl"]
    stages = {stage["name"] for stage in planned["stages"]}
    assert stages >= {"shards-pretrain", "replay", "pretrain", "evaluate-champion"}
    without = plan(second, "nightly.replay=0")["stages"]
    assert "replay" not in {stage["name"] for stage in without}
    assert [record.data for record in nights(second)] == before
    assert "leave it out" in second.here("pipeline", "plan", "nightly", "--only", "sft", code=2)


def killed(cli: Cli, number: int, when: str) -> int | None:
    """The exit code of a night killed at this rename of its record."""
    replace = Path.replace
    renames = itertools.count(1)

    def dying(path: Path, target: Path) -> Path:
        is_fatal = Path(target).name.startswith("night-") and next(renames) == number
        if is_fatal and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = replace(path, target)
        if is_fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def run() -> None:
        Path.replace = dying  # type: ignore[assignment,method-assign]  # this process ends with it
        night(cli)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture
def before_second(copy: Cli) -> Cli:
    (copy.data / "docs-4.jsonl").unlink()
    (copy.home / "nightly" / NAME / "night-000002.json").unlink()
    Registry(copy.home).rollback(NAME)
    assert champion(copy) == "1"
    return copy


@pytest.mark.soak
@pytest.mark.parametrize(("number", "when"), POINTS)
def test_a_kill_at_any_write_leads_to_the_same_end(
    before_second: Cli, number: int, when: str
) -> None:
    assert killed(before_second, number, when) == -signal.SIGKILL
    night(before_second)
    night(before_second)
    records = nights(before_second)
    assert [record.outcome for record in records] == ["nothing-new", "promoted", "promoted"]
    assert champion(before_second) == "2" and records[1].data["version"] == "2"
    versions = [registered.version for registered in Registry(before_second.home).sets(NAME)]
    assert versions == ["2", "1"], "nothing is registered twice"


@pytest.mark.long
@pytest.mark.soak
def test_the_kills_reach_every_write_of_a_record(before_second: Cli) -> None:
    assert killed(before_second, RECORDS + 1, "before") == 0


@pytest.mark.long
@pytest.mark.soak
def test_a_champion_that_was_changed_by_hand_meanwhile_is_not_replaced(copy: Cli) -> None:
    output = night(copy, *ON_CHAMPION, "nightly.deadline_hours=0.0001")
    assert "the champion, version 2, is warmed up again" in output
    registry = Registry(copy.home)
    registry.promote(NAME, "1")
    output = night(copy, *ON_CHAMPION)
    assert "version 1 became champion during the night" in output and champion(copy) == "1"
    record = nights(copy)[0]
    assert record.outcome == "kept"
    keys = registry.find(NAME, record.data["version"]).keys
    before = registry.find(NAME, "2").keys
    assert (keys["sft"], keys["lora"]) == (before["sft"], before["lora"]), "no chat was new"
    assert keys["pretrain"] != before["pretrain"]
