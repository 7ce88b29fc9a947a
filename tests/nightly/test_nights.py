"""What a night reads, which slot is whose, what is known of the nights before: without an engine and without training."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from ttrain.config import Nightly, Settings
from ttrain.config.training import TRAINING_STAGES
from ttrain.core.files import write_json
from ttrain.data import python_docs
from ttrain.errors import ArtifactError, DataError, Interrupted, NothingNew, StageFailed, TooFewRows, UsageError
from ttrain.evaluate.task_result import record_name
from ttrain.flows import night_decision, night_plan
from ttrain.nightly import heldout, records
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import Champion, InputSnapshot, Nights, StillRunning
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

BERLIN = "Europe/Berlin"
NONE = InputSnapshot({}, {})


def frozen(*digests: str, champion: str | None = None) -> InputSnapshot:
    files = {"pretrain": [{"location": f"/inbox/{digest}.jsonl", "sha256": digest} for digest in digests]}
    return InputSnapshot(files, {}, Champion(champion, {}) if champion else None)


def at(text: str, zone: str = "UTC") -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone))


@pytest.fixture
def known(tmp_path: Path) -> Nights:
    found = Nights(tmp_path, "mine")
    found.directory.mkdir(parents=True)  # as taking the lock does
    return found


def completed(known: Nights, list_: InputSnapshot, outcome: str, version: str) -> None:
    night = known.begin(list_, None)
    night.note(version=version)
    night.end_try(outcome, "", closed=True)


# --- what became of a night ---


def test_a_list_that_ends_its_process_each_time_is_given_up_and_a_deadline_in_between_counts_anew(known: Nights) -> None:
    night = known.begin(frozen("a"), None)
    for number in range(1, 2 * records.MOST_CRASHES - 1):
        if number == records.MOST_CRASHES - 1:
            night.end_try("unfinished", "the deadline", closed=False)
        settled = known.settle()
        assert settled is not None and settled.is_open
        night = settled
        night.begin_try(None)
    settled = known.settle()
    assert settled is not None and not settled.is_open and settled.outcome == "failed"
    assert "a" not in known.read(), "the next night takes the file again"


# --- which slot is whose ---


def test_ten_late_slots_give_one_night(known: Nights) -> None:
    now = datetime.now(UTC)
    slots = [now - timedelta(days=days) for days in range(10, 0, -1)]
    ran = []
    for slot in slots:
        if known.covered(slot, None, time.time()) is None:
            known.begin(NONE, slot).end_try("kept", "", closed=True)
            ran.append(slot)
    assert ran == slots[:1]
    tomorrow = now + timedelta(days=1)
    assert known.covered(tomorrow, None, tomorrow.timestamp()) is None


def test_a_slot_that_lies_before_a_night_s_beginning_is_covered_by_it_whatever_came_of_it(known: Nights) -> None:
    slot = datetime.now(UTC) - timedelta(hours=2)
    for outcome in ("failed", "unfinished", "promoted"):
        known.begin(NONE, slot).end_try(outcome, "", closed=outcome == "promoted")
        said = known.covered(slot + timedelta(hours=1), None, time.time())
        assert said and known.newest().name in said  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("outcome", "runs"), [("failed", True), ("refused", True), ("unfinished", True), ("kept", False), ("promoted", False)]
)
def test_a_retry_of_a_slot_runs_where_it_came_to_nothing(known: Nights, outcome: str, runs: bool) -> None:
    slot = datetime.now(UTC) - timedelta(seconds=5)
    known.begin(NONE, slot).end_try(outcome, "", closed=True)
    assert (known.covered(slot, None, time.time()) is None) == runs


def test_a_night_that_somebody_asks_for_is_never_covered(known: Nights) -> None:
    known.begin(NONE, None).end_try("kept", "", closed=True)
    assert known.covered(None, None, time.time()) is None


def test_a_clock_that_ran_ahead_does_not_cover_the_slots_until_it_is_right_again(
    known: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 5 * 86400)
        known.begin(NONE, None).end_try("kept", "", closed=True)
    assert known.covered(datetime.fromtimestamp(now, UTC), None, now) is None


@pytest.mark.parametrize(("zone", "day"), [("Europe/Berlin", "2026-10-25T02:30"), ("America/New_York", "2026-11-01T01:30")])
def test_an_hour_that_comes_twice_has_one_night(known: Nights, monkeypatch: pytest.MonkeyPatch, zone: str, day: str) -> None:
    first, second = at(day, zone), at(day, zone).replace(fold=1)
    assert second.timestamp() - first.timestamp() == 3600
    monkeypatch.setattr(time, "time", lambda: first.timestamp() + 2)
    known.begin(NONE, first).end_try("kept", "", closed=True)
    said = known.covered(second.astimezone(UTC), zone, second.timestamp() + 2)
    assert said and "set back" in said
    next_day = first + timedelta(days=1)
    assert known.covered(next_day, zone, next_day.timestamp() + 2) is None
    assert known.covered(second.astimezone(UTC), "UTC", second.timestamp() + 2) is None  # a clock that is never set back


# --- deadlines ---


@pytest.mark.parametrize(
    ("began", "deadline", "ends"),
    [
        ("2026-11-21T02:00", "06:00", "2026-11-21T06:00"),
        ("2026-11-21T22:00", "06:00", "2026-11-22T06:00"),  # over midnight
        ("2026-11-21T06:00", "06:00", "2026-11-22T06:00"),  # the very minute: a whole day
        ("2026-10-24T23:00", "02:30", "2026-10-25T02:30"),  # the first of the two
        ("2026-03-28T23:00", "02:30", "2026-03-29T03:30"),  # an hour that the clock leaves out
    ],
)
def test_a_deadline_is_the_next_such_hour_of_its_time_zone(began: str, deadline: str, ends: str) -> None:
    found = records.stop_at(Nightly(deadline=deadline, timezone=BERLIN), at(began, BERLIN).timestamp())
    assert found == at(ends, BERLIN).timestamp()


def test_a_deadline_in_hours_is_counted_in_time_that_passes() -> None:
    began = at("2026-10-24T23:00", BERLIN).timestamp()
    assert records.stop_at(Nightly(deadline_hours=5), began) == began + 5 * 3600
    assert records.stop_at(Nightly(), began) is None


def test_two_deadlines_and_unknown_time_zones_are_refused() -> None:
    with pytest.raises(ValueError, match="set one of them"):
        Nightly(deadline="06:00", deadline_hours=2)
    with pytest.raises(ValueError, match="try Europe/Berlin"):
        Nightly(timezone="Europe/Berlyn")


# --- what it reads ---


def watched(*digests: str, chats: str = "c") -> dict[str, list[dict[str, Any]]]:
    return {**frozen(*digests).files, "sft": [{"location": "/chats.jsonl", "sha256": chats}]}


def pretrain_of(choice: night_inputs.FileSelection) -> list[str]:
    return [file["sha256"] for file in choice.files["pretrain"]]


def test_the_first_night_reads_all_there_is() -> None:
    choice = night_inputs.select_files(Nightly(), watched("a", "b"), set(), set(), has_champion=False)
    assert pretrain_of(choice) == ["a", "b"] and len(choice.new) == 3


def test_where_all_files_have_been_read_nothing_is_new() -> None:
    choice = night_inputs.select_files(Nightly(), watched("a"), {"a", "c"}, {"a", "c"}, has_champion=True)
    assert choice.new == ()


@pytest.mark.parametrize(
    ("settings", "reads"),
    [
        ({}, ["kept", "new"]),
        ({"again": False}, ["new"]),
        ({"data": "all"}, ["learnt", "kept", "new"]),
        ({"start_from": "scratch"}, ["learnt", "kept", "new"]),
    ],
)
def test_documents_are_those_that_the_champion_has_not_learnt(settings: dict[str, Any], reads: list[str]) -> None:
    choice = night_inputs.select_files(
        Nightly(**settings), watched("learnt", "kept", "new"), {"learnt", "kept", "c"}, {"learnt", "c"}, has_champion=True
    )
    assert pretrain_of(choice) == reads
    assert choice.new == ("/inbox/new.jsonl",)
    assert [file["sha256"] for file in choice.files["sft"]] == ["c"]  # all chats, since each night has another base


def test_what_made_the_champion_follows_its_own_nights_and_a_rollback(known: Nights) -> None:
    completed(known, frozen("a"), "promoted", "1")
    completed(known, frozen("b", champion="1"), "promoted", "2")
    completed(known, frozen("c", champion="2"), "kept", "3")
    failed = known.begin(frozen("d", champion="2"), None)
    failed.end_try("failed", "", closed=True)
    assert known.read() == {"a", "b", "c"}  # of completed nights alone
    assert known.learnt(Champion("2", {})) == {"a", "b"}
    assert known.learnt(Champion("1", {})) == {"a"}
    assert known.learnt(None) == set()
    assert known.learnt(Champion("3", {})) == {"a", "b", "c"}  # kept by its figures, promoted by hand
    completed(known, frozen("e", champion="4"), "promoted", "4")  # such a circle is not made, and must not hang
    assert known.learnt(Champion("4", {})) == {"e"}


# --- the records ---


def test_nights_are_ordered_by_their_numbers_not_by_the_clock(known: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    completed(known, NONE, "kept", "1")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    completed(known, NONE, "kept", "2")
    assert [night.name for night in known.all()] == ["night-000002", "night-000001"]


def test_a_frozen_list_reads_back_as_it_was(known: Nights) -> None:
    given = InputSnapshot(frozen("a").files, {"name": "mine"}, Champion("3", {"sft": "k"}), "heldout/k")
    known.begin(given, None)
    night = known.newest()
    assert night is not None and night.frozen == given and night.is_open and night.outcome == "running"


def test_many_nights_without_news_are_one_record(known: Nights) -> None:
    for _ in range(3):
        known.add_empty("nothing-new", None, "nothing new")
    known.add_empty("failed", None, "no such folder", "failed")
    known.add_empty("failed", None, "no such folder", "failed")
    completed(known, frozen("a"), "promoted", "1")
    known.add_empty("nothing-new", None, "nothing new")
    assert [night.outcome for night in known.all()] == ["nothing-new", "promoted", "failed", "nothing-new"]
    assert not any(night.is_open for night in known.all()) and known.read() == {"a"}


@pytest.mark.parametrize("outcome", ["nothing-new", "failed"])
@pytest.mark.parametrize("first", [True, False])
def test_a_kill_while_a_night_without_a_list_is_noted_leaves_none_to_go_on_with(
    known: Nights, monkeypatch: pytest.MonkeyPatch, outcome: str, first: bool
) -> None:
    if not first:
        known.add_empty(outcome, None, "before")

    class Killed(BaseException):
        pass

    def dies(path: Path, value: object, mode: int) -> None:
        write_json(path, value, mode)
        raise Killed

    monkeypatch.setattr(records, "write_json", dies)
    with pytest.raises(Killed):
        known.add_empty(outcome, None, "now")
    monkeypatch.undo()
    night = known.settle()
    assert night is not None and not night.is_open and (night.outcome, night.data["reason"]) == (outcome, "now")


def test_a_failed_night_of_files_is_not_overwritten_by_one_that_found_none(known: Nights) -> None:
    known.begin(frozen("a"), None).end_try("failed", "", closed=True)
    known.add_empty("failed", None, "no such folder", "failed")
    assert len(known.all()) == 2


def test_being_stopped_or_killed_is_no_failure(known: Nights) -> None:
    night = known.begin(frozen("a"), None)
    for outcome in ("unfinished", "failed", "crashed", "failed"):
        night.end_try(outcome, "", closed=False)
        night.begin_try(None)
    assert night.failures == 2


def test_a_killed_night_goes_on_and_is_still_to_be_told_of(known: Nights) -> None:
    known.begin(frozen("a"), None)
    night = known.settle()
    assert night is not None and night.is_open and (night.outcome, night.data["untold"]) == ("crashed", "failed")
    assert known.settle() is not None and len(known.all()[0].data["tries"]) == 1


def test_skipped_slots_are_noted_without_the_lock(known: Nights, tmp_path: Path) -> None:
    known.skipped(datetime.now(UTC), "still running")
    known.skipped(None, "still running")
    lines = (tmp_path / "nightly" / "mine" / "skipped.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["reason"] for line in lines] == ["still running"] * 2


# --- one at a time ---

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from ttrain.nightly.records import InputSnapshot, Nights
known = Nights(Path(sys.argv[1]), "mine")
with known.lock():
    known.begin(InputSnapshot({}, {}), None)
    child = subprocess.Popen(["sleep", "60"])  # what a night starts must not hold the lock for it
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_a_second_night_is_told_who_runs_and_a_killed_one_leaves_no_lock(known: Nights, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(StillRunning, match=f"night-000001 is still running.*process {process.pid}"), known.lock():
            pass
        process.kill()
        process.wait()
        os.kill(child, 0)  # it lives
        with known.lock():
            settled = known.settle()
            assert settled is not None and settled.outcome == "crashed" and settled.is_open
            assert settled.failures == 0
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()


# --- settings and artifacts of a night ---


def artifact(store: ArtifactStore, stage: str, key: str, files: dict[str, str], **manifest: Any) -> Artifact:
    output = store.work(stage, key) / "output"
    for name, text in files.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(text, encoding="utf-8")
    return store.publish(stage, key, output, {"result": {}, "inputs": {}, "ingredients": {"files": {}}, **manifest})


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "home")


@pytest.fixture
def champion(store: ArtifactStore) -> Champion:
    of = {"shards": {"stage": "shards-pretrain", "key": "s", "content": ""}}
    artifact(
        store, "shards-pretrain", "s", {"heldout/index.json": "{}"}, ingredients={"files": {"train": [{"sha256": "f"}]}}
    )
    artifact(store, "tokenizer", "t", {"tokenizer.json": "{}"})
    artifact(store, "pretrain", "p", {"model/config.json": "{}", "model/model.safetensors": ""}, inputs=of)
    artifact(store, "sft", "q", {"model/config.json": "{}"})
    return Champion("7", {"tokenizer": "t", "pretrain": "p", "sft": "q"})


def inbox(tmp_path: Path, **files: str) -> Settings:
    directory = tmp_path / "inbox"
    directory.mkdir(exist_ok=True)
    for name, text in {"chats": "c", **files}.items():
        place = tmp_path if name == "chats" else directory
        (place / f"{name}.jsonl").write_text(text, encoding="utf-8")
    chats = str(tmp_path / "chats.jsonl")
    return Settings.model_validate({"data": {"pretrain": str(directory), "sft": chats, "lora": chats}})


def list_of(settings: Settings, store: ArtifactStore, champion: Champion | None = None) -> InputSnapshot:
    files = night_inputs.watched_files(settings, store, may_be_gone=True)
    return InputSnapshot(files, settings.model_dump(mode="json"), champion)


def test_a_night_starts_from_the_champion_s_tokenizer_and_base(
    tmp_path: Path, store: ArtifactStore, champion: Champion
) -> None:
    settings = inbox(tmp_path, a="1", b="2")
    inputs = night_inputs.inputs_of(list_of(settings, store, champion), settings, store)
    assert inputs.settings.pretrain.start_from == str(store.path("pretrain", "p") / "model")
    assert inputs.settings.tokenizer.existing == str(store.path("tokenizer", "t"))
    assert inputs.settings.data.pretrain == (str(tmp_path / "inbox/a.jsonl"), str(tmp_path / "inbox/b.jsonl"))
    assert set(inputs.replacements) == {"tokenizer"} and set(inputs.champion) == {"base", "sft"} and not inputs.keeps_base


def test_without_new_documents_the_champion_s_base_stays(tmp_path: Path, store: ArtifactStore, champion: Champion) -> None:
    settings = inbox(tmp_path)
    inputs = night_inputs.inputs_of(list_of(settings, store, champion), settings, store)
    assert inputs.keeps_base and inputs.replacements["pretrain"].key == "p"


def test_without_new_documents_the_first_model_that_differs_decides(store: ArtifactStore) -> None:
    def models(**contents: str) -> dict[str, Artifact]:
        return {name: artifact(store, name, f"{name}-{text}", {"model.txt": text}) for name, text in contents.items()}

    champion = models(pretrain="p", sft="s", dpo="d", lora="l")
    inputs = NightInputs(
        Settings(), champion={TRAINING_STAGES[name].model: made for name, made in champion.items()},
        replacements={"pretrain": champion["pretrain"]},
    )  # fmt: skip
    for tonight, metric in (
        ({"sft": "s2", "dpo": "d2", "lora": "l2"}, "chat_loss_sft"),
        ({"sft": "s", "dpo": "d2", "lora": "l2"}, "preference_accuracy/dpo"),
        ({"sft": "s", "dpo": "d", "lora": "l2"}, "domain_loss_lora"),
    ):
        rules = night_decision._rules(Settings(), inputs, SimpleNamespace(artifacts=models(**tonight)))  # type: ignore[arg-type]
        assert rules.metric == metric and rules.higher_is_better == metric.startswith("preference")
    without = replace(inputs, champion={name: made for name, made in inputs.champion.items() if name != "dpo"})
    tonight = SimpleNamespace(artifacts=models(sft="s", dpo="d2", lora="l2"))
    assert night_decision._rules(Settings(), without, tonight).metric == "domain_loss_lora"  # type: ignore[arg-type]


def test_a_night_from_scratch_keeps_the_tokenizer_alone(tmp_path: Path, store: ArtifactStore, champion: Champion) -> None:
    settings = inbox(tmp_path, a="1").model_copy(update={"nightly": Nightly(start_from="scratch")})
    inputs = night_inputs.inputs_of(list_of(settings, store, champion), settings, store)
    assert inputs.settings.pretrain.start_from == "none" and set(inputs.replacements) == {"tokenizer"}


def test_a_champion_whose_files_are_gone_is_named_with_the_cure(
    tmp_path: Path, store: ArtifactStore, champion: Champion
) -> None:
    (store.path("sft", "q") / "model" / "config.json").unlink()
    with pytest.raises(ArtifactError, match=r"version 7, needs the artifact sft q.*ttrain models promote"):
        night_inputs.inputs_of(list_of(inbox(tmp_path, a="1"), store, champion), inbox(tmp_path), store)


def test_a_night_that_goes_on_keeps_its_settings_but_for_what_changes_no_result(
    tmp_path: Path, store: ArtifactStore
) -> None:
    settings = inbox(tmp_path, a="1")
    listed = list_of(settings, store)
    changed = {"sft": {"epochs": 3.0}, "runtime": {"threads": 1}, "nightly": {"attempts": 9}}
    now = Settings.model_validate({**settings.model_dump(), **changed})
    found = night_inputs.settings_of(listed, now)
    assert found.sft == settings.sft and found.runtime.threads == 1 and found.nightly.attempts == 9


def test_settings_that_a_newer_version_refuses_are_said_to_be(tmp_path: Path, store: ArtifactStore) -> None:
    settings = inbox(tmp_path, a="1")
    listed = InputSnapshot({}, {**settings.model_dump(mode="json"), "gone": 1})
    with pytest.raises(UsageError, match="do not fit this version"):
        night_inputs.settings_of(listed, settings)


def test_a_list_that_goes_on_leaves_out_what_came_meanwhile_and_follows_renames(
    tmp_path: Path, store: ArtifactStore
) -> None:
    settings = inbox(tmp_path, a="1", b="2", c="3")
    before = list_of(settings, store)
    (tmp_path / "inbox/a.jsonl").rename(tmp_path / "inbox/z.jsonl")
    (tmp_path / "inbox/b.jsonl").write_text("another", encoding="utf-8")
    (tmp_path / "inbox/c.jsonl").unlink()
    (tmp_path / "inbox/new.jsonl").write_text("4", encoding="utf-8")
    now = night_inputs.watched_files(settings, store, may_be_gone=True)
    assert [Path(name).name for name in night_inputs.changed_files(before, now)] == ["b.jsonl", "c.jsonl"]
    again = night_inputs.refreshed_snapshot(before, now)
    assert [Path(file["location"]).name for file in again.files["pretrain"]] == ["z.jsonl", "b.jsonl"]
    assert night_inputs.changed_files(again, now) == []
    assert night_inputs.refreshed_snapshot(again, now) == again


def test_an_emptied_folder_is_a_mistake_only_before_there_is_a_champion(tmp_path: Path, store: ArtifactStore) -> None:
    settings = inbox(tmp_path)
    with pytest.raises(UsageError, match="no file in that folder ends in"):
        night_inputs.watched_files(settings, store, may_be_gone=False)
    assert night_inputs.watched_files(settings, store, may_be_gone=True)["pretrain"] == []
    gone = settings.model_copy(update={"data": settings.data.model_copy(update={"pretrain": (str(tmp_path / "typo"),)})})
    with pytest.raises(UsageError, match="there is no such file"):
        night_inputs.watched_files(gone, store, may_be_gone=True)


def test_weighted_sources_stay_as_they_are_named(tmp_path: Path, store: ArtifactStore, champion: Champion) -> None:
    plain = inbox(tmp_path, a="1")
    data = {**plain.data.model_dump(), "pretrain": [{"path": str(tmp_path / "inbox"), "weight": 3.0}]}
    settings = Settings.model_validate({**plain.model_dump(), "data": data})
    inputs = night_inputs.inputs_of(list_of(settings, store, champion), settings, store)
    assert inputs.settings.data.pretrain == settings.data.pretrain


def test_python_docs_are_one_file_that_changes_with_the_text(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = night_inputs.watched_files(Settings(), store, may_be_gone=True)
    assert [file["location"] for files in first.values() for file in files] == ["python-docs"] * 3
    (tmp_path / "other.zst").write_bytes(b"other text")
    monkeypatch.setattr(python_docs, "text_file", lambda: tmp_path / "other.zst")
    assert night_inputs.watched_files(Settings(), store, may_be_gone=True) != first


def test_held_out_documents_are_those_of_the_last_completed_night(
    tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights
) -> None:
    settings = inbox(tmp_path, a="1")

    def chosen(now: Settings) -> heldout.EarlierHeldout:
        return heldout.earlier_heldout(champion, known.all(), store, now)

    of_base = chosen(settings)  # no night yet: those beside which the champion's base was trained
    assert of_base == ("shards-pretrain/s", (heldout.BEFORE,))
    artifact(store, "heldout", "h", {"heldout/index.json": "{}"})
    night = known.begin(list_of(settings, store), None)
    night.note(heldout="heldout/h", heldout_nights=[heldout.BEFORE, night.name])
    night.end_try("kept", "", closed=True)
    assert chosen(settings) == ("heldout/h", (heldout.BEFORE, night.name))
    less = Settings.model_validate({**settings.model_dump(), "reading": {"heldout_fraction": 0.01}})
    assert chosen(less).reference is None  # some may be learnt from now on
    own = settings.model_copy(update={"data": settings.data.model_copy(update={"pretrain_heldout": ("x.jsonl",)})})
    assert chosen(own).reference is None


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_lost_held_out_documents_of_earlier_nights_stop_a_night_with_a_fix(
    tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights, harm: str
) -> None:
    """Whether they are lost before a night begins or while it is unfinished."""
    settings = inbox(tmp_path, a="1")
    artifact(store, "heldout", "h", {"heldout/index.json": "{}"})
    night = known.begin(list_of(settings, store), None)
    night.note(heldout="heldout/h")
    night.end_try("kept", "", closed=True)
    unfinished = replace(list_of(settings, store, champion), heldout="heldout/h")
    lost = store.path("heldout", "h")
    if harm == "gone":
        shutil.rmtree(lost)
    else:
        (lost / "heldout/index.json").write_text("{ }")
    why = r"held-out documents heldout h, which are not in .*, or are damaged.*data\.pretrain_heldout"
    with pytest.raises(ArtifactError, match=f"night-000001 measures its models on the {why}"):
        heldout.earlier_heldout(champion, known.all(), store, settings)
    with pytest.raises(ArtifactError, match=why):
        night_inputs.inputs_of(unfinished, settings, store)


def test_each_night_has_the_held_out_records_that_it_brought(tmp_path: Path, store: ArtifactStore) -> None:
    """Also where a record of an earlier version does not name its nights."""
    whole = artifact(store, "heldout", "h", {"heldout/nights.json": json.dumps([["a", "b"], ["c"], ["d"]])})
    named = heldout.names_by_night(whole, ["night-000001", "night-000002", "night-000005"])
    assert named == {"night-000001": ["a", "b"], "night-000002": ["c"], "night-000005": ["d"]}
    assert list(heldout.names_by_night(whole, ["night-000005"]).items()) == [
        (heldout.UNNAMED, ["a", "b", "c"]), ("night-000005", ["d"])
    ]  # fmt: skip
    assert heldout.names_by_night(artifact(store, "shards-pretrain", "s", {"heldout/index.json": "{}"}), ["x"]) == {}
    for damaged in ("no JSON", '{"a": 1}', "[1]"):
        (whole.path / "heldout/nights.json").write_text(damaged)
        with pytest.raises(ArtifactError, match=r"nights\.json is damaged"):
            heldout.names_by_night(whole, [])


def test_what_a_champion_that_no_night_made_has_learnt_is_read_from_its_artifacts(
    store: ArtifactStore, champion: Champion
) -> None:
    assert night_inputs.learnt_by(champion, store) == {"f"}
    assert night_inputs.learnt_by(None, store) == set()


def test_what_a_first_champion_has_learnt_is_remembered_when_its_artifacts_are_gone(
    tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = inbox(tmp_path, old="1", new="2")
    old = settings.model_copy(
        update={"data": settings.data.model_copy(update={"pretrain": (str(tmp_path / "inbox/old.jsonl"),)})}
    )
    shutil.rmtree(store.path("shards-pretrain", "s"))
    trained_on = {"files": {"train": [{"sha256": file["sha256"]} for file in list_of(old, store).files["pretrain"]]}}
    artifact(store, "shards-pretrain", "s", {"heldout/index.json": "{}"}, ingredients=trained_on)
    champions = [champion]
    monkeypatch.setattr(night_plan, "current_champion", lambda settings, store: champions[-1])
    frozen, _ = night_plan.choose_inputs(settings, store, known, None)
    assert (
        frozen is not None and records.shortened_names(file["location"] for file in frozen.files["pretrain"]) == "new.jsonl"
    )
    night = known.begin(frozen, None)
    assert known.all()[0].frozen == frozen
    night.note(version="8")
    night.end_try("promoted", "", closed=True)
    shutil.rmtree(store.path("shards-pretrain", "s"))
    champions.append(Champion("8", {}))
    assert night_plan.choose_inputs(settings, store, known, None)[0] is None, "nothing is new"
    (tmp_path / "inbox" / "newer.jsonl").write_text("3")
    after, _ = night_plan.choose_inputs(settings, store, known, None)
    assert (
        after is not None and records.shortened_names(file["location"] for file in after.files["pretrain"]) == "newer.jsonl"
    )
    assert after.learnt == (), "the night before has it"


def test_the_documents_that_a_champion_has_learnt_are_those_of_its_nights_and_in_the_store(
    store: ArtifactStore, champion: Champion, known: Nights
) -> None:
    """Of a champion that no night made, those of its base model; a night that keeps the base adds none."""
    assert night_inputs.learnt_documents(None, known.all(), store) == ()
    assert night_inputs.learnt_documents(champion, known.all(), store) == ("shards-pretrain/s",)
    for number, own in (("1", "b"), ("2", None), ("3", "c"), ("4", "gone")):
        if own and own != "gone":
            artifact(store, "shards-pretrain", own, {"train/index.json": "{}"})
        before = night_inputs.learnt_documents(Champion(number, champion.keys), known.all(), store)
        night = known.begin(InputSnapshot({}, {}, champion, documents=before), None)
        night.note(version=f"{int(number) + 1}", documents=own and f"shards-pretrain/{own}")
        night.end_try("promoted", "", closed=True)
    learnt = {
        number: night_inputs.learnt_documents(Champion(number, champion.keys), known.all(), store) for number in "1235"
    }
    assert learnt["1"] == ("shards-pretrain/s",)
    assert learnt["2"] == learnt["3"] == ("shards-pretrain/s", "shards-pretrain/b")
    assert learnt["5"] == ("shards-pretrain/s", "shards-pretrain/b", "shards-pretrain/c")


def test_what_nights_will_read_is_named_for_those_who_clean(known: Nights, tmp_path: Path) -> None:
    for number in (1, 2):
        night = known.begin(frozen(str(number)), None)
        night.note(heldout=f"heldout/h{number}", documents=f"shards-pretrain/s{number}")
        night.end_try("promoted", "", closed=True)
    assert records.needed_keys(tmp_path) == {"h2", "s2"}
    champion = Champion("2", {"sft": "q", "pretrain": "p"})
    known.begin(InputSnapshot({}, {}, champion, "heldout/h2", documents=("shards-pretrain/s1", "shards-pretrain/s2")), None)
    assert records.needed_keys(tmp_path) == {"h2", "s1", "s2", "q", "p"}
    assert records.needed_keys(tmp_path / "elsewhere") == set()


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ({"tracking": {"enabled": False}}, "set it to true"),
        ({"runtime": {"nodes": 2, "rendezvous": "h:29500"}}, "set runtime.nodes=1"),
    ],
)
def test_settings_that_no_night_can_have_are_refused(store: ArtifactStore, given: dict[str, Any], cure: str) -> None:
    from rich.console import Console

    from ttrain.flows.nightly import run_night

    with pytest.raises(UsageError, match=cure):
        run_night(Settings.model_validate(given), store, Console(), engine="none")
    assert not (store.root / "nightly").exists()


def test_a_night_without_news_asks_nobody_and_leaves_a_record(tmp_path: Path, store: ArtifactStore, known: Nights) -> None:
    from rich.console import Console

    from ttrain.flows.nightly import run_night

    settings, known = inbox(tmp_path, a="1"), Nights(store.root, "quickstart")
    with known.lock():
        known.begin(list_of(settings, store), None).end_try("kept", "", closed=True)
    out = io.StringIO()
    result = run_night(settings, store, Console(file=out), engine="none")
    assert (result.outcome, result.night) == ("nothing-new", "night-000002") and "all 3 files" in out.getvalue()
    assert not (store.root / "mlflow").exists() and not (store.root / "runs").exists()
    with known.lock():
        assert run_night(settings, store, Console(file=out), engine="none").outcome == "skipped"


def test_a_night_that_reaches_its_deadline_goes_on_in_the_next_slot_with_the_same_stages(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same keys, so the same work directories and checkpoints, though a file came and a setting changed meanwhile."""
    from rich.console import Console

    from ttrain.flows import nightly

    planned: list[Any] = []

    def stops(
        _: str, settings: Settings, store: ArtifactStore, stages: Any, *__: object, stop_at: float, **___: Any
    ) -> None:
        assert stop_at <= time.time()
        planned.append((settings, {stage.stage.name: stage.key for stage in stages}))
        raise Interrupted("deadline reached; the stages saved their state")

    monkeypatch.setattr(nightly, "run_pipeline", stops)
    settings, out = inbox(tmp_path, a="1"), io.StringIO()
    late = {"deadline_hours": 1e-9}
    due = datetime.fromtimestamp(time.time() - 1, UTC)
    for nightly_settings, slot in ((late, due), ({**late, "replay": 0.5, "epochs": 3}, due + timedelta(days=1))):
        now = Settings.model_validate({**settings.model_dump(), "nightly": nightly_settings})
        result = nightly.run_night(now, store, Console(file=out), engine="none", slot=slot)
        assert (result.outcome, result.night) == ("unfinished", "night-000001") and "deadline" in result.reason
        inbox(tmp_path, a="1", later="2")
    [night] = Nights(store.root, "quickstart").all()
    assert night.is_open and night.failures == 0 and [one["outcome"] for one in night.data["tries"]] == ["unfinished"] * 2
    assert planned[0] == planned[1] and planned[0][1]["tokenizer"] is not None


def test_a_folder_that_is_empty_is_refused_before_there_is_a_champion_and_nothing_new_after_it(
    tmp_path: Path, store: ArtifactStore
) -> None:
    from rich.console import Console

    from ttrain.flows.nightly import run_night

    settings, out, known = inbox(tmp_path), io.StringIO(), Nights(store.root, "quickstart")
    for _ in range(2):
        with pytest.raises(UsageError, match="no file in that folder ends in"):
            run_night(settings, store, Console(file=out), engine="none")
    [night] = known.all()
    assert (night.outcome, night.is_open) == ("refused", False), "several in a row are one record"
    settings = inbox(tmp_path, a="1")
    with known.lock():
        known.begin(list_of(settings, store), None).end_try("kept", "", closed=True)
    (tmp_path / "inbox/a.jsonl").unlink()
    assert run_night(settings, store, Console(file=out), engine="none").outcome == "nothing-new"


def test_damaged_files_are_left_out_until_they_are_replaced_and_the_night_reads_the_others(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from ttrain.data import streams
    from ttrain.flows import nightly

    read: list[str] = []

    def shards(_: str, settings: Settings, *__: object, **___: object) -> None:
        read.append(", ".join(Path(location).stem for location in settings.data.pretrain))  # type: ignore[arg-type]
        try:
            for location in settings.data.pretrain:
                with streams.noting_faults(str(location)):
                    list(streams.chunks(str(location)))
        except DataError as error:
            raise StageFailed(f"stage shards-pretrain failed: {error}", DataError.__name__, files=error.files) from None
        raise Interrupted("the test needs no model")

    def night(expected: type[Exception], *, slot: datetime | None = None) -> str:
        out.seek(out.truncate(0))
        with pytest.raises(expected):
            nightly.run_night(settings, store, Console(file=out, width=200), engine="none", slot=slot)
        return out.getvalue()

    monkeypatch.setattr(nightly, "run_pipeline", shards)
    settings, out, nights = inbox(tmp_path, a="1", c="3"), io.StringIO(), Nights(store.root, "quickstart")
    packed = gzip.compress(b'{"text": "2"}\n')
    bad = {name: tmp_path / "inbox" / f"{name}.gz" for name in ("b.jsonl", "d.jsonl")}
    for path in bad.values():
        path.write_bytes(packed[:-9])
    bad["d.jsonl"].write_bytes(b"\0" * 600)
    said = night(Interrupted)
    assert said.count("the night goes on without it") == 2 and "b.jsonl.gz is truncated" in said
    assert read == ["a, b.jsonl, c, d.jsonl", "a, c, d.jsonl", "a, c"]
    [first] = nights.all()
    assert [Path(file["location"]).name for file in first.left_out] == ["b.jsonl.gz", "d.jsonl.gz"]
    with nights.lock():
        first.end_try("kept", "", closed=True)
    nothing = nightly.run_night(settings, store, Console(file=out), engine="none")
    assert nothing.outcome == "nothing-new" and nothing.reason.endswith(
        "all 4 files have been read by a night before; left out, damaged until replaced: b.jsonl.gz, d.jsonl.gz"
    )
    assert len(read) == 3
    frozen, _ = night_plan.choose_inputs(
        settings.model_copy(update={"reading": settings.reading.model_copy(update={"max_line_bytes": 9999})}),
        store, nights, None,
    )  # fmt: skip
    assert frozen is not None and len(frozen.files["pretrain"]) == 4, "other settings may read them"
    bad["b.jsonl"].write_bytes(packed)
    assert "1 new: b.jsonl.gz" in night(Interrupted) and read[3:] == ["a, b.jsonl, c"], "without a champion it reads all"


def test_a_night_whose_only_new_file_is_damaged_fails_once(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from ttrain.flows import nightly

    settings, nights = inbox(tmp_path, a="1"), Nights(store.root, "quickstart")
    with nights.lock():
        nights.begin(list_of(settings, store), None).end_try("kept", "", closed=True)
    settings = inbox(tmp_path, a="1", b="2")
    path = str(tmp_path / "inbox/b.jsonl")

    def fails(*_: object, **__: object) -> None:
        raise StageFailed(f"stage shards-pretrain failed: {path} is binary", DataError.__name__, files=[path])

    monkeypatch.setattr(nightly, "run_pipeline", fails)
    with pytest.raises(StageFailed, match="is binary"):
        nightly.run_night(settings, store, Console(file=io.StringIO()), engine="none")
    assert (nights.all()[0].outcome, nights.all()[0].is_open) == ("failed", False)
    result = nightly.run_night(settings, store, Console(file=io.StringIO()), engine="none")
    assert result.outcome == "nothing-new" and "left out, damaged until replaced: b.jsonl" in result.reason


@pytest.mark.parametrize("has_new_chats", [False, True])
def test_a_night_of_known_documents_is_closed_as_nothing_new_or_learns_its_new_chats(
    tmp_path: Path, store: ArtifactStore, champion: Champion, monkeypatch: pytest.MonkeyPatch, has_new_chats: bool
) -> None:
    from rich.console import Console

    from ttrain.flows import nightly

    runs: list[set[str]] = []

    def names_of(recipe: Any, settings: Settings, _: object) -> list[str]:
        names: list[str] = []
        recipe(lambda stage, **inputs: names.append(stage.name) or stage.name, settings)
        return names

    def finds_nothing(_: str, settings: Settings, __: Any, stages: list[str], *___: object, **____: object) -> None:
        runs.append(set(stages))
        if "shards-pretrain" in runs[-1]:
            raise NothingNew("data.pretrain: 9 of 9 rows are near-duplicates")
        raise Interrupted("the test needs no model")

    monkeypatch.setattr(nightly, "plan", names_of)
    monkeypatch.setattr(nightly, "run_pipeline", finds_nothing)
    monkeypatch.setattr(night_plan, "current_champion", lambda settings, store: champion)
    settings, out, known = inbox(tmp_path, a="1"), io.StringIO(), Nights(store.root, "quickstart")
    with known.lock():
        known.begin(list_of(settings, store, champion), None).end_try("kept", "", closed=True)
    settings = inbox(tmp_path, a="1", copied="1 again", **({"chats": "new"} if has_new_chats else {}))
    if has_new_chats:
        with pytest.raises(Interrupted):
            nightly.run_night(settings, store, Console(file=out, width=200), engine="none")
        assert len(runs) == 2 and "sft" in runs[1] and "pretrain" not in runs[1]
        assert out.getvalue().count("near-duplicates; the new chats are learnt") == 1 and known.all()[0].is_open
        return
    result = nightly.run_night(settings, store, Console(file=out, width=200), engine="none")
    assert (result.outcome, result.night) == ("nothing-new", "night-000002") and len(runs) == 1
    assert out.getvalue().count("nothing new: data.pretrain: 9 of 9 rows are near-duplicates") == 1
    assert nightly.run_night(settings, store, Console(file=out), engine="none").reason.startswith("nothing new: all")
    assert len(runs) == 1, "the files count as read"


def test_a_wrong_setting_is_no_failed_try_and_a_retry_of_its_slot_runs(tmp_path: Path, store: ArtifactStore) -> None:
    from rich.console import Console

    from ttrain.flows.nightly import run_night

    settings, out = inbox(tmp_path, a="1"), io.StringIO()
    wrong = settings.model_copy(update={"model": settings.model.model_copy(update={"kind": "lama"})})
    due = datetime.fromtimestamp(time.time() - 1, UTC)
    for slot in (due, None):
        with pytest.raises(UsageError, match=r"model\.kind is 'lama'.*did you mean llama"):
            run_night(wrong, store, Console(file=out), engine="none", slot=slot)
    again = run_night(wrong, store, Console(file=out), engine="none", slot=due + timedelta(days=1))
    assert (again.outcome, again.night) == ("skipped", "night-000001")
    assert again.reason.startswith("night-000001 is still refused: model.kind is 'lama'")
    [night] = Nights(store.root, "quickstart").all()
    assert (night.outcome, night.is_open, night.failures, len(night.data["tries"])) == ("refused", True, 0, 3)
    assert "night-000001 was refused, which does not count as a failed attempt; correct the settings" in " ".join(
        out.getvalue().split()
    )
    frozen, reason = night_plan.choose_inputs(settings, store, Nights(store.root, "quickstart"), night)
    assert frozen is not None
    assert frozen.settings["model"]["kind"] == settings.model.kind and "with the current settings" in reason


def test_too_few_rows_are_no_failed_try_and_give_the_list_up(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from ttrain.flows import nightly

    def refuse(*_: object, **options: object) -> None:
        raise TooFewRows("pretrain.tokens_per_step is 64000, but the training data gives 5 rows")

    settings, out = inbox(tmp_path, a="1"), io.StringIO()
    monkeypatch.setattr(nightly, "run_pipeline", refuse)  # the stages before it take half a minute
    due = datetime.fromtimestamp(time.time() - 1, UTC)
    for slot in (due, None):
        with pytest.raises(TooFewRows):
            nightly.run_night(settings, store, Console(file=out), engine="none", slot=slot)
    again = nightly.run_night(settings, store, Console(file=out), engine="none", slot=due + timedelta(days=1))
    assert again.outcome == "skipped" and "is still refused: pretrain.tokens_per_step is 64000" in again.reason
    for night in Nights(store.root, "quickstart").all():
        assert (night.outcome, night.is_open, night.failures, len(night.data["tries"])) == ("refused", False, 0, 1)
    assert "was refused, which does not count as a failed attempt; the next night takes these files" in " ".join(
        out.getvalue().split()
    )


@pytest.mark.soak
def test_a_night_with_too_few_rows_trains_nothing_and_the_next_one_reads_what_came_meanwhile(tmp_path: Path) -> None:
    from rich.console import Console
    from support.pipeline_home import Cli, write_corpus

    from ttrain.config.loading import load
    from ttrain.flows.nightly import run_night

    cli = Cli(tmp_path / "home", tmp_path / "data")
    write_corpus(cli.data)
    comes_later = (cli.data / "docs-2.jsonl").rename(tmp_path / "later.jsonl")
    large = load([*cli.settings[2:], "pretrain.tokens_per_step=64000"], files=[cli.data / "tiny.yaml"]).settings
    store, out = ArtifactStore(cli.home), io.StringIO()
    for names in ("docs-1.jsonl", "docs-1.jsonl, docs-2.jsonl"):
        with pytest.raises(TooFewRows, match=r"pretrain\.tokens_per_step is 64000, 1000 rows of 64 tokens, but"):
            run_night(large, store, Console(file=out), engine="none")
        night = Nights(cli.home, "tiny-test").all()[0]
        assert (night.outcome, night.is_open, night.failures) == ("refused", False, 0)
        assert records.shortened_names(file["location"] for file in night.frozen.files["pretrain"]) == names
        comes_later = comes_later.rename(cli.data / "docs-2.jsonl")
    assert not (cli.home / "work" / "pretrain").exists(), "nothing began to train"


def test_a_file_s_name_is_nothing_that_a_terminal_obeys(store: ArtifactStore, known: Nights) -> None:
    from rich.console import Console

    from ttrain.flows import nightly
    from ttrain.pipeline.labels import NO_LABELS

    out = io.StringIO()
    running = nightly.NightRun(
        Settings(), store, Console(file=out), known, None, engine="none", in_flow=False, labels=NO_LABELS
    )
    running.say("1 new: a\x1b[2J[red].jsonl")
    assert out.getvalue() == "1 new: a\\x1b[2J[red].jsonl\n"


# --- the held-out documents of all nights ---


def test_the_held_out_set_has_every_record_once_in_an_order_that_mixes_old_and_new(tmp_path: Path) -> None:
    from support.doubles import run_here

    from ttrain.config import HeldoutConfig, Runtime
    from ttrain.stages import heldout as stage
    from ttrain.stages.shards import heldout_records

    def given(name: str, texts: list[str], **labels: str) -> Path:
        part = tmp_path / name / "heldout"
        part.mkdir(parents=True)
        lines = (json.dumps({"text": text, **labels}) + "\n" for text in texts)
        (part / "r.jsonl").write_text("".join(lines), encoding="utf-8")
        write_json(part / "index.json", {"format": 2, "shards": [{"records": "r.jsonl", "rows": len(texts), "tokens": 9}]})
        return tmp_path / name

    old, new = [f"old {n}" for n in range(40)], [f"new {n}" for n in range(40)]
    inputs = {"earlier": given("a", old), "documents": given("b", [*new, "old 3"], lang="en")}
    figures = run_here(stage, HeldoutConfig(), tmp_path / "output", inputs, Runtime())
    texts = [record["text"] for record in heldout_records(tmp_path / "output")]
    assert sorted(texts) == sorted([*old, *new]) and figures == {"records": 80, "new": 40, "nights": [40, 40]}
    assert stage.read_nights(tmp_path / "output") == [sorted(map(record_name, texts)) for texts in (old, new)]
    assert 8 <= sum(text.startswith("old") for text in texts[:40]) <= 32
    again = run_here(stage, HeldoutConfig(), tmp_path / "again", inputs, Runtime())
    assert again == figures
    name = "heldout/records.jsonl"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "output" / name).read_bytes()
    later = {"earlier": tmp_path / "output", "documents": given("c", ["newer", "new 3"])}
    assert run_here(stage, HeldoutConfig(), tmp_path / "third", later, Runtime())["nights"] == [40, 40, 1]
    assert stage.read_nights(tmp_path / "third")[:2] == stage.read_nights(tmp_path / "output")


# --- secrets of sources ---


def test_the_record_of_a_night_holds_no_secret_and_the_settings_of_now_fill_them_in(known: Nights) -> None:
    whole, shown = "https://user:hunter2@host/chats.jsonl?sig=1", "https://***@host/chats.jsonl?***"
    then = Settings.model_validate({"data": {"sft": [whole]}})
    entry = {"location": whole, "sha256": "a"}
    night = known.begin(InputSnapshot({"sft": [entry]}, then.model_dump(mode="json")), None)
    assert "hunter2" not in night.path.read_text() and night.frozen.files["sft"][0]["location"] == shown
    assert night_inputs.settings_of(night.frozen, then).data.sft == (whole,)
    rotated = whole.replace("hunter2", "rotated")
    now = Settings.model_validate({"data": {"sft": ["more.jsonl", rotated]}})
    assert night_inputs.settings_of(night.frozen, now).data.sft == (rotated,), "the secret of now, for the list of then"
    again = night_inputs.refreshed_snapshot(night.frozen, {"sft": [{"location": rotated, "sha256": "a"}]})
    assert again.files["sft"] == [{"location": rotated, "sha256": "a"}], "what is read has its URL in full"
    assert records.shortened_names([whole]) == "chats.jsonl", "as the terminal shows it"
