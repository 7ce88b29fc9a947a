"""A night that a cron starts: it trains on what is new, is compared and becomes champion."""

from collections.abc import Callable

import pytest
from support.nights import NAME, add_similar_documents
from support.pipeline_home import Cli
from support.served import every_five_seconds, flow_runs, processes_of, serving
from support.waiting import wait_until

from ttrain.nightly.records import Nights
from ttrain.store.registry import Registry

YEARLY = "0 2 1 1 *"
ENDS = ("Promoted", "Kept", "Failed", "Crashed")


@pytest.mark.soak
def test_a_slot_of_a_cron_trains_and_promotes_what_is_better(copy_of: Callable[[], Cli]) -> None:
    cli = copy_of()
    cli("pipeline", "run", "nightly", "--engine", "none")  # cached: the first champion
    add_similar_documents(cli, "docs-3", 3)
    cli("pipeline", "schedule", "nightly", "--cron", YEARLY)
    with serving(cli) as served:
        served.wait_for("scheduled: nightly/tiny-test")
        every_five_seconds(cli)
        wait_until(lambda: flow_runs(cli.home, "Running", *ENDS), 120, lambda: served.said)
        every_five_seconds(cli, YEARLY)  # later slots would each start a process for nothing
        [run] = wait_until(lambda: flow_runs(cli.home, *ENDS), 300, lambda: served.said)
        assert run["state"]["name"] == "Promoted", run["state"]
        assert run["auto_scheduled"] and run["name"] == "night-000002"
        assert served.stop() == 0, served.said
    wait_until(lambda: not processes_of(cli.home), 10)
    nights = {night.name: night for night in Nights(cli.home, NAME).newest_first()}
    night = nights[run["name"]]
    assert (night.outcome, night.data["version"]) == ("promoted", "2")
    assert night.data["decision"]["difference"] > 0
    champion = Registry(cli.home).champion(NAME)
    assert champion is not None and champion.version == "2"
    outcomes = cli.outcomes()
    assert {outcomes[name] for name in ("shards-pretrain", "pretrain", "evaluate")} == {"completed"}
