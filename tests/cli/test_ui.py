"""The pages that `ttrain up --open` opens: a view of a real MLflow and its server, in a real browser where there is one."""

import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.recorded_homes import Made, make_run
from support.served import write_double

from ttrain.cli import tracking as ui
from ttrain.flows import servers
from ttrain.store import server_records
from ttrain.store.runs import record_cached
from ttrain.tracking import pusher

METRICS = {"eval/chat_loss_sft": 4.1, "sft/validation_loss": 4.2}
OLDER, NEWER = "full-20261128-160222-1a2b4", "full-20261128-170222-1a2b4"


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, add_database: Callable[[Path], None]
) -> tuple[Path, dict[str, str]]:
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


@pytest.fixture
def running(two: tuple[Path, dict[str, str]]) -> Iterator[Path]:
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
    assert (
        f":{server.port}/?token=" in pages["table"]
        and "viewStateShareKey=ttrain-mine" in pages["table"]
    )
    assert urlsplit(page).fragment.startswith(f"/experiments/1/runs/{newest}?")
    there = ui.redirect_page(home, page)
    token = (home / "servers" / "token").read_text().strip()
    path = home / "servers" / "open.html"
    assert there == path.as_uri() and token not in there and token in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ui.redirect_page(home, "http://elsewhere:5000/#/") == "http://elsewhere:5000/#/"


def test_the_page_of_a_cached_run_is_that_of_the_run_it_equals(
    running: Path, two: tuple[Path, dict[str, str]]
) -> None:
    server = server_records.live_server(running, "mlflow")
    record_cached(running, "again", [], {}, {"metrics": {}, "equals": OLDER})
    try:
        assert (
            server
            and f"/runs/{two[1][OLDER]}?" in ui.links_of(running, server.url, ("again",))["url"]
        )
    finally:
        [path] = (running / "runs").glob("again-*.json")
        path.unlink()
