"""A model is made again from its manifests: the same bytes, or a report of what differs."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.data_commands import in_process
from support.planned_homes import remember_modules
from support.tiny_stages import build_stage

from ttrain.config.loading import load
from ttrain.core.files import read_json
from ttrain.engine import processes
from ttrain.errors import ArtifactError, Interrupted, UsageError
from ttrain.lineage.lineage import lineage_of
from ttrain.lineage.reproduce import Recipe, recipes_of, reproduce
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import MANIFEST, write_manifest
from ttrain.tasks import SHARDS_PRETRAIN, TOKENIZER


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    (root / "data").mkdir()
    for name in ("a", "b"):
        texts = (f"{name} {number} the man and the sea " * 5 for number in range(60))
        lines = [json.dumps({"text": text}) for text in texts]
        (root / "data" / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = [f"data.{name}={root}/data/*.jsonl" for name in ("pretrain", "sft", "lora")]
    runtime = [f"runtime.{value}" for value in ("threads=1", "rows_per_device=4", "workers=1")]
    overrides = [*data, *runtime, "tokenizer.vocab_size=300", "reading.seed=5"]
    settings = load(overrides, environment={}).settings
    remember_modules(root / "home")
    processes.warm_up(settings)  # so that most of the stages are forked
    store = ArtifactStore(root / "home")
    tokenizer = build_stage(TOKENIZER, settings, store, {}).artifact
    build_stage(SHARDS_PRETRAIN, settings, store, {"tokenizer": tokenizer})
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    root = shutil.copytree(made, tmp_path / "root")
    for path in root.glob(f"home/store/*/*/{MANIFEST}"):
        text = path.read_text().replace(str(made), str(root))
        write_manifest(path.parent, json.loads(text))
    return root


def alter(root: Path, stage: str, change: Callable[[dict[str, Any]], object]) -> None:
    directory = ArtifactStore(root / "home").artifacts(stage)[0].path
    manifest = read_json(directory / MANIFEST)
    change(manifest)
    write_manifest(directory, manifest)


def recipes(root: Path, text: str = "shards-pretrain") -> list[Recipe]:
    return recipes_of(lineage_of(root / "home", text), root / "home")


def rebuild(root: Path, to: Path, text: str = "shards-pretrain", screen: Any = None) -> Any:
    return reproduce(lineage_of(root / "home", text), recipes(root, text), to, screen or Mock())


def test_settings_come_from_the_manifest_whatever_the_defaults_are(root: Path) -> None:
    unneeded = {"devices": 2, "nodes": 2, "rendezvous": "other:1", "gone_by_now": 1}
    kept = {"compile": True, "rows_per_device": 7, "parallel": "fsdp"}

    def trained(manifest: dict[str, Any]) -> None:
        manifest["result"] |= {"ranks": 4, "threads": 3, "device": "cpu"}
        manifest["provenance"]["runtime"] |= {**unneeded, **kept, "threads": None}

    alter(root, "tokenizer", trained)
    (_, tokenizer), (_, shards) = recipes(root)
    of_training = {"devices": 4, "threads": 3, "device": "cpu", "nodes": 1}
    assert {**of_training, **kept}.items() <= tokenizer.runtime.model_dump().items()
    assert tokenizer.tokenizer.vocab_size == 300 and shards.reading.seed == 5
    assert (shards.runtime.threads, shards.runtime.rows_per_device) == (1, 4)
    assert tokenizer.data.paths("sft") == (str(root / "data" / "*.jsonl"),)


def test_missing_or_changed_data_are_refused(root: Path) -> None:
    (root / "data" / "b.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(ArtifactError, match=r"tokenizer: .*b\.jsonl changed.*shards-pretrain: "):
        recipes(root)
    (root / "data" / "a.jsonl").unlink()
    with pytest.raises(ArtifactError, match=r"tokenizer: .*a\.jsonl' but.*shards-pretrain: "):
        recipes(root)


def test_later_files_count_only_without_a_list_in_the_manifest(root: Path) -> None:
    (root / "data" / "0.jsonl").write_text('{"text": "more"}\n')
    files = tuple(str(root / "data" / f"{name}.jsonl") for name in ("a", "b"))
    assert [settings.data.paths("pretrain") for _, settings in recipes(root)] == [files, files]
    weighted = {"path": str(root / "data" / "*.jsonl"), "weight": 2.0}
    for change, message in (
        (lambda made: made["settings"]["data"].update(pretrain=[weighted]), r".*0\.jsonl"),
        (lambda made: made.pop("settings"), ".*manifest"),
    ):
        alter(root, "shards-pretrain", lambda manifest, by=change: by(manifest["provenance"]))
        with pytest.raises(ArtifactError, match=f"shards-pretrain{message}"):
            recipes(root)


def test_an_interrupted_reproduction_continues_in_its_home(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "again"

    def interrupt(stage: str, event: str, data: object) -> None:
        if event == "ended":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        rebuild(root, place, screen=interrupt)
    inode = ArtifactStore(place).latest("tokenizer").path.stat().st_ino
    assert rebuild(root, place, "tokenizer")["equal"]
    assert ArtifactStore(place).latest("tokenizer").path.stat().st_ino == inode
    (place / "runs").mkdir()
    for used in (place, root / "data"):
        with pytest.raises(UsageError, match=f"--home is {used}"):
            rebuild(root, used)


def test_the_command_makes_the_same_bytes_or_ends_with_1_and_reports_what_differs(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def older(manifest: dict[str, Any]) -> None:
        manifest["ingredients"]["code"]["ttrain.data.tokenizer"] = "0" * 64
        manifest["provenance"]["libraries"]["tokenizers"] = "0.1.0"
        manifest["provenance"]["machine"] = {"cores": 99}

    monkeypatch.setenv("TTRAIN_HOME", str(root / "home"))
    run, store = in_process(capsys), root / "home" / "store"
    alter(root, "tokenizer", older)
    before = sorted(store.rglob("*"))
    done = run("reproduce", "shards-pretrain", "--json")
    assert done.code == 0 and done.json["equal"] and sorted(store.rglob("*")) == before
    tokenizer, shards = done.json["stages"]
    for stage in (tokenizer, shards):
        assert stage["content"] == stage["rebuilt_content"] and stage["files"] == []
    assert shards["key"] == shards["rebuilt_key"] and shards["differences"] == []
    differences = "; ".join(tokenizer["differences"])
    for text in ("module ttrain.data.tokenizer changed", "cores: 99 → ", "tokenizers 0.1.0"):
        assert text in differences
    file = {"sha256": "0" * 64}
    alter(root, "tokenizer", lambda manifest: manifest["files"]["tokenizer.json"].update(file))
    done = run("reproduce", "shards-pretrain")
    assert done.code == 1
    assert "tokenizer.json differs" in done.out and "differ: shards-pretrain" in done.out
