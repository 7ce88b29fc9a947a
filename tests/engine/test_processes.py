"""Ranks that are killed, stopped or fail end the others, and nothing is left of them."""

import itertools
import os
import re
import signal
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
from ttrain.errors import Interrupted, StageFailed
from ttrain.store.layout import Artifact
from ttrain.tasks import PRETRAIN, STAGES

LIMIT_SECONDS = 5.0
SEEDS = itertools.count(1)


class TwoRanks:
    """A stage on two ranks, with a seed that no other test has."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.training = {"optim": {"kind": "adamw"}, "seed": next(SEEDS)}

    def run(
        self, act: Callable[[str], Any], steps: int, signum: int = 0, **runtime: Any
    ) -> Artifact:
        settings = stage_settings(steps, self.training, devices=2, **runtime)
        watcher, inputs = Watcher(act, signum), self.home.pretrain_inputs()
        return build_stage(PRETRAIN, settings, self.home.store, inputs, watcher).artifact

    def fail(self, act: Callable[[], Any], steps: int = 400, **runtime: Any) -> tuple[str, float]:
        """The stage's message, and the seconds from `act` to the end."""
        began: list[float] = []

        def act_once(line: str) -> None:
            if not began and ("now" in line or "step 6/" in line):
                began.append(time.monotonic())
                act()

        with pytest.raises(StageFailed) as failed:
            self.run(act_once, steps, **runtime)
        return str(failed.value), time.monotonic() - began[0]


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def workers() -> list[psutil.Process]:
    """The ranks that this process has started, rank 0 first."""
    ranks = [child for child in children() if child.name() == PROCESS_NAME]
    return sorted(ranks, key=lambda child: child.pid)


@pytest.fixture
def ranks(stage_home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoRanks]:
    """Afterwards no rank is left, and no address that one listened at."""
    monkeypatch.setattr(processes, "OTHERS_SECONDS", 1.0)
    yield TwoRanks(stage_home)
    assert workers() == []
    ours = {os.getpid(), *(child.pid for child in children())}
    connections = [each for each in psutil.net_connections("tcp") if each.pid in ours]
    assert [each for each in connections if each.status == "LISTEN"] == []


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_stopped_rank_ends_all_after_the_timeout(ranks: TwoRanks, rank: int) -> None:
    limit = {"rank_timeout_seconds": LIMIT_SECONDS}
    message, seconds = ranks.fail(lambda: workers()[rank].suspend(), **limit)
    reason = rf"failed on rank {1 - rank}: another rank .* rank {1 - rank} was .*: .*imed out"
    assert re.search(reason, message) and "last checkpoint" in message, message
    assert LIMIT_SECONDS < seconds < LIMIT_SECONDS + 15


def test_a_rank_that_raises_ends_the_others(ranks: TwoRanks, monkeypatch: Any) -> None:
    monkeypatch.setenv("SABOTAGE", "raise")
    monkeypatch.setattr(processes, "WORKER", "support.saboteur")
    message, seconds = ranks.fail(lambda: None)
    assert "rank 1: ZeroDivisionError: of rank 1;" in message and "log.txt" in message
    assert seconds < 20


def test_a_stage_that_is_stopped_at_its_very_start_is_continued(ranks: TwoRanks) -> None:
    """The signal comes while the ranks are forked."""
    with pytest.raises(Interrupted) as stopped:
        ranks.run(lambda line: None, 9, signal.SIGTERM)
    assert stopped.value.exit_code == 143
    assert ranks.run(lambda line: None, 9).result["steps"] == 9


def test_after_a_killed_rank_the_next_try_continues_at_the_checkpoint(ranks: TwoRanks) -> None:
    message, seconds = ranks.fail(lambda: workers()[1].kill(), 60)
    assert "SIGKILL" in message and "log.txt" in message
    assert seconds < 20
    artifact = ranks.run(lambda line: None, 60)
    assert 0 < artifact.result["resumed_from_step"] < 60
    assert not ranks.home.store.work("pretrain", artifact.key).exists()
    files = {path.name for path in artifact.path.iterdir()}
    assert files == {"checkpoints", "manifest.json", "model", "run"}


@pytest.mark.parametrize(
    ("stage", "log", "setting"),
    [
        ("pretrain", "", "runtime.rows_per_device"),
        ("tokenizer", "memory allocation of 1168 bytes failed", "tokenizer.max_b"),
    ],
)
def test_lack_of_memory_names_a_setting(tmp_path: Path, stage: str, log: str, setting: str) -> None:
    process = subprocess.Popen(["sh", "-c", f"kill -{'ABRT' if log else 'KILL'} $$"])
    process.wait()
    (tmp_path / "log.txt").write_text(log)
    group = processes.ProcessGroup([process])
    assert group.poll()
    with pytest.raises(StageFailed, match=f"memory ran out.* lower {setting}"):
        processes.result_of(group, STAGES[stage], tmp_path / "log.txt", None)
