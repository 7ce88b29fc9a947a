"""`ttrain sweep` as a user runs it: verdicts, killed, by two processes; its record and MLflow."""

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
# 2e-2 is the baseline
COMMAND = ("sweep", "pretrain.optim.muon_lr=1e-6,2e-2", *MUON, "--seeds", "3")
DOUBLED = """
SELECT count(*) FROM (
    SELECT 1 FROM metrics GROUP BY run_uuid, key, step HAVING count(*) > 1
)
"""


def shown(cli: Cli) -> Any:
    return json.loads(cli.in_process("sweep", "show", "--json", settings=False))


def trials_of(cli: Cli) -> list[dict[str, Any]]:
    return [record for record in runs.history(cli.home) if "sweep" in record]


def built(cli: Cli) -> Counter[tuple[str, str]]:
    stages = [stage for record in trials_of(cli) for stage in record["stages"]]
    stages = [stage for stage in stages if stage["outcome"] == "completed"]
    return Counter((stage["name"], stage["key"]) for stage in stages)


def results(cli: Cli) -> list[Any]:
    keys = ("setting", "values", "verdict", "over_seeds")
    return [[row[key] for key in keys] for row in shown(cli)["settings"]]


def completed_trials(cli: Cli) -> int:
    files = list(cli.home.glob("sweeps/*/sweep.json"))
    trials = json.loads(files[0].read_bytes())["trials"] if files else []
    return sum(trial["outcome"] == "completed" for trial in trials)


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
    result = shown(swept)
    assert result["outcome"] == "completed" and result["measure"]["metric"] == "eval/bits_per_byte"
    baseline, slow = result["settings"]
    assert baseline["seeds"] == slow["seeds"] == [1, 2, 3]
    assert slow["verdict"] == "worse" and slow["over_seeds"][0] > 0 and slow["over_records"][0] > 0
    counts = Counter(name for name, _ in built(swept))
    assert counts == {"tokenizer": 1, "shards-pretrain": 1, "pretrain": 6, "evaluate": 6}

    def tag(run: str, key: str) -> str:
        query = "select value from tags where run_uuid = ? and key = ?"
        [(value,)] = swept.rows("mlflow", query, run, key)
        return str(value)

    trials = swept.rows("mlflow", "select run_uuid from tags where key = 'ttrain.seed'")
    assert len(trials) == 6
    settings = {tag(run, "mlflow.parentRunId") for (run,) in trials}
    assert sorted(tag(run, "ttrain.verdict") for run in settings) == ["baseline", "worse"]
    assert len({tag(run, "mlflow.parentRunId") for run in settings}) == 1
    assert set(swept.rows("mlflow", "select status from runs")) == {("FINISHED",)}
    query = "select value from latest_metrics where key = 'sweep/difference'"
    [(mean,)] = swept.rows("mlflow", query)
    assert mean == pytest.approx(slow["difference"])
    page = swept.data / "sweep.html"
    swept.in_process("report", result["sweep"], "--out", str(page), settings=False)
    assert slow["setting"] in page.read_text(encoding="utf-8")


@pytest.mark.soak
def test_a_sweep_that_is_killed_anywhere_ends_with_the_same_verdict_and_builds_nothing_twice(
    swept: Cli, fresh: Cli
) -> None:
    chance = random.Random(1)
    for _ in range(KILLS):
        process = fresh.start(*COMMAND)
        enough = completed_trials(fresh) + chance.randrange(3)

        def is_time(process: Any = process, enough: int = enough) -> bool:
            has_ended = process.poll() is not None
            return has_ended or (completed_trials(fresh) >= enough and chance.random() < 0.1)

        wait_until(is_time, 480)
        if process.poll() is None:
            kill_at_work(process)
    fresh(*COMMAND)
    assert results(fresh) == results(swept)
    assert set(built(fresh).values()) == {1}
    assert fresh.rows("mlflow", DOUBLED) == [(0,)]
