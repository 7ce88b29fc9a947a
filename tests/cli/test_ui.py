"""The pages that `ttrain up --open` opens: a view of a real MLflow, behind a double of its
server."""

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
from ttrain.tracking import pusher

OLDER = "full-20261128-160222-1a2b4"
NEWER = "full-20261128-170222-1a2b4"


@pytest.fixture(scope="module")
def ids(
    tmp_path_factory: pytest.TempPathFactory, add_database: Callable[[Path], None]
) -> tuple[Path, dict[str, str]]:
    """(home, {run: MLflow's id}) of two runs that differ in epochs."""
    home = tmp_path_factory.mktemp("two") / "a home #1 50%"
    add_database(home)
    for number, name in enumerate((OLDER, NEWER)):
        settings = {"name": "mine", "sft": {"epochs": 1 + number}}
        stages = [Made("sft", [9 - step / 10 for step in range(8)])]
        make_run(home, name, stages, number=number, settings=settings, metrics={"sft/loss": 4.2})
    pushed = pusher.push(home)
    assert [push.why for push in pushed] == ["", ""]
    return home, {push.run: str(push.run_id) for push in pushed}


@pytest.fixture
def server(
    ids: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[server_records.Server]:
    home, _ = ids
    write_double(home)
    monkeypatch.setattr(servers, "mlflow_command", lambda home, port: (["double", str(port)], {}))
    servers.start(home, {"mlflow": servers.free_port(20_000)})
    server = server_records.live_server(home, "mlflow")
    assert server is not None
    yield server
    servers.down(home)


def test_a_browser_gets_the_token_in_a_file_that_no_other_account_can_read_not_as_an_argument(
    ids: tuple[Path, dict[str, str]], server: server_records.Server
) -> None:
    home, runs = ids
    pages = ui.links_of(home, server.url, ("latest",))
    assert f":{server.port}/?token=" in pages["table"]
    assert "viewStateShareKey=ttrain-mine" in pages["table"]
    assert urlsplit(pages["url"]).fragment.startswith(f"/experiments/1/runs/{runs[NEWER]}?")
    argument = ui.redirect_page(home, pages["url"])
    token = (home / "servers" / "token").read_text().strip()
    path = home / "servers" / "open.html"
    assert argument == path.as_uri() and token not in argument and token in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ui.redirect_page(home, "http://elsewhere:5000/#/") == "http://elsewhere:5000/#/"
