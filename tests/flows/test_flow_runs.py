"""What looks whether a run was cancelled: often, with little work, and through an absence of the server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client import orchestration
from prefect.states import Cancelling, Running

from ttrain.engine.labels import Labels
from ttrain.engine.stop_request import SIGNALLED
from ttrain.flows import flow_runs, prefect_run


class Server:
    """Answers what it is told to answer, to any client."""

    def __init__(self) -> None:
        self.state: Any = Running()
        self.clients = self.looks = 0
        self.looked = threading.Condition()

    @contextlib.contextmanager
    def client(self, **options: Any) -> Iterator[Server]:
        self.clients += 1
        yield self

    def read_flow_run(self, id_: object) -> Any:
        with self.looked:
            self.looks += 1
            self.looked.notify_all()
        if self.state is None:
            raise ConnectionError("away")
        return SimpleNamespace(state=self.state)

    def wait_for_looks(self, more: int) -> None:
        with self.looked:
            wanted = self.looks + more
            assert self.looked.wait_for(lambda: self.looks >= wanted, timeout=20)


class Asked:
    """An execution, as far as it is asked to stop."""

    def __init__(self) -> None:
        self.signum, self.stop_reason = 0, SIGNALLED
        self.asked = threading.Event()

    def ask_to_stop(self, signum: int, why: str) -> None:
        self.signum, self.stop_reason = signum, why
        self.asked.set()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(orchestration, "get_client", made.client)
    monkeypatch.setattr(flow_runs, "current_flow_run", lambda: SimpleNamespace(id="run"))
    monkeypatch.setattr(flow_runs, "WATCH_SECONDS", 0.01)
    return made


def test_one_client_looks_all_the_time_and_another_after_the_server_was_away(server: Server) -> None:
    execution: Any = Asked()
    with flow_runs.watching_for_cancellation(execution):
        server.wait_for_looks(20)
        assert server.clients == 1
        server.state = None
        server.wait_for_looks(3)
        server.state = Running()
        server.wait_for_looks(2)
        clients = server.clients
        server.wait_for_looks(20)
        assert server.clients == clients
        server.state = Cancelling()
        assert execution.asked.wait(20)
    assert execution.stop_reason == flow_runs.CANCELLED


def test_a_signal_that_came_before_the_look_is_told_as_the_cancellation_that_it_was(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_runs, "WATCH_SECONDS", 100.0)
    for state, reason in ((Cancelling(), flow_runs.CANCELLED), (Running(), SIGNALLED), (None, SIGNALLED)):
        execution: Any = Asked()
        server.state = state
        with flow_runs.watching_for_cancellation(execution):
            execution.signum = 15
        assert execution.stop_reason == reason


def test_a_flow_run_has_the_name_of_the_settings_and_the_users_tags() -> None:
    labels = Labels("", {"purpose": "baseline"})
    execution: Any = SimpleNamespace(settings=SimpleNamespace(name="mine"), labels=labels)
    assert prefect_run.tags_of(execution) == ["ttrain", "name=mine", "purpose=baseline"]
