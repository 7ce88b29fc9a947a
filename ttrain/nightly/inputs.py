"""Inputs of a night: files, settings, what it is trained on and how it continues."""

import glob
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ttrain.config import PYTHON_DOCS, Nightly, Settings
from ttrain.config.data import NEAR_DUPLICATES_OF_NIGHTS
from ttrain.config.rules import AUTO
from ttrain.config.training import TRAINING_STAGES, TRAININGS
from ttrain.core import redact
from ttrain.core.files import JsonDict, JsonObject
from ttrain.core.hashing import digest_of
from ttrain.data import locations, python_docs
from ttrain.data.records import LEAST_SHARE
from ttrain.engine.input_files import TRAIN, data_files, file_digests
from ttrain.errors import ArtifactError
from ttrain.nightly.records import (
    Champion,
    FileEntry,
    FilesByDataset,
    InputSnapshot,
    NightRecord,
    Nights,
    shortened_names,
)
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.model_files import PLATEAU
from ttrain.tasks import SHARDS
from ttrain.train.schedules import RATES

log = logging.getLogger("ttrain")
BEFORE = "before the nights"  # the name of held-out documents that no night brought
DOCUMENTS = "pretrain"  # the data set of documents
# Not part of any key: the current values are used.
UNFROZEN_SECTIONS = ("runtime", "tracking", "promotion", "notify")
UNFROZEN_OF_NIGHTLY = ("deadline", "deadline_hours", "timezone", "attempts")
# Of 2,048 tokens: 0.76 of the rates in nights of 14 steps, 0.45 in nights of 40 (docs/log.md)
FULL_RATE_STEPS = 8


@dataclass(frozen=True)
class NightInputs:
    """Settings and artifacts for the stages of a night.

    champion         artifacts by role in the evaluation (base, sft, lora); empty without a champion
    replacements     artifacts that replace a stage of the pipeline, by its name
    earlier_heldout  the held-out documents of earlier nights, which are not trained on
    learnt           documents of earlier nights: near-duplicates are left out, a sample is replayed
    replayed_chats   chats of which a sample is replayed
    plateau          the artifact that pretraining continues
    bases            by stage, models that it starts from instead of tonight's
    adapter_base     base of the champion's adapter, if it is not the champion's own model
    note             what the user should know about these
    """

    settings: Settings
    champion: Artifacts = field(default_factory=dict)
    replacements: Artifacts = field(default_factory=dict)
    earlier_heldout: Artifact | None = None
    learnt: tuple[Artifact, ...] = ()
    replayed_chats: tuple[Artifact, ...] = ()
    plateau: Artifact | None = None
    bases: Artifacts = field(default_factory=dict)
    adapter_base: Artifact | None = None
    note: str = ""

    @property
    def kept_base(self) -> Artifact | None:
        """The champion's base model if it stays, since no document is new."""
        return self.replacements.get("pretrain")


def watched_files(settings: Settings, store: ArtifactStore, *, may_be_gone: bool) -> FilesByDataset:
    """Location and digest of each file of the pipeline's training data, by data set.

    `may_be_gone`: the folder of documents may be empty, because the champion was trained on them.
    Raises UsageError if a setting matches no readable file.
    """
    files_by_dataset: dict[str, list[FileEntry]] = {}
    for dataset, stage in SHARDS.items():
        if not settings.reads(dataset):
            continue
        if settings.data.uses_python_docs(dataset):
            made_of = {
                "text": store.cache.file(python_docs.text_file()),
                **settings.python_docs.model_dump(mode="json"),
            }
            files_by_dataset[dataset] = [{"location": PYTHON_DOCS, "sha256": digest_of(made_of)}]
        elif may_be_gone and dataset == "pretrain" and _is_emptied(settings):
            files_by_dataset[dataset] = []
        else:
            files = data_files(stage, settings)[TRAIN]
            digests = file_digests(stage, settings, store)[TRAIN]
            files_by_dataset[dataset] = [
                {"location": file.location, "sha256": digest["sha256"]}
                for file, digest in zip(files, digests, strict=True)
            ]
    store.cache.save()
    return files_by_dataset


def _is_emptied(settings: Settings) -> bool:
    patterns = settings.data.paths("pretrain")
    if any(map(locations.is_remote, patterns)):
        return False
    paths = [locations.local_path(pattern) for pattern in patterns]
    can_be_empty = all(path.is_dir() or glob.has_magic(str(path)) for path in paths)
    return can_be_empty and not any(map(locations.local_matches, paths))


def without_damaged(
    watched: FilesByDataset, nights: Nights, settings: Settings
) -> tuple[FilesByDataset, str]:
    """The files that no night found damaged, and a note that names the others."""
    damaged = nights.damaged(settings)
    left_out = (file for files in watched.values() for file in files if file["sha256"] in damaged)
    return _without(watched, damaged), describe_left_out(left_out)


def describe_left_out(files: Iterable[FileEntry]) -> str:
    """A note that names the damaged files; empty if there are none."""
    names = shortened_names(file["location"] for file in files)
    return names and f"left out, damaged until replaced: {names}"


def entries_of(frozen: InputSnapshot, locations_at_fault: Iterable[str]) -> list[FileEntry]:
    """The files of a snapshot with these locations, which have no secrets."""
    chosen = set(locations_at_fault)
    return [
        file
        for files in frozen.files.values()
        for file in files
        if redact.url(file["location"]) in chosen
    ]


def smaller_snapshot(
    frozen: InputSnapshot, damaged: Collection[str], read: set[str]
) -> InputSnapshot | None:
    """The snapshot without the files at these locations; without documents, if there are none.

    None if nothing new is left, or a data set has no file.
    """
    files = _without(frozen.files, [file["sha256"] for file in entries_of(frozen, damaged)])
    if not damaged:
        files[DOCUMENTS] = []
    is_optional = {DOCUMENTS} if frozen.champion else set()
    lacks = any(not files[name] for name in frozen.files.keys() - is_optional if frozen.files[name])
    has_new = any(_without(files, read).values())
    # Files that are as before: what is damaged is not of the list, such as held-out files
    return None if files == frozen.files or lacks or not has_new else replace(frozen, files=files)


def select_files(
    settings: Nightly,
    watched: FilesByDataset,
    read: set[str],
    learnt: set[str],
    *,
    has_champion: bool,
) -> tuple[FilesByDataset, bool]:
    """Select the files that a night reads, and whether SFT reads only chats new to the champion.

    Documents are filtered, and chats if `chats` is new. Adapters start again on all their files,
    and so does SFT on another base if no chat is new.
    """
    unknown = _without(watched, learnt if settings.again else read)
    files = dict(watched)
    has_new_chats_alone = False
    continues = settings.data == "new" and settings.start_from == "champion"
    if has_champion and continues and DOCUMENTS in files:
        files[DOCUMENTS] = unknown[DOCUMENTS]
    if has_champion and settings.chats == "new" and "sft" in files:
        has_new_chats_alone = bool(unknown["sft"]) or settings.sft_base == "champion"
        files["sft"] = unknown["sft"] if has_new_chats_alone else files["sft"]
    return files, has_new_chats_alone


def _without(files: FilesByDataset, digests: Collection[str]) -> dict[str, list[FileEntry]]:
    kept = {}
    for name, entries in files.items():
        kept[name] = [file for file in entries if file["sha256"] not in digests]
    return kept


def refreshed_snapshot(
    frozen: InputSnapshot,
    now: FilesByDataset,
) -> tuple[InputSnapshot, list[str]]:
    """The snapshot with its files as they are now, and the locations whose bytes are gone.

    Renamed files have their new names, changed ones their new bytes, missing ones are left out.
    """
    files: dict[str, list[FileEntry]] = {}
    gone: list[str] = []
    for dataset, listed in frozen.files.items():
        present = now.get(dataset, [])
        by_digest = {file["sha256"]: file for file in reversed(present)}
        by_location = {file["location"]: file for file in present}
        files[dataset] = []
        for file in listed:
            here = by_location.get(file["location"])
            entry = here if here == file else by_digest.get(file["sha256"], here)
            files[dataset] += [entry] if entry else []
            gone += [] if file["sha256"] in by_digest else [file["location"]]
    return replace(frozen, files=files), gone


def with_unfrozen(frozen: JsonObject, current: JsonObject) -> JsonDict:
    """The settings of an unfinished night, with current values where they do not affect results."""
    sections = {name: current[name] for name in UNFROZEN_SECTIONS}
    nightly = {name: current["nightly"][name] for name in UNFROZEN_OF_NIGHTLY}
    return {**frozen, **sections, "nightly": {**frozen.get("nightly", {}), **nightly}}


def settings_of(frozen: InputSnapshot, current: Settings) -> Settings:
    """The user's settings of the snapshot, with current secrets and unfrozen settings."""
    now = current.model_dump()
    return Settings.model_validate(with_unfrozen(redact.restored(frozen.settings, now), now))


def inputs_of(frozen: InputSnapshot, current: Settings, store: ArtifactStore) -> NightInputs:
    """Settings and artifacts for the stages of a night. Raises ArtifactError for a missing one."""
    user = settings_of(frozen, current)
    tree = user.model_dump()
    for dataset, files in frozen.files.items():
        weighted = bool(
            user.data.weights(dataset)
        )  # the weight is that of a source, not of each of its files
        if files and not weighted and not user.data.uses_python_docs(dataset):
            tree["data"][dataset] = [file["location"] for file in files]
    champion = frozen.champion or Champion("", {})
    use = f"the champion, version {champion.version}, needs the artifact"
    advice = "restore it, or make another set the champion with `ttrain models promote`"
    artifacts = {
        stage: need_artifact(store, f"{stage}/{key}", use, advice)
        for stage, key in champion.keys.items()
    }
    replacements: dict[str, Artifact] = {}
    plateau = None
    note = ""
    base = artifacts.get("pretrain")
    if "pretrain" in user.trainings and "tokenizer" in artifacts and base:
        replacements["tokenizer"] = store.complete(artifacts["tokenizer"])
        tree["tokenizer"]["existing"] = str(replacements["tokenizer"].path)
        tree["data"]["tokenizer"] = ()
        if user.nightly.start_from == "champion":
            base = artifacts["pretrain"] = store.complete(base, ("model",))
            tree["pretrain"]["start_from"] = str(base.path / "model")
            if not frozen.files.get("pretrain"):
                replacements["pretrain"] = base
            else:
                plateau, note = _continued_plateau(user, base, champion.version)
                tree["pretrain"] |= budget_and_schedule(user, has_plateau=plateau is not None)
    bases: dict[str, Artifact] = {}
    if (
        user.nightly.sft_base == "champion"
        and "sft" in artifacts
        and user.sft.start_from == "pretrain"
    ):
        used_as = bases if frozen.files.get("sft") else replacements
        used_as["sft"] = artifacts["sft"]
    adapter_base = store.input_of(artifacts.get("lora"), "base")
    if user.nightly.lora_base == "champion" and adapter_base:
        bases["lora"] = adapter_base
    learnt = _recorded_artifacts(store, frozen.documents) if "pretrain" not in replacements else ()
    if user.reading.near_duplicates is None:
        tree["reading"]["near_duplicates"] = NEAR_DUPLICATES_OF_NIGHTS
    if base and user.reading.heldout_fraction == AUTO and not tree["reading"]["near_duplicates"]:
        # Nothing finds rows that the champion was trained on: the lowest share of `auto` holds out
        # none of them
        tree["reading"]["heldout_fraction"] = LEAST_SHARE
    has_chats = user.nightly.replay > 0 and "sft" not in replacements
    earlier = None
    if frozen.heldout and user.data.pretrain_heldout:
        earlier = store.find(*frozen.heldout.split("/"))  # None where it was removed
    elif frozen.heldout:
        earlier = find_heldout(store, frozen.heldout, "an unfinished night")
    return NightInputs(
        settings=Settings.model_validate(tree),
        champion={
            row.model: artifacts[name] for name, row in TRAINING_STAGES.items() if name in artifacts
        },
        replacements=replacements,
        earlier_heldout=earlier,
        learnt=learnt,
        replayed_chats=_recorded_artifacts(store, frozen.chats) if has_chats else (),
        plateau=plateau,
        bases=bases,
        # Where the adapter stayed with its model while the champion's own became another
        adapter_base=adapter_base
        if adapter_base and adapter_base.key not in champion.keys.values()
        else None,
        note=note,
    )


def learnt_shards(
    stage: str, champion: Champion | None, nights: Iterable[NightRecord], store: ArtifactStore
) -> tuple[str, ...]:
    """References ("stage/key") of what the champion's model of a stage was trained on, oldest
    first.

    Those of its night and of the nights before; without a night, those of the model itself. Missing
    ones are left out with a warning.
    """
    if champion is None:
        return ()
    its_night = next((night for night in nights if night.made(champion)), None)
    references = its_night.learnt_shards(stage) if its_night else ()
    model = store.find(stage, champion.keys[stage]) if stage in champion.keys else None
    if not references and model and (shards := model.manifest["inputs"].get("shards")):
        references = (f"{shards['stage']}/{shards['key']}",)
    listed = dict.fromkeys(references)
    present = tuple(reference for reference in listed if store.find(*reference.split("/")))
    if len(present) < len(listed):
        log.warning(
            "%d of %d sets that version %s has learnt are not in the store: nothing of them is "
            "replayed, and near-duplicates of them are learnt again",
            len(listed) - len(present),
            len(listed),
            champion.version,
        )
    return present


def learnt_by(champion: Champion | None, store: ArtifactStore) -> set[str]:
    """Digests of the files that the champion's own stages read, if their artifacts exist."""
    shards = filter(None, (shards_of(champion, stage, store) for stage in TRAININGS))
    return {
        file["sha256"]
        for artifact in shards
        for file in artifact.manifest["ingredients"]["files"].get(TRAIN, ())
    }


def shards_of(champion: Champion | None, stage: str, store: ArtifactStore) -> Artifact | None:
    key = champion.keys.get(stage) if champion else None
    return store.input_of(store.find(stage, key), "shards") if key else None


def _recorded_artifacts(store: ArtifactStore, references: Iterable[str]) -> tuple[Artifact, ...]:
    # With other rows the night would not be the one that began
    advice = (
        "restore it from a copy of the home. Else the list is given up after nightly.attempts, "
        "and the next one does without"
    )
    return tuple(
        need_artifact(store, reference, "the unfinished night reads", advice)
        for reference in references
    )


def describe_files(files: FilesByDataset) -> str:
    lists = []
    for name, entries in files.items():
        if entries:
            lists.append(f"{name}: {shortened_names(file['location'] for file in entries)}")
    return "; ".join(lists)


def budget_and_schedule(settings: Settings, *, has_plateau: bool) -> JsonDict:
    """Settings of `pretrain` where it continues the champion's base: a night's budget and rates.

    Without a warm-up from a plateau, whose rate is at the peak.
    """
    # A high rate raises the loss on old text (arXiv:2308.04014), in more steps by more: weights
    # move by about the rate times the root of the steps.
    nightly = settings.nightly
    optim = settings.pretrain.optim.model_dump()
    schedule = settings.pretrain.schedule.model_dump()
    changes = JsonDict()
    if nightly.rate == AUTO:
        schedule["full_rate_steps"] = schedule["full_rate_steps"] or FULL_RATE_STEPS
    else:
        names = [name.removeprefix("optim.") for name in sorted(RATES)]
        rates = {
            name: float(f"{nightly.rate * optim[name]:.6g}")
            for name in names
            if optim[name] is not None
        }
        changes["optim"] = {**optim, **rates}
    if nightly.tokens is not None or nightly.epochs is not None:
        changes |= {"tokens": nightly.tokens, "epochs": nightly.epochs}
    if has_plateau:
        schedule["warmup_steps"] = 0
    return {**changes, "schedule": schedule}


def _continued_plateau(
    settings: Settings, base: Artifact, version: str
) -> tuple[Artifact | None, str]:
    if settings.pretrain.schedule.kind != "infinite":
        return None, ""
    trained = base.manifest["ingredients"].get("settings", {}).get("pretrain.optim.kind")
    kind = settings.pretrain.optim.kind
    if base.files_of((PLATEAU,)) and trained == kind:
        return base, ""
    return None, (
        f"the champion, version {version}, is warmed up again: it left no plateau of "
        f"pretrain.optim.kind {kind} (it was {trained or 'unknown'}); "
        "the next champion will have one"
    )


# --- the held-out documents of all nights


class EarlierHeldout(NamedTuple):
    """The held-out documents of earlier nights ("stage/key"), and these nights, oldest first.

    `note`: why there are none, where a user may have expected some.
    """

    reference: str | None = None
    nights: tuple[str, ...] = ()
    note: str = ""


def earlier_heldout(
    champion: Champion | None,
    nights: Iterable[NightRecord],
    store: ArtifactStore,
    settings: Settings,
) -> EarlierHeldout:
    """The held-out documents of the last completed night, else of the champion's base model.

    None if the held-out share has changed: some may have been trained on since. If the user names
    held-out documents, nothing is measured on the earlier ones, but they are not trained on either:
    later nights may use them again. Raises ArtifactError if those of a night are gone: without them
    nothing shows what is forgotten.
    """
    is_named = bool(settings.data.pretrain_heldout)
    for night in nights:
        if reference := night.heldout:
            before = night.frozen.settings.get("reading", {}).get("heldout_fraction")
            now = settings.reading.heldout_fraction
            if before != now:
                note = (
                    f"reading.heldout_fraction was {before} and is {now}: "
                    "nothing is measured on earlier nights' text"
                )
                return EarlierHeldout(note=note)
            if is_named:
                return EarlierHeldout(reference)
            find_heldout(store, reference, night.name)
            return EarlierHeldout(reference, tuple(night.data.get("heldout_nights") or ()))
    shards = shards_of(champion, "pretrain", store)
    return (
        EarlierHeldout(f"{shards.stage}/{shards.key}", () if is_named else (BEFORE,))
        if shards
        else EarlierHeldout()
    )


def find_heldout(store: ArtifactStore, reference: str, night: str) -> Artifact:
    """The held-out documents of this "stage/key" reference. Raises ArtifactError."""
    advice = (
        "without it nothing shows what a model forgets. Restore it from a copy of the home, "
        "or name held-out documents with data.pretrain_heldout"
    )
    return need_artifact(
        store, reference, f"{night} measures its models on the held-out documents", advice
    )


def need_artifact(store: ArtifactStore, reference: str, use: str, advice: str) -> Artifact:
    """The artifact of a "stage/key" reference. Raises ArtifactError with its use and the advice."""
    stage, _, key = reference.partition("/")
    if artifact := store.find(stage, key):
        return artifact
    raise ArtifactError(
        f"{use} {stage} {key[:12]}, which is not in {store.root / 'store'}, or is damaged; {advice}"
    )
