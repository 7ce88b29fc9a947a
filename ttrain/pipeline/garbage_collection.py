"""Which artifacts and work directories nobody needs any more, and their removal.

Kept is what recent runs read or made, what their unfinished work continues from, what the registered models are, and
everything young; and while a run is in progress every artifact, since which it takes is settled as it goes. A run notes
itself under the lock that is held here (`runs.RunRecord`): one that starts meanwhile waits until what goes is out of sight.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ttrain.core.files import exclusive, read_json
from ttrain.pipeline.stage_worker import JOB
from ttrain.store import runs
from ttrain.store.artifacts import HOLDER, Store
from ttrain.store.layout import MANIFEST, Artifact

DAY_SECONDS = 86400
TRASH = "trash"  # under the home: moved there at once, then removed
ADAPTED = ("base", "tokenizer")  # inputs without which a registered model is of no use

IN_PROGRESS, RECENT, REGISTERED, YOUNG = "a run in progress", "a recent run", "a registered model", "its age"
NIGHT = "the next night"


@dataclass(frozen=True)
class Removal:
    """Something that nobody needs. `bytes` is what its end frees: a file that has another name elsewhere frees nothing."""

    what: str  # "artifact", "work", "replaced" or "leftover"
    stage: str
    key: str
    path: Path
    bytes: int
    why: str

    def to_json(self) -> dict[str, Any]:
        """The form that `clean --json` prints."""
        return {
            "what": self.what,
            "stage": self.stage,
            "key": self.key,
            "path": str(self.path),
            "bytes": self.bytes,
            "why": self.why,
        }


@dataclass
class Needs:
    """Who needs what: {key: reason}, and which runs are in progress: {run: machine}."""

    keys: dict[str, str] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)

    def reason(self, key: str) -> str | None:
        """Why this is kept; None where it is not needed."""
        return self.keys.get(key) or (IN_PROGRESS if self.running else None)

    def add(self, keys: Iterable[str], reason: str, artifacts: Mapping[str, Artifact], only: Collection[str] = ()) -> None:
        """These keys and the inputs of their artifacts, those of their inputs and so on; `only` those of these names."""
        waiting = [key for key in keys if key]
        while waiting:
            key = waiting.pop()
            if self.keys.get(key) == reason:
                continue
            self.keys.setdefault(key, reason)
            inputs = artifacts[key].manifest["inputs"] if key in artifacts else {}
            waiting += [
                entry["key"]
                for name, entry in inputs.items()
                if (not only or name in only) and self.keys.get(entry["key"]) is None
            ]


@dataclass(frozen=True)
class Cleaned:
    """What was removed, or would be, how many artifacts are kept for which reason, and which runs are in progress.

    `running`: {run: machine}; that of another machine may have ended long since (`runs.ELSEWHERE_DAYS`).
    """

    removed: list[Removal]
    kept: dict[str, int]
    running: dict[str, str]

    @property
    def bytes(self) -> int:
        """Freed on disk."""
        return sum(removal.bytes for removal in self.removed)


def clean(
    store: Store,
    registered: Collection[str],
    *,
    keep_runs: int,
    older_than_days: float,
    needed_by_nights: Callable[[Path], Collection[str]],
    dry_run: bool = False,
) -> Cleaned:
    """Remove what nobody needs. `registered`: keys that `tracking.registered_keys` names; `needed_by_nights`: those that the
    next nights of a home read (`nightly.records.needed`), asked while no run may begin.

    Kept for their runs are the newest `keep_runs` that differ in their artifacts and all of the last `older_than_days` days.
    """
    oldest = time.time() - older_than_days * DAY_SECONDS
    with contextlib.nullcontext() if dry_run else exclusive(store.root / runs.CLEANING):
        artifacts = {artifact.key: artifact for artifact in store.everything()}
        needs = _needs(store, artifacts, registered, needed_by_nights(store.root), keep_runs, oldest)
        cleaned = _cleaned(store, artifacts, needs, registered, oldest)
        if dry_run:
            return cleaned
        moved = [(removal, _moved(store, removal)) for removal in cleaned.removed]
        if not needs.running:
            _remove_locks(store)
    for path in filter(None, (path for _, path in moved)):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return replace(cleaned, removed=[removal for removal, path in moved if path])


# --- what is needed -----------------------------------------------------------------------------------------------------


def _needs(
    store: Store,
    artifacts: Mapping[str, Artifact],
    registered: Collection[str],
    nightly: Collection[str],
    keep_runs: int,
    oldest: float,
) -> Needs:
    needs = Needs()
    different: set[frozenset[tuple[str, str | None]]] = set()
    for run in runs.history(store.root):
        keys = {stage["name"]: stage.get("key") for stage in run["stages"]}
        if run["outcome"] == "running":
            needs.running[run["run"]] = run["process"].get("host", platform.node())
        made = frozenset(keys.items())
        is_new = made not in different
        different.add(made)
        if run["started_unix"] >= oldest or (is_new and len(different) <= keep_runs):
            needs.add(filter(None, keys.values()), RECENT, artifacts)
    needs.add(registered, REGISTERED, artifacts, only=ADAPTED)
    needs.add(nightly, NIGHT, artifacts, only=ADAPTED)
    for stage, key, path in _works(store):
        reason = IN_PROGRESS if _is_locked(store, stage, key) else needs.reason(key)
        if reason:
            needs.add([key, *_read_by(store, path)], reason, artifacts)
    return needs


def _works(store: Store) -> Iterator[tuple[str, str, Path]]:
    """(stage, key, directory) of all work, with that of other nodes and what was fetched halfway: KEY.node1, KEY.fetch."""
    for path in sorted((store.root / "work").glob("*/*")):
        if path.is_dir() and not path.name.startswith("."):
            yield path.parent.name, path.name.partition(".")[0], path


def _read_by(store: Store, work: Path) -> Iterator[str]:
    """Keys of the artifacts that a work directory was laid out to read."""
    job = read_json(work / JOB)
    if not isinstance(job, dict):
        return
    inputs, reused, start_from = (job.get(name) for name in ("inputs", "reuse", "start_from"))  # or of another version
    places = [*(inputs or {}).values(), *(reused or ()), *filter(None, [start_from])]
    for place in map(Path, places):
        with contextlib.suppress(ValueError):
            parts = place.relative_to(store.root / "store").parts
            yield from parts[1:2]


def _is_locked(store: Store, stage: str, key: str) -> bool:
    """Whether a process works on the key at this moment."""
    with contextlib.suppress(_TakenError), _locked(store, stage, key):
        return False
    return True


@contextlib.contextmanager
def _locked(store: Store, stage: str, key: str) -> Iterator[None]:
    """Holds both locks of a key: its run's, and that of the stage's process, which may outlive it for a moment.

    Raises _TakenError where another process has one of them.
    """

    def taken() -> None:
        raise _TakenError

    with store.lock(stage, key, waiting=taken), store.lock(stage, f"{key}.process", waiting=taken):
        yield


class _TakenError(Exception):
    """Another process has the lock."""


# --- what is not ----------------------------------------------------------------------------------------------------------


def _cleaned(
    store: Store, artifacts: Mapping[str, Artifact], needs: Needs, registered: Collection[str], oldest: float
) -> Cleaned:
    found: list[tuple[str, str, str, Path, str]] = []
    kept: dict[str, int] = {}
    for artifact in artifacts.values():
        reason = needs.reason(artifact.key)
        reason = reason or (YOUNG if artifact.manifest["published"] >= oldest else None)
        if reason:
            kept[reason] = kept.get(reason, 0) + 1
        else:
            found.append(("artifact", artifact.stage, artifact.key, artifact.path, "no run or registered model needs it"))
    for stage, key, path in _works(store):
        if _is_locked(store, stage, key):
            continue
        if key in artifacts and not store.damage(artifacts[key]):  # else this is how it is built again
            found.append(("work", stage, key, path, "its artifact is finished"))
        elif not needs.reason(key) and _changed(path) < oldest:
            found.append(("work", stage, key, path, "no recent run left it"))
    for path in sorted((store.root / "replaced").glob("*/*")):
        key = path.name.rpartition("-")[0]
        if key not in registered and _time_in_name(path) < oldest:
            found.append(("replaced", path.parent.name, key, path, "it was replaced long ago"))
    for path in sorted((store.root / "store").glob("*/*")):
        if not (path / MANIFEST).exists() and _changed(path) < oldest:  # one of a newer version of ttrain stays
            found.append(("leftover", path.parent.name, path.name, path, "it has no manifest"))
    for path in _leftovers(store):
        found.append(("leftover", "", "", path, "a process was killed while it removed this"))
    freed = _freed([path for *_, path, _ in found])
    return Cleaned([Removal(*one[:4], freed[one[3]], one[4]) for one in found], kept, needs.running)


def _leftovers(store: Store) -> Iterator[Path]:
    """What was on its way out: renamed, so that nobody takes it for whole."""
    for pattern in ("work/*/.trash-*", "work/*/*/.trash-*", f"{TRASH}/*"):
        yield from sorted(store.root.glob(pattern))


def _changed(path: Path) -> float:
    """When a directory last changed: the latest time of what is in it."""
    return max((entry.stat().st_mtime for entry in [path, *path.rglob("*")] if entry.exists()), default=0.0)


def _time_in_name(path: Path) -> float:
    """When an artifact was replaced, in seconds since 1970; 0 where its name does not say so."""
    nanoseconds = path.name.rpartition("-")[2]
    return int(nanoseconds) / 1e9 if nanoseconds.isdecimal() else 0.0


def _freed(paths: Iterable[Path]) -> dict[Path, int]:
    """{path: bytes that are free once it and all before it are gone}; of a file with several names, the last one counts."""
    names: dict[tuple[int, int], int] = {}
    freed: dict[Path, int] = {}
    for path in paths:
        freed[path] = 0
        for file in [path] if path.is_file() else path.rglob("*"):
            with contextlib.suppress(OSError):
                stat = file.lstat()
                if file.is_file():
                    names[stat.st_dev, stat.st_ino] = names.get((stat.st_dev, stat.st_ino), 0) + 1
                    freed[path] += stat.st_size if names[stat.st_dev, stat.st_ino] == stat.st_nlink else 0
    return freed


def _moved(store: Store, removal: Removal) -> Path | None:
    """Out of everybody's sight by one rename; None where it is gone, or a run took it up. A kill then leaves a leftover."""
    if removal.path.parent == store.root / TRASH:
        return removal.path
    trash = store.root / TRASH / f"{removal.path.name}-{time.time_ns()}-{os.getpid()}"
    trash.parent.mkdir(exist_ok=True)
    is_work = removal.what == "work"
    with contextlib.suppress(FileNotFoundError, _TakenError):
        with _locked(store, removal.stage, removal.key) if is_work else contextlib.nullcontext():
            removal.path.rename(trash)
            return trash
    return None


def _remove_locks(store: Store) -> None:
    """Two empty files for every key that ever was, and who had one when it was killed.

    They go while both are held here: who opened one before that finds, once it is his, that the file has no name any more,
    and takes another (filelock does).
    """
    paths = [path for suffix in (".lock", HOLDER) for path in (store.root / "work").glob(f"*/*{suffix}")]
    for stage, key in {(path.parent.name, path.name.partition(".")[0]) for path in paths}:
        if _is_known(store, stage, key):
            continue
        with contextlib.suppress(_TakenError), _locked(store, stage, key):
            if not _is_known(store, stage, key):  # nor was it made meanwhile
                for name in (f"{key}.lock", f"{key}.process.lock"):
                    (store.root / "work" / stage / name).unlink(missing_ok=True)


def _is_known(store: Store, stage: str, key: str) -> bool:
    return store.work(stage, key).exists() or store.path(stage, key).exists()
