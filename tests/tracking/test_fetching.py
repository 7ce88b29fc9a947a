"""Artifacts that only MLflow has: found by key, fetched as far as they are read, checked, never half; real MLflow."""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.kill_points import killed_everywhere
from support.tracked_stores import client_of

from ttrain.core.files import read_json
from ttrain.engine.planner import explain
from ttrain.errors import ArtifactError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tasks import STAGES
from ttrain.tracking.artifact_source import MlflowArtifacts
from ttrain.tracking.client import own_uri
from ttrain.tracking.mlflow_mirror import Mirror, TrackedRun, prepare

STAGE, KEY, EXPERIMENT = "shards-sft", "k" * 64, "ttrain"
HELDOUT = {"heldout/index.json": b"[1]", "heldout/00.arrow": b"heldout rows"}
PUBLIC = {
    **HELDOUT,
    "train/index.json": b"[1, 2]",
    "train/00.arrow": b"rows" * 400_000,
    "index.json": b"{}",
}
PRIVATE = {"run/log.txt": b"log", "checkpoints/step-1/state.json": b"1"}
MANIFEST = {"result": {"rows": 3}, "ingredients": {"settings": {}}, "inputs": {}}


@pytest.fixture(scope="module")
def pristine(
    tmp_path_factory: pytest.TempPathFactory, add_database: Callable[[Path], None]
) -> Path:
    home = tmp_path_factory.mktemp("pristine") / "home"
    add_database(home)
    track(home, make(home))
    return home


@pytest.fixture
def bare_home(tmp_path: Path, pristine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(pristine / "mlflow", tmp_path / "shared" / "mlflow")
    prepare(tmp_path / "shared")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own_uri(tmp_path / "shared"))
    return tmp_path / "home"


def make(
    home: Path, stage: str = STAGE, files: Mapping[str, bytes] | None = None, **manifest: Any
) -> Artifact:
    store, output = ArtifactStore(home), home / "work" / stage / KEY / "output"
    for name, data in (files or {**PUBLIC, **PRIVATE}).items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_bytes(data)
    return store.publish(stage, KEY, output, {**MANIFEST, **manifest})


def track(
    home: Path, artifact: Artifact, status: str = "FINISHED", experiment: str = EXPERIMENT
) -> None:
    tags = {"ttrain.stage": artifact.stage, "ttrain.key": artifact.key}
    run = TrackedRun(f"{artifact.path}", artifact.stage, experiment, time.time(), status, tags=tags)
    paths = (path for path in artifact.path.rglob("*") if path.is_file())
    run.files = {
        f"{artifact.stage}/{path.relative_to(artifact.path).as_posix()}": path for path in paths
    }
    assert Mirror(home).push(run)


def store_of(home: Path) -> ArtifactStore:
    return ArtifactStore(home, MlflowArtifacts(home, EXPERIMENT))


def found(store: ArtifactStore) -> Artifact:
    artifact = store.find(STAGE, KEY)
    assert artifact is not None
    return artifact


def files_in(directory: Path) -> dict[str, bytes]:
    paths = [
        path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json"
    ]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    "by_http",
    [
        pytest.param(False, id="own database"),
        pytest.param(True, id="server", marks=pytest.mark.soak),
    ],
)
def test_it_is_found_by_its_key_and_only_what_is_read_is_fetched(
    tmp_path: Path,
    bare_home: Path,
    by_http: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = make(tmp_path / "first")
    if by_http:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("server"))
        track(tmp_path / "first", original)
        bare_home = tmp_path / "second"
    store, said = store_of(bare_home), list[str]()
    artifact = found(store)
    assert (artifact.content, artifact.result) == (original.content, original.result)
    assert not artifact.path.exists(), "a question fetches nothing"
    part = store.complete(artifact, ("heldout",), said.append)
    assert files_in(part.path) == HELDOUT and said == ["fetching 2 files of shards-sft (15 B)"]
    assert ArtifactStore(bare_home).find(STAGE, KEY) == part, (
        "what is here needs no tracker to be a hit"
    )
    assert part.part(("heldout",)) == original.part(("heldout",))
    whole = store.complete(artifact, (), said.append)  # the same, stale artifact
    assert files_in(whole.path) == PUBLIC and said[1:] == [
        "fetching 3 files of shards-sft (1.6 MB)"
    ]
    assert store.complete(whole, (), said.append) == whole and len(said) == 2
    assert not list((bare_home / "work" / STAGE).glob("*.fetch"))
    stamps = {
        name: entry["mtime_ns"]
        for name, entry in original.manifest["files"].items()
        if name in PUBLIC
    }
    if by_http:
        assert {name: (whole.path / name).stat().st_mtime_ns for name in PUBLIC} == stamps, (
            "a hit costs a stat"
        )
    (whole.path / "heldout" / "00.arrow").unlink()
    assert ArtifactStore(bare_home).find(STAGE, KEY) is None, (
        "what was fetched can be damaged, as all that is here"
    )


def held(home: Path) -> Path:
    return max(
        (home.parent / "shared" / "mlflow" / "artifacts").glob(f"*/artifacts/{STAGE}"),
        key=lambda path: path.stat().st_mtime_ns,
    )


def test_other_bytes_are_refused_and_nothing_is_left(bare_home: Path) -> None:
    target = held(bare_home) / "train" / "00.arrow"
    target.unlink()  # it may be the same file as another home's
    target.write_bytes(b"sowr" * 400_000)
    store = store_of(bare_home)
    with pytest.raises(ArtifactError, match=r"train/00\.arrow"):
        store.complete(found(store))
    assert ArtifactStore(bare_home).find(STAGE, KEY) is None and not store.path(STAGE, KEY).exists()
    assert store.complete(found(store), ("heldout",)).path.is_dir(), (
        "the other files are as good as they were"
    )


def test_what_is_not_whole_there_is_not_there_and_an_older_one_is_taken(
    bare_home: Path, tmp_path: Path
) -> None:
    older = held(bare_home)
    track(bare_home, make(tmp_path / "again"))
    newer = held(bare_home)
    shutil.copytree(newer, tmp_path / "whole")
    harms: dict[str, Callable[[], object]] = {
        "missing": (newer / "heldout" / "00.arrow").unlink,
        "shorter": lambda: (newer / "index.json").write_bytes(b"{"),
        "no manifest": (newer / "manifest.json").unlink,
    }
    for name, harm in harms.items():
        shutil.rmtree(newer)
        shutil.copytree(tmp_path / "whole", newer)
        harm()
        store = store_of(bare_home)
        assert files_in(store.complete(found(store)).path) == PUBLIC, name
        shutil.rmtree(bare_home / "store")
    shutil.rmtree(older)
    assert store_of(bare_home).find(STAGE, KEY) is None


def test_only_finished_runs_of_the_experiment_count(bare_home: Path) -> None:
    home = bare_home
    run_id = held(home).parents[1].name
    client = client_of(home)
    for status in ("RUNNING", "FAILED", "FINISHED"):
        client.update_run(run_id, status=status)
        assert (store_of(home).find(STAGE, KEY) is not None) == (status == "FINISHED"), status
    assert ArtifactStore(home, MlflowArtifacts(home, "another")).find(STAGE, KEY) is None
    assert ArtifactStore(home, MlflowArtifacts(home)).find(STAGE, KEY) is not None, (
        "of any experiment"
    )
    client.delete_run(run_id)
    assert ArtifactStore(home, MlflowArtifacts(home)).find(STAGE, KEY) is None


DISK_CALLS = ("fsync", "rename", "replace", "unlink", "utime", "mkdir", "link")


@pytest.mark.soak
def test_a_kill_at_any_moment_leaves_nothing_half(bare_home: Path, tmp_path: Path) -> None:
    bare_home.mkdir()
    calls = killed_everywhere(bare_home, tmp_path / "copies", DISK_CALLS, complete_in_two_steps)
    assert calls > 20, "every call that reaches the disk was one of the moments"
    for victim in (tmp_path / "copies" / str(number) for number in range(1, calls)):
        before = ArtifactStore(victim).find(STAGE, KEY)  # undamaged, where it is there
        here = (
            {}
            if before is None
            else {name: PUBLIC[name] for name in PUBLIC if name not in before.absent}
        )
        assert before is None or here.items() <= files_in(before.path).items()
        complete_in_two_steps(victim)
        assert files_in(ArtifactStore(victim).path(STAGE, KEY)) == PUBLIC


def complete_in_two_steps(home: Path) -> None:
    store = store_of(home)
    store.complete(found(store), ("heldout",))
    store.complete(found(store))


def test_an_artifact_whose_manifest_is_damaged_is_named_although_mlflow_has_it_whole(
    bare_home: Path,
) -> None:
    """MLflow's copy would stand in the plan as cached, while no command that reads the store alone could find it."""
    store, place = store_of(bare_home), ArtifactStore(bare_home).path(STAGE, KEY)
    store.complete(found(store))
    os.truncate(place / "manifest.json", 40)
    assert store.find(STAGE, KEY) is None
    [damaged] = explain(STAGES[STAGE], KEY, {}, store)
    assert "manifest.json" in damaged
    with pytest.raises(ArtifactError, match=rf"{STAGE} kkk+ .*manifest\.json.*artifacts verify"):
        store.latest(STAGE)
    assert [store.set_damaged_aside(path) for path in store.unreadable()] == [True]
    assert found(store).absent and len([*(bare_home / "replaced" / STAGE).iterdir()]) == 1


def test_a_part_without_a_tracker_says_what_to_do(bare_home: Path) -> None:
    store = store_of(bare_home)
    store.complete(found(store), ("heldout",))
    alone = ArtifactStore(bare_home)
    with pytest.raises(ArtifactError, match=r"index\.json.*tracking\.enabled=true"):
        alone.complete(found(alone))
    assert read_json(found(alone).path / "manifest.json")["absent"]
