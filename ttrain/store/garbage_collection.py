"""Find and remove artifacts and work directories that are no longer needed.

Kept are artifacts that recent runs read or made or that their unfinished work continues from, registered models, and all
young ones; while a run is in progress, every artifact, since it is not yet known which it will read. A run records itself
under the lock that is held here (`runs.RunRecord`): one that starts meanwhile waits until the removed paths are moved away.
Damaged artifacts are `artifacts verify --set-aside`'s, which moves them to what was replaced.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ttrain.core.files import Taken, exclusive, read_object, refuse
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import JOB, Artifacts
from ttrain.store.runs import RecordedRun

DAY_SECONDS = 86400
TRASH = "trash"  # under the home: moved there at once, then removed
REQUIRED_INPUTS = ("base", "tokenizer")  # inputs without which a registered model is of no use

OTHER_RUN = "another run"
IN_PROGRESS, RECENT, REGISTERED, YOUNG = "a run in progress", "a recent run", "a registered model", "its age"
NIGHT = "the next night"


@dataclass(frozen=True)
class UnneededPath:
    """A path that can be removed. `bytes` is what its removal frees: a file with another hard link frees nothing."""

    kind: str  # "artifact", "work", "replaced" or "leftover"
    stage: str
    key: str
    path: Path
    bytes: int
    why: str


@dataclass
class NeededKeys:
    """Needed keys, {key: reason}, and runs in progress, {run: machine}."""

    keys: dict[str, str] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)

    def reason(self, key: str) -> str | None:
        """Why this key is kept; None if it is not needed."""
        return self.keys.get(key) or (IN_PROGRESS if self.running else None)

    def add(self, keys: Iterable[str], reason: str, artifacts: Artifacts, only: Collection[str] = ()) -> None:
        """Add these keys and, recursively, the inputs of their artifacts; `only`: restrict to inputs of these names."""
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
class CleanupResult:
    """Removed (or removable) paths, how many artifacts are kept for which reason, and the runs in progress.

    `running`: {run: machine}; a run of another machine may have ended long ago (`runs.ELSEWHERE_DAYS`).
    """

    removed: list[UnneededPath]
    kept_counts: dict[str, int]
    running: dict[str, str]

    @property
    def bytes(self) -> int:
        """Bytes freed on disk."""
        return sum(removal.bytes for removal in self.removed)


@dataclass(frozen=True)
class Kept:
    """What is kept beside registered models and what the next nights read.

    runs              the newest runs that differ in their artifacts
    since             artifacts and runs of this time and later, in seconds since 1970
    only_run          where it is set: instead, all but what only this run made or read, whatever its age
    """

    runs: int = 0
    since: float = 0.0
    only_run: RecordedRun | None = None

    @classmethod
    def recent(cls, runs: int, days: float) -> Kept:
        """The newest runs, and all of the last days."""
        return cls(runs, time.time() - days * DAY_SECONDS)


def clean(
    store: ArtifactStore,
    registered: Collection[str],
    kept: Kept,
    *,
    needed_by_nights: Callable[[Path], Collection[str]],
    dry_run: bool = False,
) -> CleanupResult:
    """Remove what is no longer needed. `registered`: keys of `Registry.keys`; `needed_by_nights`: keys that the
    next nights of a home read (`nightly.records.needed_keys`), called while no run can begin."""
    with contextlib.nullcontext() if dry_run else exclusive(store.root / runs.CLEANING):
        artifacts = {artifact.key: artifact for artifact in store.artifacts()}
        needs = _needs_of_runs(store, artifacts, kept)
        needs.add(registered, REGISTERED, artifacts, only=REQUIRED_INPUTS)
        needs.add(needed_by_nights(store.root), NIGHT, artifacts, only=REQUIRED_INPUTS)
        _add_work(store, needs, artifacts)
        kept_counts, found = Counter[str](), list[UnneededPath]()
        for removal, reason in _candidates(store, artifacts, needs, registered, kept):
            if reason is None:
                found.append(removal)
            elif removal.kind == "artifact":
                kept_counts[reason] += 1
        found = [replace(removal, bytes=_freed_bytes(removal.path)) for removal in found]
        cleaned = CleanupResult(found, dict(kept_counts), needs.running)
        return cleaned if dry_run else _removed(store, cleaned)


def _needs_of_runs(store: ArtifactStore, artifacts: Artifacts, kept: Kept) -> NeededKeys:
    needs = NeededKeys()
    different: set[frozenset[str | None]] = set()
    for run in runs.history(store.root):
        keys = frozenset(runs.keys_of(run).values())
        if run["outcome"] == "running":
            needs.running[run["run"]] = run["process"].get("host", platform.node())
        is_new = keys not in different
        different.add(keys)
        if kept.only_run:
            reason = OTHER_RUN if run["run"] != kept.only_run["run"] else None
        else:
            is_recent = run["started_unix"] >= kept.since or (is_new and len(different) <= kept.runs)
            reason = RECENT if is_recent else None
        if reason:
            needs.add(filter(None, keys), reason, artifacts)
    return needs


def _add_work(store: ArtifactStore, needs: NeededKeys, artifacts: Artifacts) -> None:
    """Add what needed work reads: that of kept runs, and that on which a process works now."""
    for stage, key, path in _work_directories(store):
        reason = IN_PROGRESS if _is_locked(store, stage, key) else needs.reason(key)
        if reason:
            needs.add([key, *_read_by(store, path)], reason, artifacts)


def _candidates(
    store: ArtifactStore, artifacts: Artifacts, needs: NeededKeys, registered: Collection[str], kept: Kept
) -> Iterator[tuple[UnneededPath, str | None]]:
    """What might be removed, and the reason to keep it; None: it is not needed."""
    own = set(runs.keys_of(kept.only_run).values()) if kept.only_run else None
    why = "only this run needs it" if kept.only_run else "no run or registered model needs it"
    for key, artifact in artifacts.items():
        if own is None or key in own:
            young = YOUNG if own is None and artifact.manifest["published"] >= kept.since else None
            yield UnneededPath("artifact", artifact.stage, key, artifact.path, 0, why), needs.reason(key) or young
    for stage, key, path in _work_directories(store):
        if _is_locked(store, stage, key) or (own is not None and key not in own):
            continue
        if key in artifacts and not store.damage(artifacts[key]):  # a damaged artifact is rebuilt from its work
            yield UnneededPath("work", stage, key, path, 0, "its artifact is finished"), None
        else:
            young = YOUNG if own is None and _last_change(path) >= kept.since else None
            yield UnneededPath("work", stage, key, path, 0, "no recent run left it"), needs.reason(key) or young
    for path in sorted((store.root / "replaced").glob("*/*")) if own is None else ():
        key, _, nanoseconds = path.name.rpartition("-")
        replaced_at = int(nanoseconds) / 1e9 if nanoseconds.isdecimal() else 0.0  # in seconds since 1970
        reason = REGISTERED if key in registered else YOUNG if replaced_at >= kept.since else None
        yield UnneededPath("replaced", path.parent.name, key, path, 0, "it was replaced long ago"), reason
    for path in sorted((store.root / TRASH).glob("*")):
        yield UnneededPath("leftover", "", "", path, 0, "a process was killed while it removed this"), None


def _removed(store: ArtifactStore, cleaned: CleanupResult) -> CleanupResult:
    """Remove what was found; returns what could be moved away. No run begins meanwhile, since the caller holds the lock."""
    moved = [(removal, _move_to_trash(store, removal)) for removal in cleaned.removed]
    for path in filter(None, (path for _, path in moved)):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return replace(cleaned, removed=[removal for removal, path in moved if path])


def _work_directories(store: ArtifactStore) -> Iterator[tuple[str, str, Path]]:
    """(stage, key, path) of all work directories, also of other nodes and partial fetches: KEY.node1, KEY.fetch."""
    for path in sorted((store.root / "work").glob("*/*")):
        if path.is_dir() and not path.name.startswith("."):
            yield path.parent.name, path.name.partition(".")[0], path


def _read_by(store: ArtifactStore, work: Path) -> Iterator[str]:
    """Keys of the artifacts that the job of a work directory reads."""
    job = read_object(work / JOB)
    inputs, reused, start_from = map(job.get, ("inputs", "reuse", "start_from"))  # may be missing: of another version
    paths = [*(inputs or {}).values(), *(reused or ()), *filter(None, [start_from])]
    for path in map(Path, paths):
        with contextlib.suppress(ValueError):
            parts = path.relative_to(store.root / "store").parts
            yield from parts[1:2]


def _is_locked(store: ArtifactStore, stage: str, key: str) -> bool:
    """Whether a process works on the key now."""
    with contextlib.suppress(Taken), _locked(store, stage, key):
        return False
    return True


@contextlib.contextmanager
def _locked(store: ArtifactStore, stage: str, key: str) -> Iterator[None]:
    """Hold both locks of a key: the run's, and the stage process's, which may outlive it a moment.

    Raises Taken if another process holds one of them.
    """
    with store.lock(stage, key, waiting=refuse), store.lock(stage, f"{key}.process", waiting=refuse):
        yield


def _last_change(path: Path) -> float:
    """When a directory last changed: the latest time of what is in it."""
    return max((entry.stat().st_mtime for entry in [path, *path.rglob("*")] if entry.exists()), default=0.0)


def _freed_bytes(path: Path) -> int:
    """What removing a path frees: a file that has another hard link frees nothing."""
    files = [path] if path.is_file() else (file for file in path.rglob("*") if file.is_file())
    return sum(stat.st_size for stat in (file.lstat() for file in files) if stat.st_nlink == 1)


def _move_to_trash(store: ArtifactStore, removal: UnneededPath) -> Path | None:
    """Move a path to the trash by one rename; None if it is gone, or work that a run took up meanwhile.

    A kill then leaves a leftover.
    """
    trash = store.root / TRASH / f"{removal.path.name}-{time.time_ns()}-{os.getpid()}"
    trash.parent.mkdir(exist_ok=True)
    is_work = removal.kind == "work"
    with contextlib.suppress(FileNotFoundError, Taken):
        with _locked(store, removal.stage, removal.key) if is_work else contextlib.nullcontext():
            return removal.path.rename(trash)
    return None
