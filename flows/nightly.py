"""A night: look for new data, train a challenger on it, compare it with the champion, promote or keep.

Records and slots of nights are in `ttrain/nightly/records.py`, their inputs in `ttrain/nightly/inputs.py`, the decision
in `ttrain/evaluate/promotion.py`; the champion is in the tracker. None of them knows an engine: this module brings them
together, and is the same with and without Prefect.

A process can be killed anywhere here. Before a night's record is written, nothing happened; after it, the next slot goes on
with the same list, finds what is finished in the store, decides the same from the same figures, and promotes what is
promoted already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rich.console import Console

from ttrain import tracking
from ttrain.config import Event, Promotion, Settings
from ttrain.config.training import BITS_PER_BYTE, CHAT_LOSS, DOMAIN_LOSS, TRAINING_STAGES
from ttrain.core.terminal import escaped
from ttrain.errors import Interrupted, TooFewRows, TrackingError, TTrainError, UsageError
from ttrain.evaluate import promotion
from ttrain.flows.full import full
from ttrain.flows.run import run_pipeline
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly import notify, records
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import Champion, InputSnapshot, NightRecord, Nights
from ttrain.pipeline.execution import PipelineRun
from ttrain.pipeline.labels import NO_LABELS, Labels
from ttrain.pipeline.plan import plan
from ttrain.pipeline.recipe import Planned, Recipe
from ttrain.pipeline.run_models import REGISTERED
from ttrain.reports import summary
from ttrain.stages import (
    EVALUATE,
    EVALUATE_CHAMPION,
    EXISTING_MODEL,
    HELDOUT,
    LEARNT_BEFORE,
    PRETRAIN,
    REPLAY,
    SHARDS_PRETRAIN,
    Stage,
)
from ttrain.store.artifacts import ArtifactStore

NAME = "nightly"


@dataclass(frozen=True)
class NightResult:
    """The outcome of a night: promoted, kept, nothing-new, skipped or unfinished (its deadline was reached)."""

    outcome: str
    reason: str
    night: str | None = None  # the name of its record; None where there is none
    decision: Mapping[str, Any] | None = None


def run_night(
    settings: Settings,
    store: ArtifactStore,
    console: Console,
    *,
    engine: str = "prefect",
    slot: datetime | None = None,
    in_flow: bool = False,
    labels: Labels = NO_LABELS,
) -> NightResult:
    """Run one night, or say why there is none. Raises what made it fail, and Interrupted where it was asked to stop:
    its list stays, and the next night goes on with it.

    `slot` is the time that it was scheduled for (with its time zone), None where somebody asks for a night now.
    """
    check(settings)
    nights = Nights(store.root, settings.name)
    try:
        with nights.lock():
            nights.settle()
            covered = nights.covered(slot, settings.nightly.timezone, time.time())
            if covered is None:
                return NightRun(settings, store, console, nights, slot, engine, in_flow, labels).night()
    except records.StillRunning as running:
        covered = str(running)
    nights.skipped(slot, covered)
    console.print(escaped(f"skipped: {covered}"), highlight=False, soft_wrap=True, markup=False)
    _send(settings, "skipped", covered)
    return NightResult("skipped", covered)


@dataclass
class NightRun:
    """One night; this process holds its lock."""

    settings: Settings
    store: ArtifactStore
    console: Console
    nights: Nights
    slot: datetime | None
    engine: str
    in_flow: bool
    labels: Labels

    def __post_init__(self) -> None:
        self.stop_at = records.stop_at(self.settings.nightly, time.time())

    def night(self) -> NightResult:
        """Run the night, from looking for data to the notification."""
        newest = self.nights.newest()
        if newest:
            _send_pending(self.settings, newest)  # a notification that a kill prevented
        night = newest if newest and newest.is_open else None
        if night:
            night.begin_try(self.slot)
        try:
            frozen, reason = choose_inputs(self.settings, self.store, self.nights, night)
            self.say(reason)
            if frozen is None:
                night = self.nights.add_empty("nothing-new", self.slot, reason)
                return NightResult("nothing-new", reason, night.name)
            if night is None:
                night = self.nights.begin(frozen, self.slot)
            elif frozen != night.frozen:
                night.freeze(frozen)
            self.say(f"{night.name}: {night_inputs.describe_files(frozen.files)}")
            return self._completed(night, frozen)
        except (Interrupted, KeyboardInterrupt) as stopped:
            return self._stopped(night, stopped)
        except Exception as error:
            self._failed(night, error)
            raise

    def _completed(self, night: NightRecord, frozen: InputSnapshot) -> NightResult:
        execution, inputs = self._train(night, frozen)
        decision = self._decide(night, frozen, execution, inputs)
        shards = execution.artifacts.get(SHARDS_PRETRAIN.name)
        night.note(heldout=_heldout_of(execution), documents=f"{shards.stage}/{shards.key}" if shards else None)
        night.end_try(decision.word, decision.reason, closed=True, event=decision.word)
        self.say(f"{decision.word}: {decision.reason}")
        _send_pending(self.settings, night)
        return NightResult(decision.word, decision.reason, night.name, decision.to_json())

    def _stopped(self, night: NightRecord | None, stopped: BaseException) -> NightResult:
        """Record the stop; the stages have saved their state. Raises what stopped them, unless it was the deadline."""
        if night is None or not night.is_open:
            raise stopped
        night.end_try("unfinished", str(stopped), closed=False, event="unfinished")
        _send_pending(self.settings, night)
        if self.stop_at is None or time.time() < self.stop_at:
            raise stopped
        return NightResult("unfinished", f"the deadline was reached; the next night goes on with {night.name}", night.name)

    def _failed(self, night: NightRecord | None, error: Exception) -> None:
        """Record the failure. A list that failed too often is given up, so that it does not block later data.

        A wrong setting is not a failure of the list, however often nobody corrects it. A list with too few rows has trained
        nothing: it is given up at once, since the next one may have more files.
        """
        refused = isinstance(error, TTrainError) and error.is_usage_error
        outcome = records.REFUSED if refused else records.FAILED
        if night is None:
            night = self.nights.add_empty(outcome, self.slot, str(error), "failed")
        elif refused:
            gives_up = isinstance(error, TooFewRows)
            night.end_try(outcome, str(error), closed=gives_up, event="failed")
            fix = "correct the settings, and the next night goes on"
            if gives_up:
                fix = "the next night takes these files and all new ones; bring more data, or correct the settings"
            self.say(f"{night.name} was refused, which does not count as a failed attempt; {fix}")
        else:
            failures, attempts = night.failures + 1, self.settings.nightly.attempts
            gives_up = failures >= attempts
            night.end_try(outcome, str(error), closed=gives_up, event="failed")
            next_step = (
                "its list is given up, the next night makes a new one" if gives_up else "the next night tries it again"
            )
            self.say(f"{night.name} failed ({failures} of {attempts} times); {next_step}")
        _send_pending(self.settings, night)

    def _train(self, night: NightRecord, frozen: InputSnapshot) -> tuple[PipelineRun, NightInputs]:
        """Run the stages."""
        inputs = night_inputs.inputs_of(frozen, self.settings, self.store)
        recipe = recipe_of(inputs)

        def on_begin(execution: PipelineRun) -> None:
            night.note_try(run=execution.record.run)
            execution.artifacts.update(inputs.replacements)

        execution = run_pipeline(
            NAME,
            inputs.settings,
            self.store,
            plan(recipe, inputs.settings, self.store),
            self.console,
            engine=self.engine,
            own_recipe=recipe,
            on_begin=on_begin,
            extra_tags={"ttrain.night": night.name},
            labels=self.labels,
            in_flow=self.in_flow,
            stop_at=self.stop_at,
        )
        return execution, inputs

    def _decide(
        self, night: NightRecord, frozen: InputSnapshot, execution: PipelineRun, inputs: NightInputs
    ) -> promotion.Decision:
        """Compare the evaluations, record the decision, promote or keep."""
        evaluations = [execution.artifacts.get(stage.name) for stage in (EVALUATE, EVALUATE_CHAMPION)]
        rules = _rules(self.settings, inputs, execution)
        # The files of a cached evaluation may be in MLflow
        complete_evaluations = [self.store.complete(e, report=self.say) if e else None for e in evaluations]
        challenger, champion = (promotion.scores_of(e, rules.metric) if e else None for e in complete_evaluations)
        assert challenger is not None, "a run that came to its end has evaluated"
        decision = promotion.decide(challenger, champion, rules)
        home, name, version = self.store.root, self.settings.name, execution.model_set
        if version is None:
            raise TrackingError(f"{night.name} cannot be decided: its models are not registered in MLflow (see above)")
        now = tracking.champion(home, name)
        previous_version = frozen.champion.version if frozen.champion else None
        if now is not None and now.version not in (previous_version, version):  # by hand, while the night went on
            reason = f"version {now.version} became champion during the night, so nothing is promoted; {decision.reason}"
            decision = replace(decision, promote=False, reason=reason)
        night.note(version=version, run=execution.record.run, decision=decision.to_json())
        table = summary.markdown(decision.rows(), ("name", "value"))
        if decision.promote or now is None or now.version != version:  # the champion keeps the decision that made it so
            tracking.log_decision(home, name, version, decision.to_json(), table, run_id=execution.tracked_run)
        if self.engine == "prefect":
            from ttrain.flows import prefect_run

            prefect_run.show_decision(table, night.name, in_flow=self.in_flow)
        if decision.promote:
            tracking.promote(home, name, version)
        return decision

    def say(self, text: str) -> None:
        """Print a message, with control characters escaped."""
        self.console.print(escaped(text), highlight=False, soft_wrap=True, markup=False)  # names of files, from anywhere


def _rules(settings: Settings, inputs: NightInputs, execution: PipelineRun) -> Promotion:
    """The rules of the night's decision. Without new documents both have the same base model, whose metric says nothing:
    then the first model that differs counts, on the chats that are held out for it."""
    rules = settings.promotion
    if not inputs.keeps_base or rules.metric != BITS_PER_BYTE.name:
        return rules
    same_sft = inputs.champion["sft"].content == execution.artifacts["sft"].content if "sft" in inputs.champion else False
    metric = DOMAIN_LOSS if same_sft else CHAT_LOSS
    return rules.model_copy(update={"metric": metric.name, "higher_is_better": metric.higher_is_better})


def _heldout_of(execution: PipelineRun) -> str | None:
    """Stage and key of the held-out documents that this night's models were measured on."""
    documents = execution.artifacts[EVALUATE.name].manifest["inputs"].get("documents")
    return f"{documents['stage']}/{documents['key']}" if documents else None


def _send_pending(settings: Settings, night: NightRecord) -> None:
    """Send the night's pending notification, if there is one."""
    event: Event | None = night.data.get("untold")
    if event is not None:
        _send(settings, event, night.data["reason"], night.name, night.data.get("decision"))
        night.note(untold=None)


def _send(
    settings: Settings, event: Event, reason: str, night: str | None = None, decision: Mapping[str, Any] | None = None
) -> None:
    text = f"ttrain {settings.name}{f', {night}' if night else ''}: {event}: {reason}"
    payload = {"pipeline": settings.name, "night": night, "text": text, "reason": reason, "decision": decision}
    notify.send(settings.notify, event, payload)


@dataclass(frozen=True)
class NightPlan:
    """The plan of a night that would begin now."""

    reason: str
    frozen: InputSnapshot | None = None  # None: there is nothing to read
    stages: tuple[Planned, ...] = ()


def plan_night(settings: Settings, store: ArtifactStore) -> NightPlan:
    """Plan a night that would begin now. Changes nothing."""
    check(settings)
    nights = Nights(store.root, settings.name)
    newest = nights.newest()
    frozen, reason = choose_inputs(settings, store, nights, newest if newest and newest.is_open else None)
    if frozen is None:
        return NightPlan(reason)
    inputs = night_inputs.inputs_of(frozen, settings, store)
    return NightPlan(reason, frozen, tuple(plan(recipe_of(inputs), inputs.settings, store)))


def recipe_of(inputs: NightInputs) -> Recipe:
    """The pipeline `full`, with stages replaced by the champion's artifacts, and the champion evaluated as well."""

    def nightly(stage: Callable[..., Any], settings: Settings) -> None:
        def build(of: Stage, **stage_inputs: Any) -> Any:
            if of.name in inputs.replacements:
                return inputs.replacements[of.name]
            if inputs.keeps_base and of is SHARDS_PRETRAIN:
                return None
            if inputs.keeps_base and of is EXISTING_MODEL:
                return inputs.replacements["pretrain"]
            if of is PRETRAIN and inputs.replayed:
                learnt = {f"{LEARNT_BEFORE}{number:04}": artifact for number, artifact in enumerate(inputs.replayed)}
                stage_inputs["replay"] = stage(REPLAY, documents=stage_inputs["shards"], **learnt)
            if of is not EVALUATE:
                return stage(of, **stage_inputs)
            measured = {**stage_inputs, "documents": documents(stage_inputs.get("documents"))}
            if inputs.champion:
                models = {row.model: inputs.champion.get(row.model) for row in TRAINING_STAGES.values()}
                stage(EVALUATE_CHAMPION, **{**measured, **models})
            return stage(EVALUATE, **measured)

        def documents(new: Any) -> Any:
            if new is None or inputs.earlier_heldout is None:
                return inputs.earlier_heldout if new is None else new
            return stage(HELDOUT, earlier=inputs.earlier_heldout, documents=new)

        full(build, settings)

    return nightly


def check(settings: Settings) -> None:
    """Raise UsageError for settings that a night cannot have."""
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


def choose_inputs(
    settings: Settings, store: ArtifactStore, nights: Nights, night: NightRecord | None
) -> tuple[InputSnapshot | None, str]:
    """The inputs of a night, or None, and the reason: those of an unfinished night, else what is new."""
    if night is not None:
        return _resumed_inputs(settings, store, night)
    watched = night_inputs.watched_files(settings, store, may_be_gone=True)
    nothing = f"nothing new: all {sum(map(len, watched.values()))} files have been read by a night before"
    read = nights.read()
    if read.issuperset(file["sha256"] for files in watched.values() for file in files) and read:
        return None, nothing  # most nights: MLflow, 2 s of a core, is not even asked
    champion = current_champion(settings, store)
    if champion is None:
        watched = night_inputs.watched_files(settings, store, may_be_gone=False)
    learnt, in_nights = night_inputs.learnt_by(champion, store), nights.learnt(champion)
    chosen = night_inputs.select_files(
        settings.nightly, watched, read | learnt, in_nights | learnt, has_champion=champion is not None
    )
    if not chosen.new:
        return None, nothing
    earlier = night_inputs.earlier_heldout(champion, nights.all(), store, settings)
    learnt_before = tuple(sorted(learnt - in_nights))  # the next champion's own artifacts will not record them
    continues = settings.nightly.start_from == "champion" and settings.nightly.data == "new"
    documents: tuple[str, ...] = ()
    replay = 0.0
    if continues and not settings.data.weights("pretrain"):  # else the night reads them all again
        documents = night_inputs.learnt_documents(champion, nights.all(), store)
        replay = settings.nightly.replay if documents and chosen.files.get("pretrain") else 0.0
    frozen = InputSnapshot(
        chosen.files, settings.model_dump(mode="json"), champion, earlier, learnt_before, documents, replay
    )
    base = f"the champion, version {champion.version}" if champion else "no champion yet"
    return frozen, f"{len(chosen.new)} new: {records.shortened_names(chosen.new)}; {base}"


def current_champion(settings: Settings, store: ArtifactStore) -> Champion | None:
    """The registered champion with the artifacts of its models; None if there is none."""
    champion = tracking.champion(store.root, settings.name)
    if champion is None:
        return None
    return Champion(champion.version, {stage: key for stage, key in champion.keys.items() if stage in REGISTERED})


def _resumed_inputs(settings: Settings, store: ArtifactStore, night: NightRecord) -> tuple[InputSnapshot, str]:
    """The inputs of an unfinished night, with its files as they are now; after a failure with the current settings."""
    frozen = night.frozen
    ended = night.ended or {"outcome": night.outcome, "reason": "in another process"}
    reason = f"{night.name} goes on ({ended['outcome']}: {ended['reason']})"
    if ended["outcome"] in (records.FAILED, records.REFUSED) and frozen.settings != (
        now := settings.model_dump(mode="json")
    ):
        frozen, reason = replace(frozen, settings=now), f"{reason}; with the current settings"
    current_files = night_inputs.watched_files(night_inputs.settings_of(frozen, settings), store, may_be_gone=True)
    if changed := night_inputs.changed_files(frozen, current_files):
        reason = f"{reason}; changed or gone since it began: {records.shortened_names(changed)}"
    return night_inputs.refreshed_snapshot(frozen, current_files), reason
