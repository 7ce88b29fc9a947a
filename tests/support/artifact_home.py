"""A user's home with artifacts or registered sets, for the commands about them."""

import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from support.night_files import artifact as publish

from ttrain.cli.main import main
from ttrain.core.files import write_json
from ttrain.engine.planner import key_of
from ttrain.nightly import records
from ttrain.store import garbage_collection, runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import JOB, Artifact
from ttrain.store.registry import ModelSet, Registry

DAY = 86400
LONG_AGO = 100 * DAY
SUFFIXES = {"pretrain": "base", "lora": "lora"}  # two of the models of a run


class Home:
    def __init__(self, root: Path) -> None:
        self.store = ArtifactStore(root)

    def publish(self, stage: str, name: str, age: float = LONG_AGO, **inputs: Artifact) -> Artifact:
        ingredients: dict[str, Any] = {"stage": stage, "settings": {"name": name}}
        ingredients |= {part: {} for part in ("arguments", "inputs", "files", "code")}
        key = key_of(ingredients)
        sources = {
            name: {"stage": source.stage, "key": source.key, "content": source.content}
            for name, source in inputs.items()
        }
        manifest = {"ingredients": ingredients, "inputs": sources, "result": {"loss": 1.5}}
        manifest |= {"seconds": 1.0, "provenance": {"libraries": {"torch": "2.13"}}}
        files = {"model/weights.bin": name * 1000}
        artifact = publish(self.store, stage, key, files, time.time() - age, **manifest)
        shutil.rmtree(self.store.work(stage, key))
        return artifact

    def run(
        self,
        *artifacts: Artifact,
        age: float = 0.0,
        outcome: str = "completed",
        name: str | None = None,
        **pending: str,
    ) -> SimpleNamespace:
        began = datetime.fromtimestamp(time.time() - age, UTC)
        run = f"full-{began:%Y%m%d-%H%M%S}-{uuid4().hex[:4]}"
        stages = [
            {"name": made.stage, "outcome": "completed", "key": made.key} for made in artifacts
        ]
        stages += [{"name": stage, "outcome": state} for stage, state in pending.items()]
        record = {"run": run, "pipeline": "full", "outcome": outcome, "stages": stages}
        record |= {"started": began.isoformat(), "started_unix": began.timestamp()}
        record |= {"process": runs.this_process(), "settings": {"name": name}, "metrics": {}}
        path = self.store.root / "runs" / f"{run}.json"
        path.parent.mkdir(exist_ok=True)
        write_json(path, record)
        return SimpleNamespace(run=run)

    def work(
        self, stage: str, key: str, age: float = LONG_AGO, reads: dict[str, Artifact] | None = None
    ) -> Path:
        work = self.store.work(stage, key)
        state = work / "output" / "checkpoints" / "step-7" / "state.json"
        state.parent.mkdir(parents=True)
        state.write_text("{}")
        inputs = {name: str(artifact.path) for name, artifact in (reads or {}).items()}
        write_json(work / JOB, {"inputs": inputs, "reuse": []})
        for path in [work, *work.rglob("*")]:
            os.utime(path, (time.time() - age, time.time() - age))
        return work

    def clean(
        self, registered: Any = (), keep: int = 1, days: float = 14
    ) -> garbage_collection.CleanupResult:
        kept = garbage_collection.Kept.recent(keep, days)
        needed = records.needed_keys
        return garbage_collection.clean(self.store, registered, kept, needed_by_nights=needed)

    @property
    def keys(self) -> set[str]:
        return keys(*self.store.artifacts())


@pytest.fixture
def user_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    return Home(tmp_path / "home")


def keys(*artifacts: Artifact) -> set[str]:
    return {artifact.key for artifact in artifacts}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    output = capsys.readouterr()
    assert (end.value.code or 0) == code, output
    return output.out


def register(home: Path, number: int, name: str = "mine", **metrics: float) -> ModelSet:
    registry = Registry(home)
    run = f"full-{number}"
    keys = {stage: f"{stage}-{number}" for stage in SUFFIXES}
    members = []
    for stage, key in keys.items():
        manifest = {"files": {"x.txt": {"sha256": key, "bytes": 1}}, "inputs": {}}
        artifact = Artifact(stage, key, Path("nowhere"), manifest)
        members.append(registry.register_model(f"{name}-{SUFFIXES[stage]}", artifact, run))
    keys |= {"evaluate": f"evaluate-{number}", "shards-pretrain": f"shards-{number}"}
    metrics = {"bits_per_byte": 2 - number / 10, **metrics}
    return registry.register_set(name, run, members, keys, metrics)


@pytest.fixture
def sets_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "a home"
    monkeypatch.setenv("TTRAIN_HOME", str(home))
    assert [register(home, number).version for number in (1, 2, 3)] == ["1", "2", "3"]
    return home
