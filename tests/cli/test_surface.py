"""The surface of the commands: help in panels, short commands, versions, logs of runs."""

import json
import threading
from pathlib import Path

import pytest
from support.data_commands import Run

from ttrain.store import runs
from ttrain.store.runs import RunRecord


@pytest.fixture
def home(tmp_path: Path, run: Run) -> Path:
    return tmp_path / "home"


def test_a_missing_device_is_refused(home: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = run("pipeline", "run", "full", "--engine", "none", "runtime.device=cuda")
    assert done.code == 2 and "runtime.device" in done.err and not (home / "runs").exists()


def test_a_log_is_printed_and_followed(
    home: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LOG_POLL_SECONDS", 0.01)
    record = RunRecord(home, "full", ["tokenizer", "sft"], {})
    record.log("tokenizer", "first")
    record.log("sft", "second \x1b[2J")
    lines = run("pipeline", "logs", record.run).out.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["tokenizer: first", "sft: second \\x1b[2J"]
    has_line = threading.Event()
    followed: list[str] = []

    def follow() -> None:
        for line in runs.log_lines(home, record.run, follow=True):
            followed.append(line.rpartition(" ")[2])
            has_line.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert has_line.wait(30)
    record.log("sft", "third")
    record.finish("completed", {})
    thread.join(30)
    assert followed == ["first", "\\x1b[2J", "third"]


def test_json_has_null_where_a_metric_is_not_finite(home: Path, run: Run) -> None:
    metrics = {"sft/loss": float("nan"), "eval/perplexity": float("inf"), "eval/chats": 2.0}
    RunRecord(home, "full", ["sft"], {}).finish("completed", metrics)
    done = run("pipeline", "status", "--json")
    shown = json.loads(done.out, parse_constant=pytest.fail)[0]["metrics"]
    assert shown == {"sft/loss": None, "eval/perplexity": None, "eval/chats": 2.0}
