"""Homes whose stages are published without being run, for tests of plans."""

import functools
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.night_files import artifact
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
AFTER_SFT = {"sft", "lora", "evaluate"}
EVERYTHING = {"tokenizer", *SHARDS, "pretrain", *AFTER_SFT}
ALL = Selection()
RESULT = {"rows": {"rows": 10}, "steps": 1, "tokens": 4096}
DATA = {"pretrain": "documents", "sft": "chats", "lora": "domain"}


@functools.cache
def _digests_of_modules() -> bytes:
    path = ROOT / ".pytest_cache" / "digests.json"
    cache = DigestCache(path)
    for stage in STAGES.values():
        code_digests(stage.module, cache)
    cache.save()
    return path.read_bytes() if path.exists() else b"{}"


def remember_modules(home: Path) -> None:
    """Give a home the digests of the modules, as an earlier run leaves them: parsing takes 1 s."""
    (home / "cache").mkdir(parents=True, exist_ok=True)
    (home / "cache" / "digests.json").write_bytes(_digests_of_modules())


class House:
    def __init__(self, directory: Path) -> None:
        remember_modules(directory / "home")
        self.data = directory / "data"
        self.store = ArtifactStore(directory / "home")
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
        return [f"data.{name}={self.data / file}.jsonl" for name, file in DATA.items()]

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
                sources = {of: source for of, source in node.sources.items() if source in built}
                inputs = {of: built[source] for of, source in sources.items()}
                planned = plan_stage(node.stage, settings, self.store, inputs)
                text = says(name, str(planned.key))
                built[name] = planned.artifact or self.publish(planned, text)
        return built

    def publish(
        self, planned: Planned, text: str = "", result: Any = RESULT, steps: Any = (), **more: Any
    ) -> Artifact:
        self._write_checkpoints(planned, steps)
        manifest = {"result": result, "ingredients": planned.ingredients, **more}
        files = {"heldout/file": text}
        return artifact(self.store, planned.stage.name, planned.known_key, files, **manifest)

    def leave(self, planned: Planned, *steps: int) -> Path:
        """The work of a run that was killed after checkpoints of these steps."""
        work = self._write_checkpoints(planned, steps)
        write_json(work / resume.INGREDIENTS, planned.ingredients)
        return work

    def _write_checkpoints(self, planned: Planned, steps: Iterable[int]) -> Path:
        work = self.store.work(planned.stage.name, planned.known_key)
        for step in steps:
            checkpoint = work / "output" / "checkpoints" / f"step-{step:08d}"
            checkpoint.mkdir(parents=True)
            write_json(checkpoint / "state.json", {"step": step})
        return work

    def plan(
        self, *overrides: str, files: Sequence[Path] = (), selection: Selection = ALL, **rerun: Any
    ) -> dict[str, Planned]:
        settings = self.settings(*overrides, files=files)
        store = ArtifactStore(self.store.root)
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
def copy(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "configs")
    return shutil.copytree(ROOT / "ttrain", tmp_path / "code" / "ttrain", ignore=ignored)


def append(path: Path, code: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(code)


def tokens(steps: int) -> list[str]:
    return [f"pretrain.tokens={steps * 4096}", "pretrain.tokens_per_step=4096"]
