"""Kills at random points of whole pipelines; TTRAIN_SOAK_KILLS says how many."""

import os
import random
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from support.pipeline_home import Cli, write_corpus

pytestmark = pytest.mark.soak
KILLS = int(os.environ.get("TTRAIN_SOAK_KILLS", "5"))
SEED = int(os.environ.get("TTRAIN_SOAK_SEED", "11"))
SETTINGS = ("tracking.enabled=false", "pretrain.tokens=40960")
PREFECT_EVERY = 4  # pipelines; under Prefect one takes longer to start
# After each kill in which no stage finished: the machine may be busier than when time was taken
MORE_PATIENCE = 1.2
CHILD_SHARE = 0.25  # of the kills hit the stage's own process instead of the pipeline's


def command(engine: str) -> tuple[str, ...]:
    return ("pipeline", "run", "full", "--engine", engine, *SETTINGS)


def contents(cli: Cli) -> dict[tuple[str, str], str]:
    digests = {}
    for stage in cli.plan(*SETTINGS):
        for name, entry in cli.manifest(stage, *SETTINGS)["files"].items():
            if not name.startswith(("run/", "checkpoints/")):
                digests[stage, name] = entry["sha256"]
    return digests


def mtimes(home: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in home.glob("store/*/*/manifest.json")}


def end(process: subprocess.Popen[str], rng: random.Random, seconds: float) -> str | None:
    """Wait for its end, or kill it after these seconds; what was killed."""
    try:
        process.communicate(timeout=seconds)
        return None
    except subprocess.TimeoutExpired:
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [child for child in children if child.name().startswith("ttrain-worker")]
        is_stage = bool(workers) and rng.random() < CHILD_SHARE
        (rng.choice(workers) if is_stage else process).kill()
        process.communicate(timeout=120)
        return "stage" if is_stage else "pipeline"


def test_any_number_of_kills_leaves_the_same_artifacts(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    write_corpus(tmp_path / "data")
    cli = Cli(tmp_path / "reference", tmp_path / "data")
    began = time.monotonic()
    cli(*command("none"))
    whole = time.monotonic() - began
    expected = contents(cli)
    kills: Counter[str] = Counter()
    chain = 0
    engine = "none"
    finished: dict[str, int] = {}
    completed = True
    patience = 1.0
    while kills.total() < KILLS or not completed:
        if completed:
            chain += 1
            engine = "none" if chain % PREFECT_EVERY else "prefect"
            cli = Cli(tmp_path / f"home-{chain}", tmp_path / "data")
            finished = {}
        longest = whole / 2 if engine == "none" else whole * 2
        seconds = 600 if kills.total() >= KILLS else rng.uniform(0.2, longest * patience)
        process = cli.start(*command(engine))
        killed = end(process, rng, seconds)
        if killed:
            kills[f"{killed}, {engine}"] += 1
        now = mtimes(cli.home)
        assert finished.items() <= now.items(), "a finished stage was built again"
        patience = 1.0 if len(now) > len(finished) else min(patience * MORE_PATIENCE, 20.0)
        finished = now
        completed = process.returncode == 0
        assert completed or killed, "it failed by itself"
        if completed:
            assert contents(cli) == expected
            assert "none damaged" in cli("artifacts", "verify", settings=False)
            assert "everything is cached" in cli(*command("none"))
    print(f"{dict(kills)} kills in {chain} pipelines")
