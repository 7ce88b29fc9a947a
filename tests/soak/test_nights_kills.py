"""Nights by a cron each minute, while everything that takes part is killed at random.

TTRAIN_SOAK_SLOTS says for how many slots. Whatever is killed - the night's flow, a stage, what
serves, the server, all at once - no two nights overlap, none blocks the next one, each file is
trained on by one completed night, and nothing is registered twice.
"""

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.nights import NAME, add_documents, assert_registered_once
from support.pipeline_home import Cli, write_corpus
from support.served import FINAL_STATES, Served, flow_runs, processes_of, slot
from support.waiting import wait_until

from ttrain.engine.stage_worker import PROCESS_NAME
from ttrain.nightly.records import COMPLETED, NOTHING_NEW, NightRecord, Nights
from ttrain.store import server_records

pytestmark = [pytest.mark.soak, pytest.mark.long]
SLOTS = int(os.environ.get("TTRAIN_SOAK_SLOTS", "2"))
TINY = (
    "pretrain.tokens=10240",
    "evaluate.new_tokens=0",
    "nightly.attempts=50",
    "nightly.replay=0.25",
    "reading.near_duplicates=0.8",
)
# Fractions of near-duplicates in new files: a night of the last alone has nothing to train on
NEAR = (0.0, 0.25, 1.0)
SETTLE_SECONDS = 600  # for the last night, without kills; one takes half a minute on two idle cores
CRASHED_SECONDS = 180  # the server's automation needs two minutes at most


def matching(home: Path, condition: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    processes = []
    for process in processes_of(home):
        with contextlib.suppress(psutil.Error):
            if condition(process):
                processes.append(process)
    return processes


def flows(home: Path) -> list[psutil.Process]:
    return matching(home, lambda process: "spawn_main" in " ".join(process.cmdline()))


def workers(home: Path) -> list[psutil.Process]:
    return matching(home, lambda process: process.name() == PROCESS_NAME)


def kill(processes: list[psutil.Process]) -> int:
    """Kill them; how many had not ended before."""
    killed = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
            killed += 1
    return killed


class Chaos:
    def __init__(self, cli: Cli, rng: random.Random) -> None:
        self.cli = cli
        self.rng = rng
        self.served = Served(cli)
        self.kills: Counter[str] = Counter()
        self.output = ""

    def strike(self) -> None:
        name = self.rng.choice(["flow", "flow", "stage", "serve", "server", "machine"])
        self.kills[name] += kill(self._victims(name))

    def _victims(self, name: str) -> list[psutil.Process]:
        home = self.cli.home
        match name:
            case "flow":
                return flows(home)
            case "stage":
                return workers(home)
            case "serve":
                return [psutil.Process(self.served.process.pid)]
            case "machine":
                return processes_of(home)
        server = server_records.live_server(home, "prefect")
        return [psutil.Process(server.pid)] if server else []

    def all_output(self) -> str:
        return self.output + self.served.said

    def keep_up(self) -> None:
        if self.served.process.poll() is not None:
            self.output += self.served.said
            time.sleep(self.rng.uniform(0, 8))
            self.served = Served(self.cli)


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    write_corpus(tmp_path / "data")
    yield Cli(tmp_path / "home", tmp_path / "data")
    kill(processes_of(tmp_path / "home"))


def test_nights_of_every_minute_stand_any_kill(cli: Cli) -> None:
    rng = random.Random(6)
    chaos = Chaos(cli, rng)
    cli("pipeline", "schedule", "nightly", "--cron", "* * * * *", "--timezone", "UTC", *TINY)
    began = time.time()
    next_strike = began + 20
    next_documents = began + 60
    documents = 0
    while time.time() < began + 60 * SLOTS:
        if time.time() > next_strike:
            chaos.strike()
            next_strike = time.time() + rng.uniform(5, 90)
        if time.time() > next_documents:
            documents += 1
            add_documents(cli.data, documents, rng, near=NEAR[(documents - 1) % len(NEAR)])
            next_documents = time.time() + rng.uniform(40, 200)
        assert_none_overlaps(cli.home)
        chaos.keep_up()
        time.sleep(0.3)

    chaos.keep_up()
    quiet = time.time()
    wait_until(lambda: is_settled(cli, quiet), SETTLE_SECONDS, chaos.all_output)
    wait_until(lambda: not stuck(cli.home), CRASHED_SECONDS, lambda: str(stuck(cli.home)))
    ended = flow_runs(cli.home, *FINAL_STATES)
    assert max(Counter(map(slot, ended)).values()) == 1, "a slot came twice"
    assert chaos.served.stop() == 0
    wait_until(lambda: not processes_of(cli.home), 10, lambda: str(processes_of(cli.home)))

    nights = list(Nights(cli.home, NAME).newest_first())
    completed = [night for night in nights if night.outcome in COMPLETED]
    assert documents_of(read(nights)).keys() == files(cli)
    promoted = documents_of([night for night in completed if night.outcome == "promoted"])
    assert max(promoted.values()) == 1, "what the champion was trained on is not new"
    # A night that trains on what one before it did has that one's version
    assert_registered_once(cli.home, len({night.data["version"] for night in completed}))
    learnt = [night.data["learnt"] for night in completed]  # the first has none to replay
    assert all(counts.get("replayed_tokens") for counts in learnt[:-1])
    # Some of the second file's documents are near-duplicates
    left_out = sum(counts.get("left_out", 0) for counts in learnt)
    is_empty = [night.outcome == NOTHING_NEW and bool(night.digests()) for night in nights]
    assert left_out or any(is_empty) or documents < 2
    print(f"{SLOTS} slots, kills {dict(chaos.kills)}, {len(completed)} nights, {documents} files")


def files(cli: Cli) -> set[str]:
    return {str(path) for path in cli.data.glob("docs*.jsonl")}


def documents_of(nights: list[NightRecord]) -> Counter[str]:
    files = [night.data["inputs"]["files"].get("pretrain", ()) for night in nights]
    return Counter(file["location"] for listed in files for file in listed)


def assert_none_overlaps(home: Path) -> None:
    """The stages of one night run side by side; those of two never do, not even an orphan's."""
    if len(nights_at_work(home)) > 1:
        time.sleep(1.5)  # one whose parent was just killed has 0.2 s, or more if busy, to notice
        remaining = nights_at_work(home)
        assert len(remaining) <= 1, f"stages of {len(remaining)} nights at once: {remaining}"


def nights_at_work(home: Path) -> Counter[int]:
    """Count the stages at work by the process of their night, above that of the fork server."""
    nights = Counter[int]()
    for worker in workers(home):
        with contextlib.suppress(psutil.Error):
            for process in worker.parents():
                if "ttrain.engine.fork_server" not in process.cmdline():
                    nights[process.pid] += 1
                    break
    return nights


def read(nights: list[NightRecord]) -> list[NightRecord]:
    """The nights that have done with their files: decided, or found nothing new in them."""
    return [night for night in nights if night.outcome in (*COMPLETED, NOTHING_NEW)]


def is_settled(cli: Cli, since: float) -> bool:
    """Whether all documents are read, and a slot after the last kill found that nothing is new."""
    nights = list(Nights(cli.home, NAME).newest_first())
    if any(night.is_open for night in nights) or documents_of(read(nights)).keys() < files(cli):
        return False
    with contextlib.suppress(OSError, AssertionError):  # the server is being started again
        return any(slot(run) > since for run in flow_runs(cli.home, "NothingNew"))
    return False


def stuck(home: Path) -> list[dict[str, Any]]:
    """Flow runs that Prefect shows as in progress, though no process runs one."""
    return [] if flows(home) else flow_runs(home, "Running", "Cancelling")
