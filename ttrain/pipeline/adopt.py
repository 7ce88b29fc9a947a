"""What the `artifacts` commands do: find by the beginning of a key, list, verify every byte, keep across a code change."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.core.files import fsync, remove_tree
from ttrain.core.hashing import differences, sha256_file
from ttrain.errors import ArtifactError, UsageError
from ttrain.pipeline.plan import key_of
from ttrain.pipeline.planned import Planned
from ttrain.pipeline.resume import works
from ttrain.stages import STAGES
from ttrain.store import runs
from ttrain.store.artifacts import SHOWN_KEY, Store
from ttrain.store.layout import MANIFEST, Artifact, altered_manifest

HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class Row:
    """One line of the list: a finished artifact, or work with a saved state that could go on."""

    stage: str
    key: str
    state: str  # "finished", "damaged: ..." or "unfinished at step N"
    path: Path
    bytes: int
    published: float | None = None  # seconds since 1970
    run: str | None = None  # the newest that made or used it

    def to_json(self) -> dict[str, Any]:
        """The form that `list --json` prints."""
        values = {"stage": self.stage, "key": self.key, "state": self.state, "path": str(self.path), "bytes": self.bytes}
        return {**values, "published_unix": self.published, "run": self.run}


def check_stage(name: str) -> None:
    """Raises UsageError where there is no such stage."""
    if name not in STAGES:
        raise UsageError(f"there is no stage '{name}'; the stages are {', '.join(STAGES)}")


def rows(store: Store, stage: str | None = None) -> list[Row]:
    """All artifacts, or those of a stage, the newest first, then what unfinished work could be continued."""
    users: dict[str, str] = {}
    for run in runs.history(store.root):
        for entry in run["stages"]:
            users.setdefault(entry.get("key") or "", run["run"])
    found = []
    for artifact in store.artifacts(stage) if stage else store.everything():
        damage = store.damage(artifact)
        found.append(
            Row(
                artifact.stage,
                artifact.key,
                f"damaged: {damage}" if damage else "finished",
                artifact.path,
                size_of(artifact),
                float(artifact.manifest["published"]),
                users.get(artifact.key),
            )
        )
    for path, problem in store.unreadable(stage or "*").items():
        held = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        found.append(Row(path.parent.name, path.name, f"damaged: {problem}", path, held))
    for name in [stage] if stage else [name for name in STAGES if STAGES[name].uses_ranks]:
        for work in works(store, name):
            held = sum(path.stat().st_size for path in work.path.rglob("*") if path.is_file())
            state = f"unfinished at step {work.step}"
            found.append(Row(name, work.key, state, work.path, held, run=users.get(work.key)))
    return found


def size_of(artifact: Artifact) -> int:
    """Bytes of the files that are here."""
    absent = artifact.absent
    return sum(entry["bytes"] for name, entry in artifact.manifest["files"].items() if name not in absent)


def find(store: Store, stage: str, prefix: str = "") -> Artifact:
    """The artifact of a stage whose key begins so, the newest undamaged one where nothing is given.

    Raises UsageError where there is none, or several have such keys.
    """
    check_stage(stage)
    if not prefix:
        return store.latest(stage)
    there = store.artifacts(stage)
    found = [artifact for artifact in there if artifact.key.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(artifact.key[:SHOWN_KEY] for artifact in (found or there)[:8]) or "none"
    problem = "several artifacts have keys that begin so" if found else "no artifact has a key that begins so"
    raise UsageError(f"{stage} {prefix}: {problem}; there are: {listed}; `ttrain artifacts list {stage}` shows them")


# --- verify -------------------------------------------------------------------------------------------------------------


def verify(artifact: Artifact, checked: Callable[[int], object] = lambda size: None) -> list[str]:
    """What is wrong with an artifact, with every byte read; `checked` is told the bytes of each file."""
    problems = [altered] if (altered := altered_manifest(artifact.manifest)) else []
    if key_of(artifact.manifest["ingredients"]) != artifact.key:
        problems.append(f"{MANIFEST} says that it was made of other things than its key does")
    absent = artifact.absent
    for name, entry in artifact.manifest["files"].items():
        if name in absent:
            continue
        try:
            size = (artifact.path / name).stat().st_size
            if size != entry["bytes"]:
                problems.append(f"{name} has {size} bytes where {entry['bytes']} were published")
            elif sha256_file(artifact.path / name) != entry["sha256"]:
                problems.append(f"{name} was altered after it was published")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
        checked(entry["bytes"])
    return problems


# --- adopt --------------------------------------------------------------------------------------------------------------


def adopt(store: Store, planned: Planned, prefix: str) -> Artifact:
    """Let an artifact stand for what the plan would build, where nothing but code (and Python) differs between the two.

    Its files get second names under the new key, or are copied where the disk has no such thing, and its manifest says
    `adopted`: from which key, and what differed. Raises UsageError where more differs, ArtifactError where it is damaged.
    """
    stage = planned.stage.name
    if planned.key is None:
        raise UsageError(f"stage {stage} {planned.why[0]}, so its key is not known yet; adopt or run that first")
    old = find(store, stage, prefix)
    if old.key == planned.key:
        raise UsageError(f"{stage} {old.key[:SHOWN_KEY]} is what the plan takes already; there is nothing to adopt")
    refused = differences(_without_code(old.manifest["ingredients"]), _without_code(planned.ingredients))
    if refused:
        raise UsageError(
            f"{stage} {old.key[:SHOWN_KEY]} cannot be adopted, since more than code differs: {'; '.join(refused)}; "
            f"give the settings that it was made with (`ttrain artifacts show {stage} {old.key[:SHOWN_KEY]}`)"
        )
    if old.absent:
        raise ArtifactError(f"{stage} {old.key[:SHOWN_KEY]} was fetched in part; only a whole one is adopted")
    problems = verify(old)
    if problems:
        raise ArtifactError(f"{stage} {old.key[:SHOWN_KEY]} is damaged, so it is not adopted: {'; '.join(problems)}")
    with store.lock(stage, planned.key):
        if store.find(stage, planned.key):
            raise UsageError(f"{stage} {planned.key[:SHOWN_KEY]} is there already; there is nothing to adopt")
        output = store.work(stage, planned.key).with_name(f"{planned.key}.adopted")
        remove_tree(output)
        for name in old.manifest["files"]:
            _second_name(old.path / name, output / name)
        entry = {
            "key": old.key,
            "differences": differences(old.manifest["ingredients"], planned.ingredients),
            "adopted_unix": time.time(),
        }
        earlier = old.manifest.get("adopted", [])
        told = {**old.manifest, "ingredients": dict(planned.ingredients), "adopted": [*earlier, entry]}
        return store.publish(stage, planned.key, output, told)


def _without_code(ingredients: Mapping[str, Any]) -> dict[str, Any]:
    return {**ingredients, "code": {}, "python": None}


def _second_name(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # a disk without links, or too many of them
        os.link(source, target)
        fsync(target.parent)
        return
    shutil.copy2(source, target)
