"""Whole stages on small data: a store with their inputs, settings, an observer."""

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from rich.console import Console
from support.planned_homes import remember_modules
from support.tiny_data import make_shards, make_tokenizer

from ttrain.config import Runtime, Settings
from ttrain.core.files import ProgressWriter
from ttrain.data.encoder import Encoder
from ttrain.engine import launch
from ttrain.engine.display import Display
from ttrain.engine.execution import PipelineRun
from ttrain.engine.graph import Graph, Plan, Planned
from ttrain.engine.planner import plan_stage
from ttrain.engine.stop_request import StopRequest
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tasks import STAGES, Stage, pretrain
from ttrain.tasks.common.job import StageContext
from ttrain.tracking.pusher import track

INPUTS = ("tokenizer", "shards-pretrain", "shards-sft")
MODEL = {"hidden_size": 32, "layers": 2, "heads": 2, "max_length": 64, "dropout": 0.1}
TRAINING = {"tokens_per_step": 256, "row_length": 32, "validation_rows": 8, "precision": "fp32"}
SPEED = {"device": "cpu", "threads": 1, "rows_per_device": 4}
SPEED |= {"log_every_steps": 1, "checkpoint_every_steps": 4}


@functools.cache
def _template() -> Path:
    place = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    root = Path(tempfile.mkdtemp(prefix="ttrain-home-", dir=place))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    encoder = make_tokenizer(root / "tokenizer")
    make_shards(root / "shards-pretrain", encoder, "documents", 60)
    make_shards(root / "shards-sft", encoder, "chats", 60)
    manifest: dict[str, Any] = {"result": {}, "ingredients": {}, "inputs": {}}
    for number, stage in enumerate(INPUTS):
        ArtifactStore(root).publish(stage, str(number) * 64, root / stage, manifest)
    return root


@dataclass
class Home:
    store: ArtifactStore
    tokenizer: Artifact
    documents: Artifact
    chats: Artifact

    @classmethod
    def make(cls, root: Path) -> Self:
        shutil.copytree(_template(), root, dirs_exist_ok=True)
        remember_modules(root)
        store = ArtifactStore(root)
        return cls(store, *map(store.latest, INPUTS))

    def pretrain_inputs(self) -> dict[str, Artifact]:
        return {"tokenizer": self.tokenizer, "shards": self.documents}

    @property
    def paths(self) -> dict[str, Path]:
        return {name: artifact.path for name, artifact in self.pretrain_inputs().items()}

    def pretrain(
        self, settings: Settings, output: Path, more: Mapping[str, Path] | None = None
    ) -> Any:
        inputs = {**self.paths, **(more or {})}
        return run_here(pretrain, settings, output, inputs, settings.runtime)


@pytest.fixture(scope="module")
def stage_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home.make(tmp_path_factory.mktemp("stages") / "home")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def stage_settings(
    steps: int = 12, pretrain: Mapping[str, Any] | None = None, **runtime: Any
) -> Settings:
    """A pretraining of `steps` steps, an SFT and an adapter, each in well under a second."""
    tree = {
        "model": MODEL,
        "pretrain": {"tokens": steps * 256, **TRAINING, **(pretrain or {})},
        "sft": {"epochs": 1.0, **TRAINING},
        "lora": {"epochs": 1.0, "rank": 2, **TRAINING},
        "evaluate": {"row_length": 32, "stride": 16, "new_tokens": 8},
    }
    return Settings.model_validate({**tree, "runtime": {**SPEED, **runtime}})


def run_here(module: Any, settings: Settings, output: Path, inputs: Any, runtime: Runtime) -> Any:
    """The results of a stage that runs here, under other random numbers each time."""
    progress = ProgressWriter(None)
    context = StageContext(inputs, {}, {}, output, runtime, progress, lambda: False)
    torch.seed()
    try:
        return module.run(settings, context)
    finally:
        torch.set_num_threads(1)


def planned(*names: str) -> list[Planned]:
    return [Planned(STAGES[name], "run", ()) for name in names]


def run_of(
    store: ArtifactStore, settings: Settings, stages: Sequence[Planned], **options: Any
) -> PipelineRun:
    plan = Plan("full", settings, store, Graph(), [*stages])
    run = PipelineRun(plan, Display(Console(quiet=True)), **options)
    track(run)
    return run


def build_stage(
    stage: Stage,
    settings: Settings,
    store: ArtifactStore,
    inputs: Any,
    act: Callable[[str], object] = lambda line: None,
) -> launch.StageOutcome:
    """Build the stage in its own process; `act(line)` sees every line of its log."""

    def report(event: str, data: Mapping[str, Any]) -> None:
        if event == "logged":
            act(data["line"])

    planned = plan_stage(stage, settings, store, inputs)
    return launch.build(planned, settings, store, report, StopRequest())
