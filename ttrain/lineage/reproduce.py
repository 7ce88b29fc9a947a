"""Rebuild a model from its raw data, in a separate home, and compare the results stage by stage.

Everything is taken from the manifests behind the model: settings, the commits of remote data, seed, threads, ranks,
micro-batches, kernels. On a CPU the same code and libraries give the same bits; if they or the
machine differ, the report says how.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ttrain.config import SHAPE_NO_RESULT, Runtime, Settings, flatten
from ttrain.config.data import dataset_read
from ttrain.config.loading import Override, merge
from ttrain.core import machine as libraries
from ttrain.core import redact
from ttrain.core.files import JsonDict, JsonObject, temporary_directory, user_path
from ttrain.engine import launch, provenance
from ttrain.engine.display import StageDisplay
from ttrain.engine.input_files import HELDOUT, TRAIN, file_digests
from ttrain.engine.planner import plan_stage
from ttrain.engine.stop_request import StopRequest
from ttrain.errors import ArtifactError, Interrupted, TTrainError, UsageError
from ttrain.lineage.lineage import Lineage, Link
from ttrain.lineage.names import with_secrets
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.differences import differences, library_changes
from ttrain.store.layout import Artifact
from ttrain.store.results import TrainingResult
from ttrain.tasks import STAGES, Stage


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
            "requested": self.lineage.target.text,
            "name": self.lineage.target.name,
            "equal": self.is_equal,
            "home": str(self.home),
            "stages": [stage.to_json() for stage in self.stages],
            "left": list(self.not_rebuilt),
        }


def reproduce(
    lineage: Lineage, recipes: Sequence[RebuildRecipe], directory: Path | None, screen: StageDisplay
) -> Reproduction:
    """Build all stages in a home of their own and compare them. Ends at the first stage that differs: the later ones read
    its output. `directory`: the home to keep, where an interrupted reproduction continues; None: a temporary one.

    Raises the error of a failed stage, or Interrupted once its state is saved.
    """
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(temporary_directory("reproduce")) if directory is None else _usable(directory)
        effect = "the stage saves its state" if directory else "what was made again is removed, for want of --home"
        store = ArtifactStore(home)
        stop_request = StopRequest(lambda text: screen("", "message", {"text": text}), effect)
        artifacts: dict[str, Artifact] = {}
        done: list[Rebuilt] = []
        stack.enter_context(stop_request.catching_signals())
        for recipe in recipes:
            if stop_request.signum:
                raise Interrupted(f"stopped before stage {recipe.link.stage}", stop_request.signum)
            inputs = {name: artifacts[key] for name, (_, key) in recipe.link.inputs.items()}
            planned = plan_stage(recipe.stage, recipe.settings, store, inputs)
            report = functools.partial(_show, screen, recipe.link.stage)
            outcome = launch.build(planned, recipe.settings, store, report, stop_request)
            artifacts[recipe.link.key] = outcome.artifact
            done.append(_compare(recipe, outcome.artifact, outcome.seconds))
            state = "equal" if done[-1].is_equal else "different"
            screen(recipe.link.stage, "ended", {"state": state, "seconds": outcome.seconds, "figures": ""})
            if not done[-1].is_equal:
                break
        store.cache.save()
    not_rebuilt = tuple(recipe.link.stage for recipe in recipes[len(done) :])
    return Reproduction(lineage, home, tuple(done), not_rebuilt)


def _usable(directory: Path) -> Path:
    """The home to build in. Raises UsageError where it has runs, whose artifacts would be taken, or other files."""
    home = user_path(directory).absolute()
    names = {path.name for path in home.iterdir()} if home.is_dir() else set()
    if home.is_file() or "runs" in names or (names and "store" not in names and "work" not in names):
        raise UsageError(f"--home is {home}, which holds other files; name a directory that is new or empty")
    return home


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
        differences=(*changed, *_environment_remarks(link)),
        files=tuple(different_files),
    )


def _show(screen: StageDisplay, stage: str, event: str, data: JsonObject) -> None:
    if event != "logged":
        screen(stage, event, {"why": "is made again"} if event == "started" else data)


ONE_MACHINE: Mapping[str, Any] = {"nodes": 1, "node_rank": 0, "rendezvous": None, "sharding": "processes"}
# Settings that only observe, time out or stop a training, or name the GPUs of that machine.
UNNEEDED = ("timeout_seconds", "stages", "loggers", "sample_every_steps", "eval_every_steps", "gpus")

SHOWN = 12


@dataclass(frozen=True)
class RebuildRecipe:
    """How to rebuild one stage."""

    link: Link
    settings: Settings

    @property
    def stage(self) -> Stage:
        """The row of the stage."""
        return STAGES[self.link.stage]


def recipes_of(lineage: Lineage, home: Path) -> list[RebuildRecipe]:
    """Return the recipe of each stage, inputs first.

    Raises ArtifactError with the reason if a stage cannot be rebuilt: only its name is known, its raw data are gone or
    have changed, or its settings are not recorded.
    """
    cache = ArtifactStore(home)
    recipes = [_recipe(link) for link in lineage.links]
    problems = [problem for recipe in recipes for problem in _data_problems(recipe, cache)]
    cache.cache.save()
    if problems:
        raise ArtifactError(f"{lineage.target.name} cannot be made again: " + "; ".join(dict.fromkeys(problems)))
    return recipes


def _recipe(link: Link) -> RebuildRecipe:
    """The recipe of one stage. Raises ArtifactError if too little is recorded."""
    tree = link.provenance.get("settings")
    if tree is None:
        raise ArtifactError(
            f"stage {link.stage} {link.key[:SHOWN]} cannot be made again: its manifest does not say where its data were"
        )
    run_settings = {name: value for name, value in tree.items() if name not in SHAPE_NO_RESULT}
    run_settings = dict(with_secrets({"settings": run_settings})["settings"])
    own_settings = link.manifest["ingredients"].get("settings", {})  # those of a night alone, such as its share of replay
    of_nights = {name: value for name, value in own_settings.items() if name.partition(".")[0] in SHAPE_NO_RESULT}
    flat_settings = {**dict(flatten(run_settings)), **of_nights, **_pinned(run_settings.get("data", {}), link)}
    overrides = [Override(f"the manifest of {link.stage}", key, value) for key, value in flat_settings.items()]
    settings, _ = merge(Settings, overrides)
    return RebuildRecipe(link, settings.model_copy(update={"runtime": _runtime(link)}))


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


def _runtime(link: Link) -> Runtime:
    """The recorded runtime: ranks, threads, micro-batches, kernels. Ranks of several machines become ranks of this one."""
    runtime, training = link.provenance.get("runtime", {}), TrainingResult.of(link.manifest["result"])
    recorded = {name: runtime[name] for name in runtime if name in Runtime.model_fields and name not in UNNEEDED}
    # By default a stage uses all cores, and this machine may have another number of them.
    cores = (link.provenance.get("machine") or {}).get("cores")
    of_training = {
        "devices": training.ranks or recorded.get("devices", 1),
        "threads": training.threads or recorded.get("threads") or cores,
        "device": training.device or recorded.get("device", "auto"),
    }
    return Runtime.model_validate({**recorded, **ONE_MACHINE, **of_training})


def _data_problems(recipe: RebuildRecipe, cache: ArtifactStore) -> Iterator[str]:
    """Problems with the raw data of a stage: missing, unreadable, or changed."""
    recorded = recipe.link.manifest["ingredients"]
    try:
        now = file_digests(recipe.stage, recipe.settings, cache)
    except TTrainError as error:
        yield f"{recipe.link.stage}: {error}"
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
