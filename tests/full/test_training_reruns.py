"""A training that fails, is stopped by a signal and is run again, each time through Prefect: exit code, Prefect, MLflow."""

import signal
import subprocess
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from support.pipeline_home import Cli
from support.waiting import wait_until

from ttrain.engine.stage_worker import PROCESS_NAME

STEPS = 60
SETTINGS = (
    f"pretrain.tokens={STEPS * 512}",
    "pretrain.schedule.kind=cosine",
    "model.moe.experts=4",
    "model.moe.balance=0.5",
    "runtime.devices=2",
    "runtime.rows_per_device=2",
    "runtime.log_level=debug",
)
RUN = ("pipeline", "run", "full", "--until", "pretrain", *SETTINGS)


def states(cli: Cli) -> dict[str, str]:
    [(id_, state)] = cli.rows(
        "prefect", "select id, state_name from flow_run order by created desc limit 1"
    )
    return {
        "": state,
        **dict(
            cli.rows("prefect", "select name, state_name from task_run where flow_run_id = ?", id_)
        ),
    }


def tracked(cli: Cli) -> dict[str, str]:
    [(id_, state)] = cli.rows(
        "mlflow", "select run_uuid, status from runs where name = ?", cli.runs()[0]["run"]
    )
    [stage] = cli.rows(
        "mlflow",
        "select status from runs join tags using (run_uuid) where key = 'mlflow.parentRunId' and value = ?"
        " and name like 'pretrain %'",
        id_,
    )
    return {"": state, "pretrain": stage[0]}


def stopped(
    cli: Cli, command: list[str], step: int, stop: Callable[[Any], object]
) -> tuple[int, str]:
    process = subprocess.Popen(
        command,
        env=cli.environment,
        cwd=cli.data,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_until(lambda: process.poll() is not None or cli.newest_step() >= step, 300)
    stop(process)
    said = process.communicate(timeout=120)[0]
    return process.returncode, said


def kill_a_rank(process: Any) -> None:
    children = psutil.Process(process.pid).children(recursive=True)
    next(child for child in children if child.name() == PROCESS_NAME).kill()


@pytest.mark.soak
def test_a_training_that_fails_and_then_is_stopped_says_so_everywhere_and_goes_on_in_one_curve(
    copy_of: Callable[[], Cli],
) -> None:
    cli = copy_of()
    code, said = stopped(cli, cli.command(*RUN), 10, kill_a_rank)
    assert code == 1, said
    assert (states(cli)[""], states(cli)["pretrain"]) == ("Failed", "Failed")
    assert tracked(cli) == {"": "FAILED", "pretrain": "FAILED"}

    failed = cli.runs()[0]
    rerun = cli.command("pipeline", "rerun", "pretrain", "--run", failed["run"], settings=False)
    code, said = stopped(cli, rerun, 25, lambda process: process.send_signal(signal.SIGTERM))
    assert code == 143 and "Traceback" not in said, said
    assert (states(cli)[""], states(cli)["shards-pretrain"], states(cli)["pretrain"]) == (
        "Cancelled",
        "Cached",
        "Cancelled",
    )
    assert tracked(cli) == {"": "KILLED", "pretrain": "KILLED"}
    outcomes = {stage["name"]: stage["outcome"] for stage in cli.runs()[0]["stages"]}
    assert (cli.runs()[0]["outcome"], outcomes["pretrain"]) == ("interrupted", "interrupted")
    saved = cli.newest_step()

    cli(*RUN)
    assert (states(cli)[""], states(cli)["pretrain"]) == ("Completed", "Completed")
    assert tracked(cli) == {"": "FINISHED", "pretrain": "FINISHED"}
    result = cli.manifest("pretrain", *SETTINGS)["result"]
    assert result["resumed_from_step"] == saved >= 25 and result["steps"] == STEPS

    # All three are one run in MLflow, with one point for each step
    query = "select key, step, value from metrics join runs using (run_uuid) where name = ? order by step"
    curves: dict[str, list[tuple[int, float]]] = {}
    for key, step, value in cli.rows(
        "mlflow", query, f"pretrain {failed['run'].rpartition('-')[2]}"
    ):
        curves.setdefault(key, []).append((step, value))
    for name in ("loss", "logits_loss", "aux_loss", "lr", "epoch_time"):
        assert [step for step, _ in curves[name]] == [*range(5, STEPS + 1, 5)], name
        assert all(value > 0 for _, value in curves[name]), name
