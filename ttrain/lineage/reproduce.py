"""Rebuild a model from its raw data, in a separate home, and compare the results stage by stage.

Everything is taken from the manifests: settings, the commits of remote data, seed, threads, ranks,
micro-batches, kernels. On a CPU the same code and libraries give the same bits; if they or the
machine differ, the report says how.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
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
from ttrain.errors import ArtifactError, TTrainError, UsageError
from ttrain.lineage.lineage import Lineage, notes_of
from ttrain.lineage.lookup import with_secrets
from ttrain.reports.history import inputs_of
from ttrain.store.artifacts import SHOWN_KEY, ArtifactStore
from ttrain.store.differences import differences, library_changes
from ttrain.store.layout import Artifact
from ttrain.store.results import TrainingResult
from ttrain.tasks import STAGES

ONE_MACHINE: JsonObject = {"nodes": 1, "node_rank": 0, "rendezvous": None, "sharding": "processes"}
# Settings that only observe, time out or stop a training, or name the GPUs of that machine.
UNNEEDED = {
    "timeout_seconds",
    "stages",
    "loggers",
    "sample_every_steps",
    "eval_every_steps",
    "gpus",
}

Recipe = tuple[Artifact, Settings]  # a recorded artifact, and the settings that rebuild it


def reproduce(
    lineage: Lineage,
    recipes: Sequence[Recipe],
    directory: Path | None,
    screen: StageDisplay,
) -> JsonDict:
    """Build all stages in a home of their own and compare them; returns what `--json` prints.

    Ends at the first stage that differs: the later ones, `left`, read its output. `directory`: the
    home to keep, where an interrupted reproduction continues; None: a temporary one.
    """
    place = (
        contextlib.nullcontext(_usable(directory))
        if directory
        else temporary_directory("reproduce")
    )
    stop = StopRequest(
        lambda text: screen("", "message", {"text": text}),
        "the stage saves its state" if directory else "without --home, nothing is kept",
    )
    built: dict[str, Artifact] = {}
    stages: list[JsonDict] = []
    with place as home, stop.catching_signals():
        store = ArtifactStore(home)
        for recorded, settings in recipes:
            stop.raise_if_signalled()
            inputs = {name: built[key] for name, (_, key) in inputs_of(recorded).items()}
            planned = plan_stage(STAGES[recorded.stage], settings, store, inputs)
            outcome = launch.build(
                planned, settings, store, functools.partial(_show, screen, recorded.stage), stop
            )
            built[recorded.key] = outcome.artifact
            compared = _compared(recorded, outcome.artifact)
            stages.append({**compared, "seconds": round(outcome.seconds, 2)})
            screen(
                recorded.stage,
                "ended",
                {
                    "state": "equal" if compared["equal"] else "different",
                    "seconds": outcome.seconds,
                    "figures": "",
                },
            )
            if not compared["equal"]:
                break
        store.cache.save()
    return {
        "requested": lineage.text,
        "name": lineage.named.name,
        "equal": compared["equal"],
        "home": str(store.root),
        "stages": stages,
        "left": [recorded.stage for recorded, _ in recipes[len(stages) :]],
    }


def _usable(directory: Path) -> Path:
    # Not a home with runs: their artifacts would be taken instead of rebuilt
    home = user_path(directory).absolute()
    names = {path.name for path in home.iterdir()} if home.is_dir() else set()
    is_other = bool(names) and names.isdisjoint({"store", "work"})
    if home.is_file() or is_other or "runs" in names:
        raise UsageError(
            f"--home is {home}, which holds other files; name a directory that is new or empty"
        )
    return home


def _compared(recorded: Artifact, rebuilt: Artifact) -> JsonDict:
    old = {name: recorded.manifest["files"][name]["sha256"] for name in recorded.files_of(())}
    new = {name: rebuilt.manifest["files"][name]["sha256"] for name in rebuilt.files_of(())}
    changed = differences(recorded.manifest["ingredients"], rebuilt.manifest["ingredients"])
    remarks = [*library_changes(recorded.manifest, libraries.versions()), *notes_of(recorded)]
    then = recorded.provenance.get("machine") or {}
    now = provenance.machine()
    machine = [
        f"{name}: {then[name]} → {now.get(name)}" for name in then if then[name] != now.get(name)
    ]
    return {
        "stage": recorded.stage,
        "key": recorded.key,
        "content": recorded.content,
        "rebuilt_key": rebuilt.key,
        "rebuilt_content": rebuilt.content,
        "differences": [*changed, *(f"it was {remark}" for remark in remarks), *machine],
        "files": [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)],
        "equal": recorded.content == rebuilt.content,
    }


def _show(screen: StageDisplay, stage: str, event: str, data: JsonObject) -> None:
    screen(stage, event, {"why": "is made again"} if event == "started" else data)


def recipes_of(lineage: Lineage, home: Path) -> list[Recipe]:
    """How to rebuild each stage, inputs first.

    Raises ArtifactError if a stage cannot be rebuilt: its raw data are gone or have changed, or its
    settings are not recorded.
    """
    store = ArtifactStore(home)
    recipes = [(artifact, _settings_of(artifact)) for artifact in lineage.artifacts]
    problems: list[str] = []
    for artifact, settings in recipes:
        recorded = {"files": artifact.manifest["ingredients"].get("files", {})}
        try:
            changes = differences(
                recorded, {"files": file_digests(STAGES[artifact.stage], settings, store)}
            )
        except TTrainError as error:
            changes = [str(error)]
        problems += [f"{artifact.stage}: {change}" for change in changes]
    store.cache.save()
    if problems:
        raise ArtifactError(
            f"{lineage.named.name} cannot be made again: {'; '.join(dict.fromkeys(problems))}"
        )
    return recipes


def _settings_of(artifact: Artifact) -> Settings:
    tree = artifact.provenance.get("settings")
    if tree is None:
        raise ArtifactError(
            f"stage {artifact.stage} {artifact.key[:SHOWN_KEY]} cannot be made again: its manifest "
            f"does not say where its data were"
        )
    of_run = {name: value for name, value in tree.items() if name not in SHAPE_NO_RESULT}
    of_run = dict(with_secrets({"settings": of_run})["settings"])
    own = artifact.manifest["ingredients"].get("settings", {})
    # Settings that only a nightly run has, such as the fraction of replayed data
    of_night = {name: own[name] for name in own if name.partition(".")[0] in SHAPE_NO_RESULT}
    values = {**dict(flatten(of_run)), **of_night, **_pinned(of_run.get("data", {}), artifact)}
    settings, _ = merge(
        Settings,
        [
            Override(f"the manifest of {artifact.stage}", key, value)
            for key, value in values.items()
        ],
    )
    recorded = artifact.provenance.get("runtime", {})
    training = TrainingResult.of(artifact.result)
    kept = {
        name: recorded[name] for name in Runtime.model_fields if name in recorded.keys() - UNNEEDED
    }
    # By default a stage uses all cores, and this machine may have another number of them.
    cores = (artifact.provenance.get("machine") or {}).get("cores")
    runtime = Runtime.model_validate(
        {
            **kept,
            **ONE_MACHINE,
            "devices": training.ranks or kept.get("devices", 1),
            "threads": training.threads or kept.get("threads") or cores,
            "device": training.device or kept.get("device", "auto"),
        }
    )
    return settings.model_copy(update={"runtime": runtime})


def _pinned(data: Mapping[str, Any], artifact: Artifact) -> dict[str, list[str]]:
    # Name exactly the files that the stage read: a folder may hold more by now, the Hub another
    # commit. Sources with weights stay as written, since a weight belongs to a source and not to
    # its files; so do URLs with secrets, which the record of the files does not have.
    dataset = STAGES[artifact.stage].dataset
    pinned: dict[str, list[str]] = {}
    name = dataset_read(dataset, data.get("tokenizer")) if dataset else ""
    for role, setting in ((TRAIN, name), (HELDOUT, f"{name}_heldout")):
        written = data.get(setting) or ()
        locations = artifact.provenance.get("files", {}).get(role)
        is_by_name = any(isinstance(entry, dict) or redact.url(entry) != entry for entry in written)
        if locations and written and not is_by_name:
            pinned[f"data.{setting}"] = list(locations)
    return pinned
