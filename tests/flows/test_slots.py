"""The times at which a cron fires where the clock changes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from ttrain.flows import serve, slots
from ttrain.flows.schedules import Schedule

DAYS = 3


# From the night before that of the change: 02:30 or 02:00 is skipped, or 02:30 or 01:30 comes twice, or none of them
@pytest.mark.parametrize(
    ("cron", "timezone", "first"),
    [
        ("30 2 * * *", "Europe/Berlin", (2027, 3, 27)),
        ("30 2 * * *", "Europe/Berlin", (2027, 10, 30)),
        ("0 2 * * *", "America/New_York", (2027, 3, 13)),
        ("30 1 * * *", "America/New_York", (2027, 11, 6)),
        ("0 3 * * *", "America/New_York", (2027, 11, 6)),
        # At midnight: left out, or twice, also before midnight
        ("30 0 * * *", "America/Santiago", (2026, 9, 5)),
        ("0 0 * * *", "Africa/Cairo", (2026, 4, 23)),
        ("30 0 * * *", "America/Havana", (2026, 3, 7)),
        ("15 0 * * *", "Asia/Beirut", (2026, 3, 28)),
        ("30 0 * * *", "Atlantic/Azores", (2026, 3, 28)),
        ("30 0 * * *", "America/Havana", (2026, 10, 31)),
        ("30 0 * * *", "Atlantic/Azores", (2026, 10, 24)),
        ("30 23 * * *", "America/Santiago", (2027, 4, 3)),
        ("15 2 * * *", "Australia/Lord_Howe", (2026, 10, 3)),  # by half an hour
        ("45 1 * * *", "Australia/Lord_Howe", (2027, 4, 3)),
    ],
)
def test_a_change_of_the_clock_neither_skips_a_night_nor_doubles_it(
    cron: str, timezone: str, first: tuple[int, int, int]
) -> None:
    """Asked as the scheduler does, again and again from later moments: one slot for each date, the same from all of them."""
    zone = ZoneInfo(timezone)
    begin = datetime(*first, tzinfo=zone).astimezone(UTC)
    following = set()
    dates = [begin.astimezone(zone).date() + timedelta(days=day) for day in range(DAYS)]
    for half_hours in range(DAYS * 48 + 2):
        moment = begin + timedelta(minutes=30 * half_hours)
        if moment.astimezone(zone).hour in (22, 23, 0, 1, 2, 3) or half_hours % 24 == 0:  # often where the clock changes
            following |= set(slots.next_slots(cron, timezone, 1, moment))
    following = {slot for slot in following if slot.astimezone(zone).date() <= dates[-1]}
    assert [slot.astimezone(zone).date() for slot in sorted(following)] == dates
    assert max(following).astimezone(zone).strftime("%-M %-H * * *") == cron, "by the clock of the zone"


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("*/30 * * * *", ["23 23:00", "23 23:30", "24 01:00", "24 01:30"]),  # each once: nothing is moved
        ("0 0,12 * * *", ["24 01:00", "24 12:00", "25 00:00", "25 12:00"]),
        ("0,30 0 * * *", ["24 01:00", "24 01:30", "25 00:00", "25 00:30"]),
        ("0 */2 * * *", ["24 01:00", "24 02:00", "24 04:00", "24 06:00"]),
        ("0 0,1 * * *", ["24 01:00", "25 00:00", "25 01:00", "26 00:00"]),  # the two are one
        ("0 0 * * 5", ["24 01:00", "01 00:00", "08 00:00", "15 00:00"]),
    ],
)
def test_of_a_cron_with_several_times_those_that_midnight_leaves_out_stay_on_their_date(
    cron: str, expected: list[str]
) -> None:
    for minute in (0,) if cron.startswith("*") else (0, 20):
        start = datetime(2026, 4, 23, 21, minute, tzinfo=UTC)  # the hour before midnight in Cairo
        found = slots.next_slots(cron, "Africa/Cairo", 4, start)
        assert [f"{slot:%d %H:%M}" for slot in found] == expected


@pytest.mark.parametrize(("cron", "following"), [("30 2 * * *", "2026-10-26T01:30"), ("* * * * *", "2026-10-25T02:00")])
def test_in_the_hour_that_comes_twice_no_slot_is_listed_that_has_passed(cron: str, following: str) -> None:
    second = datetime(2026, 10, 25, 1, 10, tzinfo=UTC)  # 02:10 in Berlin, as an hour before
    found = slots.next_slots(cron, "Europe/Berlin", 1, second)
    assert [slot.astimezone(UTC).isoformat()[:16] for slot in found] == [following]


@pytest.mark.parametrize(
    ("zone", "cron", "slot", "now", "postponed"),
    [
        ("America/Santiago", "30 0 * * *", "2026-09-06T03:30", "2026-09-06T03:31", "2026-09-06T04:30"),
        ("America/Santiago", "30 0 * * *", "2026-09-06T03:30", "2026-09-06T09:00", None),  # nothing served before
        ("America/Santiago", "30 0 * * *", "2026-09-06T04:30", "2026-09-06T04:31", None),  # it was postponed before
        ("America/Santiago", "30 23 * * *", "2026-09-06T03:30", "2026-09-06T03:31", None),  # its own time
        ("Europe/Berlin", "30 2 * * *", "2026-03-29T00:30", "2026-03-29T00:31", None),  # its own date
    ],
)
def test_a_slot_that_is_due_on_the_date_before_its_own_waits_for_its_date(
    monkeypatch: pytest.MonkeyPatch, zone: str, cron: str, slot: str, now: str, postponed: str | None
) -> None:
    moment = datetime.fromisoformat(f"{now}Z")
    monkeypatch.setattr(serve, "datetime", SimpleNamespace(now=lambda zone: moment))
    due: Any = SimpleNamespace(
        id="a", auto_scheduled=True, run_count=0, expected_start_time=datetime.fromisoformat(f"{slot}Z")
    )
    times: list[datetime] = []

    def note(number: str, state: Any, force: bool) -> None:
        times.append(state.state_details.scheduled_time)

    client = SimpleNamespace(set_flow_run_state=note)
    assert serve.postpone(client, due, Schedule("nightly", "mine", cron, zone, {})) is (postponed is not None)
    assert times == ([datetime.fromisoformat(f"{postponed}Z")] if postponed else [])
