"""`--extend`: a larger budget starts from a checkpoint of a shorter run, and comes to the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.config import Settings, Training
from ttrain.train.schedules import BUDGET, decay_start, steps_of

if TYPE_CHECKING:
    from ttrain.stages import Stage
    from ttrain.store.artifacts import Store


def extension_of(stage: Stage, settings: Settings, ingredients: Mapping[str, Any], store: Store) -> tuple[Path | None, str]:
    """A shorter run's checkpoint from which this one comes to the same weights as from scratch, and what to say.

    It must lie where the learning rate did not yet depend on the length of the run, and all but the budget must be equal.
    """
    config: Training = getattr(settings, stage.name)
    budget = {f"{stage.name}.{name}" for name in BUDGET}
    best: tuple[int, Path] | None = None
    for artifact in store.artifacts(stage.name):
        old = artifact.manifest["ingredients"]
        changed = {
            name
            for name in {*old["settings"], *ingredients["settings"]}
            if old["settings"].get(name) != ingredients["settings"].get(name)
        }
        same = all(old[name] == ingredients[name] for name in ("inputs", "code", "arguments", "files"))
        if not same or not changed <= budget or store.damage(artifact):
            continue
        new_steps = steps_of(config, artifact.result["rows"]["rows"])[0]
        whole_steps = artifact.result["tokens"] // config.tokens_per_step  # its last one may be cut short by its budget
        limit = min(whole_steps, *(decay_start(config.schedule, n) for n in (new_steps, artifact.result["steps"])))
        for path in (artifact.path / "checkpoints").glob("step-*"):
            step = int(path.name.removeprefix("step-"))
            if step <= limit and (best is None or step > best[0]):
                best = (step, path)
    if best is None:
        return None, "--extend found no shorter run with a checkpoint before its decay; it starts from scratch"
    return best[1], f"--extend: continues at step {best[0]} of the run {best[1].parent.parent.name[:12]}"
