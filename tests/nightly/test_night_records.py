"""Records of nights: slots, deadlines, tries and secrets, without training."""

from datetime import UTC, datetime, timedelta

from support.night_files import BERLIN, NONE, at, completed, frozen

from ttrain.config import Nightly, Settings
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly import records
from ttrain.nightly.records import InputSnapshot, Nights


def test_a_list_that_kills_each_process_is_given_up(known: Nights) -> None:
    night = known.begin(frozen("a"), None)
    for number in range(1, 2 * records.MOST_CRASHES - 1):
        if number == records.MOST_CRASHES - 1:
            night.end_try("unfinished", "the deadline", closed=False)
        known.settle()
        night = next(known.newest_first())
        assert night.is_open
        night.begin_try(None)
    settled = known.settle()
    assert settled is not None and not settled.is_open and settled.outcome == "failed"
    assert "a" not in known.read(), "the next night takes the file again"


def test_a_retry_of_a_slot_runs_where_it_came_to_nothing(known: Nights) -> None:
    for age, outcome in enumerate(("failed", "refused", "unfinished", "kept", "promoted"), start=5):
        slot = datetime.now(UTC) - timedelta(seconds=age)
        known.begin(NONE, slot).end_try(outcome, "", closed=True)
        assert (known.covered(slot) is None) == (outcome not in ("kept", "promoted"))


def test_a_deadline_is_the_next_such_hour_of_its_time_zone() -> None:
    settings = Nightly(deadline="06:00", timezone=BERLIN)
    for began, ends in (
        ("2026-11-21T02:00", "2026-11-21T06:00"),
        ("2026-11-21T22:00", "2026-11-22T06:00"),  # over midnight
        ("2026-11-21T06:00", "2026-11-22T06:00"),  # the very minute: a whole day
    ):
        start = at(began, BERLIN).timestamp()
        assert records.stop_at(settings, start) == at(ends, BERLIN).timestamp()
        assert records.stop_at(Nightly(deadline_hours=5), start) == start + 5 * 3600
    assert records.stop_at(Nightly(), start) is None


def test_many_nights_without_news_are_one_record(known: Nights) -> None:
    for outcome in ("nothing-new",) * 3 + ("failed",) * 2:
        known.add_empty(outcome, None, "")
    completed(known, frozen("a"), "promoted", "1")
    known.add_empty("nothing-new", None, "")
    outcomes = [night.outcome for night in known.newest_first()]
    assert outcomes == ["nothing-new", "promoted", "failed", "nothing-new"]
    known.begin(frozen("b"), None).end_try("failed", "", closed=True)
    known.add_empty("failed", None, "")
    assert len(list(known.newest_first())) == 6, "a failed night of files is not overwritten"


def test_being_stopped_or_killed_is_no_failure(known: Nights) -> None:
    night = known.begin(frozen("a"), None)
    for outcome in ("unfinished", "failed", "crashed", "failed"):
        night.end_try(outcome, "", closed=False)
        night.begin_try(None)
    assert night.failures == 2
    settled = known.settle()
    assert settled is not None and settled.is_open and settled.outcome == "crashed"


def test_a_record_holds_no_secret_and_the_current_settings_fill_them_in(known: Nights) -> None:
    location = "https://user:hunter2@host/chats.jsonl?sig=1"
    rotated = location.replace("hunter2", "rotated")
    before = Settings.model_validate({"data": {"sft": [location]}})
    files = {"sft": [{"location": location, "sha256": "a"}]}
    night = known.begin(InputSnapshot(files, before.model_dump(mode="json")), None)
    assert "hunter2" not in night.path.read_text()
    assert night.frozen.files["sft"][0]["location"] == "https://***@host/chats.jsonl?***"
    assert night_inputs.settings_of(night.frozen, before).data.sft == (location,)
    now = Settings.model_validate({"data": {"sft": ["more.jsonl", rotated]}})
    assert night_inputs.settings_of(night.frozen, now).data.sft == (rotated,)
    present = {"sft": [{"location": rotated, "sha256": "a"}]}
    refreshed, _ = night_inputs.refreshed_snapshot(night.frozen, present)
    assert refreshed.files == present, "what is read has its URL in full"
