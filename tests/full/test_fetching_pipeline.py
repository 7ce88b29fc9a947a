"""A pipeline whose store is gone, or on another machine: nothing is built twice, and only what is read is fetched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_home import Cli

from ttrain.tasks import EVALUATE
from ttrain.tracking.client import own_uri
from ttrain.tracking.mirror import prepare

SHARDS = {"documents": "shards-pretrain", "chats": "shards-sft", "domain": "shards-lora"}
READ = {"base": "pretrain", "sft": "sft", "lora": "lora", **SHARDS}


def here(home: Path) -> dict[str, set[str]]:
    """Files in the store by stage."""
    found: dict[str, set[str]] = {}
    for path in (home / "store").glob("*/*/**/*"):
        stage, _, name = path.relative_to(home / "store").as_posix().split("/", 2)
        if path.is_file() and name != "manifest.json":
            found.setdefault(stage, set()).add(name)
    return found


def read_by_evaluation(files: dict[str, set[str]]) -> dict[str, set[str]]:
    """What of a full store the evaluation reads, by its row in the table of stages."""
    wanted: dict[str, set[str]] = {}
    for name, stage in READ.items():
        parts = EVALUATE.inputs[name]
        public = {file for file in files[stage] if file.split("/")[0] not in ("run", "checkpoints")}
        wanted[stage] = {file for file in public if not parts or file.split("/")[0] in parts}
    return wanted


def evaluated(home: Path) -> Any:
    [path] = (home / "store" / "evaluate").iterdir()
    return json.loads((path / "evaluation.json").read_bytes())["metrics"]


@pytest.mark.soak
def test_without_the_store_a_pipeline_is_cached_and_a_stage_alone_fetches_what_it_reads(copy_of: Callable[..., Cli]) -> None:
    cli = copy_of()
    files, before = here(cli.home), evaluated(cli.home)
    shutil.rmtree(cli.home / "store")
    shutil.rmtree(cli.home / "work")
    (cli.home.parent / "shared").mkdir()
    (cli.home / "mlflow").rename(cli.home.parent / "shared" / "mlflow")  # as one that homes share
    prepare(cli.home.parent / "shared")
    cli.environment["MLFLOW_TRACKING_URI"] = own_uri(cli.home.parent / "shared")
    plan = cli.plan()
    assert {stage["state"] for stage in plan.values()} == {"cached"}
    assert all("in MLflow, fetched when a stage reads it" in stage["why"] for stage in plan.values())
    said = cli.here("pipeline", "run", "full")
    assert "everything is cached" in said and "in MLflow" in said
    assert here(cli.home) == {}, "a plan fetches nothing"
    said = cli.here("pipeline", "rerun", "evaluate", "--engine", "none")
    assert "equal to what was stored" in said and "evaluate: fetching" in said and "of pretrain (" in said
    wanted = read_by_evaluation(files)
    fetched = here(cli.home)
    built = fetched.pop("evaluate")
    assert fetched == wanted and "evaluation.json" in built and "run/log.txt" in built
    assert evaluated(cli.home) == before
    [run, *_] = cli.runs()
    stages = {stage["name"]: stage["outcome"] for stage in run["stages"]}
    assert stages.pop("evaluate") == "equal" and {*stages.values()} == {"cached"}
    assert run["metrics"]["eval/bits_per_byte"] > 0 and run["metrics"]["sft/validation_loss"] > 0
    said = cli.here("stage", "run", "shards-sft")  # asked for by name: the whole of it
    assert here(cli.home)["shards-sft"] == {name for name in files["shards-sft"] if name.split("/")[0] != "run"}, said
