"""Ranks that are killed, stopped or fail end the others and say why; nothing is left of them."""

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.tiny_stages import Home, Watcher, build_stage, stage_settings

from ttrain.engine import processes, stage_worker
from ttrain.engine.stage_worker import PROCESS_NAME
from ttrain.errors import ArtifactError, Interrupted, StageFailed
from ttrain.store.layout import Artifact
from ttrain.tasks import PRETRAIN, STAGES

LIMIT_SECONDS = 5.0
SEEDS = itertools.count(1)


@dataclass
class Bed:
    """A stage on two ranks that no other test has begun."""

    home: Home
    seed: int = field(default_factory=lambda: next(SEEDS))
    runtime: dict[str, float] = field(default_factory=dict)

    def run(
        self, act: Callable[[str], None] = lambda line: None, steps: int = 400, signum: int = 0
    ) -> Artifact:
        training = {"optim": {"kind": "adamw"}, "seed": self.seed}
        settings = stage_settings(steps, training, devices=2, **self.runtime)
        inputs = self.home.pretrain_inputs()
        return build_stage(
            PRETRAIN, settings, self.home.store, inputs, Watcher(act, signum)
        ).artifact

    def fail(
        self, act: Callable[[str], None] = lambda line: None, steps: int = 400
    ) -> tuple[str, float]:
        """The stage's message, and the seconds from `act` (or the line "now") to the end."""
        began = [0.0]

        def once(line: str) -> None:
            if not began[0] and ("now" in line or "step 6/" in line):
                began[0] = time.monotonic()
                act(line)

        with pytest.raises(StageFailed) as failed:
            self.run(once, steps)
        return str(failed.value), time.monotonic() - began[0]


def workers() -> list[psutil.Process]:
    """The ranks that this process has started, rank 0 first."""
    found = [
        child for child in psutil.Process().children(recursive=True) if child.name() == PROCESS_NAME
    ]
    return sorted(found, key=lambda child: child.pid)


@pytest.fixture
def bed(stage_home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    """Afterwards no rank is left, and no address that one listened at."""
    monkeypatch.setattr(processes, "OTHERS_SECONDS", 1.0)
    yield Bed(stage_home)
    assert workers() == []
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    listening = [
        found
        for found in psutil.net_connections("tcp")
        if found.pid in ours and found.status == "LISTEN"
    ]
    assert listening == []


@pytest.mark.parametrize(
    "error", [None, ArtifactError("cannot read the tokenizer: KeyboardInterrupt")]
)
def test_a_stage_stops_whatever_a_library_makes_of_the_exception(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = stage_worker.StopFlag(stops_by_itself=True)
    monkeypatch.setattr(stop, "listen", lambda: None)
    monkeypatch.setattr(stage_worker, "job_of", lambda *_, **named: (None, None))

    def run(*_: object) -> None:
        try:
            stop._handle(signal.SIGTERM, None)
        except BaseException as raised:
            assert not isinstance(raised, Exception), "which libraries take for their own"
            raise error or raised from None

    monkeypatch.setattr(stage_worker, "import_module", lambda name: SimpleNamespace(run=run))
    outcome = stage_worker._run(tmp_path, {"stage": "evaluate"}, stop, 0)
    assert outcome == {
        "outcome": "interrupted",
        "error": "stopped by a signal",
        "signal": signal.SIGTERM,
    }


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_stopped_rank_ends_all_after_the_timeout(bed: Bed, rank: int) -> None:
    bed.runtime = {"rank_timeout_seconds": LIMIT_SECONDS}
    message, seconds = bed.fail(lambda line: workers()[rank].suspend())
    waited = rf"failed on rank {1 - rank}: another rank ended while rank {1 - rank} was .*, or it hangs: .*imed out"
    assert re.search(waited, message), message
    assert "run the same command again, which continues at the last checkpoint" in message
    assert LIMIT_SECONDS < seconds < LIMIT_SECONDS + 15


def test_a_rank_that_raises_ends_the_others_and_its_own_reason_is_told(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SABOTAGE", "raise")
    monkeypatch.setattr(processes, "WORKER", "support.saboteur")
    message, seconds = bed.fail()
    assert "failed on rank 1: ZeroDivisionError: of rank 1; the traceback is in" in message
    assert seconds < 20


def test_a_stage_that_is_told_to_stop_at_its_very_start_stops_and_is_continued(bed: Bed) -> None:
    """The signal comes while the ranks are forked, before they have looked at anything."""
    with pytest.raises(Interrupted) as stopped:
        bed.run(steps=9, signum=signal.SIGTERM)
    assert stopped.value.exit_code == 143
    assert bed.run(steps=9).result["steps"] == 9


def test_a_try_after_one_whose_second_rank_was_killed_finds_its_checkpoint_and_nothing_else(
    bed: Bed,
) -> None:
    message, seconds = bed.fail(lambda line: workers()[1].kill(), steps=60)
    assert "rank 1 was killed by SIGKILL without a result, and the others were ended" in message
    assert "log.txt" in message and seconds < 20
    artifact = bed.run(steps=60)
    assert 0 < artifact.result["resumed_from_step"] < 60
    assert not bed.home.store.work("pretrain", artifact.key).exists()
    assert sorted(path.name for path in artifact.path.iterdir()) == [
        "checkpoints",
        "manifest.json",
        "model",
        "run",
    ]


@pytest.mark.parametrize(
    ("stage", "end", "log", "advice"),
    [
        (
            "pretrain",
            "kill -KILL $$",
            "",
            "; if memory ran out, lower runtime.rows_per_device or end other programs",
        ),
        (
            "tokenizer",
            "kill -ABRT $$",
            "memory allocation of 1168 bytes failed",
            "; memory ran out: lower tokenizer.max_b",
        ),
        ("pretrain", "kill -ABRT $$", "", ""),
    ],
)
def test_a_process_that_ended_for_want_of_memory_names_what_to_lower(
    tmp_path: Path, stage: str, end: str, log: str, advice: str
) -> None:
    process, log_path = subprocess.Popen(["sh", "-c", end]), tmp_path / "log.txt"
    process.wait()
    log_path.write_text(log)
    group = processes.ProcessGroup([process])
    assert group.poll()
    with pytest.raises(StageFailed, match=re.escape(f"without a result{advice}")) as failed:
        processes.result_of(group, STAGES[stage], log_path, None)
    assert ("memory ran out" in str(failed.value)) == bool(advice)
