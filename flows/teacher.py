"""The models that `pretrain.teacher` names."""

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


def name_teachers(settings: Settings, store: ArtifactStore) -> Settings:
    """The settings with the keys of the teachers, by which a rerun has the same ones.

    Raises UsageError where one is missing.
    """
    if not settings.pretrain.teacher or PRETRAIN.name not in settings.trainings:
        return settings
    teachers = [_teacher(name, settings, store) for name in settings.pretrain.teacher]
    keys = sorted(f"{teacher.stage}/{teacher.key}" for teacher in teachers)
    return settings.replaced({"pretrain": {"teacher": tuple(keys)}})


def with_teachers(graph: Graph, settings: Settings, store: ArtifactStore) -> Graph:
    """The graph, whose stage `teacher` reads its models.

    Raises UsageError where one is missing or may change between the trials of a sweep, and where
    the rows are read too rarely for a teacher to help.
    """
    if TEACHER.name not in graph:
        return graph
    config = settings.pretrain
    named = f"pretrain.teacher is {', '.join(config.teacher)}"
    if (config.passes or 0) < FEWEST_PASSES:
        raise UsageError(
            f"{named}, but pretrain.epochs is {config.epochs or 'empty'}: a teacher helps from "
            f"{FEWEST_PASSES} passes on; set pretrain.tokens=null pretrain.epochs={FEWEST_PASSES} "
            f"or more, or leave it out"
        )
    if not {PREVIOUS, CHAMPION}.isdisjoint(config.teacher):
        raise UsageError(
            f"{named}, which may be another model in each trial of a sweep; name a run, or a key "
            f"as `ttrain artifacts list` shows it"
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
    if name == PREVIOUS:
        return _previous(settings, store)
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


def _previous(settings: Settings, store: ArtifactStore) -> Artifact:
    # None that was taught itself: the same command finds its own run finished, and a mean of taught
    # models taught no better (docs/log.md).
    for run in filter(runs.is_own, runs.newest_first(store.root)):
        key = runs.keys_of(run).get(PRETRAIN.name)
        artifact = store.find(PRETRAIN.name, key) if key else None
        if artifact is None or run["settings"].get("name") != settings.name:
            continue
        if TEACHER.name not in artifact.manifest["inputs"]:
            return artifact
    raise UsageError(
        f"pretrain.teacher is {PREVIOUS}, but {store.root} has no finished pretraining named "
        f"{settings.name} that had no teacher; run once without it first, or name a model"
    )
