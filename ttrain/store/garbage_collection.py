"""Find and remove artifacts and work directories that are no longer needed.

Kept are artifacts that recent runs read or made or that their unfinished work continues from, registered models, and all
young ones; while a run is in progress, every artifact, since it is not yet known which it will read. A run records itself
under the lock that is held here (`runs.RunRecord`): one that starts meanwhile waits until the removed paths are moved away.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ttrain.core.files import JsonDict, Taken, exclusive, parse_object, read_object, refuse
from ttrain.store import runs
from ttrain.store.artifacts import HOLDER, ArtifactStore
from ttrain.store.layout import FORMAT, JOB, MANIFEST, Artifacts
from ttrain.store.runs import RecordedRun

DAY_SECONDS = 86400
WRITE_SECONDS = 3600  # without a change, after which a write is over, also by a process of another machine
TRASH = "trash"  # under the home: moved there at once, then removed
REQUIRED_INPUTS = ("base", "tokenizer")  # inputs without which a registered model is of no use

OTHER_RUN = "another run"
IN_PROGRESS, RECENT, REGISTERED, YOUNG = "a run in progress", "a recent run", "a registered model", "its age"
NIGHT = "the next night"


@dataclass(frozen=True)
class UnneededPath:
    """A path that can be removed. `bytes` is what its removal frees: a file with another hard link frees nothing."""

    kind: str  # "artifact", "damaged" (one without a manifest to go by), "work", "replaced" or "leftover"
    stage: str
    key: str
    path: Path
    bytes: int
    why: str

    def to_json(self) -> JsonDict:
        """The form that `clean --json` prints."""
        fields = asdict(self)
        return {"what": fields.pop("kind"), **fields}


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


def clean(
    store: ArtifactStore,
    registered: Collection[str],
    *,
    keep_runs: int,
    older_than_days: float,
    needed_by_nights: Callable[[Path], Collection[str]],
    dry_run: bool = False,
) -> CleanupResult:
    """Remove what is no longer needed. `registered`: keys of `Registry.keys`; `needed_by_nights`: keys that the
    next nights of a home read (`nightly.records.needed_keys`), called while no run can begin.

    Kept for their runs are the newest `keep_runs` that differ in their artifacts and all of the last `older_than_days` days.
    """
    oldest = time.time() - older_than_days * DAY_SECONDS
    with contextlib.nullcontext() if dry_run else exclusive(store.root / runs.CLEANING):
        artifacts = {artifact.key: artifact for artifact in store.artifacts()}
        needs = _needs(store, artifacts, registered, needed_by_nights(store.root), keep_runs, oldest)
        cleaned = _find_unneeded(store, artifacts, needs, registered, oldest)
        return cleaned if dry_run else _removed(store, cleaned)


def clean_run(
    store: ArtifactStore,
    registered: Collection[str],
    run: RecordedRun,
    *,
    needed_by_nights: Callable[[Path], Collection[str]],
    dry_run: bool = False,
) -> CleanupResult:
    """Remove the artifacts and the work that only this run made or read, whatever their age; its record stays.

    What any other run, a registered model or the next night needs is kept, and everything while a run is in progress.
    """
    with contextlib.nullcontext() if dry_run else exclusive(store.root / runs.CLEANING):
        artifacts = {artifact.key: artifact for artifact in store.artifacts()}
        needs = NeededKeys()
        for other in runs.history(store.root):
            if other["outcome"] == "running":
                needs.running[other["run"]] = other["process"].get("host", platform.node())
            if other["run"] != run["run"]:
                needs.add(filter(None, runs.keys_of(other).values()), OTHER_RUN, artifacts)
        needs.add(registered, REGISTERED, artifacts, only=REQUIRED_INPUTS)
        needs.add(needed_by_nights(store.root), NIGHT, artifacts, only=REQUIRED_INPUTS)
        cleaned = _find_of_run(store, artifacts, needs, set(runs.keys_of(run).values()))
        return cleaned if dry_run else _removed(store, cleaned)


def _find_of_run(
    store: ArtifactStore, artifacts: Artifacts, needs: NeededKeys, keys: Collection[str | None]
) -> CleanupResult:
    found: list[UnneededPath] = []
    kept_counts: dict[str, int] = {}
    for artifact in artifacts.values():
        if artifact.key not in keys:
            continue
        if reason := needs.reason(artifact.key):
            kept_counts[reason] = kept_counts.get(reason, 0) + 1
        else:
            found.append(UnneededPath("artifact", artifact.stage, artifact.key, artifact.path, 0, "only this run needs it"))
    for stage, key, path in _work_directories(store):
        if key in keys and not needs.reason(key) and not _is_locked(store, stage, key):
            found.append(UnneededPath("work", stage, key, path, 0, "only this run left it"))
    return CleanupResult(_with_sizes(found), kept_counts, needs.running)


def _removed(store: ArtifactStore, cleaned: CleanupResult) -> CleanupResult:
    """Remove what was found; returns what could be moved away. No run begins meanwhile, since the caller holds the lock."""
    moved = [(removal, _move_to_trash(store, removal)) for removal in cleaned.removed]
    if not cleaned.running:
        _remove_locks(store)
    for path in filter(None, (path for _, path in moved)):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return replace(cleaned, removed=[removal for removal, path in moved if path])


def _with_sizes(found: Sequence[UnneededPath]) -> list[UnneededPath]:
    freed = _freed_bytes([each.path for each in found])
    return [replace(each, bytes=freed[each.path]) for each in found]


# --- what is needed -----------------------------------------------------------------------------------------------------


def _needs(
    store: ArtifactStore,
    artifacts: Artifacts,
    registered: Collection[str],
    nightly: Collection[str],
    keep_runs: int,
    oldest: float,
) -> NeededKeys:
    needs = NeededKeys()
    different: set[frozenset[tuple[str, str | None]]] = set()
    for run in runs.history(store.root):
        keys = runs.keys_of(run)
        if run["outcome"] == "running":
            needs.running[run["run"]] = run["process"].get("host", platform.node())
        stage_keys = frozenset(keys.items())
        is_new = stage_keys not in different
        different.add(stage_keys)
        if run["started_unix"] >= oldest or (is_new and len(different) <= keep_runs):
            needs.add(filter(None, keys.values()), RECENT, artifacts)
    needs.add(registered, REGISTERED, artifacts, only=REQUIRED_INPUTS)
    needs.add(nightly, NIGHT, artifacts, only=REQUIRED_INPUTS)
    for stage, key, path in _work_directories(store):
        reason = IN_PROGRESS if _is_locked(store, stage, key) else needs.reason(key)
        if reason:
            needs.add([key, *_read_by(store, path)], reason, artifacts)
    return needs


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
    """Whether a process is working on the key now."""
    with contextlib.suppress(Taken), _locked(store, stage, key):
        return False
    return True


@contextlib.contextmanager
def _locked(store: ArtifactStore, stage: str, key: str) -> Iterator[None]:
    """Hold both locks of a key: the run's, and the stage process's, which may outlive the run for a moment.

    Raises Taken if another process holds one of them.
    """
    with store.lock(stage, key, waiting=refuse), store.lock(stage, f"{key}.process", waiting=refuse):
        yield


# --- what is not needed ------------------------------------------------------------------------------------------------


def _find_unneeded(
    store: ArtifactStore, artifacts: Artifacts, needs: NeededKeys, registered: Collection[str], oldest: float
) -> CleanupResult:
    candidates: list[UnneededPath] = []
    kept_counts: dict[str, int] = {}

    def add(kind: str, key: str, path: Path, why: str) -> None:
        candidates.append(UnneededPath(kind, path.parent.name if key else "", key, path, 0, why))

    for artifact in artifacts.values():
        reason = needs.reason(artifact.key) or (YOUNG if artifact.manifest["published"] >= oldest else None)
        if reason:
            kept_counts[reason] = kept_counts.get(reason, 0) + 1
        else:
            add("artifact", artifact.key, artifact.path, "no run or registered model needs it")
    for stage, key, path in _work_directories(store):
        if _is_locked(store, stage, key):
            continue
        if key in artifacts and not store.damage(artifacts[key]):  # a damaged artifact is rebuilt from its work
            add("work", key, path, "its artifact is finished")
        elif not needs.reason(key) and _last_change(path) < oldest:
            add("work", key, path, "no recent run left it")
    for path in sorted((store.root / "replaced").glob("*/*")):
        key, _, nanoseconds = path.name.rpartition("-")
        replaced_at = int(nanoseconds) / 1e9 if nanoseconds.isdecimal() else 0.0  # in seconds since 1970
        if key not in registered and replaced_at < oldest:
            add("replaced", key, path, "it was replaced long ago")
    for path, damage in store.unreadable().items():
        if not _is_lost(path / MANIFEST):
            continue
        reason = needs.reason(path.name) or (YOUNG if _last_change(path) >= oldest else None)
        if reason:
            kept_counts[f"{reason} though damaged"] = kept_counts.get(f"{reason} though damaged", 0) + 1
        else:
            add("damaged", path.name, path, f"{damage}, and no run or registered model needs it")
    # An interrupted removal left them, renamed so that they are not mistaken for complete ones.
    for pattern in ("work/*/.trash-*", "work/*/*/.trash-*", f"{TRASH}/*"):
        for path in sorted(store.root.glob(pattern)):
            add("leftover", "", path, "a process was killed while it removed this")
    for path in sorted(store.root.rglob(".*.tmp")):
        is_over = runs.is_interrupted_write(path) and _last_change(path) < time.time() - WRITE_SECONDS
        if is_over and not any(path.is_relative_to(candidate.path) for candidate in candidates):
            add("leftover", "", path, "a process was killed while it wrote this")
    return CleanupResult(_with_sizes(candidates), kept_counts, needs.running)


def _is_lost(manifest: Path) -> bool:
    """Whether a manifest is missing, altered or cut off; not where the disk fails, or a newer version of ttrain wrote it."""
    try:
        return bool(parse_object(manifest.read_bytes()).get("format", FORMAT) == FORMAT)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _last_change(path: Path) -> float:
    """When a directory last changed: the latest time of what is in it."""
    return max((entry.stat().st_mtime for entry in [path, *path.rglob("*")] if entry.exists()), default=0.0)


def _freed_bytes(paths: Iterable[Path]) -> dict[Path, int]:
    """{path: bytes freed once it and all before it are removed}; a file with several hard links counts at the last one."""
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


def _move_to_trash(store: ArtifactStore, removal: UnneededPath) -> Path | None:
    """Move a path to the trash by one rename; None if it is gone or a run is using it. A kill then leaves a leftover."""
    if removal.path.parent == store.root / TRASH:
        return removal.path
    trash = store.root / TRASH / f"{removal.path.name}-{time.time_ns()}-{os.getpid()}"
    trash.parent.mkdir(exist_ok=True)
    is_work = removal.kind == "work"
    with contextlib.suppress(FileNotFoundError, Taken):
        with _locked(store, removal.stage, removal.key) if is_work else contextlib.nullcontext():
            removal.path.rename(trash)
            return trash
    return None


def _remove_locks(store: ArtifactStore) -> None:
    """Remove the lock files of unknown keys: two empty files each, and the note of a holder that was killed.

    They are removed while both are held here: a process that opened one before finds, once it has the lock, that the file
    has no name any more, and opens another (filelock does).
    """
    paths = [path for suffix in (".lock", HOLDER) for path in (store.root / "work").glob(f"*/*{suffix}")]
    for stage, key in {(path.parent.name, path.name.partition(".")[0]) for path in paths}:
        if _is_known(store, stage, key):
            continue
        with contextlib.suppress(Taken), _locked(store, stage, key):
            if not _is_known(store, stage, key):  # still unknown under the locks
                for name in (f"{key}.lock", f"{key}.process.lock"):
                    (store.root / "work" / stage / name).unlink(missing_ok=True)


def _is_known(store: ArtifactStore, stage: str, key: str) -> bool:
    return store.work(stage, key).exists() or store.path(stage, key).exists()
