"""A model is made again as its manifests say: the same bytes, or what differs; refused where its raw data are gone."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.data_commands import Result, in_process
from support.planned_homes import remember_modules
from support.tiny_stages import Watcher, build_stage

from ttrain.config.loading import load
from ttrain.core.files import read_json
from ttrain.engine import processes
from ttrain.errors import ArtifactError, Interrupted, UsageError
from ttrain.lineage.lineage import lineage_of
from ttrain.lineage.reproduce import Recipe, recipes_of, reproduce
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import MANIFEST, Artifact, write_manifest
from ttrain.tasks import SHARDS_PRETRAIN, TOKENIZER


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    (root / "data").mkdir()
    for name in ("a", "b"):
        rows = (
            json.dumps({"text": f"{name} {number} the man and the sea " * 5})
            for number in range(60)
        )
        (root / "data" / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    data = str(root / "data" / "*.jsonl")
    given = [f"data.{name}={data}" for name in ("pretrain", "sft", "lora")]
    given += ["tokenizer.vocab_size=300", "reading.seed=5"]
    given += [f"runtime.{setting}" for setting in ("threads=1", "rows_per_device=4", "workers=1")]
    settings = load(given, environment={}).settings
    remember_modules(root / "home")
    processes.warm_up(settings)  # so that most of the stages are forked
    store = ArtifactStore(root / "home")
    tokenizer = build_stage(TOKENIZER, settings, store, {}, Watcher()).artifact
    build_stage(SHARDS_PRETRAIN, settings, store, {"tokenizer": tokenizer}, Watcher())
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "root")
    for path in tmp_path.glob(f"root/home/store/*/*/{MANIFEST}"):
        write_manifest(
            path.parent, json.loads(path.read_text().replace(str(made), str(tmp_path / "root")))
        )
    return tmp_path / "root"


def artifact(root: Path, stage: str = "tokenizer") -> Artifact:
    return ArtifactStore(root / "home").artifacts(stage)[0]


def alter(root: Path, stage: str, change: Any) -> None:
    directory = artifact(root, stage).path
    manifest = read_json(directory / MANIFEST)
    change(manifest)
    write_manifest(directory, manifest)


def recipes(root: Path, text: str = "shards-pretrain") -> list[Recipe]:
    return recipes_of(lineage_of(root / "home", text), root / "home")


def again(root: Path, to: Path, text: str = "shards-pretrain", screen: Any = None) -> Any:
    found = lineage_of(root / "home", text)
    return reproduce(found, recipes_of(found, root / "home"), to, screen or Mock())


def test_settings_come_from_the_manifest_whatever_the_defaults_and_the_record_say(
    root: Path,
) -> None:
    (_, tokenizer), (_, shards) = recipes(root)
    assert tokenizer.tokenizer.vocab_size == 300 and shards.reading.seed == 5
    assert (shards.runtime.threads, shards.runtime.rows_per_device) == (1, 4)
    assert tokenizer.data.paths("sft") == (str(root / "data" / "*.jsonl"),)
    assert not (root / "home" / "runs").exists()


def test_threads_ranks_kernels_and_micro_batches_are_those_of_the_training(root: Path) -> None:
    def trained(manifest: dict[str, Any]) -> None:
        manifest["result"] |= {"ranks": 4, "threads": 3, "device": "cpu"}
        runtime = manifest["provenance"]["runtime"]
        runtime |= {
            "threads": None,
            "devices": 2,
            "nodes": 2,
            "node_rank": 1,
            "rendezvous": "other:1",
        }
        runtime |= {"compile": True, "rows_per_device": 7, "parallel": "fsdp", "gone_by_now": 1}

    alter(root, "tokenizer", trained)
    [(_, settings)] = recipes(root, "tokenizer")
    runtime = settings.runtime
    assert (runtime.devices, runtime.threads, runtime.device, runtime.nodes, runtime.node_rank) == (
        4,
        3,
        "cpu",
        1,
        0,
    )
    assert (runtime.compile, runtime.rows_per_device, runtime.parallel) == (True, 7, "fsdp")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda data: (data / "a.jsonl").rename(data / "c.jsonl"),
            "a.jsonl' but there is no such file",
        ),
        (
            lambda data: (data / "b.jsonl").write_text('{"text": "other"}\n'),
            "train file b.jsonl changed",
        ),
    ],
)
def test_raw_data_that_are_gone_or_changed_are_refused_before_anything_is_built(
    root: Path, change: Any, said: str
) -> None:
    change(root / "data")
    with pytest.raises(ArtifactError, match=r"cannot be made again: .*tokenizer: ") as refused:
        recipes(root)
    assert said in str(refused.value) and "shards-pretrain: " in str(refused.value), (
        "each stage that reads them is named"
    )


def test_files_that_came_later_into_the_same_folder_do_not_count_where_the_manifest_says_which(
    root: Path,
) -> None:
    (root / "data" / "0.jsonl").write_text('{"text": "more"}\n')
    files = tuple(str(root / "data" / f"{name}.jsonl") for name in ("a", "b"))
    assert [settings.data.paths("pretrain") for _, settings in recipes(root)] == [files, files]

    def weighted(manifest: dict[str, Any]) -> None:
        manifest["provenance"]["settings"]["data"]["pretrain"] = [
            {"path": str(root / "data" / "*.jsonl"), "weight": 2.0}
        ]

    for stage in ("tokenizer", "shards-pretrain"):
        alter(root, stage, weighted)
    with pytest.raises(ArtifactError, match=r"shards-pretrain: train file 0\.jsonl is new"):
        recipes(root)
    for stage in ("tokenizer", "shards-pretrain"):
        alter(root, stage, lambda manifest: manifest["provenance"].pop("settings"))
    with pytest.raises(ArtifactError, match=r"its manifest does not say where its data were"):
        recipes(root)


def test_an_interrupted_reproduction_goes_on_in_its_home(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "again"

    def impatient(stage: str, event: str, data: object) -> None:
        if event == "ended":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="before a stage began"):
        again(root, place, screen=impatient)
    first = ArtifactStore(place).artifacts("tokenizer")[0].path.stat().st_ino
    assert again(root, place, "tokenizer")["equal"]
    assert ArtifactStore(place).artifacts("tokenizer")[0].path.stat().st_ino == first
    (place / "runs").mkdir()
    for used in (place, root / "data"):
        with pytest.raises(
            UsageError, match="which holds other files; name a directory that is new or empty"
        ):
            again(root, used)


def test_the_command_makes_the_same_bytes_or_ends_with_1_and_tells_other_code_libraries_and_machine(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> Result:
        return in_process(capsys)("reproduce", *words)

    def older(manifest: dict[str, Any]) -> None:
        manifest["ingredients"]["code"]["ttrain.data.tokenizer"] = "0" * 64
        manifest["provenance"]["libraries"]["tokenizers"] = "0.1.0"
        manifest["provenance"]["machine"] = {"processor": "an abacus", "cores": 99}

    monkeypatch.setenv("TTRAIN_HOME", str(root / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    alter(root, "tokenizer", older)
    before = sorted((root / "home" / "store").rglob("*"))
    done = run("shards-pretrain", "--json")
    tokenizer, shards = done.json["stages"]
    assert (
        done.code == 0
        and done.json["equal"]
        and sorted((root / "home" / "store").rglob("*")) == before
    )
    for stage in (tokenizer, shards):
        assert (
            stage["content"] == stage["rebuilt_content"]
            and stage["files"] == []
            and stage["seconds"] > 0
        )
    assert shards["key"] == shards["rebuilt_key"] and shards["differences"] == []
    told = "; ".join(tokenizer["differences"])
    for word in (
        "module ttrain.data.tokenizer changed",
        "tokenizers 0.1.0",
        "processor: an abacus → ",
        "cores: 99 → ",
    ):
        assert word in told
    alter(
        root,
        "tokenizer",
        lambda manifest: manifest["files"]["tokenizer.json"].update(sha256="0" * 64),
    )
    done = run("shards-pretrain")
    assert done.code == 1 and "tokenizer: tokenizer.json differs: content " in done.out
    assert "DIFFERENT: tokenizer of shards-pretrain/" in done.out
    assert "not rebuilt, because their inputs differ: shards-pretrain" in done.out
    (root / "data" / "a.jsonl").unlink()
    done = run("tokenizer")
    assert done.code == 1 and "cannot be made again: tokenizer: data.pretrain is " in done.err
