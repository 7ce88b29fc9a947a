"""The user's own files that stages read, and the digests of their bytes. Imports nothing heavy."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ttrain.config import Settings
from ttrain.config.data import PYTHON_DOCS, dataset_read
from ttrain.config.evaluate import HarnessTask
from ttrain.config.training import TRAINING_STAGES
from ttrain.core import redact
from ttrain.core.files import JsonDict, user_path
from ttrain.data import existing, first_rows, locations, python_docs
from ttrain.data.records import Kind
from ttrain.errors import CannotRead, UsageError
from ttrain.evaluate import suites
from ttrain.evaluate.items import heldout_part
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import SHARDS, TOKENIZER, Stage

# How two stores name the same part of a stage's own data files.
TRAIN, HELDOUT, EXISTING, AGAINST, PYTHON = "train", "heldout", "existing", "against", "python"


@dataclass(frozen=True)
class InputFile:
    """A file that a stage reads; `weight` is that of its source, None without weights."""

    location: str
    group: int = 0
    weight: float | None = None


def data_files(stage: Stage, settings: Settings) -> dict[str, list[InputFile]]:
    """The user's own files that the stage reads, by role: train, heldout, existing, against, ..."""
    if stage.reads_model:
        return {role: _input_files(paths) for role, paths in _model_files(settings).items()}
    if stage.reads_suites:
        return {role: _input_files(paths) for role, paths in _suite_files(settings).items()}
    if stage.reads_python_docs:
        return {PYTHON: _input_files([python_docs.text_file()])}
    if stage.dataset is None:
        return {}
    data = settings.data
    roles: dict[str, list[InputFile]] = {}
    dataset = dataset_read(stage.dataset, data.tokenizer)
    is_tokenizer = stage.dataset == "tokenizer"  # it learns from the training part alone
    weights = () if is_tokenizer else data.weights(dataset)
    heldout = () if is_tokenizer else data.paths(f"{dataset}_heldout")
    if is_tokenizer and settings.tokenizer.existing:
        tokenizer = settings.tokenizer.existing
        if tokenizer == settings.existing_model:  # its own lies where its weights are
            tokenizer = str(_model_files(settings)["config"][0].parent)
        roles[EXISTING] = _input_files(existing.tokenizer_files(tokenizer))
    elif not is_tokenizer and settings.shards.decontaminate:
        roles[AGAINST] = _input_files(evaluation_files(settings.shards.decontaminate))
    if not settings.reads(stage.dataset) or data.uses_python_docs(stage.dataset):
        return roles
    if not data.paths(dataset):
        if "pretrain" not in settings.trainings:
            raise UsageError(
                "data.pretrain is none, so that there is no text for a tokenizer; set "
                "data.tokenizer=FILE, or "
                "tokenizer.existing to a tokenizer that exists"
            )
        later = next(name for name in settings.trainings if settings.starts[name] == "pretrain")
        raise UsageError(
            f"data.pretrain is none, but {later} starts from the model "
            f"that pretrain makes of documents; set data.pretrain=FILE, "
            f"data.pretrain={PYTHON_DOCS} for those that ship with "
            f"ttrain, or {later}.start_from=MODEL, which exists: a directory, or owner/name on "
            f"the Hub"
        )
    roles[TRAIN] = _expand(data.paths(dataset), f"data.{dataset}", weights)
    if heldout:
        roles[HELDOUT] = _expand(heldout, f"data.{dataset}_heldout", ())
    return roles


def _input_files(paths: list[Path] | list[str]) -> list[InputFile]:
    return [InputFile(str(path)) for path in paths]


def check_first_rows(settings: Settings, stages: Iterable[Stage] = tuple(SHARDS.values())) -> None:
    """Raise one UsageError for all data sets whose first rows are of the wrong kind."""
    problems: list[str] = []
    data = settings.data
    names = dict.fromkeys(
        dataset_read(stage.dataset, data.tokenizer) for stage in stages if stage.dataset
    )
    for name in names:
        if not data.paths(name):
            continue
        reader = SHARDS.get(name, TOKENIZER)
        kind = cast("Kind", reader.arguments.get("kind", "documents"))
        try:
            roles = data_files(reader, settings)
            for role, setting in ((TRAIN, f"data.{name}"), (HELDOUT, f"data.{name}_heldout")):
                files = [file.location for file in roles.get(role, [])]
                first_rows.check(setting, kind, files, settings.reading)
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))


def evaluation_files(names: tuple[str, ...]) -> list[str]:
    """Files with the items of suites, and files named directly.

    Raises UsageError if one is missing, and for tasks of lm-evaluation-harness, which have no local
    files.
    """
    paths: list[str] = []
    for name in names:
        if not name.endswith(suites.ENDINGS) and name not in suites.names():
            paths += locations.expand((name,), "shards.decontaminate")
            continue
        loaded = suites.load(name)
        suites.files_of(loaded)  # raises if one is missing
        for task, spec in loaded.suite.tasks.items():
            if isinstance(spec, HarnessTask):
                raise UsageError(
                    f"shards.decontaminate names the suite {name}, but the data of its task {task} "
                    f"are those of lm-evaluation-harness; name a file with its items, as JSON Lines"
                )
            if not heldout_part(spec):
                paths.append(str(loaded.base / user_path(spec.file)))
    return list(dict.fromkeys(paths))


def _suite_files(settings: Settings) -> dict[str, list[Path]]:
    # By model, as "suites-sft". Held-out documents are checked later: a night has earlier ones.
    files_by_role: dict[str, list[Path]] = {}
    rows = TRAINING_STAGES.items()
    heldout_parts = [row.part for _, row in rows if row.loss and settings.reads(row.name)]
    for name, row in rows:
        if row.role != "base" and not settings.exists(name):
            continue
        loaded = [suites.load(name) for name in settings.evaluate.suites.of(row.model)]
        suites.check_distinct_tasks(loaded)
        for suite in loaded:
            suites.check_parts(
                suite, ["documents", *heldout_parts]
            )  # documents can be those of earlier nights
        if loaded:
            files_by_role[f"suites-{row.model}"] = [
                file for suite in loaded for file in suites.files_of(suite)
            ]
    return files_by_role


def _model_files(settings: Settings) -> dict[str, list[Path]]:
    assert settings.existing_model, "the stage is in the recipe only where there is such a model"
    setting = f"{settings.trainings[0]}.start_from"
    files = existing.model_files(settings.existing_model, setting)
    limit = existing.max_length(files["config"][0])
    for name in (*settings.trainings, "evaluate"):
        length = getattr(settings, name).row_length
        virtual = settings.virtual_tokens(name)
        if limit is not None and length + virtual > limit:
            prefix = f", after lora.virtual_tokens {virtual}," if virtual else ""
            raise UsageError(
                f"{name}.row_length is {length}{prefix} but {setting} is "
                f"{settings.existing_model}, a model of {limit} "
                f"positions; set {name}.row_length to at most {limit - virtual}"
            )
    return files


def _expand(paths: tuple[str, ...], setting: str, weights: tuple[float, ...]) -> list[InputFile]:
    if not weights:
        return _input_files(locations.expand(paths, setting))
    files: dict[str, InputFile] = {}
    for group, (path, weight) in enumerate(zip(paths, weights, strict=True)):
        new = [location for location in locations.expand((path,), setting) if location not in files]
        if not new:
            raise UsageError(
                f"{setting} weighs '{redact.url(path)}', but all its files belong to a source "
                f"before it; leave it out"
            )
        files.update({location: InputFile(location, group, weight) for location in new})
    return list(files.values())


def file_digests(
    stage: Stage, settings: Settings, store: ArtifactStore
) -> dict[str, list[JsonDict]]:
    """Name, digest and any weight of the stage's data files, by role. Raises CannotRead.

    The digest of a remote file is its commit, ETag or checksum.
    """
    digests: dict[str, list[JsonDict]] = {}
    for role, files in data_files(stage, settings).items():
        digests[role] = entries = []
        for file in files:
            try:
                digest = locations.version(file.location) or store.cache.file(Path(file.location))
            except OSError as error:
                by = f"data.{stage.dataset} names" if stage.dataset else f"stage {stage.name} reads"
                raise CannotRead(
                    f"cannot read {error.filename}, which {by}: {error.strerror}"
                ) from None
            weight = {} if file.weight is None else {"weight": file.weight, "group": file.group}
            entries.append({"name": locations.name(file.location), "sha256": digest, **weight})
    return digests
