"""The user's own files that stages read: which they are, and what identifies their bytes. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.config import Settings
from ttrain.config.suite import HELDOUT_PARTS, HarnessTask
from ttrain.core import redact
from ttrain.data import existing_model, existing_tokenizer, locations
from ttrain.errors import UsageError
from ttrain.evaluate import suites
from ttrain.stages import Stage
from ttrain.store.artifacts import Store

HELD_OUT_OF = {"chats": "sft", "domain": "lora"}
# How two stores name the same part of a stage's own data files.
TRAIN, HELDOUT, EXISTING, AGAINST = "train", "heldout", "existing", "against"


@dataclass(frozen=True)
class InputFile:
    """A file that a stage reads, and the weighted source it belongs to (no weight: all rows of the data set are alike)."""

    location: str
    group: int = 0
    weight: float | None = None


def data_files(stage: Stage, settings: Settings) -> dict[str, list[InputFile]]:
    """The user's own files that the stage reads, by role: "train", "heldout", for the tokenizer "existing", and for shards
    "against", files of evaluations.

    The roles of an existing model's files are those of `existing_model.files`.
    """
    if stage.reads_model:
        found = _model_files(settings)
        return {role: [InputFile(str(path)) for path in paths] for role, paths in found.items()}
    if stage.reads_suites:
        return _suite_files(settings)
    if stage.dataset is None:
        return {}
    data, is_tokenizer = settings.data, stage.dataset == "tokenizer"
    roles: dict[str, list[InputFile]] = {}
    if is_tokenizer and settings.tokenizer.existing:
        roles[EXISTING] = [InputFile(str(path)) for path in _tokenizer_files(settings)]
    if not is_tokenizer and settings.shards.decontaminate:
        roles[AGAINST] = [InputFile(location) for location in evaluation_files(settings.shards.decontaminate)]
    if not settings.reads(stage.dataset) or data.uses_python_docs(stage.dataset):
        return roles
    dataset = "pretrain" if is_tokenizer and not data.tokenizer else stage.dataset
    roles[TRAIN] = _expanded(data.paths(dataset), f"data.{dataset}", () if is_tokenizer else data.weights(dataset))
    if not is_tokenizer and getattr(data, f"{dataset}_heldout"):  # the tokenizer learns from the training part alone
        roles[HELDOUT] = _expanded(data.paths(f"{dataset}_heldout"), f"data.{dataset}_heldout", ())
    return roles


def evaluation_files(named: tuple[str, ...], setting: str = "shards.decontaminate") -> list[str]:
    """The files that hold the items of suites, and those that are named themselves.

    Raises UsageError where one is missing, and for tasks of the harness, whose data are not in files of ours.
    """
    found: list[str] = []
    for name in named:
        if not name.endswith(suites.ENDINGS) and name not in suites.names():
            found += locations.expand((name,), setting)
            continue
        loaded = suites.load(name)
        suites.files_of(loaded)  # all of them are there
        if harness := [task for task, spec in loaded.suite.tasks.items() if isinstance(spec, HarnessTask)]:
            raise UsageError(
                f"{setting} names the suite {name}, but the data of its task {harness[0]} are those of "
                f"lm-evaluation-harness; name a file with its items, as JSON Lines"
            )
        files = [spec.file for spec in loaded.suite.tasks.values() if not isinstance(spec, HarnessTask)]
        found += [str(loaded.base / Path(file).expanduser()) for file in files if file not in HELDOUT_PARTS]
    return list(dict.fromkeys(found))


def check_suite(settings: Settings) -> None:
    """Raise UsageError for a `runtime.eval_suite` that cannot be used: now, not after the stages before a training."""
    if settings.runtime.eval_every_steps and settings.runtime.eval_suite:
        suites.files_of(suites.load(settings.runtime.eval_suite))


def _suite_files(settings: Settings) -> dict[str, list[InputFile]]:
    """The suites of each model and what they read, as "suites-sft". Raises UsageError for a suite that cannot be used: now,
    not after the models were trained. Only whether there are held-out documents is seen later: a night has earlier ones."""
    found: dict[str, list[InputFile]] = {}
    parts = [part for part, dataset in HELD_OUT_OF.items() if settings.reads(dataset)]
    for model in type(settings.evaluate.suites).model_fields:
        loaded = [suites.load(name) for name in settings.evaluate.suites.of(model)]
        suites.distinct(loaded)
        for one in loaded:
            suites.check_parts(one, ["documents", *parts])  # documents can be those of earlier nights
        if loaded:
            found[f"suites-{model}"] = [InputFile(str(file)) for one in loaded for file in suites.files_of(one)]
    return found


def _start_setting(settings: Settings) -> str:
    return f"{settings.trainings[0]}.start_from"


def _model_files(settings: Settings) -> dict[str, list[Path]]:
    """The files of the existing model. Raises UsageError where there is none, or a stage's rows are too long for it."""
    assert settings.existing_model, "the stage is in the recipe only where there is such a model"
    setting = _start_setting(settings)
    found = existing_model.files(settings.existing_model, setting)
    limit = existing_model.max_length(found)
    for name in (*settings.trainings, "evaluate"):
        section, virtual = getattr(settings, name), settings.virtual_tokens(name)
        length = section.row_length
        if limit is not None and length + virtual > limit:
            prefix = f", after lora.virtual_tokens {virtual}," if virtual else ""
            fitting = section.longest_row(limit - virtual)
            fix = f"set {name}.row_length={fitting}" if fitting else f"set {_lengths_beside(name, virtual)}"
            raise UsageError(
                f"{name}.row_length is {length}{prefix} but {setting} is {settings.existing_model}, a model of {limit} "
                f"positions; {fix}"
            )
    return found


def _lengths_beside(name: str, virtual: int) -> str:
    """What else stands in the way of rows that fit the existing model."""
    if virtual:
        return "fewer lora.virtual_tokens"
    return f"{name}.row_length to at most that, and {name}.{'stride' if name == 'evaluate' else 'tokens_per_step'} to fit it"


def _tokenizer_files(settings: Settings) -> list[Path]:
    """The files of the existing tokenizer. That of the existing model lies where its weights are."""
    named = settings.tokenizer.existing
    assert named is not None, "asked for where there is such a tokenizer"
    if named != settings.existing_model:
        return existing_tokenizer.files(named)
    directory = _model_files(settings)["config"][0].parent
    if not (directory / existing_tokenizer.JSON).is_file():
        raise UsageError(
            f"{_start_setting(settings)} is {named}, which has no {existing_tokenizer.JSON}; "
            f"set tokenizer.existing to the folder or the name of its tokenizer, as a folder with {existing_tokenizer.JSON}"
        )
    return existing_tokenizer.files(str(directory))


def _expanded(paths: tuple[str, ...], setting: str, weights: tuple[float, ...]) -> list[InputFile]:
    if not weights:
        return [InputFile(location) for location in locations.expand(paths, setting)]
    found: dict[str, InputFile] = {}
    for group, (path, weight) in enumerate(zip(paths, weights, strict=True)):
        new = [location for location in locations.expand((path,), setting) if location not in found]
        if not new:
            raise UsageError(
                f"{setting} weighs '{redact.url(path)}', but all its files belong to a source before it; leave it out"
            )
        found.update({location: InputFile(location, group, weight) for location in new})
    return list(found.values())


def file_digests(stage: Stage, settings: Settings, store: Store) -> dict[str, list[dict[str, Any]]]:
    """Name and digest (and weight, where there is one) of the data that the stage reads, by role.

    A remote file counts by its commit, ETag or checksum. Raises UsageError where one is unreadable.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for role, files in data_files(stage, settings).items():
        try:
            found[role] = [
                {
                    "name": locations.name(file.location),
                    "sha256": locations.version(file.location) or store.cache.file(Path(file.location)),
                    **({} if file.weight is None else {"weight": file.weight, "group": file.group}),
                }
                for file in files
            ]
        except OSError as error:
            setting = f"data.{stage.dataset}"
            if stage.reads_model or stage.reads_suites:
                setting = _start_setting(settings) if stage.reads_model else "evaluate.suites"
            raise UsageError(f"cannot read {error.filename}, which {setting} names: {error.strerror}") from None
    return found
