"""Find and remove artifacts and work directories that are no longer needed.

Kept are artifacts of recent runs and of their unfinished work, registered models, and all young
ones. While a run is in progress nothing is removed, since it is not known what it will read. A run
records itself under the lock that is held here (`runs.RunRecord`), so a new one waits. Damaged
artifacts are left to `artifacts verify --set-aside`.
"""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ttrain.core.files import JsonDict, exclusive, read_object, remove_tree
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import JOB, Artifacts
from ttrain.store.runs import RecordedRun

DAY_SECONDS = 86400
REQUIRED_INPUTS = ("base", "tokenizer")  # inputs without which a registered model is of no use

# Why a key is kept
OTHER_RUN = "another run"
RECENT = "a recent run"
REGISTERED = "a registered model"
YOUNG = "its age"
NIGHT = "the next night"


@dataclass(frozen=True)
class UnneededPath:
    """A path that can be removed, and the bytes that this frees on disk."""

    kind: str  # "artifact", "work", "replaced" or "leftover"
    stage: str
    key: str
    path: Path
    why: str
    bytes: int = 0


@dataclass(frozen=True)
class CleanupResult:
    """Removed (or removable) paths, the number of kept artifacts by reason, runs in progress.

    `running`: {run: machine}; a run of another machine may have ended long ago
    (`runs.ELSEWHERE_DAYS`).
    """

    removed: list[UnneededPath] = field(default_factory=list)
    kept_counts: dict[str, int] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(removal.bytes for removal in self.removed)


@dataclass(frozen=True)
class Kept:
    """What is kept in addition to registered models and the inputs of the next nights."""

    runs: int = 0  # the newest runs that differ in their artifacts
    since: float = math.inf  # artifacts and runs of this time and later, in seconds since 1970
    # If set, instead: all but what only this run made or read, whatever its age
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
    """Remove what is no longer needed.

    `registered`: keys of `Registry.keys`; `needed_by_nights`: `nightly.records.needed_keys`, called
    while no run can begin.
    """
    with contextlib.nullcontext() if dry_run else exclusive(store.root / runs.CLEANING):
        history = runs.history(store.root)
        in_progress = [run for run in history if run["outcome"] == "running"]
        if in_progress:
            machines = {
                run["run"]: run["process"].get("host", platform.node()) for run in in_progress
            }
            return CleanupResult(running=machines)
        artifacts = {artifact.key: artifact for artifact in store.artifacts()}
        reasons = _needed_by_runs(history, artifacts, kept)
        for _, key, path in _work_directories(store):
            if key in reasons:
                _add(reasons, _read_by(store, path), reasons[key], artifacts)
        _add(reasons, registered, REGISTERED, artifacts, only=REQUIRED_INPUTS)
        _add(reasons, needed_by_nights(store.root), NIGHT, artifacts, only=REQUIRED_INPUTS)
        kept_counts = Counter[str]()
        unneeded = list[UnneededPath]()
        for candidate, reason in _candidates(store, artifacts, reasons, registered, kept):
            if reason is None:
                stats = (file.lstat() for file in candidate.path.rglob("*") if file.is_file())
                freed = sum(
                    stat.st_size for stat in stats if stat.st_nlink == 1
                )  # another hard link keeps a file
                unneeded.append(replace(candidate, bytes=freed))
            elif candidate.kind == "artifact":
                kept_counts[reason] += 1
        for removal in () if dry_run else unneeded:
            remove_tree(removal.path)
        return CleanupResult(unneeded, dict(kept_counts))


def _add(
    reasons: dict[str, str],
    keys: Iterable[str],
    reason: str,
    artifacts: Artifacts,
    only: Collection[str] = (),
) -> None:
    waiting = [*keys]
    while waiting:
        key = waiting.pop()
        if key not in reasons:
            reasons[key] = reason
            inputs = artifacts[key].manifest["inputs"] if key in artifacts else {}
            waiting += [entry["key"] for name, entry in inputs.items() if not only or name in only]


def _needed_by_runs(history: list[JsonDict], artifacts: Artifacts, kept: Kept) -> dict[str, str]:
    reasons: dict[str, str] = {}
    different: set[frozenset[str | None]] = set()
    for run in history:
        keys = frozenset(runs.keys_of(run).values())
        is_new = keys not in different
        different.add(keys)
        is_recent = run["started_unix"] >= kept.since or (is_new and len(different) <= kept.runs)
        if kept.only_run and run["run"] != kept.only_run["run"]:
            _add(reasons, filter(None, keys), OTHER_RUN, artifacts)
        elif is_recent:
            _add(reasons, filter(None, keys), RECENT, artifacts)
    return reasons


def _candidates(
    store: ArtifactStore,
    artifacts: Artifacts,
    reasons: Mapping[str, str],
    registered: Collection[str],
    kept: Kept,
) -> Iterator[tuple[UnneededPath, str | None]]:
    own = set(runs.keys_of(kept.only_run).values()) if kept.only_run else None
    why = "only this run needs it" if kept.only_run else "no run or registered model needs it"
    for key, artifact in artifacts.items():
        if own is None or key in own:
            young = YOUNG if artifact.manifest["published"] >= kept.since else None
            yield (
                UnneededPath("artifact", artifact.stage, key, artifact.path, why),
                reasons.get(key, young),
            )
    for stage, key, path in _work_directories(store):
        if own is not None and key not in own:
            continue
        if store.find(stage, key):  # a damaged artifact is rebuilt from its work
            yield UnneededPath("work", stage, key, path, "its artifact is finished"), None
        else:
            last_change = max(
                entry.stat().st_mtime for entry in [path, *path.rglob("*")] if entry.exists()
            )
            young = YOUNG if last_change >= kept.since else None
            yield (
                UnneededPath("work", stage, key, path, "no recent run left it"),
                reasons.get(key, young),
            )
    for path in sorted((store.root / "replaced").glob("*/[!.]*")) if own is None else ():
        key, _, nanoseconds = path.name.rpartition("-")
        young = YOUNG if nanoseconds.isdecimal() and int(nanoseconds) / 1e9 >= kept.since else None
        reason = REGISTERED if key in registered else young
        yield (
            UnneededPath("replaced", path.parent.name, key, path, "it was replaced long ago"),
            reason,
        )
    for path in sorted(store.root.glob("*/*/.trash-*")):
        yield (
            UnneededPath("leftover", "", "", path, "a process was killed while it removed this"),
            None,
        )


def _work_directories(store: ArtifactStore) -> Iterator[tuple[str, str, Path]]:
    for path in sorted((store.root / "work").glob("*/*")):
        if path.is_dir() and not path.name.startswith("."):
            yield path.parent.name, path.name.partition(".")[0], path


def _read_by(store: ArtifactStore, work: Path) -> Iterator[str]:
    job = read_object(work / JOB)
    for path in map(Path, [*job.get("inputs", {}).values(), *job.get("reuse", ())]):
        if path.is_relative_to(store.root / "store"):
            yield path.relative_to(store.root / "store").parts[1]
