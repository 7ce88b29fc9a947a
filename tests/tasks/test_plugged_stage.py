"""A training stage that another package brings: planned, run, tracked, registered and reported like ttrain's own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.pipeline_home import Cli, write_corpus

TOY = """
from ttrain.config.training import Optim, Training, TrainingStage


class Toy(Training):
    start_from: str = "sft"
    epochs: float | None = 1.0
    optim: Optim = Optim(lr=1e-4)


ROW = TrainingStage(Toy, "the toy", "Toys", "chat", "chats", data="sft", module="toy_stages.stage")
"""
STAGE = '''
from ttrain.tasks import sft
from ttrain.tasks.common import training


def run(config, job):
    """Train the base again on the chats."""
    return training.run(config, config.toy, job, sft.prepare)
'''
SMALL = (
    *("toy.tokens_per_step=512", "toy.row_length=64", "toy.validation_rows=16", "pretrain.tokens=2048"),
    *("sft.epochs=0.2", "toy.epochs=0.2", "lora.epochs=0.2", "evaluate.max_chats=4", "evaluate.max_bytes=1000"),
)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """The command line, with an installed package that has the stage `toy`."""
    info, package = tmp_path / "site" / "toys-1.0.dist-info", tmp_path / "site" / "toy_stages"
    info.mkdir(parents=True)
    package.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ttrain.stages]\ntoy = toy_stages:ROW\n")
    (package / "__init__.py").write_text(TOY)
    (package / "stage.py").write_text(STAGE)
    write_corpus(tmp_path / "data")
    cli = Cli(tmp_path / "home", tmp_path / "data")
    cli.environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return cli


@pytest.mark.soak
def test_a_stage_of_another_package_is_planned_run_tracked_registered_and_reported(cli: Cli, tmp_path: Path) -> None:
    settings, page = (*SMALL, "lora.start_from=toy", "evaluate.suites.toy=heldout"), tmp_path / "report.html"
    run_words = ["pipeline", "run", "full", "--engine", "none", *settings]
    cli(*run_words)
    models = cli("models", "list", "--json", settings=False)
    cli("report", "--out", str(page), settings=False)
    stages = cli("stage", "list", settings=False)
    manifests = {path.parent.parent.name: json.loads(path.read_bytes()) for path in cli.home.glob("store/*/*/manifest.json")}
    assert {"base", "sft", "toy", "lora"} <= manifests["evaluate"]["inputs"].keys()
    assert manifests["lora"]["inputs"]["base"]["stage"] == "toy" and manifests["toy"]["inputs"]["base"]["stage"] == "sft"
    [run] = cli.runs()
    assert run["metrics"]["toy/validation_loss"] > 0 and run["metrics"]["eval/chat_loss_toy"] > 0
    assert json.loads(models)[0]["models"]["toy"].startswith("tiny-test-toy/")
    assert "<h3>the toy</h3>" in page.read_text() and "toy" in stages
    (tmp_path / "site" / "toy_stages" / "stage.py").write_text(STAGE.replace("fast=False", "fast=True"))
    assert cli.to_run(*settings) == ["toy", "lora", "evaluate"], "its code is part of its key"
