"""A night: look for new data, train a challenger on it, compare it with the champion, promote or keep.

`night_plan.py` has the inputs and the graph, `night_decision.py` the decision, by the rules of
`ttrain/evaluate/promotion.py`; records and slots are in `ttrain/nightly/records.py`, the champion is in the registry. This
module brings them together, and is the same with and without Prefect.

A process can be killed anywhere here. Before a night's record is written, nothing happened; after it, the next slot goes on
with the same list, finds what is finished in the store, decides the same from the same figures, and promotes what is
promoted already.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Console

from ttrain.config import Event, Settings
from ttrain.core.terminal import print_plain
from ttrain.engine.execution import PipelineRun
from ttrain.engine.labels import NO_LABELS, Labels
from ttrain.engine.stop_request import AT_DEADLINE, SIGNALLED
from ttrain.errors import Interrupted, NothingNew, StageFailed, TooFewRows, TTrainError
from ttrain.evaluate import promotion
from ttrain.flows import night_decision, night_plan
from ttrain.flows.run import RunOptions, run_pipeline
from ttrain.nightly import history, notify, records
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import InputSnapshot, NightRecord, Nights
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.registry import Registry
from ttrain.store.runs import NOTHING_NEW
from ttrain.tasks import EVALUATE, SHARDS, SHARDS_PRETRAIN
from ttrain.tracking.pusher import push_noted

MOST_LEFT_OUT = 20  # damaged files of a night, each of which is found by a pass over the new ones


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
    night_plan.check(settings)
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
    if not in_flow:  # else the state of the flow run says it
        print_plain(console, f"skipped: {covered}")
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
            self._named(night).begin_try(self.slot)
        try:
            frozen, reason = night_plan.choose_inputs(self.settings, self.store, self.nights, night)
            if frozen is None:
                self.say_outcome(reason)
                night = self._named(self.nights.add_empty(NOTHING_NEW, self.slot, reason))
                return NightResult(NOTHING_NEW, reason, night.name)
            self.say(reason)
            if night is None:
                night = self._named(self.nights.begin(frozen, self.slot))
            elif frozen != night.frozen:
                night.freeze(frozen)
            self.say(f"{night.name}: {night_inputs.describe_files(frozen.files)}")
            return self._completed(night, frozen)
        except (Interrupted, KeyboardInterrupt) as stopped:
            return self._stopped(night, stopped)
        except NothingNew as error:
            assert night is not None, "a stage found it"
            night.end_try(NOTHING_NEW, reason := f"nothing new: {error}", closed=True)
            self.say_outcome(reason)
            return NightResult(NOTHING_NEW, reason, night.name)
        except Exception as error:
            if newest and self._was_refused_before(newest, error):
                if night:
                    night.end_try(records.REFUSED, str(error), closed=isinstance(error, TooFewRows))
                name = (night or newest).name
                self.nights.skipped(self.slot, reason := f"{name} is still refused: {error}")
                return NightResult("skipped", reason, name)
            self._failed(night, error)
            raise

    def _completed(self, night: NightRecord, frozen: InputSnapshot) -> NightResult:
        execution, inputs = self._train(night, frozen)
        decision = self._decide(night, execution, inputs)
        shards, evaluation = execution.artifacts.get(SHARDS_PRETRAIN.name), execution.artifacts[EVALUATE.name]
        chat_shards = None if "sft" in inputs.replacements else execution.artifacts.get(SHARDS["sft"].name)
        night.note(
            heldout=night_decision.heldout_of(evaluation),
            heldout_nights=list(night_decision.heldout_nights(night, evaluation)),
            documents=f"{shards.stage}/{shards.key}" if shards else None,
            chats=f"{chat_shards.stage}/{chat_shards.key}" if chat_shards else None,
            learnt=history.learnt_of(execution.artifacts, chat_shards),
        )
        reason = "; ".join(filter(None, (decision.reason, night_inputs.describe_left_out(night.unread))))
        night.end_try(decision.word, reason, closed=True, event=decision.word)
        self.say_outcome(f"{decision.word}: {reason}")
        _send_pending(self.settings, night)
        return NightResult(decision.word, reason, night.name, decision.to_json())

    def _stopped(self, night: NightRecord | None, stopped: BaseException) -> NightResult:
        """Record the stop; the stages have saved their state. Raises what stopped them, unless it was the deadline."""
        if night is None or not night.is_open:
            raise stopped
        at_deadline = self.stop_at is not None and time.time() >= self.stop_at
        reason = str(stopped).replace(SIGNALLED, AT_DEADLINE) if at_deadline else str(stopped)  # a stage knows of a signal
        night.end_try("unfinished", reason, closed=False, event="unfinished")
        _send_pending(self.settings, night)
        if not at_deadline:
            raise stopped
        return NightResult("unfinished", f"the deadline was reached; the next night goes on with {night.name}", night.name)

    def _was_refused_before(self, newest: NightRecord, error: Exception) -> bool:
        """Whether this slot is refused in the same words as the one before it, which were told then."""
        ended = newest.ended or {}
        before = (ended.get("outcome"), ended.get("reason"))
        return self.slot is not None and _is_refusal(error) and before == (records.REFUSED, str(error))

    def _failed(self, night: NightRecord | None, error: Exception) -> None:
        """Record the failure. A list that failed too often is given up, so that it does not block later data.

        A wrong setting is not a failure of the list, however often nobody corrects it. A list with too few rows, or with
        nothing new but damaged files, has trained nothing: it is given up at once, since the next one may have more files.
        """
        refused = _is_refusal(error)
        outcome = records.REFUSED if refused else records.FAILED
        if night is None:
            night = self._named(self.nights.add_empty(outcome, self.slot, str(error), "failed"))
        elif refused:
            gives_up = isinstance(error, TooFewRows)
            night.end_try(outcome, str(error), closed=gives_up, event="failed")
            fix = "correct the settings, and the next night goes on"
            if gives_up:
                fix = "the next night takes these files and all new ones; bring more data, or correct the settings"
            self.say(f"{night.name} was refused, which does not count as a failed attempt; {fix}")
        else:
            failures, attempts = night.failures + 1, self.settings.nightly.attempts
            gives_up = failures >= attempts or _is_damage(error)
            night.end_try(outcome, str(error), closed=gives_up, event="failed")
            next_step = (
                "its list is given up, the next night makes a new one" if gives_up else "the next night tries it again"
            )
            tries = "damaged files" if _is_damage(error) else f"{failures} of {attempts} times"
            self.say(f"{night.name} failed ({tries}); {next_step}")
        _send_pending(self.settings, night)

    def _train(self, night: NightRecord, frozen: InputSnapshot) -> tuple[PipelineRun, NightInputs]:
        """Run the stages on what is new and whole: again without documents that are known, and without damaged files."""
        while True:
            try:
                return self._run_stages(night, frozen)
            except (NothingNew, StageFailed) as error:
                damaged = error.files if isinstance(error, StageFailed) else ()
                if damaged:
                    night.leave_out(night_inputs.entries_of(frozen, damaged), str(error), self.settings)
                elif isinstance(error, StageFailed):
                    raise
                smaller = night_inputs.smaller_snapshot(frozen, damaged, self.nights.read())
                if smaller is None or len(night.left_out) > MOST_LEFT_OUT:
                    raise
                frozen = smaller
                self.say(f"{error}; {'the night goes on without it' if damaged else 'the new chats are learnt'}")
                night.freeze(frozen)

    def _run_stages(self, night: NightRecord, frozen: InputSnapshot) -> tuple[PipelineRun, NightInputs]:
        inputs = night_inputs.inputs_of(frozen, self.settings, self.store)
        if inputs.note:
            self.say(inputs.note)

        def on_begin(execution: PipelineRun) -> None:
            night.note_try(run=execution.record.run)
            execution.artifacts.update(inputs.replacements)

        options = RunOptions(self.engine, self.in_flow, night.name, self.stop_at, self.labels)
        return run_pipeline(night_plan.plan_of(inputs, self.store), self.console, options, on_begin), inputs

    def _decide(self, night: NightRecord, execution: PipelineRun, inputs: NightInputs) -> promotion.Decision:
        """Decide, show the decision in Prefect, promote or keep."""
        judged = night_decision.judge(night, inputs, execution, self.settings, self.store, self.say)
        decided = night_decision.record(night, execution, self.store.root, self.settings.name, judged)
        if self.engine == "prefect":
            from ttrain.flows import prefect_run

            text = "\n\n".join(night_decision.tables(decided))
            prefect_run.show_decision(text, night.name, in_flow=self.in_flow)
        if decided.decision.promote:
            assert execution.model_set is not None, "a decision is about a registered set"
            Registry(self.store.root).promote(self.settings.name, execution.model_set)
        if execution.tracker:
            push_noted(self.store.root, execution.record.run)
        return decided.decision

    def _named(self, night: NightRecord) -> NightRecord:
        """Give the flow run of a deployment the night's name."""
        if self.in_flow and self.engine == "prefect":
            from ttrain.flows import prefect_run

            prefect_run.rename(night.name)
        return night

    def say_outcome(self, text: str) -> None:
        """Print how the night ended, unless the state of a flow run says it."""
        if not self.in_flow:
            self.say(text)

    def say(self, text: str) -> None:
        """Print a message, with control characters escaped."""
        print_plain(self.console, text)  # names of files, from anywhere


def _is_refusal(error: Exception) -> bool:
    """Whether a setting is wrong, which is no failed try of the night."""
    return isinstance(error, TTrainError) and error.is_usage_error


def _is_damage(error: Exception) -> bool:
    """Whether data files are damaged, which the night has noted to leave out."""
    return isinstance(error, StageFailed) and bool(error.files)


def _send_pending(settings: Settings, night: NightRecord) -> None:
    """Send the night's pending notification, if there is one."""
    event: Event | None = night.data.get("pending_event")
    if event is not None:
        _send(settings, event, night.data["reason"], night.name, night.data.get("decision"))
        night.note(pending_event=None)


def _send(
    settings: Settings, event: Event, reason: str, night: str | None = None, decision: Mapping[str, Any] | None = None
) -> None:
    text = f"ttrain {settings.name}{f', {night}' if night else ''}: {event}: {reason}"
    payload = {"pipeline": settings.name, "night": night, "text": text, "reason": reason, "decision": decision}
    notify.send(settings.notify, event, payload)
