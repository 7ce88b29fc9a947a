"""`ttrain sweep` as a user runs it: killed and continued, side by side; what its record and MLflow have of it."""

import json
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_home import Cli, write_corpus
from support.served import kill_at_work
from support.waiting import wait_until

from ttrain.store import runs

LONGER = "pretrain.tokens=61440"  # 120 steps
ADAMW = "pretrain.optim.kind=adamw"
SHARED = {"tokenizer", "shards-pretrain"}


def sweeps(cli: Cli, command: str, *arguments: str) -> Any:
    return json.loads(cli.in_process("sweep", command, *arguments, "--json", settings=False))


def trials_of(cli: Cli) -> list[dict[str, Any]]:
    return [record for record in reversed(runs.history(cli.home)) if "sweep" in record]


def built(cli: Cli) -> Counter[str]:
    stages = [stage for record in trials_of(cli) for stage in record["stages"]]
    return Counter(stage["name"] for stage in stages if stage["outcome"] == "completed")


def kill_in_trial(cli: Cli, process: subprocess.Popen[str], number: int) -> None:
    def has_saved() -> bool:
        assert process.poll() is None, process.stdout and process.stdout.read()
        stages = [stage for run in trials_of(cli) if run["sweep"]["trial"] == number for stage in run["stages"]]
        keys = [stage["key"] for stage in stages if stage["outcome"] == "running" and stage.get("key")]
        return any((cli.home / "work" / "pretrain" / key / "output" / "checkpoints" / "latest").exists() for key in keys)

    wait_until(has_saved, 240)
    kill_at_work(process)


@pytest.mark.soak
def test_a_sweep_that_is_killed_goes_on_inside_its_trial_and_its_best_is_what_the_pipeline_makes(fresh: Cli) -> None:
    command = ("sweep", "full", "pretrain.optim.lr=log(1e-6,1e-2,3)", ADAMW, LONGER, "--sampler", "grid")
    kill_in_trial(fresh, fresh.start(*command), 2)
    stopped = sweeps(fresh, "show")
    assert stopped["outcome"] == "crashed"
    assert [trial["outcome"] for trial in stopped["trials"]] == ["completed", "running"]

    said = fresh(*command)
    assert "2 of 3" in said
    shown = sweeps(fresh, "show")
    assert [(trial["number"], trial["outcome"]) for trial in shown["trials"]] == [(n, "completed") for n in (1, 2, 3)]
    values = [trial["value"] for trial in shown["trials"]]
    assert shown["best"]["number"] == values.index(min(values)) + 1 == 3
    assert [trial["sweep"]["trial"] for trial in trials_of(fresh)] == [1, 2, 2, 3]
    assert built(fresh) == {"tokenizer": 1, "shards-pretrain": 1, "pretrain": 3}
    (continued,) = [s for s in trials_of(fresh)[2]["stages"] if s["name"] == "pretrain"]
    assert continued["resumed_from_step"] > 0

    query = """select trial.value, parent.value from tags trial join tags parent using (run_uuid)
    where trial.key = 'ttrain.trial' and parent.key = 'mlflow.parentRunId'
    and run_uuid not in (select run_uuid from tags where key = 'ttrain.stage')"""
    children = dict(fresh.rows("mlflow", query))
    [parent] = {*children.values()}
    assert sorted(children) == ["1", "2", "3"]
    assert set(fresh.rows("mlflow", "select status from runs")) == {("FINISHED",)}
    doubled = "select count(*) from (select 1 from metrics group by run_uuid, key, step having count(*) > 1)"
    assert fresh.rows("mlflow", doubled) == fresh.rows("mlflow", "select count(*) from model_versions") == [(0,)]
    figures = dict(fresh.rows("mlflow", "select key, value from latest_metrics where run_uuid = ?", parent))
    best = next(trial["metrics"] for trial in trials_of(fresh)[::-1] if trial["sweep"]["trial"] == 3)
    assert {name: figures[name] for name in best} == pytest.approx(best) and figures["sweep/best_trial"] == 3

    words = shlex.split(sweeps(fresh, "show")["command"])[2:]
    assert words[:2] == ["run", "full"]
    plan = json.loads(fresh.in_process("pipeline", "plan", *words[1:], "--json", settings=False))["stages"]
    assert {stage["name"] for stage in plan if stage["state"] == "cached"} == {*SHARED, "pretrain"}
    fresh(*command)  # all is done: the table alone
    assert len(trials_of(fresh)) == 4


@pytest.mark.soak
def test_trials_side_by_side_build_what_they_share_once_and_give_what_one_after_the_other_gives(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    found = {}
    for name, options in {"beside": ("--parallel", "2"), "after": ()}.items():
        cli = Cli(tmp_path / name, tmp_path / "data")
        said = cli("sweep", "full", "pretrain.optim.muon_lr=choice(0.01,0.02,0.05)", "--sampler", "grid", *options, "--json")
        found[name] = [trial["value"] for trial in json.loads(said[said.index("\n{") :])["trials"]]
        assert built(cli) == {"tokenizer": 1, "shards-pretrain": 1, "pretrain": 3}
        starts = [(record["started_unix"], record["started_unix"] + record["seconds"]) for record in trials_of(cli)]
        overlaps = sum(a < end and start < b for n, (a, b) in enumerate(starts) for start, end in starts[:n])
        assert (overlaps > 0) == (name == "beside")
    assert found["beside"] == found["after"]
