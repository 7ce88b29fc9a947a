"""A home with three registered sets of models."""

from pathlib import Path

import pytest

from ttrain.store.layout import Artifact
from ttrain.store.registry import ModelSet, Registry

SUFFIXES = {"pretrain": "base", "lora": "lora"}  # two of the models of a run


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
