"""The store: all or nothing, noticed when altered, found when copied, one writer at a time."""

import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.held_locks import held_elsewhere
from support.kill_points import number_printed_by

from ttrain.core.files import read_json, write_json
from ttrain.errors import ArtifactError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact, home

STAGE, KEY = "pretrain", "k" * 64
PRIVATE = {"run/log.txt": b"log", "checkpoints/step-1/state.json": b"1"}
WEIGHTS = "model/weights.bin"
FILES = {WEIGHTS: b"weights", "tokenizer.json": b"{}", **PRIVATE}
MANIFEST = {"result": {"loss": 1.5}, "ingredients": {"settings": {}}, "inputs": {}}

HARMS: dict[str, Callable[[Path], object]] = {
    "altered": lambda path: path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes())),
    "missing": Path.unlink,
    "4 bytes": lambda path: path.write_bytes(b"four"),
}

# In its own process, since it forks: publishes in copies of a home, each killed one call later.
KILLED_PUBLISH = f"""
import sys
from pathlib import Path
from support.kill_points import killed_everywhere
from ttrain.store.artifacts import ArtifactStore
def publish(home):
    store = ArtifactStore(home)
    store.publish({STAGE!r}, {KEY!r}, store.work({STAGE!r}, {KEY!r}) / "output", {MANIFEST!r})
names = ("fsync", "rename", "replace", "mkdir", "unlink")
print(killed_everywhere(Path(sys.argv[1]), Path(sys.argv[2]), names, publish, writing=True))
"""


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "home")


def make_output(path: Path, **changed: bytes) -> Path:
    """What a stage leaves: files that others read, a log, a checkpoint."""
    for name, data in {**FILES, **changed}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def publish(store: ArtifactStore, key: str = KEY, **changed: bytes) -> Artifact:
    output = make_output(store.work(STAGE, key) / "output", **changed)
    return store.publish(STAGE, key, output, MANIFEST)


def published_files(artifact: Artifact) -> dict[str, bytes]:
    """The files of an artifact by name, which are those of its manifest."""
    paths = [path for path in artifact.path.rglob("*") if path.is_file()]
    files = {path.relative_to(artifact.path).as_posix(): path.read_bytes() for path in paths}
    assert json.loads(files.pop("manifest.json"))["files"].keys() == files.keys()
    return files


def snapshot(directory: Path) -> dict[Path, tuple[int, int, bytes]]:
    def state(path: Path) -> tuple[int, int, bytes]:
        stat, data = path.stat(), path.read_bytes() if path.is_file() else b""
        return stat.st_mtime_ns, stat.st_ino, data

    return {path: state(path) for path in directory.rglob("*")}


@pytest.mark.parametrize("replaces", [False, True], ids=["fresh", "in place of another"])
def test_publishing_is_all_or_nothing_wherever_it_is_killed(tmp_path: Path, replaces: bool) -> None:
    new = {WEIGHTS: b"rebuilt"}
    whole = {**FILES, **new}
    template = ArtifactStore(tmp_path / "home")
    if replaces:
        publish(template)
    make_output(template.work(STAGE, KEY) / "output", **new)
    unfinished = 0
    copies = number_printed_by(KILLED_PUBLISH, template.root, tmp_path / "copies")
    assert copies >= 12, "it was killed at each of its calls"
    for number in range(1, copies + 1):
        store = ArtifactStore(tmp_path / "copies" / str(number))
        present = store.find(STAGE, KEY)
        assert present or not store.path(STAGE, KEY).exists(), "nothing is half published"
        if present:
            assert published_files(present) in ([whole, FILES] if replaces else [whole])
        finished = store.finish_publishing(STAGE, KEY)
        if finished:
            unfinished += 1
            assert store.find(STAGE, KEY) == finished, "only its rename was missing"
            assert published_files(finished) == whole
        output = store.work(STAGE, KEY) / "output"
        if not output.exists():
            assert present or finished, "nothing is lost"
            make_output(output, **new)
        assert published_files(store.publish(STAGE, KEY, output, MANIFEST)) == whole
        assert store.find(STAGE, KEY)
    assert unfinished, "some lacked their place alone"


def test_a_published_artifact_is_found_until_it_is_replaced(store: ArtifactStore) -> None:
    interrupted = {"model/.config.json.4242.tmp": b"{"}  # what a kill left of a file's writing
    output = store.work(STAGE, KEY) / "output"
    make_output(output, **interrupted, **{"model/.mine.tmp": b"kept"})
    result = {2: "two", 10: ("ten", 1e22), "loss": float("nan"), "half": "caf\u00e9"}
    published = store.publish(STAGE, KEY, output, {**MANIFEST, "result": result})
    found = ArtifactStore(store.root).find(STAGE, KEY)
    assert found is not None and found.content == published.content and not output.exists()
    assert found.result["10"] == ["ten", 1e22], "as JSON has it"
    assert published_files(published).keys() == {*FILES, "model/.mine.tmp"}
    for stage, key in ((STAGE, "other"), ("sft", KEY)):
        shutil.copytree(published.path, store.path(stage, key))
        assert store.find(stage, key) is None, "a copy in the place of another key"
    assert [artifact.key for artifact in store.artifacts()] == [KEY]
    second = publish(store, **{WEIGHTS: b"second"})
    [replaced] = (store.root / "replaced" / STAGE).iterdir()
    assert (replaced / WEIGHTS).read_bytes() == b"weights"
    assert store.find(STAGE, KEY) == second and published_files(second)[WEIGHTS] == b"second"


@pytest.mark.parametrize("problem", HARMS)
def test_damage_to_any_file_is_noticed_and_named(store: ArtifactStore, problem: str) -> None:
    for name in FILES:
        artifact = publish(store)
        HARMS[problem](artifact.path / name)
        if problem == "altered":
            os.utime(artifact.path / name, ns=(1, 1))  # not left to the clock's granularity
        assert store.find(STAGE, KEY) is None
        damage = store.damage(artifact)
        assert damage is not None and name in damage and problem in damage
        listed = [each.key for each in store.artifacts(STAGE)]
        assert listed == [KEY], "so that it can be explained"
        with pytest.raises(ArtifactError, match=STAGE):
            store.latest(STAGE)


def test_a_copied_home_never_changes_the_original(store: ArtifactStore, tmp_path: Path) -> None:
    keys = [letter * 64 for letter in "abc"]
    for key in keys:
        publish(store, key)
    store.cache.save()
    before = snapshot(store.root)
    # new mtimes, other inodes
    shutil.copytree(store.root, tmp_path / "copy", copy_function=shutil.copyfile)
    copy = ArtifactStore(tmp_path / "copy")
    copied = [artifact.path for key in keys if (artifact := copy.find(STAGE, key))]
    assert [path.is_relative_to(copy.root) for path in copied] == [True] * 3
    publish(copy, keys[0], **{WEIGHTS: b"other"})
    publish(copy, "d" * 64)
    copy.cache.save()
    assert snapshot(store.root) == before
    moved = ArtifactStore(store.root.rename(tmp_path / "moved"))
    assert moved.latest(STAGE).path == moved.path(STAGE, keys[-1]), "the old place is gone"


def test_the_latest_is_the_newest_undamaged(store: ArtifactStore, monkeypatch: Any) -> None:
    for key, clock in (("second", 2e9), ("third", 2e9 + 60), ("first", 1e9)):
        monkeypatch.setattr(time, "time", lambda now=clock: now)
        publish(store, key)
    assert [artifact.key for artifact in store.artifacts(STAGE)] == ["third", "second", "first"]
    assert store.latest(STAGE).manifest["published"] == 2e9 + 60
    (store.path(STAGE, "third") / "tokenizer.json").unlink()
    assert store.latest(STAGE).key == "second"


def test_private_files_do_not_count_in_the_content(store: ArtifactStore, tmp_path: Path) -> None:
    first, log = publish(store, "first"), {"run/log.txt": b"other"}
    private = publish(store, "private", **log, **{"checkpoints/step-1/state.json": b"2"})
    public = publish(store, "public", **{WEIGHTS: b"other"})
    renamed = publish(store, "renamed", **{"model/weights2.bin": b""})
    assert first.content == private.content
    assert len({first.content, public.content, renamed.content}) == 3
    assert first.part(("tokenizer.json",)) == public.part(("tokenizer.json",))
    assert first.part(("model",)) != public.part(("model",))
    artifact = publish(store)
    assert store.compare(artifact, make_output(tmp_path / "same", **log)) is artifact
    changed = make_output(tmp_path / "other", **{"tokenizer.json": b"[]"})
    assert store.compare(artifact, changed) is None


def test_a_symbolic_link_is_refused(store: ArtifactStore, tmp_path: Path) -> None:
    output = make_output(tmp_path / "output")
    (output / "link").symlink_to(output / "tokenizer.json")
    with pytest.raises(ArtifactError, match="symbolic link"):
        store.publish(STAGE, KEY, output, MANIFEST)
    assert store.find(STAGE, KEY) is None


def let_go(holder: Any) -> None:
    holder.stdin.write("\n")
    holder.stdin.flush()


@pytest.mark.parametrize("end", [let_go, subprocess.Popen.kill], ids=["leaves", "is killed"])
def test_a_lock_is_waited_for_until_its_holder(store: ArtifactStore, end: Any) -> None:
    waiting, taken = threading.Event(), threading.Event()

    def take() -> None:
        with store.lock(STAGE, "key", waiting=waiting.set):
            assert store.holder(STAGE, "key") == (os.getpid(), platform.node())
            taken.set()

    thread = threading.Thread(target=take, daemon=True)
    with held_elsewhere(store.root, STAGE, "key") as holder:
        for stage, key in ((STAGE, "other"), ("sft", "key")):  # which are not locked
            with store.lock(stage, key, waiting=pytest.fail):
                assert holder.poll() is None
        assert store.holder(STAGE, "key") == (holder.pid, platform.node())
        thread.start()
        assert waiting.wait(30)
        assert store.holder(STAGE, "key") == (holder.pid, platform.node())
        assert not taken.wait(0.3), "it is still held by the other process"
        end(holder)
        assert taken.wait(30)
    thread.join(30)
    assert store.holder(STAGE, "key") is None


def test_files_are_synced_before_their_name(store: ArtifactStore, monkeypatch: Any) -> None:
    """Files and directories are synced after their last change, new names after the rename."""
    order: list[tuple[str, int]] = []

    def note(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def noted(file: Any, *rest: Any) -> None:
            state = os.fstat(file) if name == "fsync" else Path(file).stat()
            order.append((name, state.st_ino))
            call(file, *rest)

        return noted

    for name in ("fsync", "rename"):
        monkeypatch.setattr(os, name, note(name, getattr(os, name)))
    path = publish(store).path

    def inode(name: str) -> int:
        return (path / name).stat().st_ino

    renaming = order.index(("rename", inode(".")))
    synced_before = [number for _, number in order[:renaming]]
    assert {*synced_before} >= {inode("."), *(entry.stat().st_ino for entry in path.rglob("*"))}
    assert ("fsync", inode("..")) in order[renaming:]
    assert ("fsync", inode("../..")) in order, "the stage's own directory is new, too"
    places = [synced_before.index(inode(name)) for name in (*FILES, "manifest.json")]
    assert max(places) == places[-1], "the manifest is last"


def test_work_that_differs_from_its_manifest_is_unfinished(store: ArtifactStore) -> None:
    output = store.work(STAGE, KEY) / "output"
    publish(store).path.rename(output)  # as it is before the last step
    (output / "tokenizer.json").write_bytes(b"[]")
    assert store.finish_publishing(STAGE, KEY) is None
    (output / "tokenizer.json").write_bytes(b"{}")
    shutil.copytree(output, store.work("sft", KEY) / "output")
    assert store.finish_publishing("sft", KEY) is None, "it is another stage's"
    assert store.finish_publishing(STAGE, KEY) == store.find(STAGE, KEY)
    assert store.find(STAGE, KEY) is not None


@contextlib.contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """Files of more bytes cannot be written."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    old = {"text": "ü\u2028", "number": 1}
    write_json(tmp_path / "value.json", old)
    with full_disk(1000), pytest.raises(OSError, match=r"value\.json"):
        write_json(tmp_path / "value.json", {"new": "x" * 5000})
    assert read_json(tmp_path / "value.json") == old
    assert [path.name for path in tmp_path.iterdir()] == ["value.json"]
    (tmp_path / "value.json").write_bytes(b"{")
    assert read_json(tmp_path / "value.json") is None is read_json(tmp_path / "missing.json")


def test_the_home_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TTRAIN_HOME", raising=False)
    assert home() == tmp_path / "artifacts"
    monkeypatch.setenv("TTRAIN_HOME", "elsewhere")
    assert home() == tmp_path / "elsewhere"
