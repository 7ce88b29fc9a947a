"""Watchdog over ranks: if one stops, hangs or deadlocks, the others name it and end.

Each rank has a thread that writes its progress to a file about every second (a beat). The thread of a rank that makes no
progress reads the beats of the others. It costs the training nothing: no rank writes or reads anything in a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ttrain.core.files import read_object

LIMIT_SECONDS = 20.0
LONGEST_STEPS = 5.0  # multiple of the longest step so far, if that is more
PATIENT_SECONDS = 300.0  # for the first steps (compilation), and while a rank has announced other work than training
BEAT_BYTES = 256
FIRST_SUMS = 3  # the trainer's agreements at its start, and the step that compiles
WAITING = "waiting"
IDLE_SHARE = 0.1  # a process that uses less of a core than this waits: for others, a lock, a disk


@dataclass(frozen=True)
class Beat:
    """Status of a rank, as written to its file."""

    number: int = 0  # of the beat: one that no longer grows is from a process that is stopped as a whole
    arrived: int = 0  # sums over all ranks that it has reached
    doing: str = "starting"
    busy: bool = False  # `doing` is announced work, which may take long
    idle_seconds: float = 0.0  # time without progress or computation


@dataclass
class Peer:
    """Another rank, as this one sees it."""

    beat: Beat = Beat()
    silent_seconds: float = 0.0


def give_up_reason(
    rank: int, own_beat: Beat, peers: dict[int, Peer], stalled_seconds: float, silent_limit: float, idle_limit: float
) -> str | None:
    """Why this rank, without progress for `stalled_seconds`, should give up; None to wait on.

    A silent rank is given up after `silent_limit`, ranks that all wait after `idle_limit`; a rank that computes is waited
    for, and one that has announced its work too, for PATIENT_SECONDS.
    """
    beats = {rank: own_beat, **{number: peer.beat for number, peer in peers.items()}}
    furthest = max(beat.arrived for beat in beats.values())
    for_how_long = f"for {stalled_seconds:.0f} s at sum {furthest}"
    silent = [number for number, peer in peers.items() if peer.silent_seconds >= silent_limit / 2]
    if silent and stalled_seconds >= silent_limit:
        return f"{_names(silent)} not answered {for_how_long}: stopped, or its machine is gone"
    busy = [number for number, peer in peers.items() if peer.beat.busy]
    if own_beat.busy or (busy and stalled_seconds < PATIENT_SECONDS):
        return None
    if busy:
        return f"{_names(busy)} been {', '.join(beats[number].doing for number in busy)} {for_how_long}"
    if stalled_seconds < idle_limit or not all(_is_idle(beat, idle_limit) for beat in beats.values()):
        return None
    if behind := [number for number, beat in beats.items() if beat.arrived < furthest]:
        return f"{_names(sorted(behind))} not come {for_how_long}, and does not compute either"
    return f"the ranks have waited for each other {for_how_long}"


def _is_idle(beat: Beat, limit_seconds: float) -> bool:
    return beat.doing == WAITING or beat.idle_seconds >= limit_seconds / 2


def _names(ranks: list[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers} has" if len(ranks) == 1 else f"ranks {numbers} have"


@dataclass
class Watchdog:
    """The watch of one rank. `give_up(why)` is called in the thread, once, and should end the process."""

    directory: Path
    rank: int
    world: int
    give_up: Callable[[str], object]
    limit_seconds: float = LIMIT_SECONDS
    peers: dict[int, Peer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peers = {rank: Peer() for rank in range(self.world) if rank != self.rank}
        self._doing, self._busy, self._arrived = "starting", False, 0
        self._longest = 0.0
        self._progress = 0  # changes whenever the rank gets further
        self._left = time.monotonic()
        self._tick = min(1.0, self.limit_seconds / 10)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Mark a sum over all ranks, which all ranks reach in every step."""
        self._arrived += 1
        with self.doing(WAITING):
            yield
        now = time.monotonic()
        if self._arrived > FIRST_SUMS:
            self._longest = max(self._longest, now - self._left)
        self._left = now

    @contextlib.contextmanager
    def doing(self, activity: str, *, busy: bool = False) -> Iterator[None]:
        """Mark work that is not a step; `busy` announces that it may take long."""
        previous = self._doing, self._busy
        self._doing, self._busy = activity, busy
        self._progress += 1
        try:
            yield
        finally:
            self._doing, self._busy = previous
            self._progress += 1

    def close(self) -> None:
        """End the watch."""
        self._end.set()
        self._thread.join()

    def _limits(self) -> tuple[float, float]:
        """(silent limit, idle limit) in seconds."""
        if self._arrived <= FIRST_SUMS:
            return PATIENT_SECONDS, PATIENT_SECONDS
        return self.limit_seconds, max(self.limit_seconds, min(LONGEST_STEPS * self._longest, PATIENT_SECONDS))

    def _watch(self) -> None:
        number, progress, stalled, idle, suspected = 0, -1, 0.0, 0.0, False
        computed, last = time.process_time(), time.monotonic()
        while not self._end.wait(self._tick):
            now, cpu = time.monotonic(), time.process_time()
            # a tick counts as at most two: a process that was stopped itself has waited for nobody meanwhile
            passed = min(now - last, 2 * self._tick)
            waits = cpu - computed < IDLE_SHARE * (now - last)
            moved, progress = self._progress != progress, self._progress
            computed, last, number = cpu, now, number + 1
            stalled = 0.0 if moved else stalled + passed
            idle = idle + passed if waits and not moved else 0.0
            own_beat = Beat(number, self._arrived, self._doing[:80], self._busy, idle)
            self._write_beat(own_beat)
            if stalled < self.limit_seconds / 4:
                for peer in self.peers.values():
                    peer.silent_seconds = 0.0
                suspected = False
                continue
            for rank, peer in self.peers.items():
                beat = self._read_beat(rank) or peer.beat
                peer.silent_seconds = 0.0 if beat.number != peer.beat.number else peer.silent_seconds + passed
                peer.beat = beat
            why = give_up_reason(self.rank, own_beat, self.peers, stalled, *self._limits())
            if why and suspected:  # twice in a row: the others' beats are up to a tick old
                self.give_up(why)
                return
            suspected = why is not None

    def _path(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.beat"

    def _write_beat(self, beat: Beat) -> None:
        """Write the beat in place, at fixed length: works on a full disk. Closing the file shows it to other machines."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path(self.rank), os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.pwrite(descriptor, json.dumps(asdict(beat)).ljust(BEAT_BYTES).encode(), 0)
            finally:
                os.close(descriptor)

    def _read_beat(self, rank: int) -> Beat | None:
        fields = read_object(self._path(rank))
        return Beat(**fields) if fields else None  # missing, or half written


_current: Watchdog | None = None


def start(directory: Path, rank: int, world: int, give_up: Callable[[str], object], limit_seconds: float) -> None:
    """Begin this process's watch, where it is one of several ranks."""
    global _current
    if world > 1:
        _current = Watchdog(directory, rank, world, give_up, limit_seconds)


def current() -> Watchdog | None:
    """The watch of this process; None where it is alone."""
    return _current
