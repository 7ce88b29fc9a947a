"""The long proof of tests/tracking/test_outages.py: 100,000 metrics, every outage, a kill in each.

TTRAIN_SOAK_KILLS says how many outages.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.outage_proxy import Proxy, mlflow_server
from support.tracked_writer import assert_whole, write_through

pytestmark = [pytest.mark.soak, pytest.mark.long]  # 100,000 metrics: over four minutes

MODES = ("no replies", "dead", "hanging", "error")
OUTAGES = int(os.environ.get("TTRAIN_SOAK_KILLS", "20"))
STEPS = 50_000  # two metrics a step: the loss and the tokens


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    (tmp_path / "server").mkdir()
    with mlflow_server(tmp_path / "server") as url:
        proxy = Proxy(url)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.url)
        # The count reads pages of 25,000 points; a writer waits 1 s
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
        yield proxy
        proxy.close()


def test_100_000_metrics_come_through_outages_and_kills(proxy: Proxy, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    modes = tuple(MODES[number % len(MODES)] for number in range(OUTAGES))
    seconds = max(1.5, 120 / OUTAGES)
    pace = 1.5 * seconds * OUTAGES / STEPS  # so that the curve grows until the last kill
    write_through(proxy, home, steps_in_all=STEPS, modes=modes, seconds=seconds, pace=pace)
    assert_whole(proxy.url, home, STEPS)
    print(f"{OUTAGES} outages, each with a kill, {2 * STEPS:,} points: 0 lost, 0 doubled")
