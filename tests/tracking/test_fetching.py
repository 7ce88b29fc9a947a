"""Artifacts that only a shared MLflow has: found by key, fetched as they are read, checked."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tracked_stores import client_of

from ttrain.errors import ArtifactError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tracking.artifact_source import MlflowArtifacts
from ttrain.tracking.client import open_client, own_uri
from ttrain.tracking.mlflow_mirror import Mirror, TrackedRun

STAGE, KEY = "shards-sft", "k" * 64
HELDOUT = {"heldout/index.json": b"[1]", "heldout/00.arrow": b"heldout rows"}
TRAIN = {"train/index.json": b"[1, 2]", "train/00.arrow": b"rows" * 400_000}
PUBLIC = {**HELDOUT, **TRAIN, "index.json": b"{}"}
PRIVATE = {"run/log.txt": b"log", "checkpoints/step-1/state.json": b"1"}
MANIFEST = {"result": {"rows": 3}, "ingredients": {"settings": {}}, "inputs": {}}


def publish(home: Path) -> Artifact:
    output = home / "work" / STAGE / KEY / "output"
    for name, data in {**PUBLIC, **PRIVATE}.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_bytes(data)
    return ArtifactStore(home).publish(STAGE, KEY, output, MANIFEST)


def track(home: Path, artifact: Artifact, started: float = 1e9) -> None:
    tags = {"ttrain.stage": STAGE, "ttrain.key": KEY}
    run = TrackedRun(f"{artifact.path}", STAGE, "ttrain", started, "FINISHED", started, tags=tags)
    for name in (*artifact.manifest["files"], "manifest.json"):
        run.files[f"{STAGE}/{name}"] = artifact.path / name
    assert Mirror(home).push(run)


@pytest.fixture
def bare_home(
    tmp_path: Path, add_database: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A home without artifacts, beside the shared MLflow of another home."""
    add_database(tmp_path / "shared")
    open_client(own_uri(tmp_path / "shared"), tmp_path / "shared")
    track(tmp_path / "shared", publish(tmp_path / "shared"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own_uri(tmp_path / "shared"))
    return tmp_path / "home"


def store_of(home: Path, experiment: str | None = "ttrain") -> ArtifactStore:
    return ArtifactStore(home, MlflowArtifacts(home, experiment))


def find(store: ArtifactStore) -> Artifact:
    artifact = store.find(STAGE, KEY)
    assert artifact is not None
    return artifact


def files_in(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    return {name: data for name, data in files.items() if name != "manifest.json"}


def newest_copy(home: Path) -> Path:
    """MLflow's directory of the artifact that was tracked last."""
    copies = (home.parent / "shared" / "mlflow" / "artifacts").glob(f"*/artifacts/{STAGE}")
    return max(copies, key=lambda path: path.stat().st_mtime_ns)


def test_an_artifact_is_found_and_what_is_read_is_fetched(tmp_path: Path, bare_home: Path) -> None:
    original = publish(tmp_path / "first")
    store, reports = store_of(bare_home), list[str]()
    artifact = find(store)
    assert (artifact.content, artifact.result) == (original.content, original.result)
    assert not artifact.path.exists(), "a look-up fetches nothing"
    part = store.complete(artifact, ("heldout",), reports.append)
    assert files_in(part.path) == HELDOUT
    assert ArtifactStore(bare_home).find(STAGE, KEY) == part, "a hit here needs no MLflow"
    assert part.part(("heldout",)) == original.part(("heldout",))
    whole = store.complete(artifact, (), reports.append)  # the same, stale artifact
    assert files_in(whole.path) == PUBLIC
    assert store.complete(whole, (), reports.append) == whole
    assert [report.split()[1] for report in reports] == ["2", "3"], "files, each fetched once"
    assert not list((bare_home / "work" / STAGE).glob("*.fetch"))
    (whole.path / "heldout" / "00.arrow").unlink()
    assert ArtifactStore(bare_home).find(STAGE, KEY) is None, "what was fetched can be damaged"


def test_other_bytes_are_refused_and_nothing_is_left(bare_home: Path) -> None:
    target = newest_copy(bare_home) / "train" / "00.arrow"
    target.unlink()  # it may be the same file as another home's
    target.write_bytes(b"sowr" * 400_000)
    store = store_of(bare_home)
    with pytest.raises(ArtifactError, match=r"train/00\.arrow"):
        store.complete(find(store))
    assert ArtifactStore(bare_home).find(STAGE, KEY) is None and not store.path(STAGE, KEY).exists()
    assert store.complete(find(store), ("heldout",)).path.is_dir(), "the other files are intact"


@pytest.mark.parametrize("name", ["index.json", "manifest.json"])
def test_a_bad_copy_is_passed(bare_home: Path, tmp_path: Path, name: str) -> None:
    older = newest_copy(bare_home)
    track(bare_home, publish(tmp_path / "again"), started=2e9)
    harmed = newest_copy(bare_home) / name
    harmed.unlink()
    harmed.write_bytes(b"{")
    store = store_of(bare_home)
    assert files_in(store.complete(find(store)).path) == PUBLIC
    shutil.rmtree(bare_home / "store")
    shutil.rmtree(older)
    assert store_of(bare_home).find(STAGE, KEY) is None


def test_only_finished_runs_of_the_experiment_count(bare_home: Path) -> None:
    run_id = newest_copy(bare_home).parents[1].name
    for status in ("RUNNING", "FAILED", "FINISHED"):
        client_of(bare_home).update_run(run_id, status=status)
        assert (store_of(bare_home).find(STAGE, KEY) is not None) == (status == "FINISHED"), status
    assert store_of(bare_home, "another").find(STAGE, KEY) is None
    assert store_of(bare_home, None).find(STAGE, KEY) is not None, "of any experiment"


def test_a_damaged_artifact_is_not_replaced_by_mlflows_copy(bare_home: Path) -> None:
    store = store_of(bare_home)
    os.truncate(store.complete(find(store)).path / "manifest.json", 40)
    assert store.find(STAGE, KEY) is None, "commands that read the store alone could not find it"
    assert [store.set_damaged_aside(path) for path in store.unreadable()] == [True]
    assert find(store).absent and len([*(bare_home / "replaced" / STAGE).iterdir()]) == 1


def test_a_partly_fetched_artifact_is_refused_without_a_tracker(bare_home: Path) -> None:
    store, alone = store_of(bare_home), ArtifactStore(bare_home)
    store.complete(find(store), ("heldout",))
    with pytest.raises(ArtifactError, match=r"index\.json.*tracking\.enabled=true"):
        alone.complete(find(alone))
