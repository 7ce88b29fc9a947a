"""`ttrain sweep` as a user runs it: its verdicts, killed, by two processes; what its record and MLflow have."""

import json
import os
import random
from collections import Counter
from typing import Any

import pytest
from support.pipeline_home import Cli, write_corpus
from support.served import kill_at_work
from support.waiting import wait_until

from ttrain.store import runs

KILLS = int(os.environ.get("TTRAIN_SOAK_KILLS", "10")) // 10 or 1
MUON = ("pretrain.optim.kind=muon", "pretrain.tokens=5120")  # 10 steps
COMMAND = (
    "sweep",
    "pretrain.optim.muon_lr=1e-6,2e-2",
    *MUON,
    "--seeds",
    "3",
)  # 2e-2 is the baseline


def shown(cli: Cli) -> Any:
    return json.loads(cli.in_process("sweep", "show", "--json", settings=False))


def trials_of(cli: Cli) -> list[dict[str, Any]]:
    return [record for record in reversed(runs.history(cli.home)) if "sweep" in record]


def built(cli: Cli) -> Counter[tuple[str, str]]:
    stages = [stage for record in trials_of(cli) for stage in record["stages"]]
    return Counter(
        (stage["name"], stage["key"]) for stage in stages if stage["outcome"] == "completed"
    )


def results(cli: Cli) -> list[Any]:
    return [
        (row["setting"], row["values"], row["verdict"], row["over_seeds"])
        for row in shown(cli)["settings"]
    ]


def shown_trials(cli: Cli) -> list[Any]:
    files = list(cli.home.glob("sweeps/*/sweep.json"))
    trials = json.loads(files[0].read_bytes())["trials"] if files else []
    return [trial for trial in trials if trial["outcome"] == "completed"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    directory = tmp_path_factory.mktemp("swept")
    write_corpus(directory / "data")
    cli = Cli(directory / "home", directory / "data")
    cli(*COMMAND)
    return cli


@pytest.mark.soak
def test_a_rate_that_trains_nothing_is_worse_over_its_seeds_and_mlflow_compares_the_settings(
    swept: Cli,
) -> None:
    found = shown(swept)
    assert found["outcome"] == "completed" and found["measure"]["metric"] == "eval/bits_per_byte"
    baseline, slow = found["settings"]
    assert baseline["seeds"] == slow["seeds"] == [1, 2, 3]
    assert slow["verdict"] == "worse" and slow["over_seeds"][0] > 0 and slow["over_records"][0] > 0
    assert Counter(name for name, _ in built(swept)) == {
        "tokenizer": 1,
        "shards-pretrain": 1,
        "pretrain": 6,
        "evaluate": 6,
    }

    parents = "select key, value from tags where run_uuid = ? and key in ('mlflow.parentRunId', 'ttrain.verdict')"
    trials = [
        run
        for (run,) in swept.rows("mlflow", "select run_uuid from tags where key = 'ttrain.seed'")
    ]
    children = {
        run: dict(swept.rows("mlflow", parents, run))["mlflow.parentRunId"] for run in trials
    }
    settings = {
        setting: dict(swept.rows("mlflow", parents, setting)) for setting in children.values()
    }
    assert len(children) == 6 and sorted(tags["ttrain.verdict"] for tags in settings.values()) == [
        "baseline",
        "worse",
    ]
    assert len({tags["mlflow.parentRunId"] for tags in settings.values()}) == 1
    assert set(swept.rows("mlflow", "select status from runs")) == {("FINISHED",)}
    [(mean,)] = swept.rows(
        "mlflow", "select value from latest_metrics where key = 'sweep/difference'"
    )
    assert mean == pytest.approx(slow["difference"])
    page = swept.data / "sweep.html"
    swept.in_process("report", found["sweep"], "--out", str(page), settings=False)
    assert slow["setting"] in page.read_text(encoding="utf-8")


@pytest.mark.soak
def test_a_sweep_that_is_killed_anywhere_ends_with_the_same_verdict_and_builds_nothing_twice(
    swept: Cli, fresh: Cli
) -> None:
    chance = random.Random(1)
    for _ in range(KILLS):
        process = fresh.start(*COMMAND)
        ended, wanted = len(shown_trials(fresh)), chance.randrange(3)
        wait_until(
            lambda: (
                process.poll() is not None or len(shown_trials(fresh)) >= ended + wanted  # noqa: B023
            ),
            240,
        )
        wait_until(lambda: process.poll() is not None or chance.random() < 0.1, 240)  # noqa: B023
        if process.poll() is None:
            kill_at_work(process)
    fresh(*COMMAND)
    assert results(fresh) == results(swept)
    assert set(built(fresh).values()) == {1}
    doubled = "select count(*) from (select 1 from metrics group by run_uuid, key, step having count(*) > 1)"
    assert fresh.rows("mlflow", doubled) == [(0,)]


@pytest.mark.soak
def test_two_processes_share_the_trials_of_one_sweep(swept: Cli, fresh: Cli) -> None:
    first = fresh.start(*COMMAND)
    wait_until(lambda: any(fresh.home.glob("sweeps/*/sweep.json")), 240)
    second = fresh.start(*COMMAND)
    for process in (first, second):
        output = process.communicate(timeout=600)[0]
        assert process.returncode == 0, output
    assert results(fresh) == results(swept)
    assert set(built(fresh).values()) == {1}
    processes = Counter(record["process"]["pid"] for record in trials_of(fresh))
    assert len(processes) == 2
