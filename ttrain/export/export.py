"""Exports: a model or an adapter as a directory that other programs open. Loads torch when it is called."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ttrain.core.files import fsync, read_json, read_object, remove_tree
from ttrain.errors import UsageError
from ttrain.export import gguf
from ttrain.pipeline.lineage import History
from ttrain.pipeline.model_card import Exported, card
from ttrain.pipeline.names import ADAPTER_CONFIG, BASE, base_digest_of
from ttrain.store.artifacts import Store
from ttrain.store.layout import home
from ttrain.store.model_reference import Reference
from ttrain.store.runs import process_started
from ttrain.store.weights import ADAPTER, SECOND_HEAD

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
CARD = "README.md"
# What an export writes, and so the only files that --force replaces.
WRITTEN = re.compile(
    "|".join(
        (*map(re.escape, (*TOKENIZER_FILES, CARD, "config.json", "generation_config.json", ADAPTER_CONFIG, BASE)),
         r".+\.safetensors(\.index\.json)?", r".+\.gguf", r"(modeling|configuration)_\w+\.py")
    )
)  # fmt: skip
LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")  # what the Hub knows licences by, and what YAML takes as one word
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
SHOWN = 3  # names in a message
UNMERGEABLE = ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING")  # they add positions, not weights


@dataclass(frozen=True)
class Request:
    """How something is to be exported."""

    dtype: str = "bf16"
    merge: bool = False
    shard_size: str = "5GB"
    keep_head: bool = False  # of a model trained to predict two tokens
    licence: str | None = None
    gguf: Path | None = None  # the converter of llama.cpp
    force: bool = False


@dataclass(frozen=True)
class Export:
    """What was written: `files` maps each file to its bytes; `remarks` are for the user."""

    directory: Path
    kind: str  # "model" or "adapter"
    dtype: str
    parameters: int
    files: dict[str, int]
    remarks: tuple[str, ...]


def export(
    reference: Reference, target: Path, request: Request, *, say: Callable[[str], object] = lambda text: None
) -> Export:
    """Write what `reference` names into the directory `target`; `say` is told of each step.

    Raises UsageError for a target or a wish that cannot be met, ArtifactError for weights that do not fit their config. A
    target stays as it is until the export is whole.
    """
    target = target.expanduser().resolve()
    shard_bytes = size_of(request.shard_size)
    _check_request(reference, request)
    _check_target(reference, target, request)
    reference.verify()
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(target)
    work = target.with_name(f".{target.name}.writing-{os.getpid()}")
    work.mkdir()
    try:
        exported, remarks = _fill(reference, work, request, shard_bytes, target.name, say)
        if request.gguf:
            say("converting to GGUF")
            gguf.convert(work, gguf.converter(request.gguf), dtype=request.dtype, name=target.name)
        umask = os.umask(0)
        os.umask(umask)
        for path in _files(work):
            path.chmod(0o666 & ~umask)  # libraries leave some files readable by their owner only
            fsync(path)
        written = {path.relative_to(work).as_posix(): path.stat().st_size for path in _files(work)}
        fsync(work)
        _put(work, target)
    finally:
        remove_tree(work)
    return Export(target, exported.files, exported.dtype, exported.parameters, written, tuple(remarks))


def size_of(text: str) -> int:
    """Bytes of a size such as 500MB or 5GB. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)", text, re.IGNORECASE)
    size = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if not size:
        raise UsageError(f"--shard-size is '{text}' but must be a number with KB, MB or GB, for example 5GB")
    return size


def _check_request(reference: Reference, request: Request) -> None:
    if request.licence is not None and not LICENCE.fullmatch(request.licence):
        raise UsageError(f"--license is '{request.licence}' but must be one word that names it, for example mit")
    if request.gguf:
        gguf.converter(request.gguf)
        if reference.adapter and not request.merge:
            raise UsageError(f"--gguf is given, but '{reference.text}' is an adapter; make it part of its base with --merge")
    if request.merge and reference.adapter is None:
        raise UsageError(f"--merge is given, but '{reference.text}' is a full model and no adapter; leave --merge out")
    if request.merge and reference.adapter:
        kind = read_object(reference.adapter / ADAPTER_CONFIG).get("peft_type")
        if kind in UNMERGEABLE:
            raise UsageError(
                f"--merge is given, but '{reference.text}' is a prefix, which adds positions and no weights; "
                f"leave --merge out, and load it with PEFT"
            )


def _check_target(reference: Reference, target: Path, request: Request) -> None:
    for source in {reference.model.resolve(), reference.directory.resolve(), (home() / "store").resolve()}:
        if target == source or source in target.parents:
            raise UsageError(f"--to is {target}, which lies in {source}; choose a directory of its own")
    if target.exists() and not target.is_dir():
        raise UsageError(f"--to is {target}, which is a file; choose a directory")
    if target.is_dir() and any(target.iterdir()):
        if not request.force:
            raise UsageError(f"--to is {target}, which is not empty; choose another directory, or replace it with --force")
        if not any((target / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
            raise UsageError(f"--to is {target}, which is not empty and holds no model; --force replaces models only")
        others = sorted(one.name for one in target.iterdir() if one.is_dir() or not WRITTEN.fullmatch(one.name))
        if others:
            raise UsageError(
                f"--to is {target}, which holds more than a model: {', '.join(others[:SHOWN])}; --force replaces what an "
                f"export writes and nothing else: move the rest away, or choose another directory"
            )


def _fill(
    reference: Reference, work: Path, request: Request, shard_bytes: int, name: str, say: Callable[[str], object]
) -> tuple[Exported, list[str]]:
    """Everything into `work`; returns what the card tells, and the remarks."""
    from ttrain.model import export as exporting

    remarks: list[str] = []
    adapter_only = reference.adapter is not None and not request.merge
    if adapter_only and reference.adapter:
        say(f"writing the adapter in {request.dtype}")
        parameters = exporting.write_tensors(reference.adapter / ADAPTER, work / ADAPTER, dtype=request.dtype)
        _copy(reference.adapter, work, (ADAPTER_CONFIG, BASE))
        remarks.append(
            f"an adapter alone; its base is {reference.model}. For PEFT, export that as well: ttrain export "
            f"{reference.model} --to …; for ttrain elsewhere, copy it as it is: an export has other bytes"
        )
    else:
        say(f"loading {reference.directory}")
        model = exporting.load(reference.model, reference.adapter)
        say(f"writing {request.dtype}")
        parameters = exporting.write(model, work, dtype=request.dtype, shard_bytes=shard_bytes)
        remarks += _second_head(reference, work, request, exporting.write_tensors)
    has_code = not adapter_only and _copy_code(reference.model, work)
    if not _copy(reference.tokenizer, work, TOKENIZER_FILES):
        remarks.append(f"no tokenizer: {reference.tokenizer} holds none")
    exported = Exported(
        name=name,
        files="adapter" if adapter_only else "model",
        dtype=request.dtype,
        parameters=parameters,
        config=read_object(reference.model / "config.json"),
        merged=request.merge,
        base_digest=base_digest_of(reference.adapter) if adapter_only and reference.adapter else None,
        licence=request.licence,
        has_code=has_code,
    )
    text = card(exported, History.of(reference.artifact, Store(home())))
    (work / CARD).write_text(text, encoding="utf-8")
    return exported, remarks


def _second_head(reference: Reference, work: Path, request: Request, write: Callable[..., int]) -> Iterator[str]:
    """The head for the token after the next is left out, for some programs load every safetensors file they see."""
    head = reference.second_head
    if head is None:
        if request.keep_head:
            raise UsageError(f"--keep-head is given, but {reference.model} holds no {SECOND_HEAD}; leave --keep-head out")
        return
    if not request.keep_head:
        yield "its second head is left out; --keep-head writes it beside the model, for ttrain chat --speculative"
        return
    write(head, work / SECOND_HEAD, dtype=request.dtype)


def _copy(source: Path, work: Path, names: tuple[str, ...]) -> list[str]:
    """Copy those of the files that there are; returns their names."""
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, work / name)
    return found


def _copy_code(source: Path, work: Path) -> bool:
    """The Python files of an architecture that transformers does not have, and the fields of the config that name them."""
    auto_map = read_object(source / "config.json").get("auto_map")
    if not auto_map:
        return False
    _copy(source, work, tuple(path.name for path in sorted(source.glob("*.py"))))
    config = read_json(work / "config.json")
    (work / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}, indent=2) + "\n", encoding="utf-8")
    return True


def _files(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]


def _put(work: Path, target: Path) -> None:
    """Rename the finished directory into its place; what is there is moved away first, and removed last."""
    old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    if target.is_dir() and any(target.iterdir()):
        target.rename(old)
    work.rename(target)
    fsync(target.parent)
    remove_tree(old)


def _remove_left_over(target: Path) -> None:
    """What a killed export left beside the target."""
    for path in target.parent.glob(f".{target.name}.writing-*"):
        number = path.name.rpartition("-")[2]
        if number.isdecimal() and process_started(int(number)) is None:
            remove_tree(path)
