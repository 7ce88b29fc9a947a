"""Kills at random points of whole pipelines. `make soak` runs it; TTRAIN_SOAK_KILLS says how many kills."""

import os
import random
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from support.pipeline_home import Cli, write_corpus

pytestmark = pytest.mark.soak
SETTINGS = ("tracking.enabled=false", "pretrain.tokens=40960")
PREFECT_EVERY = (
    4  # every so many pipelines one runs under Prefect, whose server takes a while to start
)
MORE_PATIENCE = 1.2  # after each kill in which no stage finished: a machine may be busier than when the time was taken
CHILD_SHARE = 0.25  # of the kills hit the stage's own process instead of the pipeline's


def command(engine: str) -> tuple[str, ...]:
    return ("pipeline", "run", "full", "--engine", engine, *SETTINGS)


def contents(cli: Cli) -> dict[str, dict[str, str]]:
    return {
        stage: {
            name: entry["sha256"]
            for name, entry in cli.manifest(stage, *SETTINGS)["files"].items()
            if not name.startswith(("run/", "checkpoints/"))
        }
        for stage in cli.plan(*SETTINGS)
    }


def mtimes(home: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in home.glob("store/*/*/manifest.json")}


def kill(process: subprocess.Popen[str], rng: random.Random) -> str:
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if child.name().startswith("ttrain-worker")]
    if workers and rng.random() < CHILD_SHARE:
        rng.choice(workers).kill()
        return "stage"
    process.kill()
    return "pipeline"


def end(process: subprocess.Popen[str], rng: random.Random, seconds: float) -> str | None:
    try:
        process.communicate(timeout=seconds)
        return None
    except subprocess.TimeoutExpired:
        killed = kill(process, rng)
        process.communicate(timeout=120)
        return killed


def test_any_number_of_kills_leaves_the_same_artifacts(tmp_path: Path) -> None:
    kills, seed = (
        int(os.environ.get("TTRAIN_SOAK_KILLS", "5")),
        int(os.environ.get("TTRAIN_SOAK_SEED", "11")),
    )
    rng = random.Random(seed)
    write_corpus(tmp_path / "data")
    reference = Cli(tmp_path / "reference", tmp_path / "data")
    began = time.monotonic()
    reference(*command("none"))
    whole = time.monotonic() - began
    expected = contents(reference)
    done = {"pipeline": 0, "stage": 0, "under Prefect": 0}
    chain, cli, engine = 0, reference, "none"
    finished: dict[str, int] = {}
    completed, patience = True, 1.0
    while done["pipeline"] + done["stage"] < kills or not completed:
        if completed:
            chain += 1
            engine = "none" if chain % PREFECT_EVERY else "prefect"
            cli, finished = Cli(tmp_path / f"home-{chain}", tmp_path / "data"), {}
        enough = done["pipeline"] + done["stage"] >= kills
        longest = whole / 2 if engine == "none" else whole * 2
        process = cli.start(*command(engine))
        killed = end(process, rng, 600 if enough else rng.uniform(0.2, longest * patience))
        if killed:
            done[killed] += 1
            done["under Prefect"] += engine == "prefect"
        now = mtimes(cli.home)
        assert {path: now.get(path) for path in finished} == finished, (
            "a finished stage was built again"
        )
        patience = 1.0 if len(now) > len(finished) else min(patience * MORE_PATIENCE, 20.0)
        finished = now
        completed = process.returncode == 0
        assert completed or killed, "it failed by itself"
        if completed:
            assert contents(cli) == expected
            assert "none damaged" in cli("artifacts", "verify", settings=False)
            assert "everything is cached" in cli(*command("none"))
    print(
        f"{done} kills in {chain} pipelines: the artifacts are those of a run that was never killed"
    )
