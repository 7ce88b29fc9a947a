"""What a night reads, as settings and artifacts: the files it watches, its champion. Imports nothing heavy."""

from __future__ import annotations

import glob
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from ttrain.config import PYTHON_DOCS, Nightly, Settings
from ttrain.core import redact
from ttrain.core.hashing import digest_of
from ttrain.data import locations
from ttrain.errors import ArtifactError, UsageError
from ttrain.nightly.records import COMPLETED, Champion, Frozen, Night, names
from ttrain.pipeline.input_files import TRAIN, data_files, file_digests
from ttrain.stages import SHARDS_LORA, SHARDS_PRETRAIN, SHARDS_SFT
from ttrain.store.artifacts import Store
from ttrain.store.layout import Artifact

WATCHED = (SHARDS_PRETRAIN, SHARDS_SFT, SHARDS_LORA)
FREE = (
    "runtime",
    "tracking",
    "nightly",
    "promotion",
    "notify",
)  # in no key: taken as they are now
DATASETS = ("pretrain", "sft", "lora")
MODELS = ("pretrain", "sft", "lora")


@dataclass(frozen=True)
class Inputs:
    """What the stages of a night are given.

    `champion`: its artifacts by what the evaluation calls them (base, sft, lora), empty where there is none. `given`: those
    that stand in for a stage of the pipeline, by its name. `earlier`: the held-out documents of the nights before.
    """

    settings: Settings
    champion: Mapping[str, Artifact] = field(default_factory=dict)
    given: Mapping[str, Artifact] = field(default_factory=dict)
    earlier: Artifact | None = None

    @property
    def keeps_base(self) -> bool:
        """No document is new: SFT and LoRA begin anew on the champion's base model."""
        return "pretrain" in self.given


def watched(settings: Settings, store: Store, *, may_be_gone: bool) -> dict[str, list[dict[str, Any]]]:
    """Location and digest of each file of the data sets that the pipeline learns from.

    `may_be_gone`: an emptied folder of documents is no mistake, since the champion has learnt what was there. Raises
    UsageError where a setting names nothing, or what cannot be read.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for stage in WATCHED:
        dataset = stage.dataset
        assert dataset is not None, "each of them reads files"
        if not settings.reads(dataset):
            continue
        if settings.data.uses_python_docs(dataset):
            made_of = {"python": platform.python_version(), **settings.python_docs.model_dump(mode="json")}
            found[dataset] = [{"location": PYTHON_DOCS, "sha256": digest_of(made_of)}]
        elif may_be_gone and dataset == "pretrain" and _is_emptied(settings):
            found[dataset] = []
        else:
            files, digests = data_files(stage, settings)[TRAIN], file_digests(stage, settings, store)[TRAIN]
            found[dataset] = [
                {"location": file.location, "sha256": digest["sha256"]} for file, digest in zip(files, digests, strict=True)
            ]
    store.cache.save()
    return found


def _is_emptied(settings: Settings) -> bool:
    """Whether all that `data.pretrain` names are folders and globs of this machine with nothing in them."""
    for pattern in settings.data.paths("pretrain"):
        if locations.is_remote(pattern):
            return False
        path = locations.local_path(pattern)
        if not (path.is_dir() or glob.has_magic(str(path))):
            return False
        try:
            locations.expand((pattern,), "data.pretrain")
        except UsageError:
            if glob.glob(str(path), recursive=True) and not path.is_dir():
                return False  # something is there that cannot be read
        else:
            return False
    return True


@dataclass(frozen=True)
class Choice:
    """What a night would read: its files, and which of them no night has read before."""

    files: Mapping[str, list[dict[str, Any]]]
    new: tuple[str, ...] = field(default=())


def choose(
    settings: Nightly, watched: Mapping[str, list[dict[str, Any]]], read: set[str], learnt: set[str], *, has_champion: bool
) -> Choice:
    """Of all files that are there, those that a night reads. `new` is empty where there is nothing to do.

    Only the documents are narrowed down: SFT and LoRA begin anew on all their files, since each night has another base.
    """
    new = tuple(file["location"] for files in watched.values() for file in files if file["sha256"] not in read)
    files = {name: list(found) for name, found in watched.items()}
    if has_champion and settings.data == "new" and settings.start_from == "champion" and "pretrain" in files:
        known = learnt if settings.again else read
        files["pretrain"] = [file for file in files["pretrain"] if file["sha256"] not in known]
    return Choice(files, new)


def changed(frozen: Frozen, now: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Files of a frozen list whose bytes are no longer there, under whatever name, given what is there now."""
    there = {dataset: {file["sha256"] for file in files} for dataset, files in now.items()}
    return [f["location"] for name, files in frozen.files.items() for f in files if f["sha256"] not in there.get(name, ())]


def frozen_again(frozen: Frozen, now: Mapping[str, list[dict[str, Any]]]) -> Frozen:
    """The same list as its files are now: renamed ones under their new names, changed ones with their new bytes, without
    those that are gone."""
    files: dict[str, list[dict[str, Any]]] = {}
    for dataset, listed in frozen.files.items():
        same = {file["sha256"]: file for file in reversed(now.get(dataset, ()))}
        place = {file["location"]: file for file in now.get(dataset, ())}
        found = [f if f in place.values() else same.get(f["sha256"]) or place.get(f["location"]) for f in listed]
        files[dataset] = [file for file in found if file]
    return replace(frozen, files=files)


def settings_of(frozen: Frozen, current: Settings) -> Settings:
    """The user's settings as they were frozen; what changes no result as it is now, and so are the secrets of sources, which
    no record holds. Raises UsageError where they no longer fit this version of ttrain."""
    now = current.model_dump()
    try:
        tree = {**redact.restored(frozen.settings, now), **{name: now[name] for name in FREE}}
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise UsageError(f"the settings of an unfinished night do not fit this version of ttrain: {error}") from None


def inputs_of(frozen: Frozen, current: Settings, store: Store) -> Inputs:
    """What the stages of a night are given. Raises ArtifactError where the champion is not in the store."""
    user = settings_of(frozen, current)
    tree = user.model_dump()
    for dataset, files in frozen.files.items():
        weighted = bool(user.data.weights(dataset))  # the weight is that of a source, not of each of its files
        if files and not weighted and not user.data.uses_python_docs(dataset):
            tree["data"][dataset] = [file["location"] for file in files]
    artifacts = _artifacts(frozen.champion, store)
    given: dict[str, Artifact] = {}
    if "pretrain" in user.trainings and {"tokenizer", "pretrain"} <= set(artifacts):
        given["tokenizer"] = store.complete(artifacts["tokenizer"])
        tree["tokenizer"]["existing"] = str(given["tokenizer"].path)
        tree["data"]["tokenizer"] = ()
        if user.nightly.start_from == "champion":
            base = store.complete(artifacts["pretrain"], ("model",))
            tree["pretrain"]["start_from"] = str(base.path / "model")
            if not frozen.files.get("pretrain"):
                given["pretrain"] = base
    roles = {"pretrain": "base", "sft": "sft", "lora": "lora"}
    champion = {roles[stage]: artifact for stage, artifact in artifacts.items() if stage in roles}
    earlier = _named(store, frozen.heldout) if frozen.heldout else None
    return Inputs(Settings.model_validate(tree), champion, given, earlier)


def _artifacts(champion: Champion | None, store: Store) -> dict[str, Artifact]:
    """The champion's artifacts by stage."""
    found: dict[str, Artifact] = {}
    for stage, key in (champion.keys if champion else {}).items():
        artifact = store.find(stage, key)
        if artifact is None:
            assert champion is not None, "it has keys"
            raise ArtifactError(
                f"the champion, version {champion.version}, needs the artifact {stage} {key[:12]}, which is not in "
                f"{store.root / 'store'}, or is damaged; bring it back, or make another set the champion with "
                f"`ttrain models promote`"
            )
        found[stage] = artifact
    return found


def earlier_heldout(champion: Champion | None, nights: Iterable[Night], store: Store, settings: Settings) -> str | None:
    """Stage and key ("stage/key") of the held-out documents that both models are measured on beside new ones, if any.

    Those of the last completed night, else those beside which the champion's base model was trained. They are of no use
    where the user names the held-out documents, or holds another share back than then: some may have been learnt since.
    """
    if settings.data.pretrain_heldout:
        return None
    for night in nights:
        if night.outcome in COMPLETED and (named := night.data.get("heldout")):
            reading = night.frozen.settings.get("reading", {})
            same = reading.get("heldout_fraction") == settings.reading.heldout_fraction
            return str(named) if same and _named(store, named) else None
    base = store.find("pretrain", champion.keys["pretrain"]) if champion and "pretrain" in champion.keys else None
    shards = base.manifest["inputs"].get("shards") if base else None
    named = f"{shards['stage']}/{shards['key']}" if shards else ""
    return named if named and _named(store, named) else None


def learnt_by(champion: Champion | None, store: Store) -> set[str]:
    """Digests of the files that the champion's own stages read, as far as their artifacts are there."""
    found: set[str] = set()
    for artifact in _there(champion, store):
        shards = artifact.manifest["inputs"].get("shards")
        made = store.find(shards["stage"], shards["key"]) if shards else None
        found |= {file["sha256"] for file in made.manifest["ingredients"]["files"].get(TRAIN, ())} if made else set()
    return found


def _there(champion: Champion | None, store: Store) -> list[Artifact]:
    keys = champion.keys if champion else {}
    return [artifact for stage in MODELS if stage in keys and (artifact := store.find(stage, keys[stage]))]


def _named(store: Store, named: str) -> Artifact | None:
    """The artifact that "stage/key" names; None where it was cleaned away."""
    stage, _, key = named.partition("/")
    return store.find(stage, key)


def description(files: Mapping[str, list[dict[str, Any]]]) -> str:
    """Which files, for a line on the terminal."""
    parts = [f"{name}: {names(file['location'] for file in found)}" for name, found in files.items() if found]
    return "; ".join(parts)
