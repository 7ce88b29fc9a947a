"""Records of nights: slots, deadlines, locks, tries and secrets, without an engine and without training."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from support.night_files import BERLIN, NONE, at, completed, frozen

from ttrain.config import Nightly, Settings
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly import records
from ttrain.nightly.records import Champion, InputSnapshot, Nights


def test_a_list_that_ends_its_process_each_time_is_given_up_and_a_deadline_in_between_counts_anew(
    known: Nights,
) -> None:
    night = known.begin(frozen("a"), None)
    for number in range(1, 2 * records.MOST_CRASHES - 1):
        if number == records.MOST_CRASHES - 1:
            night.end_try("unfinished", "the deadline", closed=False)
        known.settle()
        newest = known.newest()
        assert newest is not None and newest.is_open
        night = newest
        night.begin_try(None)
    settled = known.settle()
    assert settled is not None and not settled.is_open and settled.outcome == "failed"
    assert "a" not in known.read(), "the next night takes the file again"


def test_ten_late_slots_give_one_night_and_one_that_somebody_asks_for_is_never_covered(
    known: Nights,
) -> None:
    now = datetime.now(UTC)
    slots = [now - timedelta(days=days) for days in range(10, 0, -1)]
    ran = []
    for slot in slots:
        if known.covered(slot) is None:
            known.begin(NONE, slot).end_try("kept", "", closed=True)
            ran.append(slot)
    assert ran == slots[:1]
    tomorrow = now + timedelta(days=1)
    assert known.covered(tomorrow) is known.covered(None) is None


def test_a_retry_of_a_slot_runs_where_it_came_to_nothing(tmp_path: Path) -> None:
    slot = datetime.now(UTC) - timedelta(seconds=5)
    for outcome in ("failed", "refused", "unfinished", "kept", "promoted"):
        known = Nights(tmp_path, outcome)
        known.directory.mkdir(parents=True)
        known.begin(NONE, slot).end_try(outcome, "", closed=True)
        assert (known.covered(slot) is None) == (outcome not in ("kept", "promoted"))


def test_a_deadline_is_the_next_such_hour_of_its_time_zone_or_so_many_hours_that_pass() -> None:
    for began, deadline, ends in (
        ("2026-11-21T02:00", "06:00", "2026-11-21T06:00"),
        ("2026-11-21T22:00", "06:00", "2026-11-22T06:00"),  # over midnight
        ("2026-11-21T06:00", "06:00", "2026-11-22T06:00"),  # the very minute: a whole day
    ):
        found = records.stop_at(
            Nightly(deadline=deadline, timezone=BERLIN), at(began, BERLIN).timestamp()
        )
        assert found == at(ends, BERLIN).timestamp()
    began_at = at("2026-10-24T23:00", BERLIN).timestamp()
    assert records.stop_at(Nightly(deadline_hours=5), began_at) == began_at + 5 * 3600
    assert records.stop_at(Nightly(), began_at) is None


def test_a_frozen_list_reads_back_as_it_was_and_skipped_slots_are_noted_without_the_lock(
    known: Nights,
) -> None:
    given = InputSnapshot(
        frozen("a").files, {"name": "mine"}, Champion("3", {"sft": "k"}), "heldout/k"
    )
    known.begin(given, None)
    night = known.newest()
    assert (
        night is not None and night.frozen == given and night.is_open and night.outcome == "running"
    )
    known.skipped(datetime.now(UTC), "still running")
    known.skipped(None, "still running")
    lines = (known.directory / "skipped.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["reason"] for line in lines] == ["still running"] * 2


def test_many_nights_without_news_are_one_record(known: Nights) -> None:
    for _ in range(3):
        known.add_empty("nothing-new", None, "nothing new")
    for _ in range(2):
        known.add_empty("failed", None, "no such folder")
    completed(known, frozen("a"), "promoted", "1")
    known.add_empty("nothing-new", None, "nothing new")
    assert [night.outcome for night in known.newest_first()] == [
        "nothing-new",
        "promoted",
        "failed",
        "nothing-new",
    ]
    assert not any(night.is_open for night in known.newest_first()) and known.read() == {"a"}
    known.begin(frozen("b"), None).end_try("failed", "", closed=True)
    known.add_empty("failed", None, "no such folder")
    assert len(list(known.newest_first())) == 6, (
        "a failed night of files is not overwritten by one that found none"
    )


def test_being_stopped_or_killed_is_no_failure_and_a_killed_night_is_marked_once(
    known: Nights,
) -> None:
    night = known.begin(frozen("a"), None)
    for outcome in ("unfinished", "failed", "crashed", "failed"):
        night.end_try(outcome, "", closed=False)
        night.begin_try(None)
    assert night.failures == 2
    settled = known.settle()
    assert settled is not None and settled.is_open and settled.outcome == "crashed"
    assert known.settle() is None and len(next(known.newest_first()).data["attempts"]) == 5


# --- secrets of sources ---


def test_the_record_of_a_night_holds_no_secret_and_the_settings_of_now_fill_them_in(
    known: Nights,
) -> None:
    whole, shown = "https://user:hunter2@host/chats.jsonl?sig=1", "https://***@host/chats.jsonl?***"
    then = Settings.model_validate({"data": {"sft": [whole]}})
    entry = {"location": whole, "sha256": "a"}
    night = known.begin(InputSnapshot({"sft": [entry]}, then.model_dump(mode="json")), None)
    assert (
        "hunter2" not in night.path.read_text()
        and night.frozen.files["sft"][0]["location"] == shown
    )
    assert night_inputs.settings_of(night.frozen, then).data.sft == (whole,)
    rotated = whole.replace("hunter2", "rotated")
    now = Settings.model_validate({"data": {"sft": ["more.jsonl", rotated]}})
    assert night_inputs.settings_of(night.frozen, now).data.sft == (rotated,), (
        "the secret of now, for the list of then"
    )
    again, _ = night_inputs.refreshed_snapshot(
        night.frozen, {"sft": [{"location": rotated, "sha256": "a"}]}
    )
    assert again.files["sft"] == [{"location": rotated, "sha256": "a"}], (
        "what is read has its URL in full"
    )
    assert records.shortened_names([whole]) == "chats.jsonl", "as the terminal shows it"
