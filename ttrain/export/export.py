"""Export a model or an adapter as a directory that other programs open. Loads torch if called."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.config.training import BITS_PER_BYTE
from ttrain.core.files import (
    fsync,
    read_object,
    remove_tree,
    temporary_directory,
    temporary_path,
    user_path,
)
from ttrain.core.text import first_of
from ttrain.errors import UsageError
from ttrain.export import ollama
from ttrain.export.weights import write, write_tensors
from ttrain.reports.model_card import Exported, History, card
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.heldout_shards import heldout_shards
from ttrain.store.layout import home
from ttrain.store.model_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    BASE,
    SECOND_HEAD,
    Reference,
    base_digest_of,
    weights_digest,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ttrain.export.gguf_export import Scored

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)

CARD = "README.md"
MODELFILE = "Modelfile"
# What an export writes, and so the only files that --force replaces.
WRITTEN = re.compile(
    "|".join(
        (
            *map(
                re.escape,
                (
                    *TOKENIZER_FILES,
                    CARD,
                    MODELFILE,
                    "config.json",
                    "generation_config.json",
                    ADAPTER_CONFIG,
                    BASE,
                ),
            ),
            r".+\.safetensors(\.index\.json)?",
            r".+\.gguf",
            r"(modeling|configuration)_\w+\.py",
        )
    )
)

LICENCE = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9.+-]*"
)  # what the Hub knows licences by, and what YAML takes as one word

SHARD_SIZE = re.compile(
    r"(?!0+(\.0+)?[KMG])\d+(\.\d+)?[KMG]B", re.IGNORECASE
)  # as transformers takes it

SHOWN_LICENCES = 8
SCORED_BYTES = 32_768  # of held-out text, with which GGUF files are compared with the model


@dataclass(frozen=True)
class Request:
    """The options of an export."""

    dtype: str = "bf16"
    merge: bool = False
    shard_size: str = "5GB"
    keep_head: bool = False  # of a model trained to predict two tokens
    licence: str | None = None
    gguf: str | None = None  # types of GGUF files, such as "f16,q8_0"
    force: bool = False


@dataclass(frozen=True)
class Export:
    """What was written: `files` maps each file to its bytes; `remarks` are for the user.

    `scores` are those of the GGUF files.
    """

    directory: Path
    kind: str  # "model" or "adapter"
    dtype: str
    parameters: int
    files: dict[str, int]
    remarks: tuple[str, ...]
    scores: tuple[Scored, ...] = ()


def export(
    reference: Reference,
    target: Path,
    request: Request,
    *,
    say: Callable[[str], object] = lambda text: None,
) -> Export:
    """Write the model of `reference` into the directory `target`; `say` gets a line for each step.

    Raises UsageError for an unusable target or option, ArtifactError for weights that do not fit.
    """
    # A target stays as it is until the export is complete.
    target = user_path(target).resolve()
    _check_request(reference, request)
    _check_target(reference, target, request)
    reference.verify()
    target.parent.mkdir(parents=True, exist_ok=True)
    work = temporary_path(target)
    try:
        work.mkdir()
        exported, remarks, scores = _fill(reference, work, request, target.name, say)
        for path in work.iterdir():
            path.chmod(0o644)  # libraries leave some files readable by their owner only
            fsync(path)
        sizes = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
        remove_tree(target)
        work.rename(target)
        fsync(target.parent)
    finally:
        remove_tree(work)
    return Export(
        target,
        exported.files,
        exported.dtype,
        exported.parameters,
        sizes,
        tuple(remarks),
        tuple(scores),
    )


def _check_request(reference: Reference, request: Request) -> None:
    if not SHARD_SIZE.fullmatch(request.shard_size):
        raise UsageError(
            f"--shard-size is '{request.shard_size}' but must be a number with KB, MB or GB, "
            "for example 5GB"
        )
    if request.licence is not None and not LICENCE.fullmatch(request.licence):
        raise UsageError(
            f"--license is '{request.licence}' but must be one word that names it, for example mit"
        )
    if request.gguf is not None:
        from ttrain.export import gguf_adapter, gguf_file  # 0.4 s, which other exports need not

        types = gguf_file.check_types(request.gguf)
        if reference.adapter and not request.merge:
            gguf_adapter.check(reference.adapter, types)
        gguf_file.check_kind(read_object(reference.model / "config.json").get("model_type"))
        if not (reference.tokenizer / "tokenizer.json").is_file():
            raise UsageError(
                f"--gguf is given, but {reference.tokenizer} holds no tokenizer.json, without "
                "which such a file cannot be used; leave --gguf out"
            )
    if request.keep_head and not (
        reference.second_head and (request.merge or not reference.adapter)
    ):
        raise UsageError(
            f"--keep-head is given, but no model with {SECOND_HEAD} is written; "
            "leave --keep-head out"
        )
    if request.merge and reference.adapter is None:
        raise UsageError(
            f"--merge is given, but '{reference.text}' is a full model, not an adapter; "
            "leave --merge out"
        )


def _check_target(reference: Reference, target: Path, request: Request) -> None:
    for source in {
        reference.model.resolve(),
        reference.directory.resolve(),
        (home() / "store").resolve(),
    }:
        if target == source or source in target.parents:
            raise UsageError(
                f"--to is {target}, which lies in {source}; choose a directory of its own"
            )
    if target.is_file():
        raise UsageError(f"--to is {target}, which is a file; choose a directory")
    names = (
        sorted(path.name + "/" * path.is_dir() for path in target.iterdir())
        if target.is_dir()
        else []
    )
    if names and not request.force:
        raise UsageError(
            f"--to is {target}, which is not empty; choose another directory, "
            "or replace it with --force"
        )
    if names and {"config.json", ADAPTER_CONFIG}.isdisjoint(names):
        raise UsageError(
            f"--to is {target}, which is not empty and holds no model; --force replaces models only"
        )
    if others := [name for name in names if not WRITTEN.fullmatch(name)]:
        raise UsageError(
            f"--to is {target}, which holds more than a model: {first_of(others, 3)}; "
            "--force replaces what an "
            f"export writes and nothing else: move the rest away, or choose another directory"
        )


def _fill(
    reference: Reference, work: Path, request: Request, name: str, say: Callable[[str], object]
) -> tuple[Exported, list[str], list[Scored]]:
    # Write everything into `work`; returns what the card describes, the remarks, GGUF's scores.
    from ttrain.model import adapters, factory

    remarks: list[str] = []
    config = read_object(reference.model / "config.json")
    auto_map = config.get("auto_map")
    adapter = None if request.merge else reference.adapter  # which is written alone
    if adapter:
        say(f"writing the adapter in {request.dtype}")
        parameters = write_tensors(adapter / ADAPTER, work / ADAPTER, dtype=request.dtype)
        _copy(adapter, work, (ADAPTER_CONFIG, BASE))
        remarks.append(
            f"an adapter alone; its base is {reference.model}. For PEFT, export that as well: "
            "ttrain export "
            f"{reference.model} --to …; for ttrain elsewhere, copy it as it is: "
            "an export has other bytes"
        )
    else:
        say(f"loading {reference.directory}")
        model = factory.load(reference.model)  # raises ArtifactError for weights that do not fit
        if reference.adapter:
            model = adapters.merge(
                adapters.load(model, reference.adapter, weights_digest(reference.model))
            )
        say(f"writing {request.dtype}")
        parameters = write(model, work, dtype=request.dtype, shard_size=request.shard_size)
        # A second head only on request: some programs load every safetensors file they see.
        head = reference.second_head
        if head and request.keep_head:
            write_tensors(head, work / SECOND_HEAD, dtype=request.dtype)
        elif head:
            remarks.append("its second head is left out; --keep-head writes it beside the model")
        if auto_map:  # the Python files of the architecture, which these fields name
            _copy(reference.model, work, tuple(path.name for path in reference.model.glob("*.py")))
            written = {**read_object(work / "config.json"), "auto_map": auto_map}
            text = json.dumps(written, indent=2) + "\n"
            (work / "config.json").write_text(text, encoding="utf-8")
    if not _copy(reference.tokenizer, work, TOKENIZER_FILES):
        remarks.append(f"no tokenizer: {reference.tokenizer} holds none")
    scores = (
        _write_gguf(reference, None if adapter else model, work / name, request, say)
        if request.gguf
        else []
    )
    history = History.of(reference.artifact, ArtifactStore(home()))
    exported = Exported(
        name=name,
        files="adapter" if adapter else "model",
        dtype=request.dtype,
        parameters=parameters,
        config=config,
        merged=request.merge,
        base_digest=base_digest_of(adapter) if adapter else None,
        licence=request.licence,
        has_code=adapter is None and bool(auto_map),
        scores=tuple(scored.row() for scored in scores),
        row_licences=_row_licences(history),
    )
    (work / CARD).write_text(card(exported, history), encoding="utf-8")
    return exported, remarks, scores


def _row_licences(history: History) -> dict[str, str]:
    # The training rows were drawn from the same files, and are not stored as text.
    from ttrain.tasks.shards import heldout_records

    licences = {}
    for artifact in history.artifacts:
        if not artifact.stage.startswith("shards-") or not (artifact.path / "heldout").is_dir():
            continue
        counts = Counter(record.get("license") for record in heldout_records(artifact.path))
        named = [(licence, number) for licence, number in counts.most_common() if licence]
        if named:
            parts = [f"{licence} ({number / counts.total():.0%})" for licence, number in named]
            licences[artifact.key] = first_of(parts, SHOWN_LICENCES)
    return licences


def _write_gguf(
    reference: Reference,
    model: PreTrainedModel | None,
    stem: Path,
    request: Request,
    say: Callable[[str], object],
) -> list[Scored]:
    # Write STEM-TYPE.gguf of each type, scored, and the Modelfile of the first one. `model`: the
    # one that is exported; None: the files hold the adapter.
    from ttrain.export import gguf_export, gguf_file
    from ttrain.inference import loading
    from ttrain.model import factory
    from ttrain.tasks.shards import heldout_records, scored_documents

    if model is None:
        loaded = loading.load(reference, device="cpu")
    else:
        loaded = loading.with_tokenizer(reference.text, model, reference.tokenizer)
    shards = heldout_shards(reference.artifact, ArtifactStore(home())).get(BITS_PER_BYTE.records)
    documents = scored_documents(heldout_records(shards.path), SCORED_BYTES) if shards else []
    texts = [str(document["text"]) for document in documents]
    types = gguf_file.check_types(request.gguf or "")
    files = [stem.with_name(f"{stem.name}-{kind}.gguf") for kind in types]
    with temporary_directory("gguf") as whole:
        write(
            model or factory.load(reference.model),
            whole,
            dtype="fp32",
            shard_size=request.shard_size,
        )
        _copy(reference.tokenizer, whole, TOKENIZER_FILES)
        scores = gguf_export.write_checked(
            loaded, whole, files, texts, say, reference.adapter if model is None else None
        )
        if model is not None:
            render = ollama.renderer(whole) if loaded.can_chat else None
            text = ollama.modelfile(files[0].name, loaded, render)
            stem.with_name(MODELFILE).write_text(text, encoding="utf-8")
    return scores


def _copy(source: Path, work: Path, names: tuple[str, ...]) -> list[str]:
    # Copy those of the files that exist; returns their names.
    return [
        shutil.copyfile(source / name, work / name).name
        for name in names
        if (source / name).is_file()
    ]
