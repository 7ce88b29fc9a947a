"""The models that `pretrain.teacher` names."""

import math
from typing import Any

from ttrain.config import Settings
from ttrain.engine.graph import Graph
from ttrain.errors import UsageError
from ttrain.lineage import lookup
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.registry import CHAMPION
from ttrain.tasks import PRETRAIN, TAUGHT_BY, TEACHER

PREVIOUS = "previous"
FEWEST_PASSES = 3
MOST_SEEDS = 4  # of `previous`
SEED = "pretrain.seed"


def name_teachers(settings: Settings, store: ArtifactStore) -> Settings:
    """The settings with the keys of the teachers, by which a rerun has the same ones.

    Raises UsageError where one is missing.
    """
    if not settings.pretrain.teacher or PRETRAIN.name not in settings.trainings:
        return settings
    keys = set[str]()
    for name in settings.pretrain.teacher:
        found = (
            _previous(settings, store) if name == PREVIOUS else [_teacher(name, settings, store)]
        )
        keys.update(f"{teacher.stage}/{teacher.key}" for teacher in found)
    return settings.replaced({"pretrain": {"teacher": tuple(sorted(keys))}})


def with_teachers(graph: Graph, settings: Settings, store: ArtifactStore) -> Graph:
    """The graph, whose stage `teacher` reads its models.

    Raises UsageError where one is missing or may change between the trials of a sweep, and where
    the rows are read too rarely for a teacher to help.
    """
    if TEACHER.name not in graph:
        return graph
    config = settings.pretrain
    if (config.passes or 0) < FEWEST_PASSES:
        raise UsageError(
            f"pretrain.epochs is {config.epochs or 'empty'}, but pretrain.teacher is set: a "
            f"teacher helps from {FEWEST_PASSES} passes on; set pretrain.tokens=null "
            f"pretrain.epochs={FEWEST_PASSES} or more, or leave pretrain.teacher out"
        )
    if not {PREVIOUS, CHAMPION}.isdisjoint(config.teacher):
        raise UsageError(
            f"pretrain.teacher is {', '.join(config.teacher)}, which may be another model in each "
            f"trial of a sweep; name a run, or a key as `ttrain artifacts list` shows it"
        )
    teachers = {
        f"{TAUGHT_BY}{number}": _teacher(name, settings, store)
        for number, name in enumerate(config.teacher)
    }
    complete = Graph()
    for node in graph.values():
        read = teachers if node.stage is TEACHER else {}
        complete.add(node.stage, **node.sources, **read)
    return complete


def _teacher(name: str, settings: Settings, store: ArtifactStore) -> Artifact:
    named = lookup.find(store, f"{settings.name}@{CHAMPION}" if name == CHAMPION else name)
    keys = dict(named.artifacts)
    stage = PRETRAIN.name if PRETRAIN.name in keys else next(reversed(keys), "")
    artifact = store.find(stage, keys[stage]) if stage else None
    if artifact is None or not artifact.files_of(("model",)):
        raise UsageError(
            f"pretrain.teacher is {name}, but no whole model of that name is in {store.root}; "
            f"name a run or a stage that has one, or leave it out"
        )
    return store.complete(artifact, ("model",))


def _previous(settings: Settings, store: ArtifactStore) -> list[Artifact]:
    """The newest pretraining of this name and its other seeds: the best by validation loss."""
    # None that was taught itself: the same command finds its own run finished, and a mean of taught
    # models taught no better. Four of six seeds, without the two that did not learn to copy from
    # their context, were 0.019 bits per byte better than five (docs/log.md).
    same: Any = None
    found: dict[str, Artifact] = {}
    for run in filter(runs.is_own, runs.newest_first(store.root)):
        key = runs.keys_of(run).get(PRETRAIN.name)
        artifact = store.find(PRETRAIN.name, key) if key else None
        if artifact is None or run["settings"].get("name") != settings.name:
            continue
        if TEACHER.name not in artifact.manifest["inputs"]:
            same = same or _without_seed(artifact)
            if _without_seed(artifact) == same:
                found[artifact.key] = artifact
    if not found:
        raise UsageError(
            f"pretrain.teacher is {PREVIOUS}, but {store.root} has no finished pretraining named "
            f"{settings.name} that had no teacher; run once without it first, or name a model"
        )
    return sorted(found.values(), key=_validation_loss)[:MOST_SEEDS]


def _without_seed(pretrained: Artifact) -> Any:
    read = pretrained.manifest["ingredients"]["settings"]
    return {**read, SEED: None}, pretrained.manifest["inputs"]


def _validation_loss(pretrained: Artifact) -> float:
    return pretrained.manifest["result"].get("validation_loss") or math.inf
