"""The six stages as a Prefect flow whose tasks are cached by their inputs and their source."""

from __future__ import annotations

import os

from prefect import flow, task
from prefect.cache_policies import INPUTS, TASK_SOURCE
from step import step


@task(cache_policy=INPUTS + TASK_SOURCE, persist_result=True)
def stage(number: int, before: int) -> int:
    return step(number, before)


@flow(persist_result=True)
def six() -> int:
    value = 0
    for number in range(1, 1 + int(os.environ.get("BENCH_STAGES", "6"))):
        value = stage.with_options(name=f"stage-{number}")(number, value)
    return value


if __name__ == "__main__":
    assert six() == int(os.environ.get("BENCH_STAGES", "6"))
