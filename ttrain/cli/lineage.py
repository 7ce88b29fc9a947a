"""The `ttrain lineage` and `ttrain reproduce` commands: a model's inputs, and whether it can be rebuilt."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option, Typer

from ttrain.cli.options import AsJson
from ttrain.core.terminal import console, outlast_output, print_escaped, print_json
from ttrain.core.text import format_time, short_digest
from ttrain.store.layout import home

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ttrain.pipeline.lineage import Lineage, LineageData, Link
    from ttrain.pipeline.reproduce import Reproduction

LINEAGE_EPILOG = (
    "Examples:  ttrain lineage quickstart@challenger\n\nttrain lineage quickstart-sft/3 --json\n\n"
    "ttrain lineage full-20261121-160222-1a2b:sft\n\nttrain lineage sft\n\nttrain lineage 3f1c0a9b"
)
REPRODUCE_EPILOG = (
    "Examples:  ttrain reproduce quickstart@challenger\n\nttrain reproduce quickstart-sft/3 --home again\n\n"
    "ttrain reproduce full-20261121-160222-1a2b:pretrain --json"
)
INDENT = 18

ModelVersion = Annotated[
    str,
    Argument(
        metavar="VERSION",
        help="a registered model (NAME/VERSION, NAME@ALIAS; a set or one model), a run, RUN:STAGE, a stage, the "
        "beginning of an artifact's key, or its directory",
    ),
]


def add_lineage(app: Typer, panel: str) -> None:
    """Add the commands to the app."""
    app.command("lineage", rich_help_panel=panel, epilog=LINEAGE_EPILOG)(lineage)
    app.command("reproduce", rich_help_panel=panel, epilog=REPRODUCE_EPILOG)(reproduce)


def lineage(version: ModelVersion, as_json: AsJson = False) -> None:
    """Print what a model was made of: data, tokenizer, shards, base, SFT and LoRA, with keys, code, seed and settings.

    It is read from the store, or from MLflow if the store is gone.
    """
    from ttrain.pipeline.lineage import lineage_of

    model_lineage = lineage_of(home(), version)
    if as_json:
        print_json(model_lineage.to_json())
        return
    for line in _lineage_lines(model_lineage):
        print_escaped(line)


def reproduce(
    version: ModelVersion,
    to: Annotated[
        Path | None,
        Option("--home", metavar="DIR", help="build in this new or empty directory, and keep it"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild a model from its raw data in a separate home, and compare every stage with its record.

    Settings, seed, threads, ranks, micro-batches and kernels are those of the record. Exit code 0 where all bytes are the
    same, 1 where a stage differs, or where the raw data are gone or changed.
    """

    from ttrain.pipeline import reproduce as making
    from ttrain.pipeline.lineage import lineage_of
    from ttrain.pipeline.progress_display import Display
    from ttrain.pipeline.reproduce import recipes_of

    outlast_output()
    model_lineage = lineage_of(home(), version)
    recipes = recipes_of(model_lineage, home())
    with making.home_for(to, model_lineage.target.name) as build_home, closing(Display(console(stderr=as_json))) as display:
        result = making.reproduce(model_lineage, recipes, build_home, display)
    if as_json:
        print_json(result.to_json())
    else:
        for line in _result_lines(result, is_kept=to is not None):
            print_escaped(line)
    if not result.is_equal:
        raise Exit(1)


def _result_lines(result: Reproduction, *, is_kept: bool) -> Iterator[str]:
    """Yield the differences with their reasons, then the verdict."""
    for stage in result.stages:
        if stage.differences:
            yield f"{stage.stage}: not as it was: {'; '.join(stage.differences)}"
        if not stage.is_equal:
            contents = f"{short_digest(stage.content)} was recorded, {short_digest(stage.rebuilt_content)} came out"
            yield f"{stage.stage}: {', '.join(stage.files) or 'a file'} differs: content {contents}"
    if result.not_rebuilt:
        yield f"not rebuilt, because their inputs differ: {', '.join(result.not_rebuilt)}"
    location = f"; it is in {result.home}" if is_kept else ""
    count, name = len(result.stages), result.lineage.target.name
    if result.is_equal:
        yield f"the same: all {count} stages of {name} gave the recorded bytes{location}"
    else:
        yield f"DIFFERENT: {result.stages[-1].stage} of {name} did not give the recorded bytes{location}"


def _lineage_lines(model_lineage: Lineage) -> Iterator[str]:
    kinds = {"set": "a set of models", "model": "a registered model", "key": "an artifact", "stage": "the newest artifact"}
    kind_label = kinds.get(model_lineage.target.kind, "a run")
    yield f"{model_lineage.target.name}: {kind_label}" + (
        f", of the run {model_lineage.target.run}" if model_lineage.target.run else ""
    )
    for note in model_lineage.notes:
        yield f"note: {note}"
    versions = {_versions(link) for link in model_lineage.links if link.libraries}
    for link in model_lineage.links:
        yield ""
        libraries = f"with {_versions(link)}" if len(versions) > 1 and link.libraries else ""
        for number, line in enumerate((*_link_lines(link), *([libraries] if libraries else []))):
            yield f"{link.stage if number == 0 else '':<{INDENT}}{line}".rstrip()
    if len(versions) == 1:
        yield ""
        yield f"all with {versions.pop()}"


def _link_lines(link: Link) -> Iterator[str]:
    origin = f"made {format_time(link.made_unix)}" if link.made_unix else "made at an unrecorded time"
    yield f"key {short_digest(link.key)}   {origin}" + (f" by {link.run}" if link.run else "")
    facts = [
        f"content {short_digest(link.content)}" if link.content else "",
        f"code {short_digest(link.code)}" if link.code else "",
    ]
    facts += [f"commit {_commit(link.commit)}" if link.commit else "", "" if link.seed is None else f"seed {link.seed}"]
    yield ", ".join(fact for fact in facts if fact)
    for data in link.data:
        yield f"read {_data_line(data)}"
    if link.inputs:
        yield "from " + ", ".join(f"{name} {short_digest(key)}" for name, (_, key) in sorted(link.inputs.items()))
    if link.settings:
        yield "settings " + " ".join(
            f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in link.settings.items()
        )
    if trained := _training_facts(link):
        yield f"trained {trained}"
    if link.chosen:
        yield f"chosen {link.chosen}"
    for note in link.notes:
        yield f"note: {note}"


def _training_facts(link: Link) -> str:
    """Precision, device, ranks and threads of a training stage: the order of its sums depends on them."""
    result = link.manifest.get("result", {})
    if "ranks" not in result:
        return ""
    runtime = link.provenance.get("runtime", {})
    facts = [f"in {result.get('precision')} on {result.get('device')}", f"ranks {result['ranks']}"]
    facts += [f"threads {result['threads']}"] if "threads" in result else []
    facts += [f"{name} {runtime[name]}" for name in ("rows_per_device", "compile", "reduction") if name in runtime]
    return ", ".join(facts)


def _data_line(data: LineageData) -> str:
    counts = ((data.documents, "records"), (data.tokens, "tokens"), (data.bytes, "bytes of text"))
    amounts = ", ".join(f"{count:,} {unit}" for count, unit in counts if count is not None)
    location = f" at {data.location}" if data.location else ""
    return f"{data.part} {data.name} sha256 {short_digest(data.sha256)}" + (f" ({amounts})" if amounts else "") + location


def _versions(link: Link) -> str:
    """Versions of the libraries in use, including ttrain and Python."""
    return ", ".join(f"{name} {version}" for name, version in link.libraries.items())


def _commit(text: str) -> str:
    """The shortened commit, and whether there were uncommitted changes."""
    commit, plus, changes = text.partition("+")
    return short_digest(commit) + plus + changes
