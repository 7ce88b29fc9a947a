"""Begin a training again, or at an older checkpoint (`--fresh`, `--from-step N`); unfinished work is kept beside it.

What is prepared here is unfinished work like any other, which the run then continues, or does not find.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ttrain.core.files import link_or_copy, remove_tree, write_json
from ttrain.core.text import first_of
from ttrain.engine import resume
from ttrain.engine.graph import Planned
from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore

RESTARTED = "restarted.json"  # in a work directory that begins with older checkpoints, also where the stage is forced
SHOWN_STEPS = 10


def restart(store: ArtifactStore, stages: Sequence[Planned], from_step: int | None) -> list[str]:
    """Set the unfinished work of these stages aside; returns a line about each that had some.

    With `from_step` the first of them begins with the checkpoints up to that step: of the work that --continue names, of its
    own unfinished work, or of its artifact. Raises UsageError where there is no such checkpoint, or a run uses the work.
    """
    trainings = [planned for planned in stages if planned.stage.uses_ranks and planned.key]
    if from_step is None:
        return [line for planned in trainings for line in _set_work_aside(store, planned)]
    if not trainings:
        raise UsageError(
            f"--from-step is {from_step}, but no training will run; `ttrain pipeline rerun STAGE --from-step {from_step}` "
            f"runs a finished one again"
        )
    planned = trainings[0]
    work, source = _work_of(store, planned), _source(store, planned)
    prepared = work.with_name(f"{planned.key}.restarted")
    remove_tree(prepared)
    copy_until(source, prepared / "output", from_step, planned.stage.name)
    lines = _set_work_aside(store, planned)
    write_json(prepared / resume.INGREDIENTS, planned.ingredients)
    write_json(prepared / RESTARTED, {"step": from_step})
    if other := planned.partial_run:
        differs = resume.changes(other, planned.ingredients)
        entry = {"key": other.key, "to": planned.key, "step": from_step, "differences": differs}
        write_json(prepared / resume.CONTINUED, [entry])
    prepared.rename(work)
    return [*lines, f"{planned.stage.name} continues at the checkpoint of step {from_step}"]


def copy_until(source: Path, output: Path, step: int, subject: str) -> None:
    """Give an output the checkpoints of another up to this step, and its curves, which the training cuts off there.

    Raises UsageError where there is no checkpoint of the step.
    """
    steps = resume.steps_in(source)
    if step not in steps:
        there_are = f"those of the steps {first_of([*map(str, steps)], SHOWN_STEPS)}" if steps else "none"
        raise UsageError(
            f"--from-step is {step}, but {subject} has no checkpoint of that step; there are {there_are} "
            f"(runtime.keep_every_steps keeps more)"
        )
    for number in (number for number in steps if number <= step):
        directory = Path("checkpoints") / f"step-{number:08d}"
        (output / directory).mkdir(parents=True)
        for file in (source / directory).iterdir():
            link_or_copy(file, output / directory / file.name)
    (output / "run").mkdir(exist_ok=True)
    for curve in (source / "run").glob("*.jsonl"):
        shutil.copyfile(curve, output / "run" / curve.name)


def set_aside(path: Path) -> Path:
    """Rename a directory to the first free name among PATH.1, PATH.2, ...; returns it."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def _work_of(store: ArtifactStore, planned: Planned) -> Path:
    assert planned.key is not None, "the inputs exist, so the key is known"
    return store.work(planned.stage.name, planned.key)


def _source(store: ArtifactStore, planned: Planned) -> Path:
    """The output whose checkpoints the stage would continue."""
    work = planned.partial_run.path if planned.partial_run else _work_of(store, planned)
    if planned.artifact and not resume.saved_step(work):
        return planned.artifact.path
    return work / "output"


def _set_work_aside(store: ArtifactStore, planned: Planned) -> list[str]:
    """Rename the unfinished work of a stage; a line on where it is, or none if there was none."""
    work, stage = _work_of(store, planned), planned.stage.name

    def taken() -> None:
        raise UsageError(f"the unfinished work of {stage} cannot be set aside: a run is using it now; stop that run first")

    with store.lock(stage, work.name, waiting=taken), store.lock(stage, f"{work.name}.process", waiting=taken):
        step = resume.saved_step(work)
        if not step:
            remove_tree(work)
            return []
        aside = set_aside(work)
    return [f"the unfinished work of {stage} at step {step} is set aside; --continue {aside.name} resumes it"]
