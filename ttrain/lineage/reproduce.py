"""Rebuild a model from its raw data, in a separate home, and compare the results stage by stage.

Everything is taken from the manifests behind the model: settings, the commits of remote data, seed, threads, ranks,
micro-batches, kernels. On a CPU the same code and libraries give the same bits; if they or the
machine differ, the report says how.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ttrain.config import SHAPE_NO_RESULT, Runtime, Settings, flatten
from ttrain.config.base import is_retired
from ttrain.config.data import dataset_read
from ttrain.config.loading import Override, merge
from ttrain.core import machine as libraries
from ttrain.core import redact
from ttrain.core.files import JsonDict, JsonObject, read_json, temporary_directory, user_path, write_json
from ttrain.engine import launch, provenance
from ttrain.engine.display import StageDisplay
from ttrain.engine.input_files import HELDOUT, TRAIN, file_digests
from ttrain.engine.planner import plan_stage
from ttrain.engine.stop_request import StopRequest
from ttrain.errors import ArtifactError, Interrupted, TTrainError, UsageError
from ttrain.lineage.lineage import REGISTRY, Lineage, Link
from ttrain.lineage.names import with_secrets
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.differences import differences, library_changes
from ttrain.store.layout import Artifact
from ttrain.store.runs import is_interrupted_write
from ttrain.tasks import STAGES, Stage

MARK_FILE = "reproduces.json"  # in the home given for a reproduction: an interrupted one continues there


@dataclass(frozen=True)
class Rebuilt:
    """One rebuilt stage."""

    stage: str
    key: str
    content: str  # as recorded
    rebuilt_key: str
    rebuilt_content: str
    seconds: float
    differences: tuple[str, ...]  # in its ingredients: code, libraries, machine
    files: tuple[str, ...]  # output files that differ

    @property
    def is_equal(self) -> bool:
        """Whether the rebuilt bytes are the same."""
        return self.content == self.rebuilt_content

    def to_json(self) -> JsonDict:
        """The form that `reproduce --json` prints."""
        return {**asdict(self), "equal": self.is_equal}


@dataclass(frozen=True)
class Reproduction:
    """The result of a reproduction. `not_rebuilt` are the stages after the first one that differs."""

    lineage: Lineage
    home: Path
    stages: tuple[Rebuilt, ...]
    not_rebuilt: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether every stage was rebuilt with the same bytes."""
        return not self.not_rebuilt and all(stage.is_equal for stage in self.stages)

    def to_json(self) -> JsonDict:
        """What `reproduce --json` prints."""
        return {
            "asked": self.lineage.target.text,
            "name": self.lineage.target.name,
            "equal": self.is_equal,
            "home": str(self.home),
            "stages": [stage.to_json() for stage in self.stages],
            "left": list(self.not_rebuilt),
        }


def reproduce(lineage: Lineage, recipes: Sequence[RebuildRecipe], home: Path, screen: StageDisplay) -> Reproduction:
    """Build all stages in `home` and compare them. Ends at the first stage that differs: the later ones read its output.

    Raises the error of a failed stage, or Interrupted once its state is saved.
    """
    is_kept = (home / MARK_FILE).exists()
    effect = "the stage saves its state" if is_kept else "what was made again is removed, for want of --home"
    store, stop_request = ArtifactStore(home), StopRequest(lambda text: screen("", "message", {"text": text}), effect)
    artifacts: dict[str, Artifact] = {}
    done: list[Rebuilt] = []
    next_step = "the same command continues" if is_kept else "nothing is kept; with --home DIR the same command continues"
    with _saying(next_step), stop_request.catching_signals():
        for recipe in recipes:
            if stop_request.signum:
                raise Interrupted(f"stopped before stage {recipe.stage.name}", stop_request.signum)
            inputs = {name: artifacts[key] for name, (_, key) in recipe.link.inputs.items()}
            planned = plan_stage(recipe.stage, recipe.settings, store, inputs)
            report = partial(_show, screen, recipe.stage.name)
            outcome = launch.build(planned, recipe.settings, store, report, stop_request)
            artifacts[recipe.link.key] = outcome.artifact
            done.append(_compare(recipe, outcome.artifact, outcome.seconds))
            state = "equal" if done[-1].is_equal else "different"
            screen(recipe.stage.name, "ended", {"state": state, "seconds": outcome.seconds, "figures": ""})
            if not done[-1].is_equal:
                break
    store.cache.save()
    not_rebuilt = tuple(recipe.stage.name for recipe in recipes[len(done) :])
    return Reproduction(lineage, home, tuple(done), not_rebuilt)


@contextmanager
def _saying(next_step: str) -> Iterator[None]:
    """Add to an interruption what the user can do then."""
    try:
        yield
    except Interrupted as error:
        raise Interrupted(f"{error}; {next_step}", error.signum) from None


@contextmanager
def home_for(directory: Path | None, name: str) -> Iterator[Path]:
    """Yield the directory to build in: the given one, which stays, or a temporary one.

    Raises UsageError if the given one holds anything but an interrupted reproduction of the same model.
    """
    if directory is None:
        with temporary_directory("reproduce") as folder:
            yield folder
        return
    home = user_path(directory).absolute()
    mark = read_json(home / MARK_FILE)
    if home.exists() and not home.is_dir():
        raise UsageError(f"--home is {home}, which is a file; name a directory that is new or empty")
    is_used = home.is_dir() and not all(map(is_interrupted_write, home.iterdir()))  # a kill may leave an unfinished mark
    if is_used and mark != {"name": name}:
        contents = f"a reproduction of {mark['name']}" if isinstance(mark, dict) and "name" in mark else "other files"
        raise UsageError(f"--home is {home}, which holds {contents}; name a directory that is new or empty")
    home.mkdir(parents=True, exist_ok=True)
    write_json(home / MARK_FILE, {"name": name})
    yield home


def _compare(recipe: RebuildRecipe, artifact: Artifact, seconds: float) -> Rebuilt:
    link, recorded = recipe.link, recipe.link.manifest["files"]
    original = Artifact(link.stage, link.key, artifact.path, link.manifest)
    names = sorted({*original.files_of(()), *artifact.files_of(())})
    new = artifact.manifest["files"]
    different_files = [name for name in names if recorded.get(name, {}).get("sha256") != new.get(name, {}).get("sha256")]
    changed = differences(link.manifest["ingredients"], artifact.manifest["ingredients"])
    return Rebuilt(
        stage=link.stage,
        key=link.key,
        content=original.content,
        rebuilt_key=artifact.key,
        rebuilt_content=artifact.content,
        seconds=round(seconds, 2),
        differences=(*changed, *recipe.remarks),
        files=tuple(different_files),
    )


def _show(screen: StageDisplay, stage: str, event: str, data: JsonObject) -> None:
    if event != "logged":
        screen(stage, event, {"why": "is made again"} if event == "started" else data)


ONE_MACHINE: Mapping[str, Any] = {"nodes": 1, "node_rank": 0, "rendezvous": None}
# Settings that only observe, time out or stop a training, or name the GPUs of that machine.
UNNEEDED = ("timeout_seconds", "stages", "loggers", "tensorboard", "sample_every_steps", "eval_every_steps", "gpus")

SHOWN = 12


@dataclass(frozen=True)
class RebuildRecipe:
    """How to rebuild one stage."""

    link: Link
    stage: Stage
    settings: Settings
    remarks: tuple[str, ...] = field(default=())  # what differs from the original run


def recipes_of(lineage: Lineage, home: Path) -> list[RebuildRecipe]:
    """Return the recipe of each stage, inputs first.

    Raises ArtifactError with the reason if a stage cannot be rebuilt: only its name is known, its raw data are gone or
    have changed, or its settings are not recorded.
    """
    cache = ArtifactStore(home)
    recipes = [_recipe(link, home) for link in lineage.links]
    problems = [problem for recipe in recipes for problem in _data_problems(recipe, cache)]
    cache.cache.save()
    if problems:
        raise ArtifactError(f"{lineage.target.name} cannot be made again: " + "; ".join(dict.fromkeys(problems)))
    return recipes


def _recipe(link: Link, home: Path) -> RebuildRecipe:
    """The recipe of one stage. Raises ArtifactError if too little is recorded."""
    if link.known_from == REGISTRY:
        raise ArtifactError(
            f"stage {link.stage or 'unknown'} {link.key[:SHOWN]} cannot be made again: its manifest is neither in the store "
            f"{home / 'store'} nor in MLflow, so its settings are not known"
        )
    record = link.provenance
    tree = record.get("settings")
    if tree is None:
        raise ArtifactError(
            f"stage {link.stage} {link.key[:SHOWN]} cannot be made again: its manifest does not say where its data were"
        )
    runtime, remarks = _runtime(link)
    run_settings = {name: value for name, value in tree.items() if name not in SHAPE_NO_RESULT}
    run_settings = dict(with_secrets({"settings": run_settings})["settings"])
    own_settings = link.manifest["ingredients"].get("settings", {})  # those of a night alone, such as its share of replay
    of_nights = {name: value for name, value in own_settings.items() if name.partition(".")[0] in SHAPE_NO_RESULT}
    flat_settings = {**dict(flatten(run_settings)), **of_nights, **_pinned(run_settings.get("data", {}), link)}
    overrides = [Override(f"the manifest of {link.stage}", key, value) for key, value in flat_settings.items()]
    settings, _ = merge(Settings, overrides)
    settings = settings.model_copy(update={"runtime": runtime})
    return RebuildRecipe(link, STAGES[link.stage], settings, (*remarks, *_environment_remarks(link)))


def _pinned(data: Mapping[str, Any], link: Link) -> dict[str, list[str]]:
    """Settings that name exactly the files that the stage read: a folder may hold more by now, the Hub another commit.

    Sources with weights stay as they were written, since a weight belongs to a source and not to its files; and so do URLs
    with secrets, which the record of the files does not have.
    """
    locations, dataset = link.provenance.get("files", {}), STAGES[link.stage].dataset
    if dataset is None:
        return {}
    name = dataset_read(dataset, data.get("tokenizer"))
    pinned = {}
    for role, setting in ((TRAIN, name), (HELDOUT, f"{name}_heldout")):
        written = data.get(setting) or ()
        is_by_name = any(isinstance(entry, dict) or redact.url(entry) != entry for entry in written)
        if locations.get(role) and written and not is_by_name:
            pinned[f"data.{setting}"] = list(locations[role])
    return pinned


def _runtime(link: Link) -> tuple[Runtime, list[str]]:
    """The recorded runtime: ranks, threads, micro-batches, kernels. Ranks of several machines become ranks of this one."""
    runtime = link.provenance.get("runtime", {})
    recorded = {name: value for name, value in runtime.items() if name not in UNNEEDED}
    result, remarks = link.manifest["result"], []
    unknown = sorted(name for name in recorded.keys() - Runtime.model_fields.keys() if not is_retired(name))
    if unknown:
        remarks.append(f"this ttrain has no runtime.{', runtime.'.join(unknown)}")
    nodes = recorded.get("nodes", 1)
    if nodes > 1:
        remarks.append(f"{nodes} machines trained together, here one does")
    if recorded.get("night"):
        remarks.append("it was trained with runtime.night, whose hours change the size of the micro-batches")
    values = {**{name: value for name, value in recorded.items() if name not in unknown}, **ONE_MACHINE}
    values["devices"] = result.get("ranks", recorded.get("devices", 1) * nodes)
    # By default a stage uses all cores, and this machine may have another number of them.
    cores = (link.provenance.get("machine") or {}).get("cores")
    values["threads"] = result.get("threads") or recorded.get("threads") or cores
    values["device"] = result.get("device", recorded.get("device", "auto"))
    values["sharding"] = "processes"
    return Runtime.model_validate(values), remarks


def _data_problems(recipe: RebuildRecipe, cache: ArtifactStore) -> Iterator[str]:
    """Problems with the raw data of a stage: missing, unreadable, or changed."""
    recorded = recipe.link.manifest["ingredients"]
    try:
        now = file_digests(recipe.stage, recipe.settings, cache)
    except TTrainError as error:
        yield f"{recipe.stage.name}: {error}"
        return
    changed = differences({"files": recorded.get("files", {})}, {"files": now})
    yield from (f"{recipe.stage.name}: {line}" for line in changed)


def _environment_remarks(link: Link) -> Iterator[str]:
    """Remarks on versions and machine that differ from the recorded ones."""
    yield from (
        note.replace("made with", "it was made with") for note in library_changes(link.manifest, libraries.versions())
    )
    yield from (f"it was {note}" for note in link.notes)
    recorded = link.provenance.get("machine") or {}
    machine = provenance.machine()
    yield from (
        f"{name}: {recorded[name]} → {machine.get(name)}" for name in recorded if recorded[name] != machine.get(name)
    )
