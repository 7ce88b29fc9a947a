"""The commands `ttrain models`, `ttrain lineage` and `ttrain reproduce`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ttrain.cli.options import AsJson, Output, Table, app, argument, command, command_group, option
from ttrain.core.files import JsonObject
from ttrain.core.terminal import console, outlast_output
from ttrain.core.text import format_number, format_time, short_digest
from ttrain.errors import UsageError
from ttrain.store.layout import home
from ttrain.store.results import TrainingResult

if TYPE_CHECKING:
    from ttrain.store.registry import ModelSet

models_app = command_group(
    "models",
    "Models",
    help="List the registered sets of models (tokenizer, base, SFT and LoRA of one run) and "
    "choose the champion; show what "
    "models cost.",
    epilog="Example:  ttrain models list",
)

Name = Annotated[str | None, option("the pipeline's name (setting `name`), if there are several")]
KINDS = {
    "set": "a set of models",
    "model": "a registered model",
    "key": "an artifact",
    "stage": "the newest artifact",
}
# Settings that the order of a training's sums depends on.
ORDER_OF_SUMS = ("rows_per_device", "compile")


@command(
    models_app, "Examples:  ttrain models list\n\nttrain models list --metric chat_loss_sft --json"
)
def models_list(
    name: Name = None,
    metric: Annotated[
        str | None, option("the evaluation metric to show; default: bits_per_byte")
    ] = None,
) -> Output:
    """List the sets, the newest first: aliases, metric, run, and the promotion decision."""
    from ttrain.config.training import BITS_PER_BYTE
    from ttrain.tracking.registered import take_over_champions

    metric = metric or BITS_PER_BYTE.name
    model_sets = take_over_champions(home()).sets(name)
    values = [model_set.to_json() for model_set in model_sets]
    if not model_sets:
        hint = "no sets of models are registered yet; `ttrain pipeline run full` registers one"
        return Output(values, [hint])
    header = ("set", "aliases", metric, "models", "run", "registered", "decision")
    return Output(values, [Table(header, [_row(model_set, metric) for model_set in model_sets])])


def _row(model_set: ModelSet, metric: str) -> tuple[str, ...]:
    decision = model_set.decision or {}
    word = {True: "promoted: ", False: "kept: "}.get(decision.get("promote", ""), "")
    return (
        str(model_set),
        ", ".join(model_set.aliases),
        format_number(model_set.metrics.get(metric)),
        ", ".join(str(member).removeprefix(f"{model_set.name}-") for member in model_set.models),
        model_set.run,
        format_time(model_set.created),
        f"{word}{decision.get('reason', '')}",
    )


@command(models_app, "Examples:  ttrain models history\n\nttrain models history --nights 5 --json")
def models_history(
    name: Name = None,
    nights: Annotated[int, option("how many, the newest first", min=1, max=1000)] = 30,
) -> Output:
    """List the last nights: data, losses, and whether and why models were promoted."""
    from ttrain.nightly import history

    pipeline, listed = history.history(home(), name, nights)
    return Output(
        {"name": pipeline, "nights": listed},
        [Table(history.HEADER, [*map(history.row, listed)]), history.summary_line(listed)],
    )


@command(
    models_app,
    "Examples:  ttrain models promote 3\n\nttrain models promote full-20261121-160222-1a2b\n\n"
    "ttrain models promote --previous",
)
def models_promote(
    which: Annotated[
        str, argument("a set's version, or the run that made its models", metavar="VERSION|RUN")
    ] = "",
    name: Name = None,
    previous: Annotated[
        bool, option("the champion before; each further call goes one back", "--previous")
    ] = False,
) -> Output:
    """Make a set the champion, whatever its metrics; nights continue from it."""
    from ttrain.store.registry import CHAMPION
    from ttrain.tracking.pusher import push_noted
    from ttrain.tracking.registered import take_over_champions

    if previous == bool(which):
        raise UsageError("name a version or a run, or the champion before with --previous")
    registry = take_over_champions(home())
    if previous:
        promoted = registry.rollback(registry.only_name(name))
        status = "is champion again"
    else:
        chosen = registry.find_set(which, name)
        status = "is already champion" if CHAMPION in chosen.aliases else "is champion"
        promoted = registry.promote(chosen.name, chosen.version)
    push_noted(home(), promoted.run)
    models = ", ".join(map(str, promoted.models))
    return Output(promoted.to_json(), [f"{promoted} of the run {promoted.run} {status}: {models}"])


ModelVersion = Annotated[
    str,
    argument(
        "a registered model (NAME/VERSION, NAME@ALIAS; a set or one model), a run, RUN:STAGE, a "
        "stage, the "
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
def lineage(version: ModelVersion) -> Output:
    """Print what a model was made of: stages with data, keys, code, seed and settings.

    From the store, or from a shared MLflow.
    """
    from ttrain.lineage.lineage import lineage_of

    behind = lineage_of(home(), version)
    value = behind.to_json()
    of_run = f", of the run {value['run']}" if value["run"] else ""
    rows: list[tuple[str, str, str]] = []
    listed: dict[str, None] = {}
    for stage, artifact in zip(value["stages"], behind.artifacts, strict=True):
        title = stage["stage"]
        for name, text in stage_facts(stage, artifact.result):
            if text:
                rows.append((title, name, text))
                title = ""
        listed |= {f"{name} {version}": None for name, version in stage["libraries"].items()}
    kind = KINDS.get(value["kind"], "a run")
    return Output(
        value,
        [
            f"{value['name']}: {kind}{of_run}",
            Table(("stage", "", ""), rows),
            f"with {', '.join(listed)}",
        ],
    )


@command(
    app,
    "Examples:  ttrain reproduce quickstart@challenger\n\nttrain reproduce quickstart-sft/3 "
    "--home again\n\n"
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
) -> Output:
    """Rebuild a model from its raw data in a separate home, and compare stages with their records.

    Settings, seed, threads, ranks and kernels are those recorded. Exit code 1 for different bytes,
    and for missing or changed raw data.
    """

    from ttrain.engine.display import Display
    from ttrain.lineage import reproduce as work
    from ttrain.lineage.lineage import lineage_of

    outlast_output()
    behind = lineage_of(home(), version)
    recipes = work.recipes_of(behind, home())
    with closing(Display(console(stderr=as_json))) as display:
        result = work.reproduce(behind, recipes, to, display)
    return Output(
        result, _result_lines(result, is_kept=to is not None), code=int(not result["equal"])
    )


def _result_lines(result: JsonObject, *, is_kept: bool) -> Iterator[str]:
    for stage in result["stages"]:
        if stage["differences"]:
            yield f"{stage['stage']}: not as it was: {'; '.join(stage['differences'])}"
        if not stage["equal"]:
            yield (
                f"{stage['stage']}: {', '.join(stage['files'])} differs: content "
                f"{short_digest(stage['content'])} was recorded, "
                f"{short_digest(stage['rebuilt_content'])} came out"
            )
    if result["left"]:
        yield f"not rebuilt, because their inputs differ: {', '.join(result['left'])}"
    location = f"; it is in {result['home']}" if is_kept else ""
    name = result["name"]
    stages = result["stages"]
    if result["equal"]:
        yield f"the same: all {len(stages)} stages of {name} gave the recorded bytes{location}"
    else:
        yield (
            f"DIFFERENT: {stages[-1]['stage']} of {name} did not give the recorded bytes{location}"
        )


def stage_facts(stage: JsonObject, result: JsonObject) -> Iterator[tuple[str, str]]:
    """(name, text) of what is known of a stage; "" for unknown values."""
    commit, plus, changes = (stage["commit"] or "").partition("+")  # whether some were uncommitted
    made = format_time(stage["made_unix"])
    yield "key", short_digest(stage["key"])
    yield "made", f"{made} by {stage['run']}" if stage["run"] else made
    yield "content", short_digest(stage["content"])
    yield "code", short_digest(stage["code"])
    yield "commit", commit and f"{short_digest(commit)}{plus}{changes}"
    yield "seed", _known({"": stage["seed"]})
    units = {"documents": "records", "tokens": "tokens", "bytes": "bytes of text"}
    for data in stage["data"]:
        counts = ", ".join(
            f"{data[name]:,} {unit}" for name, unit in units.items() if data[name] is not None
        )
        place = f"at {data['location']}" if data["location"] else ""
        words = (
            data["part"],
            data["name"],
            "sha256",
            short_digest(data["sha256"]),
            f"({counts})" if counts else "",
            place,
        )
        yield "read", " ".join(filter(None, words))
    inputs = sorted(stage["inputs"].items())
    yield "from", _known({name: short_digest(used["key"]) for name, used in inputs})
    settings = stage["settings"].items()
    yield (
        "settings",
        " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings),
    )
    training = TrainingResult.of(result)
    runtime = stage["runtime"] or {}
    if training.ranks:  # the order of its sums depends on these
        order = {
            name: getattr(training, name) for name in ("precision", "device", "ranks", "threads")
        }
        yield "trained", _known({**order, **{name: runtime.get(name) for name in ORDER_OF_SUMS}})
    for note in stage["notes"]:
        yield "note", note


def _known(values: JsonObject) -> str:
    known = {name: value for name, value in values.items() if value not in (None, "")}
    return ", ".join(f"{name} {value}".strip() for name, value in known.items())
