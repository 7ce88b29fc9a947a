"""Records of nights: slots, deadlines, tries, secrets, their table, the best of any champion."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.night_files import BERLIN, NONE, at, completed, frozen

from ttrain.config import Nightly, Settings
from ttrain.evaluate.forgetting import BestScore
from ttrain.nightly import history, records
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly.decision import best_scores
from ttrain.nightly.records import InputSnapshot, Nights

BITS = "bits_per_byte"
KEPT = "it forgets night-000001: 2.00000 became 2.20000"
LEARNT = {"documents": 1200, "tokens": 340_000, "left_out": 3, "chats": 12}


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


def text(name: str, champion: float | None, challenger: float, **fields: Any) -> dict[str, Any]:
    values = {"champion": champion, "challenger": challenger}
    return {"kind": "night", "name": name, "records": 40, **values, **fields}


def test_nights_are_listed_newest_first_with_losses(known: Nights) -> None:
    decision = {"metric": BITS, "challenger": 2.0, "champion": None, "lost": []}
    notes = {"decision": decision, "learnt": LEARNT, "texts": []}
    completed(known, frozen("a", "<b>"), "promoted", "1", **notes)
    second = known.begin(frozen("c", champion="1"), None)
    decision |= {"challenger": 1.9, "champion": 2.0, "lost": ["night-000001"]}
    lost = text("night-000001", 2.0, 2.2, difference=-0.2, lost=True)
    second.note(version="2", decision=decision, learnt=LEARNT, texts=[lost])
    second.end_try("kept", KEPT, closed=True)
    known.add_empty("nothing-new", None, "nothing new")
    known.begin(frozen("d", champion="1"), None)
    listed = history.history(known.directory.parents[1], None, 30)[1]
    assert [night["outcome"] for night in listed] == ["running", "nothing-new", "kept", "promoted"]
    running, _, kept, promoted = listed
    assert promoted["files"] == ["/inbox/a.jsonl", "/inbox/<b>.jsonl"]
    expected = {"reason": KEPT, "lost": ["night-000001"], "champion": "1", "version": "2"}
    assert expected.items() <= kept.items() and kept["texts"][0]["change"] == pytest.approx(0.1)
    assert (running["figure"], running["texts"], running["reason"]) == (None, [], "")
    row = dict(zip(history.HEADER, history.row(kept), strict=True))
    cells = {"new documents": "1,200", "chats": "12", "lost": "night-000001", "why": KEPT}
    assert cells.items() <= row.items()


def add(
    nights: Nights, outcome: str, champion: str | None, version: str, *texts: Any, by: str = BITS
) -> None:
    notes = {"decision": {"metric": by}, "texts": list(texts)}
    completed(nights, frozen(champion=champion), outcome, version, **notes)


def test_the_best_champion_on_a_text_of_a_completed_night_is_found(known: Nights) -> None:
    value = 2.0
    add(known, "promoted", None, "1", text("first", None, value))
    for number in range(2, 11):  # each loses 2.9 % on the first text, and all but one are promoted
        outcome = "kept" if number == 5 else "promoted"
        champion = str(number - 2 if number == 6 else number - 1)
        texts = (text("first", value, value * 1.029), text(f"new-{number}", 3.0, 1.0))
        add(known, outcome, champion, str(number), *texts)
        value *= 1.029 if outcome == "promoted" else 1.0
    add(known, "unfinished", "1", "11", text("first", 1.0, 1.0))
    best = best_scores(known.newest_first(), BITS)
    assert best["first"] == BestScore(2.0, "version 1", 40)
    assert best["new-9"] == BestScore(1.0, "version 9", 40), "nothing was promoted on it since"
    assert best["new-5"] == BestScore(3.0, "version 4", 40), "a kept challenger was no champion"


def test_only_texts_of_nights_with_the_newest_records_and_the_metric_count(known: Nights) -> None:
    add(known, "promoted", None, "10", text("first", None, 2.0))
    others = [text("chat_loss_sft", 1.0, 1.0, kind="metric")]
    add(known, "promoted", "10", "11", text("first", 2.5, 2.6, records=30), *others)
    add(known, "promoted", "11", "12", text("first", 0.1, 0.1), by="bits_per_byte_sft")
    best = best_scores(known.newest_first(), BITS)
    assert best == {"first": BestScore(2.5, "version 10", 30)}
