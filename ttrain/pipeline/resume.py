"""Unfinished work of the stages that train: which there is, and how another key goes on with it (`--continue KEY`).

What differs may be the code, since only a person knows whether a change of it matters, the budget, which the trainer lets
change, and the learning rate, which people lower in the middle of a training. With other data or other settings the
checkpoint would be that of another run, and it is refused. Work of another rate is not offered: the user must name it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.core.files import fsync, read_json, remove_tree, write_json
from ttrain.core.hashing import differences
from ttrain.errors import UsageError
from ttrain.stages import STAGES, Stage
from ttrain.train.schedules import BUDGET, RATES

if TYPE_CHECKING:
    from ttrain.store.artifacts import Store

INGREDIENTS, CONTINUED = "ingredients.json", "continued.json"
SHOWN_KEY = 12  # characters of a key that a person reads
SHOWN_CHANGES = 3  # in the one line that offers the work


@dataclass(frozen=True)
class Work:
    """A work directory in which a training saved its state at `step`, under the key of these ingredients."""

    stage: str
    key: str
    path: Path
    step: int
    ingredients: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.stage} {self.key[:SHOWN_KEY]} at step {self.step}"


def saved_step(work: Path) -> int:
    """Step of the newest checkpoint in a work directory; 0 where there is none."""
    names = (path.name.removeprefix("step-") for path in (work / "output" / "checkpoints").glob("step-*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def works(store: Store, stage: str) -> Iterator[Work]:
    """The unfinished work of a stage, the furthest first."""
    found = []
    for path in (store.root / "work" / stage).glob(f"*/{INGREDIENTS}"):
        ingredients, step = read_json(path), saved_step(path.parent)
        if isinstance(ingredients, dict) and step:
            found.append(Work(stage, path.parent.name, path.parent, step, ingredients))
    yield from sorted(found, key=lambda work: (-work.step, work.key))


def changes(work: Work, ingredients: Mapping[str, Any]) -> list[str]:
    """What differs between the work and what is to be made, one line each."""
    return differences(work.ingredients, ingredients)


def forbidden_changes(work: Work, ingredients: Mapping[str, Any], *, free: frozenset[str] = BUDGET) -> list[str]:
    """Those of the changes with which a checkpoint cannot be continued: all but code, Python, a budget that reaches it, and
    the other settings of the stage that are `free`."""
    return differences(_fixed(work, free), _fixed(work, free, ingredients)) + _too_short(work, ingredients["settings"])


def _too_short(work: Work, settings: Mapping[str, Any]) -> list[str]:
    """A budget that ends, or may end, before the step of the work. Passes over rows that were not counted yet may not."""
    tokens, epochs = (settings[f"{work.stage}.{name}"] for name in ("tokens", "epochs"))
    if tokens is not None:
        enough = tokens >= work.step * settings[f"{work.stage}.tokens_per_step"]
    else:
        before = work.ingredients["settings"][f"{work.stage}.epochs"]
        enough = before is not None and epochs >= before
    return [] if enough else [f"its budget, {tokens or epochs} {'tokens' if tokens else 'epochs'}, may end before that step"]


def _fixed(work: Work, free: frozenset[str], ingredients: Mapping[str, Any] | None = None) -> dict[str, Any]:
    of = work.ingredients if ingredients is None else ingredients
    left_out = {f"{work.stage}.{name}" for name in free}
    settings = {name: value for name, value in of["settings"].items() if name not in left_out}
    return {**of, "settings": settings, "code": {}, "python": None}


def offer(stage: Stage, ingredients: Mapping[str, Any], store: Store) -> list[str]:
    """How to go on with unfinished work that could be continued under another key, in words: one line, or none."""
    for work in works(store, stage.name):
        if not forbidden_changes(work, ingredients):
            key, lines = work.key[:SHOWN_KEY], changes(work, ingredients)
            more = f"; and {len(lines) - SHOWN_CHANGES} more" if len(lines) > SHOWN_CHANGES else ""
            differs = "; ".join(lines[:SHOWN_CHANGES]) + more
            return [f"unfinished work {key} at step {work.step} differs in: {differs}; --continue {key} goes on there"]
    return []


def named(stage: Stage, prefix: str, ingredients: Mapping[str, Any], store: Store) -> Work | None:
    """The work of this stage whose key begins so; None where that is not this stage's.

    Raises UsageError with the differences where it cannot be continued as what the ingredients say.
    """
    work = next((work for work in works(store, stage.name) if work.key.startswith(prefix)), None)
    if work and (refused := forbidden_changes(work, ingredients, free=BUDGET | RATES)):
        raise UsageError(
            f"--continue {prefix} is the unfinished work of {work}, which was made under other settings or data: "
            f"{'; '.join(refused)}; put them back, or leave --continue out to begin anew"
        )
    return work


def resolve(store: Store, prefix: str) -> str:
    """Name of the stage whose work has a key that begins so. Raises UsageError where there is none, or several have."""
    there = [work for name, stage in STAGES.items() if stage.uses_ranks for work in works(store, name)]
    found = [work for work in there if work.key.startswith(prefix)]
    if len(found) == 1:
        return found[0].stage
    if found:
        listed = ", ".join(map(str, found))
        raise UsageError(f"--continue {prefix} is the beginning of several keys: {listed}; give more of one")
    for stage in _gone_on_with(store, prefix):
        return stage
    listed = f"there is: {', '.join(map(str, there))}" if there else "there is none at all"
    raise UsageError(f"--continue {prefix}: no unfinished work has a key that begins so; {listed}")


def _gone_on_with(store: Store, prefix: str) -> Iterator[str]:
    """The stages that went on with such work before, and so have it under another key, finished or not."""
    for name, stage in STAGES.items():
        if stage.uses_ranks:
            known = [history(work.path, work.key) for work in works(store, name)]
            known += [artifact.manifest.get("continued", []) for artifact in store.artifacts(name)]
            if any(entry["key"].startswith(prefix) for entries in known for entry in entries):
                yield name


def adopt(store: Store, work: Work, key: str, ingredients: Mapping[str, Any]) -> None:
    """Make the work that of another key, whose lock the caller holds: a note of what differs in it, then one rename.

    What another run of that key saved while this one waited for the lock stays: it took the work over. Killed in between,
    the work is still where it was, and the note is for nobody. Raises UsageError where a run is at it, or it is gone.
    """
    destination = store.work(work.stage, key)
    if saved_step(destination):
        return

    def taken() -> None:
        raise UsageError(f"the unfinished work of {work} cannot be continued as another: a run is at it now")

    with store.lock(work.stage, work.key, waiting=taken), store.lock(work.stage, f"{work.key}.process"):
        if not saved_step(work.path):
            raise UsageError(
                f"the unfinished work of {work} is gone: a run of other code took it over, or it was cleaned away"
            )
        entry = {"key": work.key, "to": key, "step": saved_step(work.path), "differences": changes(work, ingredients)}
        earlier = [old for old in read_json(work.path / CONTINUED) or [] if (old["key"], old["to"]) != (work.key, key)]
        write_json(work.path / CONTINUED, [*earlier, entry])
        remove_tree(destination)
        work.path.rename(destination)
        fsync(destination.parent)


def history(work: Path, key: str) -> list[dict[str, Any]]:
    """Under which keys the work of this key was begun, the first of them first: key, step and differences of each change."""
    entries: list[dict[str, Any]] = []
    for entry in reversed(read_json(work / CONTINUED) or []):
        if entry["to"] == key:
            entries.insert(0, {name: entry[name] for name in ("key", "step", "differences")})
            key = entry["key"]
    return entries
