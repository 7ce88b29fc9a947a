"""`ttrain ui` and the views that it writes: real MLflow, its server, and its pages in a real browser where there is one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import Browser, executable

from ttrain import cli_ui, tracking
from ttrain.cli import main
from ttrain.runs import RunRecord, record_cached
from ttrain.tracking import Run, Store, open_store, showing

SETTINGS = {"model.layers": 2, "sft.optim.lr": 1e-3, "runtime.devices": 1}
FIGURES = {"eval/bits_per_byte": 1.5, "eval/chat_loss_sft": 4.1, "sft/validation_loss": 4.2, "total/device_hours": 0.5}
CURVE = [{"step": tokens, "metrics": {"losses_by_tokens/sft": 9 - tokens / 1000}} for tokens in (512, 1024, 1536)]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Before anything imports MLflow: it would write an installation id into the user's ~/.config."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tracking.ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield


def track(home: Path, params: Mapping[str, object], metrics: Mapping[str, float]) -> tuple[str, str]:
    """(name, id) of a finished run of a pipeline with one stage, on record and tracked."""
    store = open_store(home, "ttrain")
    assert isinstance(store, Store)
    record = RunRecord(home, "full", ["sft"], {"tracking": {"experiment": "ttrain"}})
    parent = store.start_run(record.run, tags={"ttrain.pipeline": "full", "ttrain.run": record.run}, params=params)
    child = store.start_run("sft", parent=parent, tags={"ttrain.stage": "sft", "ttrain.key": record.run}, params={})
    assert isinstance(parent, Run) and isinstance(child, Run) and parent.id is not None
    assert parent.log_metrics(CURVE)
    parent.log_summary(metrics)
    for run in (child, parent):
        run.finish("FINISHED")
    record.stage("sft", outcome="completed", key=record.run)
    record.note(tracking={"run_id": parent.id})
    record.finish("completed", metrics)
    store.close()
    return record.run, parent.id


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """(home, {name: id}) with two runs, the newer one with another learning rate."""
    home = tmp_path_factory.mktemp("two") / "a home #1 50%"
    home.mkdir()
    runs = [
        track(home, SETTINGS, FIGURES),
        track(home, {**SETTINGS, "sft.optim.lr": 2e-4}, {**FIGURES, "eval/chat_loss_sft": 4.4}),
    ]
    return home, dict(runs)


def experiment(home: Path) -> tuple[Any, Any]:
    """(client, experiment)"""
    client = tracking.open_reader(home).client
    return client, client.get_experiment_by_name("ttrain")


def view(home: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(experiment(home)[1].tags[f"mlflow.sharedViewState.{name}"])
    return found


@pytest.fixture(scope="module")
def served(two: tuple[Path, dict[str, str]]) -> Iterator[dict[str, Any]]:
    """What `ttrain ui A B --json` says, while its server runs; it ends with 0 at Ctrl-C, and its server with it."""
    home, runs = two
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", "-c", "from ttrain.cli import main; main()", "ui", *runs, "--no-browser", "--json"]
    process = subprocess.Popen(
        [*command, "--port", str(port)], env={**os.environ, "TTRAIN_HOME": str(home)}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = []
    while not lines or lines[-1] != "}\n":
        lines.append(process.stdout.readline())
        assert lines[-1], f"it ended with {process.wait()}: {lines}"
    said = json.loads("".join(lines))
    yield said
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    with socket.socket() as probe, pytest.raises(OSError):
        probe.connect((urlsplit(said["url"]).hostname, urlsplit(said["url"]).port))


def test_the_table_has_the_settings_that_differ_then_the_figures(two: tuple[Path, dict[str, str]]) -> None:
    home, runs = two
    pages = tracking.addresses(home, ["ttrain"])
    assert pages is not None and pages.experiment == "ttrain"
    saved = view(home, showing.TABLE)
    state = json.loads(saved["state"])
    figures = [f"metrics.`{name}`" for name in ("eval/bits_per_byte", "eval/chat_loss_sft", "total/device_hours")]
    assert state["selectedColumns"][:-2] == ["params.`sft.optim.lr`", *figures]
    assert state["columnOrder"][1:] == state["selectedColumns"]
    assert pages.table.endswith("&workflowType=machine_learning") and f"viewStateShareKey={showing.TABLE}" in pages.table
    client, found = experiment(home)
    listed = client.search_runs([found.experiment_id], state["searchFilter"], order_by=[f"{state['orderByKey']} DESC"])
    assert [run.info.run_name for run in listed] == list(runs)[::-1]  # pipelines alone, the newest first


def test_what_did_not_change_is_not_written_and_what_a_user_wrote_stays(two: tuple[Path, dict[str, str]]) -> None:
    home, _ = two
    tracking.addresses(home, ["ttrain"])
    before = view(home, showing.TABLE)
    client, found = experiment(home)
    client.set_experiment_tag(found.experiment_id, tracking.NOTE, "mine")
    tracking.addresses(home, ["ttrain"])
    assert view(home, showing.TABLE) == before
    assert experiment(home)[1].tags[tracking.NOTE] == "mine"


def test_the_end_of_a_run_brings_the_views_up_to_date_and_a_silent_server_is_left_alone(
    two: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = two
    client, found = experiment(home)
    client.set_experiment_tag(found.experiment_id, f"mlflow.sharedViewState.{showing.TABLE}", "")
    store = open_store(home, "ttrain")
    tracking.refresh_views(store)
    assert "params.`sft.optim.lr`" in json.loads(view(home, showing.TABLE)["state"])["selectedColumns"]
    tracking.refresh_views(tracking.NullStore())
    with socket.socket() as deaf:  # takes connections, and never answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        silent = open_store(home, "ttrain")
        began = time.monotonic()
        tracking.refresh_views(silent)
        assert time.monotonic() - began < 1


def test_a_damaged_view_is_written_anew(two: tuple[Path, dict[str, str]]) -> None:
    home, _ = two
    client, found = experiment(home)
    client.set_experiment_tag(found.experiment_id, f"mlflow.sharedViewState.{showing.CURVES}", '{"name": 7')
    tracking.addresses(home, ["ttrain"])
    assert json.loads(view(home, showing.CURVES)["state"])["selectedColumns"]


def test_runs_without_an_evaluation_are_judged_by_their_validation() -> None:
    only_trained = {"pretrain/validation_loss": 3.0, "pretrain/tokens": 5.0}
    evaluated = {**only_trained, "eval/bits_per_byte": 1.0}
    assert showing.figures([evaluated]) == ["eval/bits_per_byte", "pretrain/tokens"]
    both = ["eval/bits_per_byte", "pretrain/validation_loss", "pretrain/tokens"]
    assert showing.figures([evaluated, only_trained]) == both
    assert showing.figures([]) == []


def test_settings_that_shape_the_models_come_before_those_that_do_not() -> None:
    first = {"runtime.devices": "1", "lora.rank": "4", "model.layers": "2", "same": "x"}
    second = {"runtime.devices": "2", "lora.rank": "8", "model.layers": "3", "same": "x", "data.sft": "a"}
    assert showing.differing([first, second]) == ["data.sft", "model.layers", "lora.rank", "runtime.devices"]
    many = [{f"sft.{number}": str(run) for number in range(30)} for run in range(2)]
    assert len(showing.differing(many)) == showing.MOST_SETTINGS


def test_the_largest_view_fits_into_a_tag() -> None:
    longest = [f"params.`{'x' * 60}{number}`" for number in range(showing.MOST_SETTINGS)]
    longest += [f"metrics.`{name}`" for name in (*showing.JUDGED_BY, *showing.JUDGED_BY.values(), *showing.BESIDE)]
    state = showing.compact(showing.state_of(longest))
    assert len(showing.compact({"name": "x" * 60, "createdAt": 1, "updatedAt": 1, "state": state})) < 5000


def test_ui_names_the_pages_of_its_runs(served: dict[str, Any], two: tuple[Path, dict[str, str]]) -> None:
    _, runs = two
    assert served["until_stopped"] and served["experiment"] == "ttrain"
    assert all(run_id in served["url"] for run_id in runs.values()) and "/#/compare-runs?" in served["url"]
    with urllib.request.urlopen(served["table"], timeout=30) as answer:  # all before the # is one page
        assert b"<title>MLflow</title>" in answer.read()


def test_ui_takes_the_server_that_runs(
    served: dict[str, Any],
    two: tuple[Path, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home, runs = two
    monkeypatch.setenv("TTRAIN_HOME", str(home))
    main_ends(["ui", "latest", "--no-browser", "--json"], None)
    said = json.loads(capsys.readouterr().out)
    newest = list(runs.values())[-1]
    assert not said["until_stopped"] and said["table"] == served["table"]
    assert urlsplit(said["url"]).fragment.startswith(f"/experiments/1/runs/{newest}?")


def test_ui_of_a_cached_run_is_that_of_the_run_it_equals(
    served: dict[str, Any],
    two: tuple[Path, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home, runs = two
    monkeypatch.setenv("TTRAIN_HOME", str(home))
    older = next(iter(runs))
    record_cached(home, "again", [], {}, {}, older)
    try:
        main_ends(["ui", "again", "--no-browser", "--json"], None)
    finally:
        [path] = (home / "runs").glob("again-*.json")
        path.unlink()
    assert f"/runs/{runs[older]}?" in json.loads(capsys.readouterr().out)["url"]


def main_ends(arguments: list[str], code: int | None) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert (end.value.code or None) == code


@pytest.mark.soak  # a browser, for what only another version of MLflow breaks
@pytest.mark.skipif(executable() is None, reason="no Chromium is installed")
def test_mlflows_own_pages_show_which_run_is_better_and_why(
    served: dict[str, Any], two: tuple[Path, dict[str, str]]
) -> None:
    _, runs = two
    header = "[...document.querySelectorAll('[role=columnheader][col-id*=\"`\"]')].map(one => one.getAttribute('col-id'))"
    with Browser() as browser:
        browser.open(served["table"])
        browser.wait_for("document.querySelectorAll('[col-id=\"metrics.`eval/bits_per_byte`\"]').length > 1")
        figures = [f"metrics.`{name}`" for name in ("eval/bits_per_byte", "eval/chat_loss_sft", "total/device_hours")]
        assert browser.evaluate(header)[1:5] == ["params.`sft.optim.lr`", *figures]
        cells = (
            "[...document.querySelectorAll('[role=gridcell][col-id=\"params.`sft.optim.lr`\"]')].map(one => one.innerText)"
        )
        assert browser.evaluate(cells) == ["0.0002", "0.001"]  # of two rows: the stages' runs are none of them

        browser.open("about:blank")
        browser.open(served["curves"])
        text = browser.wait_for("document.body.innerText.includes('Step') && document.body.innerText")
        assert text.index("losses_by_tokens\n(1)") < text.index("eval\n(2)")
        assert all(f"{name} (losses_by_tokens/sft)" in text for name in runs)

        browser.open("about:blank")
        browser.open(served["url"])
        switches = "document.querySelectorAll('button[role=switch]')"
        browser.wait_for(f"{switches}.length > 1")
        browser.evaluate(f"{switches}[0].click()")  # show differences only
        rows = (
            "[...document.querySelectorAll('table')].map(one => one.innerText).filter(one => one.includes('sft.optim.lr'))"
        )
        [differing] = browser.wait_for(f"{rows}.length && !{rows}[0].includes('model.layers') && {rows}")
        assert differing.split() == ["sft.optim.lr", "0.001", "0.0002"]


@pytest.mark.parametrize(
    ("arguments", "uri", "code", "message"),
    [
        (["nope"], None, 2, "there is no run 'nope'"),
        (["latest:nope"], None, 2, "has no stage 'nope'; it has sft"),
        ([], "sqlite:///elsewhere.db", 2, "which is no server; `ttrain ui` opens servers and the home's own database"),
        ([], "http://me:hidden@127.0.0.1:9", 1, "MLflow at http://127.0.0.1:9 cannot be asked"),
    ],
    ids=["no run", "no stage", "no server", "silent"],
)
def test_what_cannot_be_shown_is_said(
    two: tuple[Path, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    uri: str | None,
    code: int,
    message: str,
) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(two[0]))
    if uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    main_ends(["ui", *arguments, "--no-browser"], code)
    said = capsys.readouterr().err
    assert message in said and "hidden" not in said


def test_a_home_where_nothing_was_tracked_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "none"))
    main_ends(["ui"], 2)
    assert "begin with `ttrain pipeline run full`" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_no_browser_is_asked_that_would_take_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail("it was asked"))
    assert not cli_ui._open("http://127.0.0.1:1")
