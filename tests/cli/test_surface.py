"""Commands about runs and sets of models, and a device that is missing."""

import json
import threading
from functools import partial
from pathlib import Path

import pytest
from support.data_commands import Run, in_process

from ttrain.store import runs
from ttrain.store.registry import Registry
from ttrain.store.runs import RunRecord


def test_a_missing_device_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = run("pipeline", "run", "full", "--engine", "none", "runtime.device=cuda")
    assert done.code == 2 and "runtime.device" in done.err and not Path("home/runs").exists()


def test_a_log_is_printed_and_followed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LOG_POLL_SECONDS", 0.01)
    record = RunRecord(Path("home"), "full", ["tokenizer", "sft"], {})
    record.log("tokenizer", "first")
    record.log("sft", "second \x1b[2J")
    lines = run("pipeline", "logs", record.run).out.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["tokenizer: first", "sft: second \\x1b[2J"]
    has_line = threading.Event()
    followed: list[str] = []

    def follow() -> None:
        for line in runs.log_lines(Path("home"), record.run, follow=True):
            followed.append(line.rpartition(" ")[2])
            has_line.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert has_line.wait(30)
    record.log("sft", "third")
    record.finish("completed", {})
    thread.join(30)
    assert followed == ["first", "\\x1b[2J", "third"]


def test_json_has_null_where_a_metric_is_not_finite(run: Run) -> None:
    metrics = {"sft/loss": float("nan"), "eval/perplexity": float("inf"), "eval/chats": 2.0}
    RunRecord(Path("home"), "full", ["sft"], {}).finish("completed", metrics)
    done = run("pipeline", "status", "--json")
    shown = json.loads(done.out, parse_constant=pytest.fail)[0]["metrics"]
    assert shown == {"sft/loss": None, "eval/perplexity": None, "eval/chats": 2.0}


def test_the_commands_list_promote_and_roll_back_sets_of_models(
    sets_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = partial(in_process(capsys), "models")
    for name, version in (("2", "2"), ("ll-3", "3"), ("full-1", "1")):
        line = f"mine/{version} of the run full-{version} is champion: mine-base/{version}"
        assert models("promote", name).out.startswith(line)
    assert models("promote", "--previous", "--json").json["version"] == "3"
    decision = {"promote": True, "reason": "better by 0.10000"}
    Registry(sets_home).decide("mine", "3", decision, run="full-3")
    listed = models("list", "--json").json
    aliases = [(entry["version"], entry["aliases"]) for entry in listed]
    assert aliases == [("3", ["champion"]), ("2", []), ("1", [])]
    assert listed[0]["decision"] == decision
    assert decision["reason"] in " ".join(models("list").out.split())
