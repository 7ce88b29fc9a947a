"""The pages that `ttrain up --open` opens: a view of a real MLflow and its server, in a real browser where there is one."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.browser import Browser, executable
from support.recorded_homes import Made, make_run
from support.served import write_double

from ttrain.cli import tracking as ui
from ttrain.errors import TTrainError
from ttrain.flows import servers
from ttrain.store import server_records
from ttrain.store.runs import record_cached
from ttrain.tracking import pusher

METRICS = {"eval/chat_loss_sft": 4.1, "sft/validation_loss": 4.2}
OLDER, NEWER = "full-20261128-160222-1a2b4", "full-20261128-170222-1a2b4"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, add_database: Callable[[Path], None]) -> tuple[Path, dict[str, str]]:
    """(home, {name: id}) with two runs, the newer one with other epochs."""
    home = tmp_path_factory.mktemp("two") / "a home #1 50%"
    add_database(home)
    for number, (name, epochs) in enumerate({OLDER: 1, NEWER: 3}.items()):
        settings = {"name": "mine", "sft": {"epochs": epochs}}
        stages = [Made("sft", [9 - epochs * step / 10 for step in range(8)])]
        make_run(home, name, stages, number=number, settings=settings, metrics=METRICS)
    done = pusher.push(home)
    assert [one.why for one in done] == ["", ""]
    return home, {one.run: str(one.run_id) for one in done}


@pytest.fixture(scope="module")
def served(two: tuple[Path, dict[str, str]]) -> Iterator[dict[str, str]]:
    """The pages of both runs, as `ttrain up A B` names them, while MLflow's server runs."""
    home, runs = two
    servers.start(home, {"mlflow": servers.free_port(21_000)})
    server = server_records.live_server(home, "mlflow")
    assert server is not None
    yield ui.links_of(home, server.url, [*runs])
    servers.stop(home, "mlflow")


@pytest.fixture
def running(two: tuple[Path, dict[str, str]]) -> Iterator[Path]:
    """The home of `two`, whose server is a double."""
    home, _ = two
    with pytest.MonkeyPatch.context() as patch:
        write_double(home)
        patch.setattr(servers, "mlflow_command", lambda home, port: (["double", str(port)], {}))
        servers.start(home, {"mlflow": servers.free_port(20_000)})
        yield home
        servers.down(home)


def test_a_browser_gets_the_token_in_a_file_that_no_other_account_can_read_not_as_an_argument(
    running: Path, two: tuple[Path, dict[str, str]]
) -> None:
    home, server = running, server_records.live_server(running, "mlflow")
    assert server is not None
    pages, newest = ui.links_of(home, server.url, ("latest",)), two[1][NEWER]
    page = pages["url"]
    assert f":{server.port}/?token=" in pages["table"] and "viewStateShareKey=ttrain-mine" in pages["table"]
    assert urlsplit(page).fragment.startswith(f"/experiments/1/runs/{newest}?")
    there = ui.redirect_page(home, page)
    token = (home / "servers" / "token").read_text().strip()
    path = home / "servers" / "open.html"
    assert there == path.as_uri() and token not in there and token in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ui.redirect_page(home, "http://elsewhere:5000/#/") == "http://elsewhere:5000/#/"


def test_the_page_of_a_cached_run_is_that_of_the_run_it_equals(running: Path, two: tuple[Path, dict[str, str]]) -> None:
    server = server_records.live_server(running, "mlflow")
    record_cached(running, "again", [], {}, {"metrics": {}, "equals": OLDER})
    try:
        assert server and f"/runs/{two[1][OLDER]}?" in ui.links_of(running, server.url, ("again",))["url"]
    finally:
        [path] = (running / "runs").glob("again-*.json")
        path.unlink()


@pytest.mark.soak  # a browser, for what only another version of MLflow breaks
@pytest.mark.skipif(executable() is None, reason="no Chromium is installed")
def test_mlflows_own_pages_show_which_run_is_better_and_why(served: dict[str, str]) -> None:
    # In the order in which they are seen, which is not that of the document
    headers = (
        "[...document.querySelectorAll('[role=columnheader][col-id]')]"
        ".sort((one, other) => one.getAttribute('aria-colindex') - other.getAttribute('aria-colindex'))"
        ".map(one => one.getAttribute('col-id')).filter(id => /^(metrics|params)\\.|Description/.test(id)).join()"
    )
    columns = "attributes.`Description`,metrics.`eval/chat_loss_sft`,params.`sft.epochs`"
    texts = (
        "[...document.querySelectorAll('[role=gridcell][col-id=\"attributes.`Description`\"]')].map(one => one.innerText)"
    )
    with Browser() as browser:
        browser.open(served["table"])
        browser.wait_for(f"{headers} === '{columns}'")
        shown = browser.wait_for(f"{texts}.length === 2 && {texts}.every(Boolean) && {texts}")
        assert [text[:14] for text in shown] == ["`sft.epochs=3`", "the first run "]

        browser.open("about:blank")
        browser.open(served["curves"])
        text = browser.wait_for("document.body.innerText.includes('Step') && document.body.innerText")
        assert text.index("Curves\n(2)") < text.index("eval\n(1)")
        assert all(f"{name} (Curves/sft loss)" in text for name in (OLDER, NEWER))

        browser.open("about:blank")
        browser.open(served["url"])
        switches = "document.querySelectorAll('button[role=switch]')"
        browser.wait_for(f"{switches}.length > 1")
        browser.evaluate(f"{switches}[0].click()")  # show differences only
        rows = "[...document.querySelectorAll('table')].map(one => one.innerText).filter(one => one.includes('sft.epochs'))"
        [differing] = browser.wait_for(f"{rows}.length && !{rows}[0].includes('model.layers') && {rows}")
        assert differing.split() == ["sft.epochs", "1.0", "3.0"]


def test_of_an_mlflow_that_does_not_answer_there_are_no_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, OLDER, [Made("sft")])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hidden@127.0.0.1:9")
    with pytest.raises(TTrainError) as error:
        ui.links_of(tmp_path, "http://127.0.0.1:9", [])
    assert "MLflow at http://127.0.0.1:9" in str(error.value) and "hidden" not in str(error.value)


def test_without_runs_there_is_the_table_of_the_newest_name(two: tuple[Path, dict[str, str]]) -> None:
    links = ui.links_of(two[0], "http://127.0.0.1:9", [])
    assert set(links) == {"table", "curves", "experiment"} and "viewStateShareKey=ttrain-mine" in links["table"]


def test_a_home_where_nothing_was_tracked_is_left_as_it_is(tmp_path: Path) -> None:
    assert ui.links_of(tmp_path / "none", "http://127.0.0.1:9", []) == {}
    assert not (tmp_path / "none").exists()
