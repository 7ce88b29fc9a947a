"""The clocks of the tests: what waits is told from what computes, and a rank that hangs from one that is slow."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

import pytest
from support.waiting import hanging, stopwatch


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_stopwatch_counts_what_is_waited_for_and_not_what_is_computed() -> None:
    waited = stopwatch()
    compute(0.3)
    assert waited() < 0.15
    time.sleep(0.2)
    assert 0.15 < waited() < 0.35


def test_what_waits_hangs_and_what_computes_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def processes(*work: Callable[[], None]) -> list[multiprocessing.process.BaseProcess]:
        fork = multiprocessing.get_context("fork")
        made: list[multiprocessing.process.BaseProcess] = [fork.Process(target=one) for one in work]
        for process in made:
            process.start()
        return made

    busy = processes(lambda: compute(0.5), lambda: compute(0.1))
    assert hanging(busy, 2.0) == [] and not any(process.is_alive() for process in busy)
    monkeypatch.setattr("support.waiting.BUSY", 1)
    for stuck in (processes(lambda: time.sleep(60), lambda: compute(0.1)), processes(lambda: compute(60))):
        assert hanging(stuck, 0.3) == stuck[:1]
        stuck[0].kill()
