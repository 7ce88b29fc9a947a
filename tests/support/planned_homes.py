"""Homes whose stages are published without being run, for tests of plans."""

import functools
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from ttrain.config import Settings
from ttrain.config.loading import load
from ttrain.core.files import write_json
from ttrain.core.hashing import DigestCache, code_digests
from ttrain.engine import resume
from ttrain.engine.graph import Planned, Rerun, Selection
from ttrain.engine.planner import plan, plan_stage
from ttrain.flows.full import full
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tasks import STAGES

SHARDS = {"shards-pretrain", "shards-sft", "shards-lora"}
ALL = Selection()
AFTER_SFT = {"sft", "lora", "evaluate"}
EVERYTHING = {"tokenizer", *SHARDS, "pretrain", *AFTER_SFT}
RESULT = {"rows": {"rows": 10}, "steps": 1, "tokens": 4096}


@functools.cache
def _digests_of_modules() -> bytes:
    cache = DigestCache(path := ROOT / ".pytest_cache" / "digests.json")
    for stage in STAGES.values():
        code_digests(stage.module, cache)
    cache.save()
    return path.read_bytes() if path.exists() else b"{}"


def remember_modules(home: Path) -> None:
    """Give a home the digests of the package's modules, as an earlier run leaves them: to parse them takes 1 s, which the
    checkout's own memory of them spares the next session."""
    (home / "cache").mkdir(parents=True, exist_ok=True)
    (home / "cache" / "digests.json").write_bytes(_digests_of_modules())


class House:
    def __init__(self, directory: Path) -> None:
        remember_modules(directory / "home")
        self.data, self.store = directory / "data", ArtifactStore(directory / "home")
        self.data.mkdir()
        self.write("documents.jsonl", '{"text": "a"}\n')
        self.write("chats.jsonl", '{"question": "q", "answer": "a"}\n')
        self.write("domain.jsonl", '{"question": "q", "answer": "b"}\n')

    def write(self, name: str, text: str) -> Path:
        path = self.data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    @property
    def files(self) -> list[str]:
        names = {"pretrain": "documents", "sft": "chats", "lora": "domain"}
        return [f"data.{name}={self.data / file}.jsonl" for name, file in names.items()]

    def settings(self, *overrides: str, files: Sequence[Path] = ()) -> Settings:
        return load([*self.files, *overrides], files=files, environment={}).settings

    def build(
        self,
        settings: Settings,
        says: Callable[[str, str], str] = lambda stage, key: key,
        stages: Collection[str] = tuple(STAGES),
    ) -> dict[str, Artifact]:
        built: dict[str, Artifact] = {}
        for name, node in full(settings).items():
            if name in stages:
                inputs = {
                    of: built[source] for of, source in node.sources.items() if source in built
                }
                planned = plan_stage(node.stage, settings, self.store, inputs)
                built[name] = planned.artifact or self.publish(
                    planned, says(name, str(planned.key))
                )
        return built

    def publish(
        self,
        planned: Planned,
        text: str = "",
        result: dict[str, Any] | None = None,
        steps: Any = (),
        **more: Any,
    ) -> Artifact:
        assert planned.key
        output = self.store.work(planned.stage.name, planned.key) / "output"
        (output / "heldout").mkdir(parents=True)
        (output / "heldout" / "file").write_text(text)
        for step in steps:
            (output / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
            (output / "checkpoints" / f"step-{step:08d}" / "state.json").write_text(str(step))
        manifest = {
            "result": result or RESULT,
            "ingredients": planned.ingredients,
            "inputs": {},
            **more,
        }
        return self.store.publish(planned.stage.name, planned.key, output, manifest)

    def leave(self, planned: Planned, *steps: int) -> Path:
        """The work of a run that was killed after checkpoints of these steps."""
        assert planned.key
        work = self.store.work(planned.stage.name, planned.key)
        for step in steps:
            checkpoint = work / "output" / "checkpoints" / f"step-{step:08d}"
            checkpoint.mkdir(parents=True)
            write_json(checkpoint / "state.json", {"step": step})
        write_json(work / resume.INGREDIENTS, planned.ingredients)
        return work

    def plan(
        self, *overrides: str, files: Sequence[Path] = (), selection: Selection = ALL, **rerun: Any
    ) -> dict[str, Planned]:
        settings, store = self.settings(*overrides, files=files), ArtifactStore(self.store.root)
        stages = plan(full(settings), settings, store, Rerun(**rerun), selection=selection)
        return {planned.stage.name: planned for planned in stages}


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    house = House(tmp_path_factory.mktemp("finished"))
    house.build(house.settings())
    house.plan()
    return house.store.root


@pytest.fixture
def built(house: House, finished: Path) -> House:
    shutil.copytree(finished, house.store.root, dirs_exist_ok=True)
    house.store = ArtifactStore(house.store.root)
    return house


def running(stages: dict[str, Planned]) -> set[str]:
    return {name for name, planned in stages.items() if planned.state == "run"}


@pytest.fixture
def copy(house: House) -> Path:
    package = house.data.parent / "code" / "ttrain"
    shutil.copytree(
        ROOT / "ttrain", package, ignore=shutil.ignore_patterns("__pycache__", "configs")
    )
    return package


def append(path: Path, code: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + code, encoding="utf-8")


def tokens(steps: int) -> list[str]:
    return [f"pretrain.tokens={steps * 4096}", "pretrain.tokens_per_step=4096"]
