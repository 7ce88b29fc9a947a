"""`ttrain models`: which runs' models are registered as sets, and which set is champion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttrain.cli.options import AsJson
from ttrain.core.terminal import escaped, print_json, table

if TYPE_CHECKING:
    from ttrain.tracking import Member, ModelSet

models_app = typer.Typer(
    no_args_is_help=True,
    help="List the registered sets of models (tokenizer, base, SFT and LoRA of one run) and choose the champion.",
    epilog="Example:  ttrain models list",
)

Name = Annotated[str | None, typer.Option("--name", help="of the pipeline (setting `name`), where there are several")]


@models_app.command("list", epilog="Examples:  ttrain models list\n\nttrain models list --metric chat_loss_sft --json")
def models_list(
    name: Name = None,
    metric: Annotated[str, typer.Option(help="of the evaluation, to show")] = "bits_per_byte",
    as_json: AsJson = False,
) -> None:
    """List the sets, the newest first: aliases, figure, run, and what was decided about them."""
    from ttrain import tracking
    from ttrain.store.layout import home

    found = tracking.list_sets(home(), name)
    if as_json:
        print_json([one.to_json() for one in found])
        return
    if not found:
        named = f" named {name}" if name else ""
        print(escaped(f"no sets of models{named} are registered yet; `ttrain pipeline run full` registers one"))
        return
    table(("set", "is", metric, "models", "run", "registered", "decision"), [_row(one, metric) for one in found])
    there = sorted({figure for one in found for figure in one.metrics})
    if there and metric not in there:
        print(escaped(f"no evaluation has '{metric}'; --metric can be {', '.join(there)}"))
    if not any(tracking.CHAMPION in one.aliases for one in found):
        newest = found[0]
        print(escaped(f"there is no champion; to choose one: ttrain models promote {newest.version} --name {newest.name}"))


@models_app.command(
    "promote", epilog="Examples:  ttrain models promote 3\n\nttrain models promote full-20261121-160222-1a2b"
)
def models_promote(
    which: Annotated[str, typer.Argument(metavar="VERSION|RUN", help="a set's version, or the run that made its models")],
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Make a set the champion, whatever the figures say: nights continue from it and compare with it."""
    from ttrain import tracking
    from ttrain.store.layout import home

    root = home()
    chosen = _chosen(root, tracking.list_sets(root, name), which, name)
    already = tracking.CHAMPION in chosen.aliases
    _print(tracking.promote(root, chosen.name, chosen.version), "is champion already" if already else "is champion", as_json)


@models_app.command("rollback", epilog="Example:  ttrain models rollback")
def models_rollback(name: Name = None, as_json: AsJson = False) -> None:
    """Make the champion before this one champion again; once more goes further back."""
    from ttrain import tracking
    from ttrain.store.layout import home

    root = home()
    found = tracking.list_sets(root, name)
    _print(tracking.rollback(root, _only_name(found, name)), "is champion again", as_json)


def _row(one: ModelSet, metric: str) -> tuple[str, ...]:
    from datetime import datetime

    value = one.metrics.get(metric)
    decision = one.decision or {}
    word = {True: "promoted: ", False: "kept: "}.get(decision.get("promote", ""), "")
    models = ", ".join(f"{member.name.removeprefix(f'{one.name}-')} {member.version}" for member in _members(one))
    return (
        f"{one.name}/{one.version}",
        ", ".join(one.aliases),
        "" if value is None else f"{value:.4f}",
        models,
        one.run,
        f"{datetime.fromtimestamp(one.created).astimezone():%Y-%m-%d %H:%M}",
        f"{word}{decision.get('reason', '')}",
    )


def _members(one: ModelSet) -> list[Member]:
    order = ("tokenizer", "pretrain", "sft", "lora")
    return [one.members[stage] for stage in order if stage in one.members]


def _only_name(found: Sequence[ModelSet], name: str | None) -> str:
    from ttrain.errors import UsageError

    names = sorted({one.name for one in found})
    if len(names) == 1:
        return names[0]
    if not names:
        what = f"no sets of models named {name} are" if name else "no sets of models are"
        raise UsageError(f"{what} registered; `ttrain pipeline run full` registers one, `ttrain models list` shows them")
    raise UsageError(f"there are sets of {', '.join(names)}; say which with --name, for example --name {names[0]}")


def _chosen(root: Path, found: Sequence[ModelSet], which: str, name: str | None) -> ModelSet:
    """The set of this version, or with the models of this run, whose name may be cut short; a run whose models
    were all there shares the set."""
    from ttrain.core.files import read_json
    from ttrain.errors import UsageError

    if which.isdigit():
        name = _only_name(found, name)
        same = [one for one in found if one.version == which]
        if not same:
            there = ", ".join(one.version for one in found)
            raise UsageError(f"{name} has no set {which}; it has {there}; `ttrain models list` shows them")
        return same[0]
    known = {one.run for one in found if which and (one.run.startswith(which) or one.run.endswith(which))}
    which = known.pop() if len(known) == 1 else which
    record = read_json(root / "runs" / f"{which}.json") if which and "/" not in which else None
    keys = {stage["name"]: stage.get("key") for stage in record["stages"]} if isinstance(record, dict) else {}
    for one in found:
        if one.run == which or (one.members and all(keys.get(name) == one.keys[name] for name in one.members)):
            return one
    runs = ", ".join(dict.fromkeys(one.run for one in found)) or "none"
    raise UsageError(f"no registered set has the models of a run '{which}'; there are sets of {runs}")


def _print(one: ModelSet, what: str, as_json: bool) -> None:
    if as_json:
        print_json(one.to_json())
        return
    models = ", ".join(f"{member.name}/{member.version}" for member in _members(one))
    print(escaped(f"{one.name}/{one.version} of the run {one.run} {what}: {models}"))
