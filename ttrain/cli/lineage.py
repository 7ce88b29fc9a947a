"""`ttrain lineage` and `ttrain reproduce`: what a model was made of, and whether it can be made again."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttrain.cli.options import AsJson
from ttrain.core.terminal import console, escaped, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ttrain.pipeline.lineage import Lineage
    from ttrain.pipeline.lineage_links import Data, Link
    from ttrain.pipeline.reproduce import Reproduction

LINEAGE_EPILOG = (
    "Examples:  ttrain lineage quickstart@challenger\n\nttrain lineage quickstart-sft/3 --json\n\n"
    "ttrain lineage full-20261121-160222-1a2b:sft\n\nttrain lineage sft\n\nttrain lineage 3f1c0a9b"
)
REPRODUCE_EPILOG = (
    "Examples:  ttrain reproduce quickstart@challenger\n\nttrain reproduce quickstart-sft/3 --home again\n\n"
    "ttrain reproduce full-20261121-160222-1a2b:pretrain --json"
)
SHORT = 12  # letters of a digest that are shown
INDENT = 17

Asked = Annotated[
    str,
    typer.Argument(
        metavar="VERSION",
        help="a registered model (NAME/VERSION, NAME@ALIAS; a set or one model), a run, RUN:STAGE, a stage, the "
        "beginning of an artifact's key, or its directory",
    ),
]


def add_lineage(app: typer.Typer) -> None:
    """Give the command line these commands."""
    app.command("lineage", epilog=LINEAGE_EPILOG)(lineage)
    app.command("reproduce", epilog=REPRODUCE_EPILOG)(reproduce)


def lineage(version: Asked, as_json: AsJson = False) -> None:
    """Print what a model was made of: data, tokenizer, shards, base, SFT and LoRA, with keys, code, seed and settings.

    It is read from the store, or from MLflow alone where the store is gone.
    """
    from ttrain.pipeline.lineage import lineage_of
    from ttrain.store.layout import home

    found = lineage_of(home(), version)
    if as_json:
        print_json(found.to_json())
        return
    for line in _lines(found):
        print(escaped(line))


def reproduce(
    version: Asked,
    to: Annotated[
        Path | None,
        typer.Option("--home", metavar="DIR", help="build in this new or empty directory, and keep it", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a model again from its raw data, in a home of its own, and compare every stage with what was recorded.

    Settings, seed, threads, ranks, micro-batches and kernels are those of the record. Exit code 0 where all bytes are the
    same, 1 where a stage differs, or where the raw data are gone or changed.
    """
    from contextlib import closing

    from ttrain.core.standard_streams import outlast_output
    from ttrain.pipeline import reproduce as making
    from ttrain.pipeline.lineage import lineage_of
    from ttrain.pipeline.progress_display import Display
    from ttrain.pipeline.reproduce_recipes import recipes_of
    from ttrain.store.layout import home

    outlast_output()
    found = lineage_of(home(), version)
    recipes = recipes_of(found, home())
    with making.home_for(to, found.named.name) as place, closing(Display(console(stderr=as_json))) as display:
        result = making.reproduce(found, recipes, place, display)
    if as_json:
        print_json(result.to_json())
    else:
        for line in _told(result, kept=to is not None):
            print(escaped(line))
    if not result.is_equal:
        raise typer.Exit(1)


def _told(result: Reproduction, *, kept: bool) -> Iterator[str]:
    """What differs and why, then the answer."""
    for stage in result.stages:
        if stage.differences:
            yield f"{stage.stage}: not as it was: {'; '.join(stage.differences)}"
        if not stage.is_equal:
            contents = f"{stage.content[:SHORT]} was recorded, {stage.rebuilt_content[:SHORT]} came out"
            yield f"{stage.stage}: {', '.join(stage.files) or 'a file'} differs: content {contents}"
    if result.left:
        yield f"not made, since they read what differs: {', '.join(result.left)}"
    where = f"; it is in {result.home}" if kept else ""
    count, name = len(result.stages), result.lineage.named.name
    if result.is_equal:
        yield f"the same: all {count} stages of {name} gave the recorded bytes{where}"
    else:
        yield f"DIFFERENT: {result.stages[-1].stage} of {name} did not give the recorded bytes{where}"


def _lines(found: Lineage) -> Iterator[str]:
    kinds = {"set": "a set of models", "model": "a registered model", "key": "an artifact", "stage": "the newest artifact"}
    what = kinds.get(found.named.kind, "a run")
    yield f"{found.named.name}: {what}" + (f", of the run {found.named.run}" if found.named.run else "")
    for note in found.notes:
        yield f"note: {note}"
    versions = {_versions(link) for link in found.links if link.libraries}
    for link in found.links:
        yield ""
        own = f"with {_versions(link)}" if len(versions) > 1 and link.libraries else ""
        for number, line in enumerate((*_of_link(link), *([own] if own else []))):
            yield f"{link.stage if number == 0 else '':<{INDENT}}{line}".rstrip()
    if len(versions) == 1:
        yield ""
        yield f"all with {versions.pop()}"


def _of_link(link: Link) -> Iterator[str]:
    made = f"made {_date(link.made)}" if link.made else "made at a time that is not on record"
    yield f"key {link.key[:SHORT]}   {made}" + (f" by {link.run}" if link.run else "")
    facts = [f"content {link.content[:SHORT]}" if link.content else "", f"code {link.code[:SHORT]}" if link.code else ""]
    facts += [f"commit {_commit(link.commit)}" if link.commit else "", "" if link.seed is None else f"seed {link.seed}"]
    yield ", ".join(fact for fact in facts if fact)
    for data in link.data:
        yield f"read {_of_data(data)}"
    if link.inputs:
        yield "from " + ", ".join(f"{name} {key[:SHORT]}" for name, (_, key) in sorted(link.inputs.items()))
    if link.settings:
        yield "settings " + " ".join(f"{name}={_value(value)}" for name, value in link.settings.items())
    if trained := _trained(link):
        yield f"trained {trained}"
    for note in link.notes:
        yield f"note: {note}"


def _trained(link: Link) -> str:
    """Where and how, of a stage that trains: what the order of its sums depends on."""
    result = link.manifest.get("result", {})
    if "ranks" not in result:
        return ""
    runtime = link.manifest.get("provenance", {}).get("runtime", {})
    facts = [f"in {result.get('precision')} on {result.get('device')}", f"ranks {result['ranks']}"]
    facts += [f"threads {result['threads']}"] if "threads" in result else []
    facts += [f"{name} {runtime[name]}" for name in ("rows_per_device", "compile", "reduction") if name in runtime]
    return ", ".join(facts)


def _of_data(data: Data) -> str:
    counts = ((data.documents, "records"), (data.tokens, "tokens"), (data.bytes, "bytes of text"))
    told = ", ".join(f"{count:,} {what}" for count, what in counts if count is not None)
    where = f" at {data.location}" if data.location else ""
    return f"{data.part} {data.name} sha256 {data.sha256[:SHORT]}" + (f" ({told})" if told else "") + where


def _versions(link: Link) -> str:
    """Of the libraries that computed, ttrain and Python among them."""
    return ", ".join(f"{name} {version}" for name, version in link.libraries.items())


def _commit(text: str) -> str:
    """The first letters, and whether there were changes."""
    commit, plus, changes = text.partition("+")
    return commit[:SHORT] + plus + changes


def _value(value: object) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
