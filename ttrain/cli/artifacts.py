"""The `ttrain artifacts` commands: list, verify, adopt and remove the outputs of stages."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from ttrain.cli.options import (
    Output,
    SettingsOptions,
    Table,
    argument,
    command,
    command_group,
    option,
)
from ttrain.cli.registry import stage_facts
from ttrain.core.files import JsonDict
from ttrain.core.terminal import bar
from ttrain.core.text import format_duration, format_size, format_time, short_digest
from ttrain.errors import UsageError
from ttrain.store import name_syntax
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact, home, usable_home
from ttrain.store.runs import ELSEWHERE_DAYS

MEGABYTE = 1e6
CELL_CHARACTERS = 80  # characters of a list in a table
KEEP_RUNS = 10
OLDER_THAN_DAYS = 14.0

artifacts_app = command_group(
    "artifacts",
    "Look",
    help="Find, check, keep and remove the outputs of stages.",
    epilog="Examples:  ttrain artifacts list\n\nttrain artifacts clean --dry-run",
)

StageName = Annotated[str, argument("the stage", metavar="STAGE")]


def _known_stage(stage: str) -> str:
    if stage:
        from ttrain.tasks import STAGES

        name_syntax.need_stage(stage, STAGES)
    return stage


StageFilter = Annotated[
    str, argument("of this stage alone", metavar="STAGE", callback=_known_stage)
]
Key = Annotated[str, argument("the beginning of its key; without: the newest", metavar="KEY")]


@command(artifacts_app, "Examples:  ttrain artifacts list\n\nttrain artifacts list sft --json")
def artifacts_list(stage: StageFilter = "") -> Output:
    """List finished artifacts and resumable work, with the newest run of each."""
    from ttrain.engine.artifact_commands import artifact_rows

    artifacts = artifact_rows(ArtifactStore(home()), stage or None)
    shown = [
        (
            row.stage,
            short_digest(row.key),
            format_time(row.published_unix),
            row.state,
            format_size(row.bytes),
            row.run or "",
        )
        for row in artifacts
    ]
    total = f"{len(artifacts)} artifacts, {format_size(sum(row.bytes for row in artifacts))}"
    return Output(
        artifacts, [Table(("stage", "key", "published", "state", "size", "run"), shown), total]
    )


@command(
    artifacts_app, "Examples:  ttrain artifacts show sft\n\nttrain artifacts show sft 3f1c --json"
)
def artifacts_show(stage: StageName, key: Key = "") -> Output:
    """Print an artifact's lineage, state and metrics."""
    from ttrain.config import flatten
    from ttrain.engine.artifact_commands import find_artifact, size_of
    from ttrain.lineage.lineage import facts_of

    store = ArtifactStore(home())
    artifact = find_artifact(store, stage, key)
    damage = store.damage(artifact)
    manifest = artifact.manifest
    rows = [
        ("path", str(artifact.path)),
        ("state", f"damaged: {damage}" if damage else "finished"),
        ("size", f"{format_size(size_of(artifact))} in {len(manifest['files'])} files"),
        *((name, text) for name, text in stage_facts(facts_of(artifact), artifact.result) if text),
        *((f"result {name}", _shown(value)) for name, value in flatten(dict(artifact.result))),
    ]
    return Output(
        {**manifest, "path": str(artifact.path), "damage": damage},
        [Table(("property", "value"), rows)],
    )


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    is_long = isinstance(value, list | dict) and len(text) > CELL_CHARACTERS
    return f"{len(value)} entries; --json has them" if is_long else text  # type: ignore[arg-type]


@command(
    artifacts_app,
    "Examples:  ls $(ttrain artifacts path sft)/model\n\nttrain artifacts path sft 3f1c",
)
def artifacts_path(stage: StageName, key: Key = "") -> None:
    """Print the path of a stage's newest artifact, or of the one whose key begins with KEY."""
    from ttrain.engine.artifact_commands import find_artifact

    print(find_artifact(ArtifactStore(home()), stage, key).path)


@command(
    artifacts_app,
    "Examples:  ttrain artifacts verify\n\nttrain artifacts verify pretrain --set-aside --json",
)
def artifacts_verify(
    stage: StageFilter = "",
    set_aside: Annotated[
        bool,
        option(
            "move damaged artifacts to `replaced`, so that the next run rebuilds them",
            "--set-aside",
        ),
    ] = False,
) -> Output:
    """Compare every byte of every artifact with its manifest. Exit code 1 for damage."""
    from ttrain.engine import artifact_commands

    store = ArtifactStore(home())
    artifacts = store.artifacts(stage or "*")
    unreadable = store.unreadable(stage or "*")
    damaged: list[tuple[Path, str, Artifact | None]] = [
        (path, why, None) for path, why in unreadable.items()
    ]
    sizes = [artifact_commands.size_of(artifact) for artifact in artifacts]
    with bar("verifying", "MB", round(sum(sizes) / MEGABYTE)) as show:
        for done, artifact in zip(itertools.accumulate(sizes), artifacts, strict=True):
            if problems := artifact_commands.verify(artifact):
                damaged.append((artifact.path, "; ".join(problems), artifact))
            show(round(done / MEGABYTE))
    for path, _, found in damaged if set_aside else ():
        store.set_damaged_aside(path, found)
    count = len(sizes) + len(unreadable)
    entries = [
        {"stage": path.parent.name, "key": path.name, "path": path, "problems": why.split("; ")}
        for path, why, _ in damaged
    ]
    value = {"artifacts": count, "bytes": sum(sizes), "damaged": entries, "set_aside": set_aside}
    total = f"{count} artifacts, {format_size(sum(sizes))}"
    if not damaged:
        return Output(value, [f"{total}: none damaged"])
    advice = (
        "moved to replaced: the next run rebuilds them"
        if set_aside
        else "--set-aside lets the next run rebuild them"
    )
    rows = [(path.parent.name, short_digest(path.name), why) for path, why, _ in damaged]
    return Output(
        value,
        [Table(("stage", "key", "damage"), rows), f"{total}: {len(damaged)} damaged; {advice}"],
        code=1,
    )


@command(
    artifacts_app,
    "Examples:  ttrain artifacts adopt --all\n\nttrain artifacts adopt pretrain\n\nttrain "
    "artifacts adopt sft sft.epochs=3",
)
def artifacts_adopt(
    *,
    stage: Annotated[str, argument("the stage, see `ttrain stage list`", metavar="STAGE")] = "",
    settings_options: SettingsOptions,
    everything: Annotated[
        bool, option("every stage that only changed code would build again", "--all")
    ] = False,
) -> Output:
    """Keep artifacts across a code change that you know to be harmless; their manifests say so.

    Per stage the newest one is kept that only changed code would rebuild, inputs first.
    """
    from ttrain import api
    from ttrain.engine.artifact_commands import adopt
    from ttrain.engine.planner import no_stage

    usable_home()
    if everything:  # then the first word is a setting
        given = [word for word in (stage, *(settings_options.overrides or ())) if word]
        stage = ""
        settings_options = replace(settings_options, overrides=given)
    elif not stage:
        raise UsageError(
            "`ttrain artifacts adopt` needs a stage, or --all; try ttrain artifacts adopt --all"
        )
    plan = api.plan("full", settings_options.load().settings)
    if stage and stage not in plan.graph:
        raise no_stage(stage, plan.graph, plan.settings)
    adopted = adopt(plan, stage)
    rows: list[Sequence[str]] = []
    value: list[JsonDict] = []
    for artifact in adopted:
        seconds = artifact.manifest.get("seconds", 0.0)
        history = artifact.manifest["adopted"]
        rows.append(
            (
                artifact.stage,
                short_digest(history[-1]["key"]),
                short_digest(artifact.key),
                format_duration(seconds),
                "; ".join(history[-1]["differences"]),
            )
        )
        made = {"stage": artifact.stage, "key": artifact.key, "path": str(artifact.path)}
        value.append({**made, "adopted": history, "seconds": seconds})
    saved = sum(made["seconds"] for made in value)
    if not rows:
        return Output(
            value, ["no stage would be built again for changed code alone; nothing was adopted"]
        )
    return Output(
        value,
        [
            Table(("stage", "was", "is", "took", "although"), rows),
            f"kept; this saves {format_duration(saved)}",
        ],
    )


@command(
    artifacts_app,
    "Examples:  ttrain artifacts clean --dry-run\n\nttrain artifacts clean --keep-runs 3 "
    "--older-than 7\n\n"
    "ttrain artifacts clean --run latest --dry-run",
)
def artifacts_clean(
    keep_runs: Annotated[
        int, option("the newest runs, counted once for equal artifacts", min=1)
    ] = KEEP_RUNS,
    older_than: Annotated[
        float,
        option(
            "keep artifacts that are younger, or that a younger run used", min=0, metavar="DAYS"
        ),
    ] = OLDER_THAN_DAYS,
    run: Annotated[
        str, option("instead: what only this run needs, also if it is young", metavar="RUN")
    ] = "",
    dry_run: Annotated[bool, option("only print what would be removed", "--dry-run")] = False,
) -> Output:
    """Remove artifacts and work that no recent run or registered model needs."""
    from ttrain.nightly import records
    from ttrain.store import garbage_collection
    from ttrain.store.registry import Registry
    from ttrain.store.run_views import need_run

    store = ArtifactStore(usable_home())
    if run and (keep_runs, older_than) != (KEEP_RUNS, OLDER_THAN_DAYS):
        raise UsageError(
            f"--run {run} cannot be combined with --keep-runs or --older-than; remove one of them"
        )
    kept = (
        garbage_collection.Kept(only_run=need_run(store.root, run))
        if run
        else garbage_collection.Kept.recent(keep_runs, older_than)
    )
    cleaned = garbage_collection.clean(
        store,
        Registry(store.root).keys(),
        kept,
        needed_by_nights=records.needed_keys,
        dry_run=dry_run,
    )
    value = {
        "dry_run": dry_run,
        "removed": cleaned.removed,
        "bytes": cleaned.bytes,
        "kept": cleaned.kept_counts,
    }
    rows = [
        (
            removal.kind,
            removal.stage,
            short_digest(removal.key) or removal.path.relative_to(store.root).as_posix(),
            format_size(removal.bytes),
            removal.why,
        )
        for removal in cleaned.removed
    ]
    kept_counts = ", ".join(
        f"{count} for {reason}" for reason, count in sorted(cleaned.kept_counts.items())
    )
    verb = "would be removed, which frees" if dry_run else "removed, which frees"
    shown: list[str | Table] = (
        [Table(("kind", "stage", "key", "frees", "why"), rows)] if rows else []
    )
    shown.append(
        f"{len(rows)} {verb} {format_size(cleaned.bytes)}; kept: {kept_counts or 'no artifact'}"
    )
    if cleaned.running:
        active_runs = ", ".join(f"{run} on {machine}" for run, machine in cleaned.running.items())
        shown.append(
            f"nothing is removed while runs are in progress: {active_runs}; one on another "
            "machine counts until its "
            f"file in {store.root / 'runs'} has not changed for {ELSEWHERE_DAYS} days"
        )
    return Output({**value, "running": cleaned.running}, shown)
