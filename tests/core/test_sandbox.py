"""A child with a budget: what exceeds it is named, and the next request is answered, from any thread or forked process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from ttrain.core.sandbox import BudgetExceeded, Sandbox, WorkFailed
from ttrain.errors import DataError


def work(request: bytes) -> Iterator[bytes]:
    """In the child: what the request asks for."""
    match request.decode():
        case "loop":
            while True:
                pass
        case "memory":
            yield b"x" * (1 << 40)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "error":
            raise RuntimeError("no such luck")
        case "data error":
            raise DataError("a.jsonl:3: wrong")
        case "many":
            for number in range(10_000):
                yield b"%d" % number
        case "print":
            print("this is no result", flush=True)
            yield b"printed"
        case text:
            yield text.upper().encode()


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    with closing(Sandbox(work, seconds=0.2, seconds_per_result=0.05, memory_bytes=256 << 20)) as sandbox:
        yield sandbox


def test_what_goes_wrong_is_named_and_the_next_request_is_answered(sandbox: Sandbox) -> None:
    for request, error, message in (
        (b"error", WorkFailed, "RuntimeError: no such luck"), (b"data error", DataError, "a.jsonl:3: wrong"),
        (b"memory", BudgetExceeded, "it needs more than 256 MiB of memory"),
        (b"crash", BudgetExceeded, "its process ended with SIGSEGV"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            sandbox.call(request)
        assert sandbox.call(b"hello") == b"HELLO"
        assert sandbox.call(b"print") == b"printed"


def test_a_thousand_expensive_requests_cannot_add_up(sandbox: Sandbox) -> None:
    for seconds in (r"0\.2", r"0\.05"):
        with pytest.raises(BudgetExceeded, match=f"more than {seconds} s"):
            sandbox.call(b"loop")
    for _ in range(5):
        sandbox.call(b"cheap")
    with pytest.raises(BudgetExceeded, match=r"more than 0\.2 s"):
        sandbox.call(b"loop")


def test_threads_and_streams_within_streams_have_children_of_their_own(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(2) as threads:
        texts = [f"text {number}" for number in range(12)]
        assert list(threads.map(lambda text: sandbox.call(text.encode()).decode(), texts)) == [t.upper() for t in texts]
    outer = sandbox.stream(b"many")
    assert next(outer) == b"0"
    assert sandbox.call(b"inner") == b"INNER"
    assert len(list(outer)) == 9_999


def test_a_stream_that_nobody_reads_on_leaves_no_process(sandbox: Sandbox) -> None:
    others = psutil.Process().children(recursive=True)  # of other tests
    stream = sandbox.stream(b"many")
    next(stream)
    children = set(psutil.Process().children(recursive=True)) - set(others)
    assert len(children) == 2
    stream.close()
    deadline = time.monotonic() + 20
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, "killed processes are gone at once"
        time.sleep(0.01)


def test_a_forked_process_has_children_of_its_own(sandbox: Sandbox) -> None:
    assert sandbox.call(b"before") == b"BEFORE"
    forked = os.fork()
    if not forked:
        answer = b""
        try:
            answer = sandbox.call(b"in the fork")
            sandbox.close()
        finally:
            os._exit(0 if answer == b"IN THE FORK" else 1)
    assert sandbox.call(b"here") == b"HERE"
    assert os.waitpid(forked, 0)[1] == 0
    assert sandbox.call(b"after") == b"AFTER"
