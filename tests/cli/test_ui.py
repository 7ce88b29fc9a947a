"""The pages that `ttrain up --open` opens: views of a real MLflow and its server, in a real browser where there is one."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.browser import Browser, executable
from support.recorded_homes import BEGAN, Made, make_artifact
from support.served import write_double
from support.tracked_stores import client_of, pushed

from ttrain.cli import tracking as ui
from ttrain.config import Settings
from ttrain.errors import TTrainError
from ttrain.flows import servers
from ttrain.store import server_records
from ttrain.store.runs import RunRecord, record_cached
from ttrain.tracking import views

SETTINGS = {"model": {"layers": 2}, "sft": {"optim": {"lr": 1e-3}}}
FIGURES = {"eval/bits_per_byte": 1.5, "eval/chat_loss_sft": 4.1, "sft/validation_loss": 4.2, "total/device_hours": 0.5}
CURVE = [{"step": step, "tokens": 512 * step, "time": BEGAN, "metrics": {"loss": 9 - step / 2}} for step in (1, 2, 3)]


def track(home: Path, settings: Mapping[str, object], metrics: Mapping[str, float]) -> tuple[str, str]:
    """(name, id) of a finished run of a pipeline with one stage, on record and tracked."""
    record = RunRecord(home, "full", ["sft"], Settings().replaced(dict(settings)).model_dump(mode="json"))
    made = Made("sft", key=record.run, texts={"run/metrics.jsonl": "".join(f"{json.dumps(row)}\n" for row in CURVE)})
    make_artifact(home, record.run, made, BEGAN)
    record.stage("sft", outcome="completed", key=record.run)
    record.finish("completed", metrics)
    [run_id] = pushed(home, [record.run])
    assert run_id
    return record.run, run_id


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, add_database: Callable[[Path], None]) -> tuple[Path, dict[str, str]]:
    """(home, {name: id}) with two runs, the newer one with another learning rate."""
    home = tmp_path_factory.mktemp("two") / "a home #1 50%"
    add_database(home)
    older = track(home, SETTINGS, FIGURES)
    newer = track(home, {**SETTINGS, "sft": {"optim": {"lr": 2e-4}}}, {**FIGURES, "eval/chat_loss_sft": 4.4})
    return home, dict([older, newer])


@pytest.fixture(scope="module")
def served(two: tuple[Path, dict[str, str]]) -> Iterator[dict[str, str]]:
    """The pages of both runs, as `ttrain up A B` names them, while MLflow's server runs."""
    home, runs = two
    servers.start(home, {"mlflow": servers.free_port(21_000)})
    server = server_records.live_server(home, "mlflow")
    assert server is not None
    yield ui.links_of(home, server.url, [*runs])
    servers.stop(home, "mlflow")


@pytest.fixture(scope="module")
def running(two: tuple[Path, dict[str, str]]) -> Iterator[Path]:
    """The home of `two`, whose server is a double."""
    home, _ = two
    with pytest.MonkeyPatch.context() as patch:
        write_double(home)
        patch.setattr(servers, "mlflow_command", lambda home, port: (["double", str(port)], {}))
        servers.start(home, {"mlflow": servers.free_port(20_000)})
        yield home
        servers.down(home)


def test_the_table_is_the_view_of_the_newest_run(two: tuple[Path, dict[str, str]]) -> None:
    home, runs = two
    pages = ui._pages(home, [])
    assert (pages.experiment, pages.name) == ("ttrain", "quickstart")
    client, found = client_of(home), client_of(home).get_experiment_by_name("ttrain")
    [saved] = [
        text for tag, text in found.tags.items() if tag.startswith(views.VIEW) and tag[len(views.VIEW) :] in pages.table
    ]
    state = json.loads(json.loads(saved)["state"])
    assert state["selectedColumns"][-1] == "params.`sft.optim.lr`"
    listed = client.search_runs([found.experiment_id], state["searchFilter"])
    assert [run.info.run_name for run in listed] == list(runs)[::-1]  # pipelines alone, the newest first


def test_a_browser_gets_the_token_in_a_file_that_no_other_account_can_read_not_as_an_argument(
    running: Path, two: tuple[Path, dict[str, str]]
) -> None:
    home, server = running, server_records.live_server(running, "mlflow")
    assert server is not None
    pages, newest = ui.links_of(home, server.url, ("latest",)), list(two[1].values())[-1]
    page = pages["url"]
    assert f":{server.port}/?token=" in pages["table"]
    assert urlsplit(page).fragment.startswith(f"/experiments/1/runs/{newest}?")
    there = ui.redirect_page(home, page)
    token = (home / "servers" / "token").read_text().strip()
    path = home / "servers" / "open.html"
    assert there == path.as_uri() and token not in there and token in path.read_text()
    assert [stat.S_IMODE(file.stat().st_mode) for file in (path, path.parent)] == [0o600, 0o700]
    assert ui.redirect_page(home, "http://elsewhere:5000/#/") == "http://elsewhere:5000/#/"


def test_the_page_of_a_cached_run_is_that_of_the_run_it_equals(running: Path, two: tuple[Path, dict[str, str]]) -> None:
    older, server = next(iter(two[1])), server_records.live_server(running, "mlflow")
    record_cached(running, "again", [], {}, {}, older)
    try:
        assert server and f"/runs/{two[1][older]}?" in ui.links_of(running, server.url, ("again",))["url"]
    finally:
        [path] = (running / "runs").glob("again-*.json")
        path.unlink()


@pytest.mark.soak  # a browser, for what only another version of MLflow breaks
@pytest.mark.skipif(executable() is None, reason="no Chromium is installed")
def test_mlflows_own_pages_show_which_run_is_better_and_why(
    served: dict[str, str], two: tuple[Path, dict[str, str]]
) -> None:
    _, runs = two
    # In the order in which they are seen, which is not that of the document; what MLflow has of its own aside
    headers = (
        "[...document.querySelectorAll('[role=columnheader][col-id]')]"
        ".sort((one, other) => one.getAttribute('aria-colindex') - other.getAttribute('aria-colindex'))"
        ".map(one => one.getAttribute('col-id')).filter(id => /^(metrics|params)\\./.test(id)).join()"
    )
    cells = "[...document.querySelectorAll('[role=gridcell][col-id=\"params.`sft.optim.lr`\"]')].map(one => one.innerText)"
    with Browser() as browser:
        browser.open(served["table"])
        browser.wait_for(f"{headers} === 'metrics.`eval/bits_per_byte`,metrics.`eval/chat_loss_sft`,params.`sft.optim.lr`'")
        browser.wait_for(f"{cells}.join() === '0.0002,0.001'")  # of two rows: the stages' runs are none of them

        browser.open("about:blank")
        browser.open(served["curves"])
        text = browser.wait_for("document.body.innerText.includes('Step') && document.body.innerText")
        assert text.index("Curves\n(1)") < text.index("eval\n(2)")
        assert all(f"{name} (Curves/sft loss)" in text for name in runs)

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
    ("runs", "uri", "message"),
    [
        (["nope"], None, "there is no run 'nope'"),
        (["latest:nope"], None, "has no stage 'nope'; there is sft"),
        ([], "http://me:hidden@127.0.0.1:9", "MLflow at http://127.0.0.1:9 has no run of"),
    ],
    ids=["no run", "no stage", "silent"],
)
def test_what_cannot_be_shown_is_said(
    two: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch, runs: list[str], uri: str | None, message: str
) -> None:
    if uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(TTrainError) as error:
        ui.links_of(two[0], "http://127.0.0.1:9", runs)
    assert message in str(error.value) and "hidden" not in str(error.value)


def test_a_home_where_nothing_was_tracked_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(TTrainError, match="begin with `ttrain pipeline run full`"):
        ui.links_of(tmp_path / "none", "http://127.0.0.1:9", [])
    assert not (tmp_path / "none").exists()


def test_no_browser_is_asked_that_would_take_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail("it was asked"))
    ui.open_in_browser(tmp_path, "http://127.0.0.1:1")
    assert "open the address yourself" in capsys.readouterr().err
