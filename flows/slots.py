"""The times at which a cron fires: those of Prefect's own scheduler, each on its date.

Importing Prefect for it takes 1.2 s of CPU, so a schedule's file keeps the next ones.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

CLOCK_CHANGE = timedelta(hours=3)  # more than any zone's clock is set forward at a time
YEARS = 5  # a cron that has not fired by then never does; 29 February may take eight, but is not worth waiting for


def next_slots(cron: str, timezone: str, count: int, start: datetime | None = None) -> list[datetime]:
    """The next slots, with their time zone: those of Prefect's own scheduler, each on its date."""
    from prefect.server.schemas.schedules import CronSchedule

    begin = start or datetime.now(UTC)
    schedule = CronSchedule(cron=cron, timezone=timezone)
    end = begin + timedelta(days=366 * YEARS)

    async def dates() -> list[datetime]:
        soon = begin + timedelta(hours=2)
        # Also the slots of the last hours, which may be moved past `begin`
        found = await schedule.get_dates(start=begin - CLOCK_CHANGE, end=soon)
        # In the second of two equal hours Prefect begins with the slots of the first, up to 60
        found += await schedule.get_dates(count + 60, start=soon, end=end)
        return [await on_its_date(date, cron, timezone) for date in found]

    try:
        slots = asyncio.run(dates())
    except ValueError:  # croniter raises it where no date fits
        return []
    return sorted({slot for slot in slots if slot >= begin})[:count]


async def on_its_date(slot: datetime, cron: str, timezone: str) -> datetime:
    """The slot in its time zone, on the date that the cron means.

    Prefect runs a time that the clock leaves out an hour earlier. At midnight that is the date
    before, which would have two nights and the next date none. Such a slot moves to the end of
    the change: 00:30 is 01:30 of its date.
    """
    from prefect.server.schemas.schedules import CronSchedule

    zone = ZoneInfo(timezone)
    local = slot.astimezone(zone)
    skipped = _utc_offset(slot + CLOCK_CHANGE, zone) - _utc_offset(slot, zone)
    moved = (slot + skipped).astimezone(zone)
    if skipped <= timedelta(0) or moved.date() == local.date():
        return local
    shown = local.replace(tzinfo=UTC)  # in UTC no time is left out: it is one of the cron or not
    is_own_time = shown in await CronSchedule(cron=cron, timezone="UTC").get_dates(1, start=shown)
    return local if is_own_time else moved


def _utc_offset(moment: datetime, zone: ZoneInfo) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta(0)
