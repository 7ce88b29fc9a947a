"""Which set of models is champion: promoted, rolled back, listed.

A set is a version of the registered model that bears the pipeline's name. Its alias `champion` is the one truth, set by
one write. The aliases of the same name on its base, SFT, LoRA and tokenizer versions follow it, for those who ask for one
model; so does the list of earlier champions. Where a kill came between two writes, both are mended by what comes next.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, final

from ttrain.core.files import exclusive
from ttrain.core.redact import without_user
from ttrain.errors import TrackingError, UsageError
from ttrain.tracking.calls import first_line, is_refusal, outcome
from ttrain.tracking.database import REPAIR, UNWRITABLE, database_of, open_client
from ttrain.tracking.model_description import add_decision
from ttrain.tracking.model_sets import CHALLENGER, DECISION, KIND, SET, ModelSet, all_pages, lock_of, set_of
from ttrain.tracking.registry import CHAMPION
from ttrain.tracking.store import Store

log = logging.getLogger("ttrain")
Result = TypeVar("Result")

HISTORY: Final = "ttrain.champions"  # tag of the registered model: versions, the oldest first, the present champion last
HISTORY_KEPT: Final = 200


@final
class Champions:
    """The sets of one MLflow. Every method raises TrackingError where MLflow cannot be asked."""

    def __init__(self, home: Path, uri: str) -> None:
        self._home, self._uri = home, uri
        self._opened: Any = None

    def sets(self, name: str | None = None) -> list[ModelSet]:
        """All sets, of one name or of all, the newest first; aliases that a kill left behind are mended.

        Reading needs no lock, so that it works in a home that cannot be written.
        """
        seen = self._look(name)
        if any(self._repairs(model, seen) for model in {one.name for one in seen.sets}):
            try:
                with self._alone():
                    seen = self._look(name)
                    for model in {one.name for one in seen.sets}:
                        self._mend(model, seen)
            except OSError as error:
                if error.errno not in UNWRITABLE:
                    raise
        return seen.sets

    def champion(self, name: str) -> ModelSet | None:
        """The champion; None where none was promoted."""
        if self._is_unused():
            return None
        found, error = outcome(lambda: self._client.get_model_version_by_alias(name, CHAMPION))
        if error is not None and not is_refusal(error):
            raise self._trouble(error)
        return None if found is None or found.tags.get(KIND) != SET else set_of(found, (CHAMPION,))

    def find(self, name: str, version: str) -> ModelSet:
        """A set by its version. Raises UsageError that lists what there is."""
        return self._look(name).chosen(name, version)

    def promote(self, name: str, version: str) -> ModelSet:
        """Makes this set the champion; promoted again, it stays so. Raises UsageError where there is no such set."""
        with self._alone():
            seen = self._look(name)
            chosen, before = seen.chosen(name, version), seen.history(name)
            if before[-1:] != [version]:
                self._write_history(name, [*before, version])  # first: without the alias, it is cut back to the truth
            if CHAMPION not in chosen.aliases:  # also where a kill left the history of the very first champion alone
                self._asked(partial(self._client.set_registered_model_alias, name, CHAMPION, version))
                self._note(chosen, "ttrain.promoted")
            if CHALLENGER in chosen.aliases:
                self._asked(partial(self._client.delete_registered_model_alias, name, CHALLENGER))
            return self._settled(name, version)

    def rollback(self, name: str) -> ModelSet:
        """Makes the champion before this one champion again. Raises UsageError where there is none."""
        with self._alone():
            seen = self._look(name)
            history, there = seen.history(name), {one.version for one in seen.of(name)}
            earlier = [version for version in history[:-1] if version in there and version != history[-1]]
            if not earlier:
                raise UsageError(f"{name} has no earlier champion to go back to; {_listed(seen.of(name))}")
            self._asked(partial(self._client.set_registered_model_alias, name, CHAMPION, earlier[-1]))
            if history[-1] in there:
                self._note(seen.chosen(name, history[-1]), "ttrain.rolled_back")
            return self._settled(name, earlier[-1])

    def log_decision(self, name: str, version: str, decision: Mapping[str, Any], table: str, run_id: str | None) -> None:
        """Puts a decision about a set where people look: tags and description of the version, tags, figures and files of
        the run. What is there is replaced, so it can be done again."""
        chosen = self.find(name, version)
        text = json.dumps(dict(decision), sort_keys=True)
        word = "promoted" if decision["promote"] else "kept"
        self._asked(partial(self._client.set_model_version_tag, name, version, DECISION, text))
        found = self._asked(partial(self._client.get_model_version, name, version))
        self._asked(partial(add_decision, self._client, found, table))
        if run_id or chosen.run_id:
            store = Store(self._client, self._uri, self._home, "")
            run = store.run_of(run_id or str(chosen.run_id))
            run.set_tags({"ttrain.decision": word, "ttrain.decision.reason": str(decision["reason"])})
            figures = {key: decision[key] for key in ("challenger", "champion", "difference", "samples")}
            low, high = decision["interval"] or (None, None)
            figures |= {"interval_low": low, "interval_high": high}
            figures["smallest_difference"] = decision.get("smallest_difference")
            run.log_summary({f"promotion/{key}": value for key, value in figures.items() if value is not None})
            run.log_text(json.dumps(dict(decision), indent=1, sort_keys=True), "decision.json")
            run.log_text(table, "decision.md")
            store.close()

    def _settled(self, name: str, version: str) -> ModelSet:
        """What follows the alias is brought in line; the set as it now is."""
        seen = self._look(name)
        self._mend(name, seen)
        return seen.chosen(name, version)

    def _mend(self, name: str, seen: _Seen) -> None:
        """The history and the members' aliases follow the set's own aliases; nothing is written where all is in line."""
        for repair in self._repairs(name, seen):
            repair()

    def _repairs(self, name: str, seen: _Seen) -> list[Callable[[], object]]:
        """What brings history and aliases of the members in line; [] where they are."""
        repairs: list[Callable[[], object]] = []
        history = seen.history(name)
        if history != seen.histories.get(name, []):
            repairs.append(partial(self._write_history, name, history))
        champion, challenger = seen.holder(name, CHAMPION), seen.holder(name, CHALLENGER)
        if challenger is not None and challenger is champion:  # promoted, and killed then
            repairs.append(partial(self._asked, partial(self._client.delete_registered_model_alias, name, CHALLENGER)))
            challenger = None
        names = sorted({member.name for one in seen.of(name) for member in one.members.values()})
        for alias, holder in ((CHAMPION, champion), (CHALLENGER, challenger)):
            wanted = {member.name: member.version for member in holder.members.values()} if holder else {}
            for model in names:
                if seen.aliases.get(model, {}).get(alias) != wanted.get(model):
                    repairs.append(partial(self._point, model, alias, wanted.get(model)))
        return repairs

    def _point(self, model: str, alias: str, version: str | None) -> None:
        """Moves or removes one member's alias; a version that somebody deleted is passed over with a warning."""
        if version is None:
            act = partial(self._client.delete_registered_model_alias, model, alias)
        else:
            act = partial(self._client.set_registered_model_alias, model, alias, version)
        _, error = outcome(act)
        if error is not None and not is_refusal(error):
            raise self._trouble(error)
        if error is not None:
            log.warning("MLflow has no %s/%s, so it cannot be called %s: %s", model, version, alias, first_line(error))

    def _write_history(self, name: str, versions: Sequence[str]) -> None:
        text = " ".join(versions[-HISTORY_KEPT:])
        self._asked(partial(self._client.set_registered_model_tag, name, HISTORY, text))

    def _note(self, chosen: ModelSet, tag: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._asked(partial(self._client.set_model_version_tag, chosen.name, chosen.version, tag, now))

    def _look(self, name: str | None) -> _Seen:
        """Two questions, whatever there is: one for each alias took 0.4 s of computing for a promotion."""
        if self._is_unused():
            return _Seen([], {}, {})
        text = f"tags.`{KIND}` = '{SET}'" + (f" and name = '{name}'" if name else "")
        versions = self._asked(partial(all_pages, partial(self._client.search_model_versions, text)))
        prefix = f"name LIKE '{name}%'" if name else None  # also the members, whose names begin with it
        models = self._asked(partial(all_pages, partial(self._client.search_registered_models, prefix)))
        aliases = {model.name: {alias: str(number) for alias, number in model.aliases.items()} for model in models}
        sets = [
            set_of(one, (alias for alias, number in aliases.get(one.name, {}).items() if number == str(one.version)))
            for one in versions
        ]
        sets.sort(key=lambda one: (one.created, int(one.version)), reverse=True)
        histories = {model.name: _numbers(model.tags.get(HISTORY, "")) for model in models}
        return _Seen(sets, aliases, histories)

    def _asked(self, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except Exception as error:
            raise self._trouble(error) from None

    def _trouble(self, error: Exception) -> TrackingError:
        cause = first_line(error)
        fix = "" if REPAIR in cause else "; start it, or set MLFLOW_TRACKING_URI to the one that holds them"
        return TrackingError(f"MLflow at {without_user(self._uri)} cannot be asked for the registered models: {cause}{fix}")

    @property
    def _client(self) -> Any:
        if self._opened is None:
            self._opened = self._asked(lambda: open_client(self._uri, self._home))
        return self._opened

    def _is_unused(self) -> bool:
        """Whether it is the home's own database, which nothing has made yet: asking would make it."""
        return self._uri == f"sqlite:///{database_of(self._home)}" and not database_of(self._home).exists()

    def _alone(self) -> Any:
        """One process of this home at a time; MLflow itself would let two write in turns."""
        return exclusive(lock_of(self._home))


@dataclass(frozen=True)
class _Seen:
    """What MLflow holds at one time: sets, the newest first; aliases and written histories by name of the model."""

    sets: list[ModelSet]
    aliases: dict[str, dict[str, str]]
    histories: dict[str, list[str]]

    def of(self, name: str) -> list[ModelSet]:
        """The sets of one name."""
        return [one for one in self.sets if one.name == name]

    def chosen(self, name: str, version: str) -> ModelSet:
        """The set of this version. Raises UsageError that lists what there is."""
        for one in self.of(name):
            if one.version == version:
                return one
        raise UsageError(f"{name} has no version {version} that is a set of models; {_listed(self.of(name))}")

    def holder(self, name: str, alias: str) -> ModelSet | None:
        """The set that has this alias."""
        return next((one for one in self.of(name) if alias in one.aliases), None)

    def history(self, name: str) -> list[str]:
        """The champions, oldest first, ending with the present one: entries after it were never or are no longer true."""
        written, champion = self.histories.get(name, []), self.holder(name, CHAMPION)
        if champion is None:
            return written
        while champion.version in written and written[-1] != champion.version:
            written = written[:-1]
        return written if champion.version in written else [*written, champion.version]


def _numbers(text: str) -> list[str]:
    return [word for word in text.split() if word.isdigit()]


def _listed(sets: Iterable[ModelSet]) -> str:
    names = [f"{one.version} ({', '.join([*one.aliases, one.run])})" for one in sets]
    return f"there are {', '.join(names)}" if names else "there are none yet; a run of `ttrain pipeline run full` makes one"
