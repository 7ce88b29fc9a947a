"""Kills at random points of whole pipelines. `make soak` runs it; TTRAIN_SOAK_KILLS says how many kills."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from harness import Cli, write_corpus

pytestmark = pytest.mark.soak
RUN = ("pipeline", "run", "full", "--engine", "none", "tracking.enabled=false", "pretrain.tokens=40960")


def contents(cli: Cli) -> dict[str, dict[str, str]]:
    """Digests of all files that stages read, by stage."""
    return {
        stage: {
            name: entry["sha256"]
            for name, entry in cli.manifest(stage, *RUN[5:])["files"].items()
            if not name.startswith(("run/", "checkpoints/"))
        }
        for stage in cli.plan(*RUN[5:])
    }


def mtimes(home: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in home.glob("store/*/*/manifest.json")}


def test_any_number_of_kills_leaves_the_same_artifacts(tmp_path: Path) -> None:
    kills, rng = int(os.environ.get("TTRAIN_SOAK_KILLS", "5")), random.Random(11)
    write_corpus(tmp_path / "data")
    reference = Cli(tmp_path / "reference", tmp_path / "data")
    began = time.monotonic()
    reference(*RUN)
    whole = time.monotonic() - began
    expected = contents(reference)
    done = 0
    chain = 0
    finished: dict[str, int] = {}
    cli: Any = None
    while done < kills:
        if cli is None:
            cli, finished = Cli(tmp_path / f"home-{chain}", tmp_path / "data"), {}
            chain += 1
        process = cli.start(*RUN)
        try:
            process.wait(timeout=rng.uniform(0.2, whole / 2))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            done += 1
        now = mtimes(cli.home)
        assert {path: now.get(path) for path in finished} == finished, "a finished stage was built again"
        finished = now
        if process.returncode == 0:
            assert contents(cli) == expected
            cli = None
    if cli is not None:
        cli(*RUN)
        assert contents(cli) == expected
    print(f"{done} kills in {chain} pipelines: the artifacts are those of a run that was never killed")
