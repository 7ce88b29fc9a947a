"""Registered models: `ttrain models`; what one is made of, and whether that is repeatable: `ttrain lineage`, `reproduce`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit

from ttrain.cli.options import AsJson, app, argument, command, command_group, option, with_settings_file
from ttrain.core.terminal import console, escaped, outlast_output, print_escaped, print_json, table
from ttrain.core.text import format_number, format_time, short_digest
from ttrain.errors import UsageError
from ttrain.store import references, runs
from ttrain.store.layout import home

if TYPE_CHECKING:
    from ttrain.pipeline.lineage import Lineage, LineageData, Link
    from ttrain.pipeline.reproduce import Reproduction
    from ttrain.store.registry import ModelSet, Version

models_app = command_group(
    "models",
    "Models",
    help="List the registered sets of models (tokenizer, base, SFT and LoRA of one run) and choose the champion; show what "
    "models cost; import one.",
    epilog="Example:  ttrain models list",
)

Name = Annotated[str | None, option("the pipeline's name (setting `name`), if there are several")]


@command(models_app, "Examples:  ttrain models list\n\nttrain models list --metric chat_loss_sft --json")
def models_list(
    name: Name = None,
    metric: Annotated[str | None, option("the evaluation metric to show; default: bits_per_byte")] = None,
    as_json: AsJson = False,
) -> None:
    """List the sets, the newest first: aliases, metric, run, and the promotion decision."""
    from ttrain.config.training import BITS_PER_BYTE
    from ttrain.store.registry import CHAMPION
    from ttrain.tracking.registered import take_over_champions

    metric = metric or BITS_PER_BYTE.name
    model_sets = take_over_champions(home(), name).sets(name)
    if as_json:
        print_json([model_set.to_json() for model_set in model_sets])
        return
    if not model_sets:
        qualifier = f" named {name}" if name else ""
        hint = f"no sets of models{qualifier} are registered yet; `ttrain pipeline run full` registers one"
        print_escaped(with_settings_file(hint))
        return
    table(
        ("set", "aliases", metric, "models", "run", "registered", "decision"),
        [_row(model_set, metric) for model_set in model_sets],
    )
    metric_names = sorted({figure for model_set in model_sets for figure in model_set.metrics})
    if metric_names and metric not in metric_names:
        print_escaped(f"no evaluation has '{metric}'; --metric can be {', '.join(metric_names)}")
    if not any(CHAMPION in model_set.aliases for model_set in model_sets):
        newest = model_sets[0]
        print_escaped(f"there is no champion; to choose one: ttrain models promote {newest.version} --name {newest.name}")


@command(models_app, "Examples:  ttrain models history\n\nttrain models history --nights 5 --json")
def models_history(
    name: Name = None,
    nights: Annotated[int, option("how many, the newest first", min=1, max=1000)] = 30,
    as_json: AsJson = False,
) -> None:
    """List the last nights: what each learnt and lost, whether its models were promoted, and why."""
    from ttrain.nightly import history

    pipeline, listed = history.history(home(), name, nights)
    if as_json:
        print_json({"name": pipeline, "nights": listed})
        return
    table(history.HEADER, [history.row(night) for night in listed])
    print(escaped(history.summary_line(listed)))


@command(models_app, "Examples:  ttrain models promote 3\n\nttrain models promote full-20261121-160222-1a2b")
def models_promote(
    which: Annotated[str, argument("a set's version, or the run that made its models", metavar="VERSION|RUN")],
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Make a set the champion, regardless of its figures: nights continue from it and compare with it."""
    from ttrain.store.registry import CHAMPION
    from ttrain.tracking.registered import push_champion, take_over_champions

    root = home()
    registry = take_over_champions(root, name)
    chosen = _find_set(root, registry.sets(name), which, name)
    already = CHAMPION in chosen.aliases
    promoted = registry.promote(chosen.name, chosen.version)
    push_champion(root, chosen.name)
    _print(promoted, "is already champion" if already else "is champion", as_json)


@command(models_app, "Example:  ttrain models rollback")
def models_rollback(name: Name = None, as_json: AsJson = False) -> None:
    """Make the previous champion the champion again; each further call goes one back."""
    from ttrain.tracking.registered import push_champion, take_over_champions

    registry = take_over_champions(home(), name)
    champion = registry.rollback(_only_name(registry.sets(name), name))
    push_champion(home(), champion.name)
    _print(champion, "is champion again", as_json)


def _row(model_set: ModelSet, metric: str) -> tuple[str, ...]:
    value = model_set.metrics.get(metric)
    decision = model_set.decision or {}
    word = {True: "promoted: ", False: "kept: "}.get(decision.get("promote", ""), "")
    models = ", ".join(
        f"{member.name.removeprefix(f'{model_set.name}-')} {member.version}" for member in _members(model_set)
    )
    return (
        f"{model_set.name}/{model_set.version}",
        ", ".join(model_set.aliases),
        format_number(value),
        models,
        model_set.run,
        format_time(model_set.created),
        f"{word}{decision.get('reason', '')}",
    )


def _members(model_set: ModelSet) -> list[Version]:
    from ttrain.config.training import MODEL_STAGES

    return [model_set.members[stage] for stage in ("tokenizer", *MODEL_STAGES) if stage in model_set.members]


def _only_name(model_sets: Sequence[ModelSet], name: str | None) -> str:
    names = sorted({model_set.name for model_set in model_sets})
    if len(names) == 1:
        return names[0]
    if not names:
        named = f" named {name}" if name else ""
        raise UsageError(
            f"no sets of models{named} are registered; `ttrain pipeline run full` registers one, `ttrain models list` shows "
            f"them"
        )
    raise UsageError(f"there are sets of {', '.join(names)}; choose one with --name, for example --name {names[0]}")


def _find_set(root: Path, model_sets: Sequence[ModelSet], which: str, name: str | None) -> ModelSet:
    """Find the set of this version, or of this run, whose name may be shortened; a run whose models were all
    cached shares the set of the run that made them."""

    if which.isdigit():
        name = _only_name(model_sets, name)
        matches = [model_set for model_set in model_sets if model_set.version == which]
        if not matches:
            versions = [model_set.version for model_set in model_sets]
            raise references.unknown("set", which, versions, owner=name, also="; `ttrain models list` shows them")
        return matches[0]
    names = [model_set.run for model_set in model_sets]
    run = references.matching(which, [*dict.fromkeys([*names, *runs.names(root)])])
    record = runs.read(root, run) if run else None
    keys = runs.keys_of(record) if record else {}
    for model_set in model_sets:
        if model_set.run == run or (
            model_set.members and all(keys.get(name) == model_set.keys[name] for name in model_set.members)
        ):
            return model_set
    also = "; `ttrain models list` shows them" if names else ""
    raise references.unknown("registered set of the run", which, names, also=also)


def _print(model_set: ModelSet, status: str, as_json: bool) -> None:
    if as_json:
        print_json(model_set.to_json())
        return
    models = ", ".join(f"{member.name}/{member.version}" for member in _members(model_set))
    print_escaped(f"{model_set.name}/{model_set.version} of the run {model_set.run} {status}: {models}")


INDENT = 18

ModelVersion = Annotated[
    str,
    argument(
        "a registered model (NAME/VERSION, NAME@ALIAS; a set or one model), a run, RUN:STAGE, a stage, the "
        "beginning of an artifact's key, or its directory",
        metavar="REF",
    ),
]


@command(
    app,
    "Examples:  ttrain lineage quickstart@challenger\n\nttrain lineage quickstart-sft/3 --json\n\n"
    "ttrain lineage full-20261121-160222-1a2b:sft\n\nttrain lineage sft\n\nttrain lineage 3f1c0a9b",
    "Look",
)
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


@command(
    app,
    "Examples:  ttrain reproduce quickstart@challenger\n\nttrain reproduce quickstart-sft/3 --home again\n\n"
    "ttrain reproduce full-20261121-160222-1a2b:pretrain --json",
    "Look",
)
def reproduce(
    version: ModelVersion,
    to: Annotated[
        Path | None,
        option("build in this new or empty directory, and keep it", "--home", metavar="DIR"),
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
    commit, plus, changes = (link.commit or "").partition("+")  # and whether there were uncommitted changes
    facts += [f"commit {short_digest(commit)}{plus}{changes}" if commit else ""]
    facts += ["" if link.seed is None else f"seed {link.seed}"]
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
    settings = {name: runtime.get(name) for name in ("rows_per_device", "compile")}
    facts += [f"{name} {value}" for name, value in settings.items() if value is not None]
    return ", ".join(facts)


def _data_line(data: LineageData) -> str:
    counts = ((data.documents, "records"), (data.tokens, "tokens"), (data.bytes, "bytes of text"))
    amounts = ", ".join(f"{count:,} {unit}" for count, unit in counts if count is not None)
    location = f" at {data.location}" if data.location else ""
    return f"{data.part} {data.name} sha256 {short_digest(data.sha256)}" + (f" ({amounts})" if amounts else "") + location


def _versions(link: Link) -> str:
    """Versions of the libraries in use, including ttrain and Python."""
    return ", ".join(f"{name} {version}" for name, version in link.libraries.items())
