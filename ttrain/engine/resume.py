"""Unfinished work of training stages: resume it under another key, or restart.

`--continue KEY` allows other code (only a person can judge it), another sufficient budget and,
where the user names the work, another learning rate. Other data or settings are refused. What
`--fresh` and `--from-step N` prepare is unfinished work like any other.
"""

import contextlib
import itertools
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrain.config import TRAINING_STAGES, Settings, Training, rules
from ttrain.core.files import (
    JsonDict,
    fsync,
    link_or_copy,
    read_json,
    read_object,
    remove_tree,
    write_json,
)
from ttrain.core.text import first_of
from ttrain.engine.graph import PartialRun, Planned
from ttrain.errors import UsageError
from ttrain.store import name_syntax
from ttrain.store.artifacts import SHOWN_KEY, ArtifactStore
from ttrain.store.differences import Ingredients, differences
from ttrain.store.results import TrainingResult
from ttrain.tasks import STAGES, Stage
from ttrain.train.schedules import BUDGET, RATES, shared_steps, steps_of

INGREDIENTS, CONTINUED = "ingredients.json", "continued.json"
# in a work directory that begins with older checkpoints, also where the stage is forced
RESTARTED = "restarted.json"

SHOWN_CHANGES = 3  # in the one line that offers the work
SHOWN_STEPS = 10


def steps_in(output: Path) -> list[int]:
    """The steps of the checkpoints in an output of a training."""
    names = (path.name.removeprefix("step-") for path in (output / "checkpoints").glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def checkpoint_of(output: Path, step: int) -> Path:
    """The directory of a checkpoint in an output of a training."""
    return output / "checkpoints" / f"step-{step:08d}"


def saved_step(work: Path) -> int:
    """Step of the newest checkpoint in a work directory; 0 if there is none."""
    return max(steps_in(work / "output"), default=0)


def partial_runs(store: ArtifactStore, stage: str) -> Iterator[PartialRun]:
    """The unfinished work of a stage, the most advanced first."""
    runs_with_checkpoint = []
    for path in (store.root / "work" / stage).glob(f"*/{INGREDIENTS}"):
        ingredients = read_json(path)
        step = saved_step(path.parent)
        if ingredients and step:
            runs_with_checkpoint.append(
                PartialRun(stage, path.parent.name, path.parent, step, ingredients)
            )
    yield from sorted(runs_with_checkpoint, key=lambda work: (-work.step, work.key))


def changes_besides(
    free: frozenset[str], before: Ingredients, now: Ingredients, *, code: bool = False
) -> list[str]:
    """The differences in all but these settings, and but the code unless it counts."""
    names = {f"{now['stage']}.{name}" for name in free}

    def compared(of: Ingredients) -> JsonDict:
        settings = {name: value for name, value in of["settings"].items() if name not in names}
        return {**of, "settings": settings, "code": of["code"] if code else {}}

    return differences(compared(before), compared(now))


def forbidden_changes(
    work: PartialRun, ingredients: Ingredients, *, free: frozenset[str] = BUDGET
) -> list[str]:
    """The changes that forbid resuming: all but code, a sufficient budget and `free` settings."""
    return [
        *changes_besides(free, work.ingredients, ingredients),
        *_too_short(work, ingredients["settings"]),
    ]


def _too_short(work: PartialRun, settings: Mapping[str, Any]) -> list[str]:
    # An `auto` budget of the work is the number in its checkpoint, a new one what many rows give.
    # Epochs may not become fewer.
    usual = TRAINING_STAGES[work.stage].settings.by_rows
    old = work.ingredients["settings"]
    least = {
        "tokens": rules.TOKENS,
        "epochs": usual.epochs,
        "tokens_per_step": usual.tokens_per_step,
    }
    by_rows = read_object(checkpoint_of(work.path / "output", work.step) / "state.json").get(
        "identity", {}
    )

    def number(values: Mapping[str, Any], name: str) -> Any:
        key = f"{work.stage}.{name}"
        if values[key] != rules.AUTO:
            return values[key]
        return by_rows.get(name, least[name]) if old[key] == rules.AUTO else least[name]

    before = {name: number(old, name) for name in least}
    tokens = number(settings, "tokens")
    epochs = number(settings, "epochs")
    least_tokens = min(work.step * before["tokens_per_step"], before["tokens"] or math.inf)
    if (tokens or 0) >= least_tokens or (before["epochs"] and (epochs or 0) >= before["epochs"]):
        return []
    budget = f"{tokens} tokens" if tokens else f"{epochs} epochs"
    return [f"its budget, {budget}, may end before that step"]


def offer(stage: Stage, ingredients: Ingredients, store: ArtifactStore) -> list[str]:
    """A line on how to resume unfinished work under another key, or none."""
    for work in partial_runs(store, stage.name):
        if forbidden_changes(work, ingredients):
            continue
        lines = differences(work.ingredients, ingredients)
        if not lines:  # the same key
            return [
                f"unfinished work at step {work.step} is set aside; --continue {work.key} "
                f"resumes it"
            ]
        key = work.key[:SHOWN_KEY]
        return [
            f"unfinished work {key} at step {work.step} differs in: "
            f"{first_of(lines, SHOWN_CHANGES, '; ')}; --continue {key} resumes it"
        ]
    return []


def find_partial_run(
    stage: Stage, prefix: str, ingredients: Ingredients, store: ArtifactStore
) -> PartialRun | None:
    """The stage's unfinished work with this key prefix; None if there is none.

    Raises UsageError with the differences if these ingredients cannot continue it.
    """
    work = next(
        (work for work in partial_runs(store, stage.name) if work.key.startswith(prefix)), None
    )
    if work and (refused := forbidden_changes(work, ingredients, free=BUDGET | RATES)):
        raise UsageError(
            f"--continue {prefix} is the unfinished work of {work}, which was made under other "
            f"settings or data: "
            f"{'; '.join(refused)}; restore them, or leave --continue out to start from scratch"
        )
    return work


def find_stage(store: ArtifactStore, prefix: str) -> str:
    """The stage whose work has this key prefix, or was resumed from it. Raises UsageError."""
    stages = [name for name, stage in STAGES.items() if stage.uses_ranks]
    works = [work for name in stages for work in partial_runs(store, name)]
    # A whole key is not the beginning of the copy KEY.1 that --from-step set aside.
    matches = [work for work in works if work.key == prefix] or [
        work for work in works if work.key.startswith(prefix)
    ]
    if len(matches) > 1:
        raise name_syntax.ambiguous(f"--continue {prefix}", "keys", [*map(str, matches)])
    continued = [(work.stage, history(work.path, work.key)) for work in works]
    for name in stages:
        continued += [
            (name, artifact.manifest.get("continued", [])) for artifact in store.artifacts(name)
        ]
    for name, entries in [*((work.stage, [{"key": work.key}]) for work in matches), *continued]:
        if any(entry["key"].startswith(prefix) for entry in entries):
            return name
    listed = f"there is: {', '.join(map(str, works))}" if works else "there is none at all"
    raise UsageError(f"--continue {prefix}: no unfinished work has a key that begins so; {listed}")


@contextlib.contextmanager
def _unused(store: ArtifactStore, stage: str, key: str) -> Iterator[None]:
    # Raises UsageError where a run uses the work, which is about to be moved.

    def taken() -> None:
        raise UsageError(
            f"the unfinished work {key[:SHOWN_KEY]} of {stage} cannot be moved: a run is using "
            f"it now; stop that run first"
        )

    with store.lock(stage, key, waiting=taken), store.lock(stage, f"{key}.process"):
        yield


def take_over(store: ArtifactStore, work: PartialRun, key: str, ingredients: Ingredients) -> None:
    """Move the work to another key, whose lock the caller holds, and record the differences.

    Work that another run of that key saved meanwhile stays. A kill in between leaves the work in
    place. Raises UsageError if the work is in use or gone.
    """
    destination = store.work(work.stage, key)
    if saved_step(destination):
        return
    with _unused(store, work.stage, work.key):
        if not saved_step(work.path):
            raise UsageError(
                f"the unfinished work of {work} is gone: a run of other code took it over, or "
                f"it was cleaned away"
            )
        entry = {
            "key": work.key,
            "to": key,
            "step": saved_step(work.path),
            "differences": differences(work.ingredients, ingredients),
        }
        earlier = [
            old
            for old in read_json(work.path / CONTINUED) or []
            if (old["key"], old["to"]) != (work.key, key)
        ]
        write_json(work.path / CONTINUED, [*earlier, entry])
        remove_tree(destination)
        work.path.rename(destination)
        fsync(destination.parent)


def history(work: Path, key: str) -> list[JsonDict]:
    """The earlier keys of this work, oldest first: key, step and differences."""
    entries: list[JsonDict] = []
    for entry in reversed(read_json(work / CONTINUED) or []):
        if entry["to"] == key:
            entries.insert(0, {name: entry[name] for name in ("key", "step", "differences")})
            key = entry["key"]
    return entries


def extension_of(
    stage: Stage, settings: Settings, ingredients: Ingredients, store: ArtifactStore
) -> tuple[Path | None, int, str]:
    """Find a shorter run's checkpoint that leads to the same weights as training from scratch.

    It lies before the learning rate depends on the length of the run, and only the budget differs.
    Returns (checkpoint or None, its step, the reason).
    """
    config: Training = getattr(settings, stage.name)
    if config.early_stopping:
        raise UsageError(
            f"--extend cannot be combined with {stage.name}.early_stopping: the best weights "
            f"may lie in the shorter run; "
            f"remove one of them"
        )
    checkpoints: dict[int, Path] = {}
    for artifact in store.artifacts(stage.name):
        old = artifact.manifest["ingredients"]
        if changes_besides(BUDGET, old, ingredients, code=True) or store.damage(artifact):
            continue
        result = TrainingResult.of(artifact.result)
        rows = result.rows
        fill = rows["fill"] if config.packing == "none" else 1.0
        epoch_rows = rows.get("epoch", rows["rows"])
        new_steps, _ = steps_of(config.resolved(epoch_rows), epoch_rows, fill)
        shared = [shared_steps(config.schedule, steps) for steps in (new_steps, result.steps)]
        may_be_cut = old["settings"][f"{stage.name}.epochs"] is not None  # the last step
        for step in steps_in(artifact.path):
            if step <= min(result.steps - may_be_cut, *shared):
                checkpoints.setdefault(step, checkpoint_of(artifact.path, step))
    if not checkpoints:
        return (
            None,
            0,
            "--extend found no shorter run of this batch with a checkpoint before its decay; it "
            "starts from scratch",
        )
    step = max(checkpoints)
    return (
        checkpoints[step],
        step,
        f"--extend: continues at step {step} of the shorter training "
        f"{checkpoints[step].parents[1].name[:SHOWN_KEY]}",
    )


# --- Begin again: --fresh, and --from-step N ------------------------------------------------------


def restart(store: ArtifactStore, stages: Sequence[Planned], from_step: int | None) -> list[str]:
    """Rename the unfinished work of these stages aside; returns a line for each.

    With `from_step` the first stage starts from the checkpoints up to that step, of the work that
    --continue names, of its own work or of its artifact. Raises UsageError.
    """
    trainings = [planned for planned in stages if planned.stage.uses_ranks and planned.key]
    if from_step is None:
        return [line for planned in trainings for line in _set_work_aside(store, planned)]
    if not trainings:
        raise UsageError(
            f"--from-step is {from_step}, but no training will run; `ttrain pipeline rerun "
            f"STAGE --from-step {from_step}` "
            f"runs a finished one again"
        )
    planned = trainings[0]
    work = store.work(planned.name, planned.known_key)
    other = planned.partial_run
    source = (other.path if other else work) / "output"
    if planned.artifact and not steps_in(source):
        source = planned.artifact.path
    prepared = begun_at(store, planned, source, from_step)
    if other:
        entry = {
            "key": other.key,
            "to": planned.key,
            "step": from_step,
            "differences": differences(other.ingredients, planned.ingredients),
        }
        write_json(prepared / CONTINUED, [entry])
    lines = _set_work_aside(store, planned)
    prepared.rename(work)
    return [*lines, f"{planned.name} continues at the checkpoint of step {from_step}"]


def begun_at(store: ArtifactStore, planned: Planned, source: Path, step: int) -> Path:
    """New work with the checkpoints of an output up to this step, and its curves.

    Raises UsageError if there is no such checkpoint.
    """
    steps = steps_in(source)
    if step not in steps:
        there_are = (
            f"those of the steps {first_of([*map(str, steps)], SHOWN_STEPS)}" if steps else "none"
        )
        raise UsageError(
            f"--from-step is {step}, but {planned.name} has no checkpoint of that step; there "
            f"are {there_are} "
            f"(runtime.keep_every_steps keeps more)"
        )
    work = store.work(planned.name, planned.known_key)
    prepared = work.with_name(f"{work.name}.restarted")
    remove_tree(prepared)
    output = prepared / "output"
    for number in steps[: steps.index(step) + 1]:
        shutil.copytree(
            checkpoint_of(source, number),
            checkpoint_of(output, number),
            copy_function=lambda file, copy: link_or_copy(Path(file), Path(copy)),
        )
    (output / "run").mkdir()
    for curve in (source / "run").glob("*.jsonl"):
        shutil.copyfile(curve, output / "run" / curve.name)
    write_json(prepared / INGREDIENTS, planned.ingredients)
    write_json(prepared / RESTARTED, {"step": step})
    return prepared


def _set_work_aside(store: ArtifactStore, planned: Planned) -> list[str]:
    work = store.work(planned.name, planned.known_key)
    with _unused(store, planned.name, work.name):
        step = saved_step(work)
        if not step:
            remove_tree(work)
            return []
        names = (work.with_name(f"{work.name}.{number}") for number in itertools.count(1))
        aside = work.rename(next(path for path in names if not path.exists()))
    return [
        f"the unfinished work of {planned.name} at step {step} is set aside; --continue "
        f"{aside.name} resumes it"
    ]
