"""Unfinished work of training stages, and how to resume it under another key (`--continue KEY`).

Allowed differences are the code, since only a person knows whether a change of it matters, the budget, which the trainer can
change, and the learning rate, which people lower in the middle of a training. With other data or other settings the
checkpoint would be that of another run, so it is refused. Work with another rate is not offered: the user must name it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.config import TRAINING_STAGES, Settings, Training, rules
from ttrain.config.rules import AUTO
from ttrain.core.files import JsonDict, fsync, read_json, read_object, remove_tree, write_json
from ttrain.core.text import first_of
from ttrain.errors import UsageError
from ttrain.store import references
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.differences import Ingredients, differences
from ttrain.store.results import TrainingResult
from ttrain.tasks import STAGES, Stage
from ttrain.train.schedules import BUDGET, RATES, shared_steps, steps_of

INGREDIENTS, CONTINUED = "ingredients.json", "continued.json"

SHOWN_KEY = 12  # characters of a key that a person reads

SHOWN_CHANGES = 3  # in the one line that offers the work


@dataclass(frozen=True)
class PartialRun:
    """A work directory in which a training saved its state at `step`, under the key of these ingredients."""

    stage: str
    key: str
    path: Path
    step: int
    ingredients: Ingredients

    def __str__(self) -> str:
        return f"{self.stage} {self.key[:SHOWN_KEY]} at step {self.step}"


def steps_in(output: Path) -> list[int]:
    """The steps of the checkpoints in an output of a training."""
    names = (path.name.removeprefix("step-") for path in (output / "checkpoints").glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def saved_step(work: Path) -> int:
    """Step of the newest checkpoint in a work directory; 0 if there is none."""
    return max(steps_in(work / "output"), default=0)


def partial_runs(store: ArtifactStore, stage: str) -> Iterator[PartialRun]:
    """The unfinished work of a stage, the most advanced first."""
    runs_with_checkpoint = []
    for path in (store.root / "work" / stage).glob(f"*/{INGREDIENTS}"):
        ingredients, step = read_json(path), saved_step(path.parent)
        if ingredients and step:
            runs_with_checkpoint.append(PartialRun(stage, path.parent.name, path.parent, step, ingredients))
    yield from sorted(runs_with_checkpoint, key=lambda work: (-work.step, work.key))


def changes(work: PartialRun, ingredients: Ingredients) -> list[str]:
    """The differences between the work and the stage to build, one line each."""
    return differences(work.ingredients, ingredients)


def forbidden_changes(work: PartialRun, ingredients: Ingredients, *, free: frozenset[str] = BUDGET) -> list[str]:
    """The changes that forbid resuming a checkpoint: all but code, a sufficient budget, and the other settings of
    the stage that are `free`."""
    left_out = {f"{work.stage}.{name}" for name in free}

    def compared(ingredients: Ingredients) -> JsonDict:
        settings = {name: value for name, value in ingredients["settings"].items() if name not in left_out}
        return {**ingredients, "settings": settings, "code": {}}

    return differences(compared(work.ingredients), compared(ingredients)) + _too_short(work, ingredients["settings"])


def _too_short(work: PartialRun, settings: Mapping[str, Any]) -> list[str]:
    """The problem of a budget that may end before the step of the work. Epochs of uncounted rows may not become fewer."""
    usual = TRAINING_STAGES[work.stage].settings.by_rows
    tokens, epochs = (settings[f"{work.stage}.{name}"] for name in ("tokens", "epochs"))
    if tokens is not None:
        earlier_tokens = _trained_with(work, "tokens", rules.TOKENS) or math.inf
        if tokens == AUTO:  # the same number where it was `auto`, else at most this
            was_auto = work.ingredients["settings"][f"{work.stage}.tokens"] == AUTO
            tokens = earlier_tokens if was_auto else rules.TOKENS
        step_tokens = _trained_with(work, "tokens_per_step", usual.tokens_per_step)
        most_tokens = work.step * step_tokens  # rows that are not packed have fewer
        is_long_enough = tokens >= min(most_tokens, earlier_tokens)
    else:
        earlier_epochs = _trained_with(work, "epochs", usual.epochs)
        if epochs == AUTO:  # the same number where it was `auto`, else this or more
            was_auto = work.ingredients["settings"][f"{work.stage}.epochs"] == AUTO
            epochs = earlier_epochs if was_auto else usual.epochs
        is_long_enough = earlier_epochs is not None and epochs >= earlier_epochs
    return (
        []
        if is_long_enough
        else [f"its budget, {tokens or epochs} {'tokens' if tokens else 'epochs'}, may end before that step"]
    )


def _trained_with(work: PartialRun, name: str, usual: float) -> Any:
    """A setting of the work, with the number that its rows gave for `auto`; `usual` where no checkpoint says it."""
    value = work.ingredients["settings"][f"{work.stage}.{name}"]
    if value != AUTO:
        return value
    state = read_object(work.path / "output" / "checkpoints" / f"step-{work.step:08d}" / "state.json")
    return state.get("identity", {}).get(name, usual)


def offer(stage: Stage, ingredients: Ingredients, store: ArtifactStore) -> list[str]:
    """One line on how to resume unfinished work under another key, or none."""
    for work in partial_runs(store, stage.name):
        if not forbidden_changes(work, ingredients):
            key, lines = work.key[:SHOWN_KEY], changes(work, ingredients)
            if not lines:  # the same key: it was set aside
                return [f"unfinished work at step {work.step} is set aside; --continue {work.key} resumes it"]
            differs = first_of(lines, SHOWN_CHANGES, "; ")
            return [f"unfinished work {key} at step {work.step} differs in: {differs}; --continue {key} resumes it"]
    return []


def find_partial_run(stage: Stage, prefix: str, ingredients: Ingredients, store: ArtifactStore) -> PartialRun | None:
    """Find this stage's unfinished work by its key prefix; None if the stage has none.

    Raises UsageError with the differences if it cannot be resumed with these ingredients.
    """
    work = next((work for work in partial_runs(store, stage.name) if work.key.startswith(prefix)), None)
    if work and (refused := forbidden_changes(work, ingredients, free=BUDGET | RATES)):
        raise UsageError(
            f"--continue {prefix} is the unfinished work of {work}, which was made under other settings or data: "
            f"{'; '.join(refused)}; restore them, or leave --continue out to start from scratch"
        )
    return work


def find_stage(store: ArtifactStore, prefix: str) -> str:
    """Name of the stage whose unfinished work has this key prefix. Raises UsageError if none or several match."""
    saved_runs = [work for name, stage in STAGES.items() if stage.uses_ranks for work in partial_runs(store, name)]
    matches = [work for work in saved_runs if work.key.startswith(prefix)]
    if len(matches) == 1:
        return matches[0].stage
    if matches:
        raise references.ambiguous(f"--continue {prefix}", "keys", [*map(str, matches)])
    for name, stage in STAGES.items():  # it resumed such work before, and now has it under another key, finished or not
        if stage.uses_ranks:
            histories = [history(work.path, work.key) for work in partial_runs(store, name)]
            histories += [artifact.manifest.get("continued", []) for artifact in store.artifacts(name)]
            if any(entry["key"].startswith(prefix) for entries in histories for entry in entries):
                return name
    listed = f"there is: {', '.join(map(str, saved_runs))}" if saved_runs else "there is none at all"
    raise UsageError(f"--continue {prefix}: no unfinished work has a key that begins so; {listed}")


def take_over(store: ArtifactStore, work: PartialRun, key: str, ingredients: Ingredients) -> None:
    """Move the work to another key, whose lock the caller holds: record the differences in it, then rename it.

    What another run of that key saved while this one waited for the lock stays: it took the work over. After a kill in
    between, the work is still in place and the record has no effect. Raises UsageError if a run uses the work or it is gone.
    """
    destination = store.work(work.stage, key)
    if saved_step(destination):
        return

    def taken() -> None:
        raise UsageError(f"the unfinished work of {work} cannot be resumed under another key: a run is using it now")

    with store.lock(work.stage, work.key, waiting=taken), store.lock(work.stage, f"{work.key}.process"):
        if not saved_step(work.path):
            raise UsageError(
                f"the unfinished work of {work} is gone: a run of other code took it over, or it was cleaned away"
            )
        entry = {"key": work.key, "to": key, "step": saved_step(work.path), "differences": changes(work, ingredients)}
        earlier = [old for old in read_json(work.path / CONTINUED) or [] if (old["key"], old["to"]) != (work.key, key)]
        write_json(work.path / CONTINUED, [*earlier, entry])
        remove_tree(destination)
        work.path.rename(destination)
        fsync(destination.parent)


def history(work: Path, key: str) -> list[JsonDict]:
    """The earlier keys of this work, oldest first: key, step and differences of each change."""
    entries: list[JsonDict] = []
    for entry in reversed(read_json(work / CONTINUED) or []):
        if entry["to"] == key:
            entries.insert(0, {name: entry[name] for name in ("key", "step", "differences")})
            key = entry["key"]
    return entries


def extension_of(
    stage: Stage, settings: Settings, ingredients: Ingredients, store: ArtifactStore
) -> tuple[Path | None, str]:
    """Find a shorter run's checkpoint that leads to the same weights as training from scratch; return it and the reason.

    It must lie before the learning rate depends on the length of the run, and all but the budget must be equal.
    """
    config: Training = getattr(settings, stage.name)
    budget = {f"{stage.name}.{name}" for name in BUDGET}
    best: tuple[int, Path] | None = None
    for artifact in store.artifacts(stage.name):
        old = artifact.manifest["ingredients"]
        old_settings, settings_now = old.get("settings", {}), ingredients["settings"]
        changed = {name for name in {*old_settings, *settings_now} if old_settings.get(name) != settings_now.get(name)}
        same = all(old.get(name) == ingredients[name] for name in ("inputs", "code", "arguments", "files"))
        if not same or not changed <= budget or store.damage(artifact):
            continue
        result = TrainingResult.of(artifact.result)
        rows = result.rows
        fill = rows["fill"] if config.packing == "none" else 1.0
        epoch_rows = rows.get("epoch", rows["rows"])
        new_steps = steps_of(config.resolved(epoch_rows), epoch_rows, fill)[0]
        may_be_cut = old_settings[f"{stage.name}.epochs"] is not None  # the last step
        whole_steps = result.steps - may_be_cut
        limit = min(whole_steps, *(shared_steps(config.schedule, n) for n in (new_steps, result.steps)))
        for path in (artifact.path / "checkpoints").glob("step-*"):
            step = int(path.name.removeprefix("step-"))
            if step <= limit and (best is None or step > best[0]):
                best = (step, path)
    if best is None:
        return None, "--extend found no shorter run of this batch with a checkpoint before its decay; it starts from scratch"
    return best[1], f"--extend: continues at step {best[0]} of the shorter training {best[1].parent.parent.name[:12]}"
