"""What to do after a run: commands that work as they are printed, built from the command that ran."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from ttrain.core import redact

if TYPE_CHECKING:
    from ttrain.config import Settings

OWN_DATA = "data.pretrain=docs.jsonl data.sft=chats.jsonl data.lora=domain.jsonl"
# The quickstart's SFT model is better after three passes over the chats than after one (README has the verdict), and
# not at another learning rate: 2e-4 made it 20 % worse, 4e-3 made no difference that 220 chats show.
BETTER_EPOCHS, MOST_EPOCHS = 3, 10


def with_settings(words: Sequence[str], *settings: str) -> str:
    """The command of these words, with settings, key=value, instead of its own of the same keys."""
    keys = {setting.partition("=")[0] for setting in settings}
    kept = [redact.text(word) for word in words if word.partition("=")[0].strip() not in keys]
    return shlex.join(["ttrain", *kept, *settings])


def next_steps(
    run: str,
    settings: Settings,
    made: Collection[str],
    passes: Mapping[str, float] = MappingProxyType({}),
    overfit: Collection[str] = (),
) -> list[str]:
    """The lines after a run that made, or took from the store, the artifacts of these stages.

    `passes`: those over the rows that a rule decided, by stage; `overfit`: stages whose guard warned of too many.
    """
    from ttrain.config import TRAINING_STAGES

    page = "  curves, samples and metrics, as a page: ttrain report latest"
    if settings.tracking.enabled:
        page = "  curves, models and their metrics, in MLflow: ttrain up latest --open"
    lines = ["next:", page]
    for row in [row for row in TRAINING_STAGES.values() if row.role != "adapter" and row.name in made][-1:]:
        changed = _one_thing(settings, row.name, passes.get(row.name), row.name in overfit)
        lines[1:1] = [
            f"  talk to the {row.label} model: ttrain chat {row.name}",
            f"  its files, for transformers: ttrain export {row.name} --to out/{row.name}",
        ]
        lines.append(f"  change one thing, rerun what it touches: ttrain pipeline rerun {row.name} --run {run} {changed}")
    if "source" in made:  # the text that ttrain brings
        lines.append(f"  your own text: ttrain pipeline run full {OWN_DATA}")
    return lines


def _one_thing(settings: Settings, stage: str, passes: float | None, is_overfit: bool) -> str:
    """A setting of a stage, and a value that is worth a try: fewer passes where those that were made were too many."""
    from ttrain.config import rules

    section = getattr(settings, stage)
    epochs = (passes or section.by_rows.epochs) if section.epochs == rules.AUTO else section.epochs
    if is_overfit and epochs and stage != "pretrain":
        return f"{stage}.epochs={epochs / 2:g}"
    if stage != "pretrain" and (epochs or MOST_EPOCHS) < MOST_EPOCHS:
        return f"{stage}.epochs={max(BETTER_EPOCHS, 2 * epochs):g}"
    return f"{stage}.seed={section.seed + 1}"
