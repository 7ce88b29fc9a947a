"""How a night learns: pretraining that continues the champion's plateau or warms its model up again, its budget, and the
models that SFT and LoRA start from."""

from __future__ import annotations

from typing import Any

from ttrain.config import Settings
from ttrain.config.rules import AUTO
from ttrain.config.training import TRAINING_STAGES
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.model_files import PLATEAU
from ttrain.train.schedules import RATES

INFINITE = "infinite"
FULL_RATE_STEPS = 8  # of 2,048 tokens: 0.76 of the rates in nights of 14 steps, 0.45 in nights of 40 (docs/log.md)


def budget_and_schedule(settings: Settings, *, has_plateau: bool) -> dict[str, Any]:
    """Settings of `pretrain` that differ where it continues the champion's base: the budget and the rates of a night, and no
    warm-up of a plateau, whose rate is at the peak. A high rate raises the loss on what is old (arXiv:2308.04014), in more
    steps by more: weights move by about the rate times the root of the steps."""
    nightly, optim, schedule = settings.nightly, settings.pretrain.optim.model_dump(), dict[str, Any]()
    changes: dict[str, Any] = {}
    if nightly.rate == AUTO:
        schedule["full_rate_steps"] = settings.pretrain.schedule.full_rate_steps or FULL_RATE_STEPS
    else:
        names = [name.removeprefix("optim.") for name in sorted(RATES)]
        rates = {name: float(f"{nightly.rate * optim[name]:.6g}") for name in names if optim[name] is not None}
        changes["optim"] = {**optim, **rates}
    if nightly.tokens is not None or nightly.epochs is not None:
        changes |= {"tokens": nightly.tokens, "epochs": nightly.epochs}
    if has_plateau:
        schedule["warmup_steps"] = 0
    return {**changes, "schedule": {**settings.pretrain.schedule.model_dump(), **schedule}}


def continued_plateau(settings: Settings, base: Artifact, version: str) -> tuple[Artifact | None, str]:
    """The artifact whose plateau the night continues, and a note where there should be one and is none."""
    if settings.pretrain.schedule.kind != INFINITE:
        return None, ""
    trained = base.manifest["ingredients"].get("settings", {})
    kind, now = trained.get("pretrain.optim.kind"), settings.pretrain.optim.kind
    if not base.files_of((PLATEAU,)):
        problem = f"pretrain.schedule.kind was {trained.get('pretrain.schedule.kind', 'unknown')} and left no plateau"
    elif kind != now:
        problem = f"pretrain.optim.kind was {kind}, whose state {now} cannot continue"
    else:
        return base, ""
    return None, f"the champion, version {version}, is warmed up again: its {problem}; the next champion will have a plateau"


def chat_bases(settings: Settings, champion: Artifacts, store: ArtifactStore) -> dict[str, Artifact]:
    """By stage, the models that SFT and LoRA start from instead of tonight's; `champion`: its artifacts by stage."""
    bases: dict[str, Artifact] = {}
    nightly = settings.nightly
    if nightly.sft_base == "champion" and "sft" in champion and settings.sft.start_from == "pretrain":
        bases["sft"] = champion["sft"]
    if nightly.lora_base == "champion" and "lora" in champion and (base := store.input_of(champion["lora"], "base")):
        bases["lora"] = base
    return bases


def foreign_bases(champion: Artifacts, store: ArtifactStore) -> dict[str, Artifact]:
    """By stage, the bases of adapters that stayed with their model while the champion's own became another."""
    own = {artifact.key for artifact in champion.values()}
    adapters = (name for name in champion if name in TRAINING_STAGES and TRAINING_STAGES[name].role == "adapter")
    return {name: base for name in adapters if (base := store.input_of(champion[name], "base")) and base.key not in own}
