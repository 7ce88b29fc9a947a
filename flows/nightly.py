"""A night: look for new data, train a challenger on it, compare it with the champion, promote or keep.

What a night is and which slot is whose stands in `ttrain/nightly/records.py`, what it reads in
`ttrain/nightly/inputs.py`, its stages in `flows/night_plan.py`, the decision in `ttrain/evaluate/promotion.py`; the
champion is in the tracker. None of them knows an
engine: this brings them together, and is the same with and without Prefect.

A process can be killed anywhere here. Before a night's record is written, nothing happened; after it, the next slot goes on
with the same list, finds what is finished in the store, decides the same from the same figures, and promotes what is
promoted already.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rich.console import Console

from flows.engine import run_pipeline
from flows.night_plan import check, list_of, recipe_of
from ttrain import tracking
from ttrain.config import Event, Promotion, Settings
from ttrain.core.terminal import escaped
from ttrain.errors import Interrupted, TooFewRows, TrackingError, TTrainError
from ttrain.evaluate import promotion
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly import notify, records
from ttrain.nightly.inputs import Inputs
from ttrain.nightly.records import Frozen, Night, Nights
from ttrain.pipeline.execution import Execution
from ttrain.pipeline.labels import NONE as NO_LABELS
from ttrain.pipeline.labels import Labels
from ttrain.pipeline.plan import plan
from ttrain.reports import summary
from ttrain.stages import (
    EVALUATE,
    EVALUATE_CHAMPION,
)
from ttrain.store.artifacts import Store

NAME = "nightly"
OF_BASE = "bits_per_byte"  # the metric of the base model, which a night without new documents does not change


@dataclass(frozen=True)
class NightResult:
    """What became of a night: promoted, kept, nothing-new, skipped or unfinished (its deadline was reached)."""

    outcome: str
    reason: str
    night: str | None = None  # the name of its record; None where there is none
    decision: Mapping[str, Any] | None = None


def run_night(
    settings: Settings,
    store: Store,
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
    known = Nights(store.root, settings.name)
    try:
        with known.lock():
            known.settle()
            covered = known.covered(slot, settings.nightly.timezone, time.time())
            if covered is None:
                return _Running(settings, store, console, known, slot, engine=engine, in_flow=in_flow, labels=labels).night()
    except records.StillRunning as running:
        covered = str(running)
    known.skipped(slot, covered)
    console.print(escaped(f"skipped: {covered}"), highlight=False, soft_wrap=True, markup=False)
    _send(settings, "skipped", covered)
    return NightResult("skipped", covered)


class _Running:
    """One night, whose lock this process has."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        console: Console,
        known: Nights,
        slot: datetime | None,
        *,
        engine: str,
        in_flow: bool,
        labels: Labels,
    ) -> None:
        self.settings, self.store, self.console, self.known, self.slot = settings, store, console, known, slot
        self.engine, self.in_flow, self.labels = engine, in_flow, labels
        self.stop_at = records.stop_at(settings.nightly, time.time())

    def night(self) -> NightResult:
        """From looking for data to telling what became of it."""
        newest = self.known.newest()
        if newest:
            _tell(self.settings, newest)  # what a kill kept from being told
        night = newest if newest and newest.is_open else None
        if night:
            night.begin_try(self.slot)
        try:
            frozen, reason = list_of(self.settings, self.store, self.known, night)
            self._say(reason)
            if frozen is None:
                night = self.known.without_list("nothing-new", self.slot, reason)
                return NightResult("nothing-new", reason, night.name)
            if night is None:
                night = self.known.begin(frozen, self.slot)
            elif frozen != night.frozen:
                night.freeze(frozen)
            self._say(f"{night.name}: {night_inputs.description(frozen.files)}")
            return self._completed(night, frozen)
        except (Interrupted, KeyboardInterrupt) as stopped:
            return self._stopped(night, stopped)
        except Exception as error:
            self._failed(night, error)
            raise

    def _completed(self, night: Night, frozen: Frozen) -> NightResult:
        execution, inputs = self._train(night, frozen)
        decision = self._decide(night, frozen, execution, inputs)
        night.note(heldout=_heldout_of(execution))
        night.end_try(decision.word, decision.reason, closed=True, event=decision.word)
        self._say(f"{decision.word}: {decision.reason}")
        _tell(self.settings, night)
        return NightResult(decision.word, decision.reason, night.name, decision.to_json())

    def _stopped(self, night: Night | None, stopped: BaseException) -> NightResult:
        """The stages have saved their state. Raises what stopped them, unless it was the deadline."""
        if night is None or not night.is_open:
            raise stopped
        night.end_try("unfinished", str(stopped), closed=False, event="unfinished")
        _tell(self.settings, night)
        if self.stop_at is None or time.time() < self.stop_at:
            raise stopped
        return NightResult("unfinished", f"the deadline was reached; the next night goes on with {night.name}", night.name)

    def _failed(self, night: Night | None, error: Exception) -> None:
        """Note it. A list that failed too often is given up, so that nothing stands in the way of what comes after it.

        A wrong setting is no failure of the list, however often nobody corrects it. A list with too few rows has trained
        nothing: it is given up at once, since the next one may have more files.
        """
        refused = isinstance(error, TTrainError) and error.is_usage_error
        outcome = records.REFUSED if refused else records.FAILED
        if night is None:
            night = self.known.without_list(outcome, self.slot, str(error), "failed")
        elif refused:
            gives_up = isinstance(error, TooFewRows)
            night.end_try(outcome, str(error), closed=gives_up, event="failed")
            fix = "correct the settings, and the next night goes on"
            if gives_up:
                fix = "the next night takes these files and all new ones; bring more data, or correct the settings"
            self._say(f"{night.name} was refused, which is no failed try; {fix}")
        else:
            failures, attempts = night.failures + 1, self.settings.nightly.attempts
            gives_up = failures >= attempts
            night.end_try(outcome, str(error), closed=gives_up, event="failed")
            cure = "its list is given up, the next night makes a new one" if gives_up else "the next night tries it again"
            self._say(f"{night.name} failed ({failures} of {attempts} times); {cure}")
        _tell(self.settings, night)

    def _train(self, night: Night, frozen: Frozen) -> tuple[Execution, Inputs]:
        """Run the stages."""
        inputs = night_inputs.inputs_of(frozen, self.settings, self.store)
        recipe = recipe_of(inputs)

        def began(execution: Execution) -> None:
            night.note_try(run=execution.record.run)
            execution.artifacts.update(inputs.given)

        execution = run_pipeline(
            NAME,
            inputs.settings,
            self.store,
            plan(recipe, inputs.settings, self.store),
            self.console,
            engine=self.engine,
            own_recipe=recipe,
            began=began,
            extra_tags={"ttrain.night": night.name},
            labels=self.labels,
            in_flow=self.in_flow,
            stop_at=self.stop_at,
        )
        return execution, inputs

    def _decide(self, night: Night, frozen: Frozen, execution: Execution, inputs: Inputs) -> promotion.Decision:
        """Compare, write down the figures, promote or keep."""
        evaluations = [execution.artifacts.get(stage.name) for stage in (EVALUATE, EVALUATE_CHAMPION)]
        rules = _rules(self.settings, inputs, execution)
        here = [self.store.complete(e, said=self._say) if e else None for e in evaluations]  # a cached one may be in MLflow
        challenger, champion = (promotion.scores_of(e, rules.metric) if e else None for e in here)
        assert challenger is not None, "a run that came to its end has evaluated"
        decision = promotion.decide(challenger, champion, rules)
        home, name, version = self.store.root, self.settings.name, execution.model_set
        if version is None:
            raise TrackingError(f"{night.name} cannot be decided: its models are not registered in MLflow (see above)")
        now = tracking.champion(home, name)
        before = frozen.champion.version if frozen.champion else None
        if now is not None and now.version not in (before, version):  # by hand, while the night went on
            reason = f"version {now.version} became champion during the night, so nothing is promoted; {decision.reason}"
            decision = replace(decision, promote=False, reason=reason)
        night.note(version=version, run=execution.record.run, decision=decision.to_json())
        table = summary.markdown(decision.rows(), ("what", "value"))
        if decision.promote or now is None or now.version != version:  # the champion keeps the decision that made it so
            tracking.log_decision(home, name, version, decision.to_json(), table, run_id=execution.tracked_run)
        if self.engine == "prefect":
            from flows import orchestrate

            orchestrate.show_decision(table, night.name, in_flow=self.in_flow)
        if decision.promote:
            tracking.promote(home, name, version)
        return decision

    def _say(self, text: str) -> None:
        self.console.print(escaped(text), highlight=False, soft_wrap=True, markup=False)  # names of files, from anywhere


def _rules(settings: Settings, inputs: Inputs, execution: Execution) -> Promotion:
    """By what the night is decided. Without new documents both have the same base model, so that its figure says nothing:
    then the first model that differs counts, on the chats that are held out for it."""
    rules = settings.promotion
    if not inputs.keeps_base or rules.metric != OF_BASE:
        return rules
    same_sft = inputs.champion["sft"].content == execution.artifacts["sft"].content if "sft" in inputs.champion else False
    metric = "domain_loss_lora" if same_sft else "chat_loss_sft"
    return rules.model_copy(update={"metric": metric, "higher_is_better": False})


def _heldout_of(execution: Execution) -> str | None:
    """Stage and key of the held-out documents that this night's models were measured on."""
    found = execution.artifacts[EVALUATE.name].manifest["inputs"].get("documents")
    return f"{found['stage']}/{found['key']}" if found else None


def _tell(settings: Settings, night: Night) -> None:
    """The notification, where it was not sent yet and somebody wants it."""
    event: Event | None = night.data.get("untold")
    if event is not None:
        _send(settings, event, night.data["reason"], night.name, night.data.get("decision"))
        night.note(untold=None)


def _send(
    settings: Settings, event: Event, reason: str, night: str | None = None, decision: Mapping[str, Any] | None = None
) -> None:
    text = f"ttrain {settings.name}{f', {night}' if night else ''}: {event}: {reason}"
    told = {"pipeline": settings.name, "night": night, "text": text, "reason": reason, "decision": decision}
    notify.send(settings.notify, event, told)
