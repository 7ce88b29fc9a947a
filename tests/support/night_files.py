"""Nights of a pipeline, their files and their champion, without training."""

from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from ttrain.config import Settings
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly.records import Champion, InputSnapshot, NightRecord, Nights
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact, write_manifest

BERLIN = "Europe/Berlin"
NONE = InputSnapshot({}, {})


def frozen(*digests: str, champion: str | None = None) -> InputSnapshot:
    files = [{"location": f"/inbox/{digest}.jsonl", "sha256": digest} for digest in digests]
    return InputSnapshot({"pretrain": files}, {}, Champion(champion, {}) if champion else None)


def at(text: str, zone: str = "UTC") -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone))


def completed(
    known: Nights, list_: InputSnapshot, outcome: str, version: str | None = None, **notes: Any
) -> NightRecord:
    night = known.begin(list_, None)
    night.note(version=version, **notes)
    night.end_try(outcome, "", closed=True)
    return night


def artifact(
    store: ArtifactStore, stage: str, key: str, files: Any, published: float = 0, **manifest: Any
) -> Artifact:
    """Publish an artifact with these files, now or at that time."""
    output = store.work(stage, key) / "output"
    output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(text, encoding="utf-8")
    empty = {"result": {}, "inputs": {}, "ingredients": {"files": {}}}
    artifact = store.publish(stage, key, output, {**empty, **manifest})
    if published:
        whole = write_manifest(artifact.path, {**artifact.manifest, "published": published})
        artifact = Artifact(stage, key, artifact.path, whole)
    return artifact


def inbox(tmp_path: Path, **files: str) -> Settings:
    directory = tmp_path / "inbox"
    directory.mkdir(exist_ok=True)
    chats = tmp_path / "chats.jsonl"
    chats.write_text(files.pop("chats", "c"), encoding="utf-8")
    for name, text in files.items():
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")
    data = {"pretrain": str(directory), "sft": str(chats), "lora": str(chats)}
    return Settings.model_validate({"data": data})


def list_of(
    settings: Settings, store: ArtifactStore, champion: Champion | None = None
) -> InputSnapshot:
    files = night_inputs.watched_files(settings, store, may_be_gone=True)
    return InputSnapshot(files, settings.model_dump(mode="json"), champion)
