"""What a night reads and which stages it has: found before it begins, the same for its plan and its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flows.full import full
from ttrain import tracking
from ttrain.config import Settings
from ttrain.errors import UsageError
from ttrain.evaluate import promotion
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly import records
from ttrain.nightly.inputs import Inputs
from ttrain.nightly.records import Champion, Frozen, Night, Nights
from ttrain.pipeline.execution import REGISTERED
from ttrain.pipeline.plan import plan
from ttrain.pipeline.planned import Planned, Recipe
from ttrain.stages import EVALUATE, EVALUATE_CHAMPION, EXISTING_MODEL, HELDOUT, SHARDS_PRETRAIN, Stage
from ttrain.store.artifacts import Store


@dataclass(frozen=True)
class NightPlan:
    """What a night would do now."""

    reason: str
    frozen: Frozen | None = None  # None: it would read nothing
    stages: tuple[Planned, ...] = ()


def plan_night(settings: Settings, store: Store) -> NightPlan:
    """What a night that began now would do. Changes nothing."""
    check(settings)
    known = Nights(store.root, settings.name)
    newest = known.newest()
    frozen, reason = list_of(settings, store, known, newest if newest and newest.is_open else None)
    if frozen is None:
        return NightPlan(reason)
    inputs = night_inputs.inputs_of(frozen, settings, store)
    return NightPlan(reason, frozen, tuple(plan(recipe_of(inputs), inputs.settings, store)))


def recipe_of(inputs: Inputs) -> Recipe:
    """The pipeline `full`, where the champion stands in for what it brings, and is measured beside its challenger."""

    def nightly(stage: Callable[..., Any], settings: Settings) -> None:
        def build(of: Stage, **given: Any) -> Any:
            if of.name in inputs.given:
                return inputs.given[of.name]
            if inputs.keeps_base and of is SHARDS_PRETRAIN:
                return None
            if inputs.keeps_base and of is EXISTING_MODEL:
                return inputs.given["pretrain"]
            if of is not EVALUATE:
                return stage(of, **given)
            measured = {**given, "documents": documents(given.get("documents"))}
            if inputs.champion:
                models = {role: inputs.champion.get(role) for role in ("base", "sft", "lora")}
                stage(EVALUATE_CHAMPION, **{**measured, **models})
            return stage(EVALUATE, **measured)

        def documents(new: Any) -> Any:
            if new is None or inputs.earlier is None:
                return inputs.earlier if new is None else new
            return stage(HELDOUT, earlier=inputs.earlier, documents=new)

        full(build, settings)

    return nightly


def check(settings: Settings) -> None:
    """Raises UsageError for settings that no night can have."""
    promotion.check_metric(settings)
    if not settings.tracking.enabled:
        raise UsageError(
            "tracking.enabled is false, but a night needs to know the champion, which is an alias in MLflow; set it to true"
        )
    if settings.runtime.nodes > 1:
        raise UsageError(
            f"runtime.nodes is {settings.runtime.nodes}, but a night runs on one machine, with runtime.devices ranks; set "
            f"runtime.nodes=1, or train with `ttrain pipeline run full` on each node and `ttrain models promote`"
        )


def list_of(settings: Settings, store: Store, known: Nights, night: Night | None) -> tuple[Frozen | None, str]:
    """What a night reads, or None, and why: the list of one that is unfinished, else what is new."""
    if night is not None:
        return _again(settings, store, night)
    watched = night_inputs.watched(settings, store, may_be_gone=True)
    nothing = f"nothing new: all {sum(map(len, watched.values()))} files have been read by a night before"
    read = known.read()
    if read.issuperset(file["sha256"] for files in watched.values() for file in files) and read:
        return None, nothing  # most nights: MLflow, 2 s of a core, is not even asked
    champion = _champion(settings, store)
    if champion is None:
        watched = night_inputs.watched(settings, store, may_be_gone=False)
    learnt, in_nights = night_inputs.learnt_by(champion, store), known.learnt(champion)
    chosen = night_inputs.choose(
        settings.nightly, watched, read | learnt, in_nights | learnt, has_champion=champion is not None
    )
    if not chosen.new:
        return None, nothing
    earlier = night_inputs.earlier_heldout(champion, known.all(), store, settings)
    before = tuple(sorted(learnt - in_nights))  # the next champion's own artifacts will not tell of them
    frozen = Frozen(chosen.files, settings.model_dump(mode="json"), champion, earlier, before)
    base = f"the champion, version {champion.version}" if champion else "no champion yet"
    return frozen, f"{len(chosen.new)} new: {records.names(chosen.new)}; {base}"


def _champion(settings: Settings, store: Store) -> Champion | None:
    found = tracking.champion(store.root, settings.name)
    if found is None:
        return None
    return Champion(found.version, {stage: key for stage, key in found.keys.items() if stage in REGISTERED})


def _again(settings: Settings, store: Store, night: Night) -> tuple[Frozen, str]:
    """The list of an unfinished night, with the bytes that its files have now; after a failure with the settings of now."""
    frozen = night.frozen
    ended = night.ended or {"outcome": night.outcome, "reason": "in another process"}
    reason = f"{night.name} goes on ({ended['outcome']}: {ended['reason']})"
    if ended["outcome"] in (records.FAILED, records.REFUSED) and frozen.settings != (
        now := settings.model_dump(mode="json")
    ):
        frozen, reason = replace(frozen, settings=now), f"{reason}; with the settings of now"
    there = night_inputs.watched(night_inputs.settings_of(frozen, settings), store, may_be_gone=True)
    if changed := night_inputs.changed(frozen, there):
        reason = f"{reason}; changed or gone since it began: {records.names(changed)}"
    return night_inputs.frozen_again(frozen, there), reason
