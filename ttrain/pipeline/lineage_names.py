"""What `ttrain lineage` and `ttrain reproduce` are asked about: a registered model, a run, a stage, a key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain import tracking
from ttrain.errors import TTrainError, UsageError
from ttrain.pipeline.adopt import HEX
from ttrain.stages import RUNNABLE, STAGES
from ttrain.store import runs
from ttrain.store.artifacts import SHOWN_KEY, Store
from ttrain.tracking.model_sets import KEY, KIND, SET
from ttrain.tracking.reading import REGISTERED

SHORTEST_KEY = 6
RUN_ID = 32  # characters of MLflow's ids, which are hexadecimal as keys are
OUTSIDE = (
    "what `ttrain train --task`, `ttrain gate train` and exports leave is no artifact of a pipeline, and nothing says what "
    "it was made of; to make it again, run the same command with another --out and compare"
)
MODELS_OF_A_SET = ("tokenizer", "pretrain", "sft", "lora")


@dataclass(frozen=True)
class Named:
    """What a text means: `roots` are (stage, key) of the artifacts that it stands for."""

    text: str
    kind: str  # set, model, run, stage or key
    name: str  # in full: NAME/VERSION, a run's name, STAGE/KEY
    roots: tuple[tuple[str, str], ...]
    run: str | None = None  # name of the pipeline's run
    tags: Mapping[str, str] = field(default_factory=dict, repr=False)  # of a registered version
    run_id: str | None = None
    notes: tuple[str, ...] = ()


def named(home: Path, text: str) -> Named:
    """What the text means. Raises UsageError that lists what there is."""
    store = Store(home)
    if text in STAGES:
        artifact = store.latest(text)
        return Named(text, "stage", f"{text}/{artifact.key}", ((text, artifact.key),))
    if (found := _key(store, text) or _place(store, text)) is not None:
        return found
    run, colon, stage = text.partition(":")
    if colon and stage in STAGES:
        whole = _run(home, run)
        roots = tuple(root for root in whole.roots if root[0] == stage)
        if not roots:
            raise UsageError(f"the run {whole.name} has no finished stage {stage}; it has {_stages(whole.roots)}")
        return Named(text, "run", f"{whole.name}:{stage}", roots, whole.name)
    if matched := REGISTERED.fullmatch(text):
        return _registered(home, text, **matched.groupdict())
    return _run(home, text)


def _key(store: Store, text: str) -> Named | None:
    """An artifact by the beginning of its key, or STAGE/KEY; None where the text is no key."""
    stage, slash, prefix = text.rpartition("/")
    if not (HEX.issuperset(prefix) and len(prefix) >= SHORTEST_KEY and len(prefix) != RUN_ID):
        return None
    if slash and (stage not in STAGES or prefix.isdecimal()):
        return None  # NAME/VERSION
    found = {
        (path.parent.name, path.name)
        for path in (store.root / "store").glob(f"{stage or '*'}/{prefix}*")
        if store.at(path) is not None
    } or set(tracking.keys_beginning(store.root, stage or None, prefix))
    if not found and not slash:
        return None  # a run may be called so
    if len(found) != 1:
        listed = ", ".join(f"{name}/{key[:SHOWN_KEY]}" for name, key in sorted(found))
        rule = f"is the beginning of {len(found)} keys: {listed}" if found else "is the key of no artifact"
        raise UsageError(f"'{text}' {rule}; `ttrain artifacts list` shows them")
    [root] = found
    return Named(text, "key", "/".join(root), (root,))


def _place(store: Store, text: str) -> Named | None:
    """An artifact by a directory of the store, or one below it; None where the text names no directory.

    Raises UsageError for what lies elsewhere: nobody wrote down how it came about.
    """
    if text in RUNNABLE:  # and in no pipeline
        raise UsageError(f"'{text}': {OUTSIDE}")
    place, root = Path(text).expanduser().resolve(), (store.root / "store").resolve()
    if not place.is_dir():
        return None
    parts = place.relative_to(root).parts if place.is_relative_to(root) else ()
    if len(parts) >= len(("stage", "key")) and parts[0] in STAGES:
        return Named(text, "key", "/".join(parts[:2]), ((parts[0], parts[1]),))
    if not text.startswith(("/", ".", "~")):
        return None  # a model or a run may be called so
    raise UsageError(f"{text} is no directory of the store {root}: {OUTSIDE}")


def _registered(home: Path, text: str, name: str, alias: str | None, version: str | None) -> Named:
    """A set, or one model, by what MLflow knows of it; a set's version also by the records of the home."""
    try:
        found = tracking.find_version(home, name, version=version, alias=alias)
    except TTrainError as error:
        noted = _noted(home, f"{name}/{version}") if version else None
        if noted is None:
            raise
        roots = _roots_of(noted["stages"])
        return Named(text, SET, f"{name}/{version}", roots, noted["run"], notes=(f"{error}: taken from the run's record",))
    full, tags = f"{found.name}/{found.version}", found.tags
    if tags.get(KIND) == SET:
        keys = {tag.removeprefix(KEY): key for tag, key in tags.items() if tag.startswith(KEY)}
        roots = tuple((stage, keys[stage]) for stage in MODELS_OF_A_SET if stage in keys)
        return Named(text, SET, full, roots, tags.get("ttrain.run"), tags)
    if not tags.get("ttrain.key"):
        raise UsageError(f"the registered model {full} was not made by ttrain: it has no tag ttrain.key")
    return Named(text, "model", full, ((tags["ttrain.stage"], tags["ttrain.key"]),), None, tags, found.run_id)


def _noted(home: Path, model_set: str) -> dict[str, Any] | None:
    """The run that registered this set, by its record."""
    return next((run for run in runs.newest_first(home) if run.get("model_set") == model_set), None)


def _run(home: Path, text: str) -> Named:
    """A run, as `tracking.read_run` finds it."""
    view = tracking.read_run(home, text)
    roots = tuple((name, stage.key) for name, stage in view.stages.items() if stage.key and _is_done(stage.status))
    if not roots:
        raise UsageError(f"the run {view.name} has finished no stage, so there is nothing behind it")
    return Named(text, "run", view.name, roots, view.name, notes=view.notes)


def _roots_of(stages: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((one["name"], one["key"]) for one in stages if one.get("key") and _is_done(one["outcome"]))


def _is_done(outcome: str) -> bool:
    return outcome in ("completed", "cached", "equal", "different")


def _stages(roots: Iterable[tuple[str, str]]) -> str:
    return ", ".join(stage for stage, _ in roots) or "none"
