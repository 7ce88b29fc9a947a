"""A night: train a challenger on new data, compare it with the champion, promote or keep.

Inputs and graph: `night_plan.py`; decision: `ttrain/evaluate/promotion.py`; records and slots:
`ttrain/nightly/records.py`. Three things keep a night from overlapping or blocking:

the lock      a slot that finds it taken is skipped the record    written before the first stage, so
that a killed night continues with the same list the end       of lists that fail again and again
"""

import time
from dataclasses import dataclass, replace
from datetime import datetime

from rich.console import Console

from ttrain.config import Settings
from ttrain.core.terminal import print_plain
from ttrain.engine.execution import PipelineRun
from ttrain.engine.stop_request import AT_DEADLINE, SIGNALLED
from ttrain.errors import Interrupted, NothingNew, StageFailed, TooFewRows
from ttrain.flows import night_plan
from ttrain.flows.engine import RunOptions, run_pipeline
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly import notify, records
from ttrain.nightly.decision import decide
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import InputSnapshot, NightRecord, Nights
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.runs import NOTHING_NEW
from ttrain.tracking.pusher import push_noted

MOST_LEFT_OUT = 20  # damaged files of a night, each of which is found by a pass over the new ones


@dataclass(frozen=True)
class NightResult:
    """The outcome of a night; unfinished at its deadline."""

    outcome: str
    reason: str
    night: str | None = None  # the name of its record; None where there is none


def run_night(
    settings: Settings,
    store: ArtifactStore,
    console: Console,
    options: RunOptions,
    slot: datetime | None = None,
) -> NightResult:
    """Run one night, or say why there is none.

    `slot`: its scheduled time (with time zone), None for a night on demand. Raises what made it
    fail, and Interrupted, after which the next night continues with its list.
    """
    night_plan.check(settings)
    nights = Nights(store.root, settings.name)
    options = replace(options, stop_at=records.stop_at(settings.nightly, time.time()))
    run = NightRun(settings, store, console, nights, slot, options)
    try:
        with nights.lock():
            if crashed := nights.settle():  # else repeated kills would go unnoticed
                run.send("failed", crashed.data["reason"], crashed)
            covered = nights.covered(slot)
            if covered is None:
                return run.night()
    except records.StillRunning as running:
        covered = str(running)
    nights.skipped(slot, covered)
    run.say(f"skipped: {covered}")
    run.send("skipped", covered)
    return NightResult("skipped", covered)


@dataclass
class NightRun:
    """One night; this process holds its lock."""

    settings: Settings
    store: ArtifactStore
    console: Console
    nights: Nights
    slot: datetime | None
    options: RunOptions

    def night(self) -> NightResult:
        """Run the night, from looking for data to the notification."""
        newest = self.nights.newest()
        ended = newest.ended if newest else None
        night = newest if newest and newest.is_open else None
        if night:
            night.begin_try(self.slot)
        try:
            frozen, reason = night_plan.choose_inputs(self.settings, self.store, self.nights, night)
            self.say(reason)
            if night is None:
                night = self.nights.begin(frozen, self.slot)
            elif frozen != night.frozen:
                night.note(inputs=frozen.to_json())
            self.say(f"{night.name}: {night_inputs.describe_files(frozen.files)}")
            execution, inputs = self._train(night, frozen)
            decision = decide(night, inputs, execution, self.say)
            push_noted(self.store.root, execution.record.run)
            reason = "; ".join(
                filter(None, (decision.reason, night_inputs.describe_left_out(night.unread)))
            )
            self.say(f"{decision.word}: {reason}")
            return self._end(night, decision.word, reason)
        except NothingNew as error:
            reason = f"nothing new: {error}"
            self.say(reason)
            return self._end(night, NOTHING_NEW, reason)
        except (Interrupted, KeyboardInterrupt) as stopped:
            return self._stopped(night, stopped)
        except Exception as error:
            known = ended and (ended["outcome"], ended["reason"]) == (records.REFUSED, str(error))
            if self.slot and known and newest:  # notified at the slot before this one
                if night:
                    night.end_try(records.REFUSED, str(error), closed=isinstance(error, TooFewRows))
                name = (night or newest).name
                reason = f"{name} is still refused: {error}"
                self.nights.skipped(self.slot, reason)
                return NightResult("skipped", reason, name)
            self._failed(night, error)
            raise

    def _end(
        self, night: NightRecord | None, outcome: str, reason: str, *, closed: bool = True
    ) -> NightResult:
        if night:
            night.end_try(outcome, reason, closed=closed)
        else:
            night = self.nights.add_empty(outcome, self.slot, reason)
        if outcome != NOTHING_NEW:
            self.send(records.FAILED if outcome == records.REFUSED else outcome, reason, night)
        return NightResult(outcome, reason, night.name)

    def _stopped(self, night: NightRecord | None, stopped: BaseException) -> NightResult:
        # Raises what stopped the stages, which have saved their state, unless it was the deadline.
        if night is None or not night.is_open:
            raise stopped
        deadline = self.options.stop_at
        reason = str(stopped)
        at_deadline = deadline is not None and time.time() >= deadline
        if at_deadline:  # a stage knows only of a signal
            reason = reason.replace(SIGNALLED, AT_DEADLINE)
        result = self._end(night, "unfinished", reason, closed=False)
        if not at_deadline:
            raise stopped
        return result

    def _failed(self, night: NightRecord | None, error: Exception) -> None:
        # A wrong setting is no failure of the list. A list with too few rows, or with nothing new
        # but damaged files, has trained nothing and is given up at once: the next one may have
        # more.
        if getattr(error, "is_usage_error", False):
            outcome = records.REFUSED
            gives_up = isinstance(error, TooFewRows)
            advice = "was refused, which does not count as a failed attempt; " + (
                "the next night takes these files and all new ones; bring more data, or "
                "correct the settings"
                if gives_up
                else "correct the settings, and the next night goes on"
            )
        else:
            outcome = records.FAILED
            is_damage = isinstance(error, StageFailed) and bool(error.files)
            failures = (night.failures if night else 0) + 1
            attempts = self.settings.nightly.attempts
            gives_up = is_damage or failures >= attempts
            tries = "damaged files" if is_damage else f"{failures} of {attempts} times"
            advice = f"failed ({tries}); " + (
                "its list is given up, the next night makes a new one"
                if gives_up
                else "the next night tries it again"
            )
        result = self._end(night, outcome, str(error), closed=gives_up)
        if night:
            self.say(f"{result.night} {advice}")

    def _train(self, night: NightRecord, frozen: InputSnapshot) -> tuple[PipelineRun, NightInputs]:
        # Again without documents that are known, and without damaged files.
        while True:
            try:
                return self._run_stages(night, frozen)
            except (NothingNew, StageFailed) as error:
                damaged = error.files if isinstance(error, StageFailed) else ()
                if damaged:
                    night.leave_out(
                        night_inputs.entries_of(frozen, damaged), str(error), self.settings
                    )
                elif isinstance(error, StageFailed):
                    raise
                smaller = night_inputs.smaller_snapshot(frozen, damaged, self.nights.read())
                if smaller is None or len(night.left_out) > MOST_LEFT_OUT:
                    raise
                frozen = smaller
                goes_on = "the night goes on without it" if damaged else "the new chats are learnt"
                self.say(f"{error}; {goes_on}")
                night.note(inputs=frozen.to_json())

    def _run_stages(
        self, night: NightRecord, frozen: InputSnapshot
    ) -> tuple[PipelineRun, NightInputs]:
        inputs = night_inputs.inputs_of(frozen, self.settings, self.store)
        if inputs.note:
            self.say(inputs.note)

        def on_begin(execution: PipelineRun) -> None:
            night.note_try(run=execution.record.run)
            execution.artifacts.update(inputs.replacements)

        execution = run_pipeline(
            night_plan.plan_of(inputs, self.store),
            self.console,
            replace(self.options, night=night.name),
            on_begin,
        )
        return execution, inputs

    def say(self, text: str) -> None:
        """Print a message, with control characters escaped."""
        print_plain(self.console, text)  # names of files, from anywhere

    def send(self, event: str, reason: str, night: NightRecord | None = None) -> None:
        """Notify whom the settings name."""
        name = night.name if night else None
        about = ", ".join(filter(None, (self.settings.name, name)))
        payload = {
            "pipeline": self.settings.name,
            "night": name,
            "text": f"ttrain {about}: {event}: {reason}",
            "reason": reason,
            "decision": night.data.get("decision") if night else None,
        }
        notify.send(self.settings.notify, event, payload)
