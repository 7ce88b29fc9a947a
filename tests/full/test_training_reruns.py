"""A training that fails, is stopped and run again through Prefect: exit code, Prefect, MLflow."""

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
TRACKED_STAGE = """
SELECT status FROM runs JOIN tags USING (run_uuid)
WHERE key = 'mlflow.parentRunId' AND value = ? AND name LIKE 'pretrain %'
"""
CURVES = """
SELECT key, step, value FROM metrics JOIN runs USING (run_uuid) WHERE name = ? ORDER BY step
"""


def states(cli: Cli, *stages: str) -> list[str]:
    """Prefect's states of the newest flow run and of these stages."""
    query = "select id, state_name from flow_run order by created desc limit 1"
    [(id_, state)] = cli.rows("prefect", query)
    query = "select name, state_name from task_run where flow_run_id = ?"
    tasks = dict(cli.rows("prefect", query, id_))
    return [state, *(tasks[stage] for stage in stages)]


def tracked(cli: Cli) -> list[str]:
    """MLflow's states of the newest run and of its pretraining."""
    query = "select run_uuid, status from runs where name = ?"
    [(id_, state)] = cli.rows("mlflow", query, cli.runs()[0]["run"])
    [(stage,)] = cli.rows("mlflow", TRACKED_STAGE, id_)
    return [state, stage]


def stopped(
    cli: Cli, process: subprocess.Popen[str], step: int, stop: Callable[[Any], object]
) -> str:
    wait_until(lambda: process.poll() is not None or cli.newest_step() >= step, 300)
    stop(process)
    return process.communicate(timeout=120)[0]


def kill_a_rank(process: Any) -> None:
    children = psutil.Process(process.pid).children(recursive=True)
    next(child for child in children if child.name() == PROCESS_NAME).kill()


@pytest.mark.soak
def test_a_training_that_fails_and_then_is_stopped_says_so_everywhere_and_goes_on_in_one_curve(
    copy_of: Callable[[], Cli],
) -> None:
    cli = copy_of()
    process = cli.start(*RUN)
    said = stopped(cli, process, 10, kill_a_rank)
    assert process.returncode == 1, said
    assert states(cli, "pretrain") == ["Failed", "Failed"]
    assert tracked(cli) == ["FAILED", "FAILED"]

    failed = cli.runs()[0]["run"]
    process = cli.start("pipeline", "rerun", "pretrain", "--run", failed, settings=False)
    said = stopped(cli, process, 25, lambda process: process.send_signal(signal.SIGTERM))
    assert process.returncode == 143 and "Traceback" not in said, said
    assert states(cli, "shards-pretrain", "pretrain") == ["Cancelled", "Cached", "Cancelled"]
    assert tracked(cli) == ["KILLED", "KILLED"]
    assert cli.runs()[0]["outcome"] == cli.outcomes()["pretrain"] == "interrupted"
    saved = cli.newest_step()

    cli(*RUN)
    assert states(cli, "pretrain") == ["Completed", "Completed"]
    assert tracked(cli) == ["FINISHED", "FINISHED"]
    result = cli.manifest("pretrain", *SETTINGS)["result"]
    assert result["resumed_from_step"] == saved >= 25 and result["steps"] == STEPS

    # All three are one run in MLflow, with one point for each step
    points = cli.rows("mlflow", CURVES, f"pretrain {failed.rpartition('-')[2]}")
    for name in ("loss", "logits_loss", "aux_loss", "lr", "epoch_time"):
        curve = [(step, value) for key, step, value in points if key == name]
        assert [step for step, _ in curve] == [*range(5, STEPS + 1, 5)], name
        assert all(value > 0 for _, value in curve), name
