"""Rebuild a model from its raw data, in a separate home, and compare the results stage by stage.

Everything is taken from the manifests behind the model: settings, the commits of remote data, seed, threads, ranks,
micro-batches, kernels. On a CPU the same code and libraries give the same bits; if they or the machine differ, the report
says how.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ttrain.config import SHAPE_NO_RESULT, Runtime, Settings, flatten
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
from ttrain.lineage.lineage import Lineage, notes_of
from ttrain.lineage.names import with_secrets
from ttrain.store.artifacts import SHOWN_KEY, ArtifactStore
from ttrain.store.differences import differences, library_changes
from ttrain.store.layout import Artifact
from ttrain.tasks import STAGES, Stage

MARK_FILE = "reproduces.json"  # in the home given for a reproduction: an interrupted one continues there

# Settings that only observe, time out or stop a training, or name the GPUs or nodes of its machines.
UNNEEDED = ("timeout_seconds", "stages", "loggers", "tensorboard", "sample_every_steps", "eval_every_steps", "gpus",
            "nodes", "node_rank", "rendezvous")  # fmt: skip


@dataclass(frozen=True)
class RebuildRecipe:
    """How to rebuild one stage as it was recorded."""

    recorded: Artifact
    stage: Stage
    settings: Settings


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
    next_step = "the same command continues" if is_kept else "nothing is kept; with --home DIR the same command continues"
    store, stop = ArtifactStore(home), StopRequest(lambda text: screen("", "message", {"text": text}), next_step)
    artifacts: dict[str, Artifact] = {}
    done: list[Rebuilt] = []
    with stop.catching_signals():
        for recipe in recipes:
            name, used = recipe.stage.name, recipe.recorded.manifest["inputs"]
            if stop.signum:
                raise Interrupted(f"stopped before stage {name}; {next_step}", stop.signum)
            inputs = {input_name: artifacts[of["key"]] for input_name, of in used.items()}
            planned = plan_stage(recipe.stage, recipe.settings, store, inputs)
            outcome = launch.build(planned, recipe.settings, store, partial(_show, screen, name), stop)
            artifacts[recipe.recorded.key] = outcome.artifact
            done.append(_compare(recipe.recorded, outcome.artifact, outcome.seconds))
            state = "equal" if done[-1].is_equal else "different"
            screen(name, "ended", {"state": state, "seconds": outcome.seconds, "figures": ""})
            if not done[-1].is_equal:
                break
    store.cache.save()
    return Reproduction(lineage, home, tuple(done), tuple(recipe.stage.name for recipe in recipes[len(done) :]))


def _show(screen: StageDisplay, stage: str, event: str, data: JsonObject) -> None:
    if event != "logged":
        screen(stage, event, {"why": "is made again"} if event == "started" else data)


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
    if home.is_file():
        raise UsageError(f"--home is {home}, which is a file; name a directory that is new or empty")
    home.mkdir(parents=True, exist_ok=True)
    if any(home.iterdir()) and read_json(home / MARK_FILE) != {"name": name}:
        raise UsageError(f"--home is {home}, which holds other files; name a directory that is new or empty")
    write_json(home / MARK_FILE, {"name": name})
    yield home


def _compare(recorded: Artifact, artifact: Artifact, seconds: float) -> Rebuilt:
    before, now = recorded.manifest["files"], artifact.manifest["files"]
    names = sorted({*recorded.files_of(()), *artifact.files_of(())})
    changed = differences(recorded.manifest["ingredients"], artifact.manifest["ingredients"])
    return Rebuilt(
        stage=recorded.stage,
        key=recorded.key,
        content=recorded.content,
        rebuilt_key=artifact.key,
        rebuilt_content=artifact.content,
        seconds=round(seconds, 2),
        differences=(*changed, *_remarks(recorded)),
        files=tuple(name for name in names if before.get(name, {}).get("sha256") != now.get(name, {}).get("sha256")),
    )


def recipes_of(lineage: Lineage, home: Path) -> list[RebuildRecipe]:
    """Return the recipe of each stage, inputs first.

    Raises ArtifactError with the reason if a stage cannot be rebuilt: only its name is known, its raw data are gone or
    have changed, or its settings are not recorded.
    """
    store, recipes, problems = ArtifactStore(home), list[RebuildRecipe](), list[str]()
    for link in lineage.links:
        if link.artifact is None or "settings" not in link.artifact.provenance:
            problems.append(f"{link.stage} {link.key[:SHOWN_KEY]}: how it was made is recorded neither here nor in MLflow")
            continue
        recipe = RebuildRecipe(link.artifact, STAGES[link.stage], _settings_of(link.artifact))
        recipes.append(recipe)
        try:
            now = file_digests(recipe.stage, recipe.settings, store)
        except TTrainError as error:
            problems.append(f"{link.stage}: {error}")
        else:
            before = link.artifact.manifest["ingredients"].get("files", {})
            problems += [f"{link.stage}: {line}" for line in differences({"files": before}, {"files": now})]
    store.cache.save()
    if problems:
        raise ArtifactError(f"{lineage.target.name} cannot be made again: " + "; ".join(dict.fromkeys(problems)))
    return recipes


def _settings_of(artifact: Artifact) -> Settings:
    """The settings that a stage was made with, on exactly the files that it read."""
    tree = {name: value for name, value in artifact.provenance["settings"].items() if name not in SHAPE_NO_RESULT}
    tree = dict(with_secrets({"settings": tree})["settings"])
    own = artifact.manifest["ingredients"].get("settings", {})  # those of a night alone, such as its share of replay
    of_nights = {name: value for name, value in own.items() if name.partition(".")[0] in SHAPE_NO_RESULT}
    values = {**dict(flatten(tree)), **of_nights, **_pinned(tree.get("data", {}), artifact)}
    overrides = [Override(f"the manifest of {artifact.stage}", key, value) for key, value in values.items()]
    return merge(Settings, overrides)[0].model_copy(update={"runtime": _runtime_of(artifact)})


def _pinned(data: Mapping[str, Any], artifact: Artifact) -> dict[str, list[str]]:
    """Settings that name exactly the files that the stage read: a folder may hold more by now, the Hub another commit.

    Sources with weights stay as they were written, since a weight belongs to a source and not to its files; and so do URLs
    with secrets, which the record of the files does not have.
    """
    locations, dataset = artifact.provenance.get("files", {}), STAGES[artifact.stage].dataset
    pinned: dict[str, list[str]] = {}
    if dataset is None:
        return pinned
    name = dataset_read(dataset, data.get("tokenizer"))
    for role, setting in ((TRAIN, name), (HELDOUT, f"{name}_heldout")):
        written = data.get(setting) or ()
        is_by_name = any(isinstance(entry, dict) or redact.url(entry) != entry for entry in written)
        if locations.get(role) and written and not is_by_name:
            pinned[f"data.{setting}"] = list(locations[role])
    return pinned


def _runtime_of(artifact: Artifact) -> Runtime:
    """The recorded runtime: ranks, threads, micro-batches, kernels. Ranks of several machines become ranks of this one."""
    recorded, result = artifact.provenance.get("runtime", {}), artifact.manifest["result"]
    known = Runtime.model_fields.keys() - {*UNNEEDED}  # what was recorded may have settings of another version
    values = {name: value for name, value in recorded.items() if name in known}
    values["devices"] = result.get("ranks", recorded.get("devices", 1) * recorded.get("nodes", 1))
    # By default a stage uses all cores, and this machine may have another number of them.
    cores = (artifact.provenance.get("machine") or {}).get("cores")
    values["threads"] = result.get("threads") or recorded.get("threads") or cores
    values["device"] = result.get("device", recorded.get("device", "auto"))
    values["sharding"] = "processes"
    return Runtime.model_validate(values)


def _remarks(artifact: Artifact) -> Iterator[str]:
    """What else differs from the making of the record: libraries, the machine, its history."""
    yield from (f"it was {line}" for line in library_changes(artifact.manifest, libraries.versions()))
    yield from (f"it was {note}" for note in notes_of(artifact.manifest))
    runtime, here = artifact.provenance.get("runtime", {}), provenance.machine()
    if runtime.get("nodes", 1) > 1:
        yield f"{runtime['nodes']} machines trained together, here one does"
    if runtime.get("night"):
        yield "it was trained with runtime.night, whose hours change the size of the micro-batches"
    for name, value in (artifact.provenance.get("machine") or {}).items():
        if value != here.get(name):
            yield f"{name}: {value} → {here.get(name)}"
