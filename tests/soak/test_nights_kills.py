"""Nights by a cron each minute, while everything that takes part is killed at random. `make soak` runs it.

TTRAIN_SOAK_SLOTS says for how many slots. Whatever is killed - the night's flow, a stage, what serves, the server, all at
once - no two nights overlap, none wedges the next one, each file is learnt by one completed night, and nothing is registered
twice.
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
NEAR = (
    0.0,
    0.25,
    1.0,
)  # shares of near-duplicates in the files that come: a night of the last alone learns nothing
SETTLE_SECONDS = 600  # for the last night to be finished without kills; one takes half a minute on two idle cores
CRASHED_SECONDS = 180  # the server's automation needs two minutes at most


def named(home: Path, what: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in processes_of(home):
        try:
            if what(process):
                found.append(process)
        except psutil.Error:
            continue
    return found


def flows(home: Path) -> list[psutil.Process]:
    return named(home, lambda process: "spawn_main" in " ".join(process.cmdline()))


def workers(home: Path) -> list[psutil.Process]:
    return named(home, lambda process: process.name() == PROCESS_NAME)


class Chaos:
    def __init__(self, cli: Cli, rng: random.Random) -> None:
        self.cli, self.rng, self.home = cli, rng, cli.home
        self.served = Served(cli)
        self.kills: Counter[str] = Counter()
        self.said = ""

    def strike(self) -> None:
        what = self.rng.choice(["flow", "flow", "stage", "serve", "server", "machine"])
        victims = {
            "flow": lambda: flows(self.home),
            "stage": lambda: workers(self.home),
            "serve": lambda: [psutil.Process(self.served.process.pid)],
            "server": self._server,
            "machine": lambda: processes_of(self.home),
        }[what]()
        for process in victims:
            try:
                process.kill()
                self.kills[what] += 1
            except psutil.Error:
                continue

    def keep_up(self) -> None:
        if self.served.process.poll() is not None:
            self.said += self.served.said
            time.sleep(self.rng.uniform(0, 8))
            self.served = Served(self.cli)

    def _server(self) -> list[psutil.Process]:
        server = server_records.live_server(self.home, "prefect")
        return [psutil.Process(server.pid)] if server else []


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    write_corpus(tmp_path / "data")
    yield Cli(tmp_path / "home", tmp_path / "data")
    for process in processes_of(tmp_path / "home"):
        with contextlib.suppress(psutil.Error):
            process.kill()


def test_nights_of_every_minute_stand_any_kill(cli: Cli) -> None:
    rng = random.Random(6)
    chaos = Chaos(cli, rng)
    cli("pipeline", "schedule", "nightly", "--cron", "* * * * *", "--timezone", "UTC", *TINY)
    nights = Nights(cli.home, NAME)
    began, next_strike, next_documents, documents = (
        time.time(),
        time.time() + 20,
        time.time() + 60,
        0,
    )
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
    wait_until(
        lambda: is_settled(cli, quiet), SETTLE_SECONDS, lambda: chaos.said + chaos.served.said
    )
    wait_until(
        lambda: not stuck(cli.home),
        CRASHED_SECONDS,
        lambda: str([run["name"] for run in stuck(cli.home)]),
    )
    ended = flow_runs(cli.home, *FINAL_STATES)
    assert max(Counter(map(slot, ended)).values()) == 1, "a slot came twice"
    assert chaos.served.stop() == 0
    wait_until(lambda: not processes_of(cli.home), 10, lambda: str(processes_of(cli.home)))

    completed = [night for night in nights.newest_first() if night.outcome in COMPLETED]
    assert documents_of(read(list(nights.newest_first()))).keys() == files(cli)
    promoted = documents_of([night for night in completed if night.outcome == "promoted"])
    assert max(promoted.values()) == 1, "what the champion has learnt is not new"
    versions = {
        night.data["version"] for night in completed
    }  # where a night learns what one before it did, that one's
    assert_registered_once(cli.home, len(versions))
    learnt = [night.data["learnt"] for night in completed]
    assert all(figures.get("replayed_tokens") for figures in learnt[:-1]), (
        "the newest first; the first has none to replay"
    )
    left_out = sum(figures.get("left_out", 0) for figures in learnt)
    empty = sum(
        night.outcome == NOTHING_NEW and bool(night.digests()) for night in nights.newest_first()
    )
    assert left_out or empty or documents < 2, (
        "some of the second file's documents are near-duplicates"
    )
    print(f"{SLOTS} slots, kills {dict(chaos.kills)}, {len(completed)} nights, {documents} files")


def files(cli: Cli) -> set[str]:
    return {str(path) for path in cli.data.glob("docs*.jsonl")}


def documents_of(nights: list[NightRecord]) -> Counter[str]:
    return Counter(
        file["location"]
        for night in nights
        for file in night.data["inputs"]["files"].get("pretrain", ())
    )


def assert_none_overlaps(home: Path) -> None:
    """The stages of one night run side by side; those of two never do, not even an orphan's."""
    if len(nights_at_work(home)) > 1:
        time.sleep(
            1.5
        )  # one whose parent was killed just now has 0.2 s, on a busy machine more, to notice
        remaining = nights_at_work(home)
        assert len(remaining) <= 1, f"stages of {len(remaining)} nights at once: {remaining}"


def nights_at_work(home: Path) -> Counter[int]:
    """The stages at work by the process that runs their night: each has a process of the fork server's between."""
    nights = Counter[int]()
    for process in workers(home):
        with contextlib.suppress(psutil.Error):
            above = (
                one for one in process.parents() if "ttrain.engine.fork_server" not in one.cmdline()
            )
            nights[next(above).pid] += 1
    return nights


def read(nights: list[NightRecord]) -> list[NightRecord]:
    """The nights that have done with their files: decided, or found nothing new in them."""
    return [night for night in nights if night.outcome in (*COMPLETED, NOTHING_NEW)]


def is_settled(cli: Cli, since: float) -> bool:
    """Whether all documents are learnt, and a slot after the last kill found that nothing is new."""
    nights = list(Nights(cli.home, NAME).newest_first())
    if any(night.is_open for night in nights) or documents_of(read(nights)).keys() < files(cli):
        return False
    with contextlib.suppress(OSError, AssertionError):  # the server is being started again
        return any(slot(run) > since for run in flow_runs(cli.home, "NothingNew"))
    return False


def stuck(home: Path) -> list[dict[str, Any]]:
    """Flow runs that Prefect takes to be in progress, other than those whose process is just at it."""
    return [] if flows(home) else flow_runs(home, "Running", "Cancelling")
