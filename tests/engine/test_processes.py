"""Ranks that are killed, stopped or fail end the others, and nothing is left of them."""

import itertools
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.tiny_stages import Home, Watcher, build_stage, stage_settings

from ttrain.engine import processes
from ttrain.engine.stage_worker import PROCESS_NAME
from ttrain.errors import StageFailed
from ttrain.store.layout import Artifact
from ttrain.tasks import PRETRAIN, STAGES

LIMIT_SECONDS = 5.0
SEEDS = itertools.count(1)


class TwoRanks:
    """A stage on two ranks, with a seed that no other test has."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.training = {"optim": {"kind": "adamw"}, "seed": next(SEEDS)}

    def run(self, steps: int, act: Callable[[str], Any] = print, **runtime: Any) -> Artifact:
        settings = stage_settings(steps, self.training, devices=2, **runtime)
        inputs = self.home.pretrain_inputs()
        return build_stage(PRETRAIN, settings, self.home.store, inputs, Watcher(act)).artifact

    def fail(self, act: Callable[[], Any], steps: int = 400, **runtime: Any) -> tuple[str, float]:
        """The stage's message, and the seconds from `act` to the end."""
        began: list[float] = []

        def act_once(line: str) -> None:
            if not began and ("now" in line or "step 6/" in line):
                began.append(time.monotonic())
                act()

        with pytest.raises(StageFailed) as failed:
            self.run(steps, act_once, **runtime)
        return str(failed.value), time.monotonic() - began[0]


def workers() -> list[psutil.Process]:
    """The ranks that this process has started, rank 0 first."""
    children = psutil.Process().children(recursive=True)
    ranks = [child for child in children if child.name() == PROCESS_NAME]
    return sorted(ranks, key=lambda child: child.pid)


@pytest.fixture
def ranks(stage_home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoRanks]:
    """Afterwards no rank is left."""
    monkeypatch.setattr(processes, "OTHERS_SECONDS", 1.0)
    yield TwoRanks(stage_home)
    assert workers() == []


def test_a_stopped_rank_ends_all_after_the_timeout(ranks: TwoRanks) -> None:
    limit = {"rank_timeout_seconds": LIMIT_SECONDS}
    message, seconds = ranks.fail(lambda: workers()[0].suspend(), **limit)
    assert re.search("failed on rank 1: .*imed out", message), message
    assert LIMIT_SECONDS < seconds < LIMIT_SECONDS + 15


def test_a_rank_that_raises_ends_the_others(ranks: TwoRanks, monkeypatch: Any) -> None:
    monkeypatch.setenv("SABOTAGE", "raise")
    monkeypatch.setattr(processes, "WORKER", "support.saboteur")
    message, seconds = ranks.fail(lambda: None)
    assert "rank 1: ZeroDivisionError: of rank 1;" in message and seconds < 20


def test_after_a_killed_rank_the_next_try_continues_at_the_checkpoint(ranks: TwoRanks) -> None:
    message, seconds = ranks.fail(lambda: workers()[1].kill(), 60)
    assert "SIGKILL" in message and "log.txt" in message and seconds < 20
    artifact = ranks.run(60)
    assert 0 < artifact.result["resumed_from_step"] < 60
    assert not ranks.home.store.work("pretrain", artifact.key).exists()


def test_lack_of_memory_names_a_setting(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    for signum, text, stage, setting in (
        ("KILL", "", "pretrain", "runtime.rows_per_device"),
        ("ABRT", "memory allocation of 1168 bytes failed", "tokenizer", "tokenizer.max_b"),
    ):
        process = subprocess.Popen(["sh", "-c", f"kill -{signum} $$"])
        process.wait()
        log.write_text(text)
        group = processes.ProcessGroup([process])
        assert group.poll()
        with pytest.raises(StageFailed, match=f"memory ran out.* lower {setting}"):
            processes.result_of(group, STAGES[stage], log, None)
