"""When a rank gives the others up, and when it waits on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ttrain.train import watchdog
from ttrain.train.watchdog import WAITING, Beat, Peer, Watchdog, give_up_reason

LONG = watchdog.PATIENT_SECONDS
REST, WORK = {"idle_seconds": 99.0}, {"idle_seconds": 0.0}


@pytest.mark.parametrize(
    ("own", "peer", "silent", "stalled", "expected"),
    [
        (Beat(9, 7, WAITING), Beat(9, 6, **REST), 0, 19, None),  # not yet
        (Beat(9, 7, WAITING), Beat(9, 6, **REST), 10, 20, "rank 1 has not answered for 20 s at sum 7: stopped"),
        (Beat(9, 7, **WORK), Beat(9, 6, **REST), 10, 20, "rank 1 has not answered"),  # in a wait that is not marked
        (Beat(9, 7, WAITING), Beat(9, 6, **WORK), 9, LONG * 2, None),  # slow, but it computes
        (Beat(9, 7, WAITING), Beat(9, 6, **REST), 0, 39, None),  # its longest step took 8 s: it may be reading
        (Beat(9, 7, WAITING), Beat(9, 6, **REST), 0, 40, "rank 1 has not come for 40 s at sum 7"),
        (Beat(9, 6, **REST), Beat(9, 7, WAITING), 0, 40, "rank 0 has not come for 40 s at sum 7"),  # itself
        (Beat(9, 7, **REST), Beat(9, 7, **REST), 0, 40, "the ranks have waited for each other for 40 s"),
        (Beat(9, 7, **WORK), Beat(9, 7, WAITING), 0, 40, None),  # itself computes
        (Beat(9, 7, WAITING), Beat(9, 6, "saving", True, 99), 9, LONG - 1, None),
        (Beat(9, 7, WAITING), Beat(9, 6, "saving", True, 99), 9, LONG, "rank 1 has been saving for 300 s"),
        (Beat(9, 7, WAITING), Beat(9, 6, "saving", True, 99), 10, 20, "rank 1 has not answered"),  # stopped while it saves
        (Beat(9, 7, "saving", True, 99), Beat(9, 8, WAITING), 0, LONG, None),  # it saves itself
    ],
)  # fmt: skip
def test_the_verdict(own: Beat, peer: Beat, silent: float, stalled: float, expected: str | None) -> None:
    found = give_up_reason(0, own, {1: Peer(peer, silent)}, stalled, silent_limit=20, idle_limit=40)
    assert found == expected if expected is None else expected in str(found)


def test_a_rank_whose_peers_tell_nothing_gives_them_up_once_after_its_first_steps(tmp_path: Path) -> None:
    given_up: list[str] = []
    watch = Watchdog(tmp_path, 0, 3, given_up.append, limit_seconds=0.1)
    for _ in range(watchdog.FIRST_SUMS):
        with watch.arriving():
            pass
    time.sleep(0.3)
    assert given_up == [], "the first steps may compile"
    began = time.monotonic()
    with watch.arriving():
        while not given_up and time.monotonic() < began + 10:
            time.sleep(0.01)
        assert 0.07 < time.monotonic() - began < 10
        time.sleep(0.1)
    watch.close()
    assert [why.split(" for ")[0] for why in given_up] == ["ranks 1, 2 have not answered"]


def test_ranks_that_get_on_are_left_alone_however_long_it_takes(tmp_path: Path) -> None:
    """Two watches in one process, steps a ninth of the limit long, one announced pause of two limits."""
    given_up: list[str] = []
    watches = [Watchdog(tmp_path, rank, 2, given_up.append, limit_seconds=0.5) for rank in (0, 1)]
    for step in range(12):
        if step == 8:
            with watches[0].doing("saving", busy=True), watches[1].arriving():
                time.sleep(1.1)
            continue
        for watch in watches:
            with watch.arriving():
                pass
        time.sleep(0.05)
    for watch in watches:
        watch.close()
    assert given_up == []
