"""The `ttrain models` commands: list registered sets of models and choose the champion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ttrain.cli.options import AsJson, check_output_file, command_group
from ttrain.core.terminal import escaped, print_escaped, print_json, table
from ttrain.core.text import format_number, format_time
from ttrain.errors import UsageError
from ttrain.store.layout import home

if TYPE_CHECKING:
    from ttrain.tracking import Member, ModelSet

models_app = command_group(
    help="List the registered sets of models (tokenizer, base, SFT and LoRA of one run) and choose the champion; show what "
    "models cost; import one.",
    epilog="Example:  ttrain models list",
)

Name = Annotated[str | None, Option(help="the pipeline's name (setting `name`), if there are several")]


@models_app.command("list", epilog="Examples:  ttrain models list\n\nttrain models list --metric chat_loss_sft --json")
def models_list(
    name: Name = None,
    metric: Annotated[str | None, Option(help="the evaluation metric to show; default: bits_per_byte")] = None,
    as_json: AsJson = False,
) -> None:
    """List the sets, the newest first: aliases, metric, run, and the promotion decision."""
    from ttrain import tracking
    from ttrain.config.training import BITS_PER_BYTE

    metric = metric or BITS_PER_BYTE.name
    model_sets = tracking.list_sets(home(), name)
    if as_json:
        print_json([model_set.to_json() for model_set in model_sets])
        return
    if not model_sets:
        qualifier = f" named {name}" if name else ""
        print_escaped(f"no sets of models{qualifier} are registered yet; `ttrain pipeline run full` registers one")
        return
    table(
        ("set", "aliases", metric, "models", "run", "registered", "decision"),
        [_row(model_set, metric) for model_set in model_sets],
    )
    metric_names = sorted({figure for model_set in model_sets for figure in model_set.metrics})
    if metric_names and metric not in metric_names:
        print_escaped(f"no evaluation has '{metric}'; --metric can be {', '.join(metric_names)}")
    if not any(tracking.CHAMPION in model_set.aliases for model_set in model_sets):
        newest = model_sets[0]
        print_escaped(f"there is no champion; to choose one: ttrain models promote {newest.version} --name {newest.name}")


@models_app.command("history", epilog="Examples:  ttrain models history\n\nttrain models history --html nights.html")
def models_history(
    name: Name = None,
    nights: Annotated[int, Option(min=1, max=1000, help="how many, the newest first")] = 30,
    page: Annotated[
        Path | None, Option("--html", help="write a page to this file", metavar="FILE", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the last nights: what each learnt and lost, whether its models were promoted, and why."""
    from ttrain.nightly import history, history_page

    if page:
        check_output_file(page)
    pipeline, listed = history.history(home(), name, nights)
    if page:
        page.write_text(history_page.render(pipeline, listed), encoding="utf-8")
    if as_json:
        print_json({
            "name": pipeline, "page": str(page) if page else None, "nights": [night.to_json() for night in listed],
        })  # fmt: skip
        return
    table(history.HEADER, [history.row(night) for night in listed])
    print(escaped(history.summary_line(listed) + (f"; written to {page}" if page else "")))


@models_app.command(
    "promote", epilog="Examples:  ttrain models promote 3\n\nttrain models promote full-20261121-160222-1a2b"
)
def models_promote(
    which: Annotated[str, Argument(metavar="VERSION|RUN", help="a set's version, or the run that made its models")],
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Make a set the champion, regardless of its figures: nights continue from it and compare with it."""
    from ttrain import tracking

    root = home()
    chosen = _find_set(root, tracking.list_sets(root, name), which, name)
    already = tracking.CHAMPION in chosen.aliases
    promoted = tracking.Champions(root).promote(chosen.name, chosen.version)
    _print(promoted, "is already champion" if already else "is champion", as_json)


@models_app.command("rollback", epilog="Example:  ttrain models rollback")
def models_rollback(name: Name = None, as_json: AsJson = False) -> None:
    """Make the previous champion the champion again; each further call goes one back."""
    from ttrain import tracking

    root = home()
    model_sets = tracking.list_sets(root, name)
    _print(tracking.Champions(root).rollback(_only_name(model_sets, name)), "is champion again", as_json)


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


def _members(model_set: ModelSet) -> list[Member]:
    from ttrain.config.training import MODEL_STAGES

    return [model_set.members[stage] for stage in ("tokenizer", *MODEL_STAGES) if stage in model_set.members]


def _only_name(model_sets: Sequence[ModelSet], name: str | None) -> str:
    names = sorted({model_set.name for model_set in model_sets})
    if len(names) == 1:
        return names[0]
    if not names:
        problem = f"no sets of models named {name} are" if name else "no sets of models are"
        raise UsageError(f"{problem} registered; `ttrain pipeline run full` registers one, `ttrain models list` shows them")
    raise UsageError(f"there are sets of {', '.join(names)}; choose one with --name, for example --name {names[0]}")


def _find_set(root: Path, model_sets: Sequence[ModelSet], which: str, name: str | None) -> ModelSet:
    """Find the set of this version, or of this run, whose name may be shortened; a run whose models were all
    cached shares the set of the run that made them."""
    from ttrain.store import references, runs

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
    raise references.unknown("registered set of the run", which, names, also="; `ttrain models list` shows them")


def _print(model_set: ModelSet, status: str, as_json: bool) -> None:
    if as_json:
        print_json(model_set.to_json())
        return
    models = ", ".join(f"{member.name}/{member.version}" for member in _members(model_set))
    print_escaped(f"{model_set.name}/{model_set.version} of the run {model_set.run} {status}: {models}")
