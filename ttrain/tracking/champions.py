"""Promote, roll back and list sets of models; one of them is the champion.

A set is a version of the registered model that bears the pipeline's name. Its alias `champion` is the single
source of truth, set by one write. The aliases of the same name on its base, SFT, LoRA and tokenizer versions follow it, for
users of one model; so does the list of earlier champions. After a kill between two writes, the next command repairs both.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from ttrain.core.files import JsonObject, exclusive, read_object, write_json
from ttrain.errors import TrackingError, UsageError
from ttrain.tracking.calls import all_pages, attempt, first_line, is_refusal
from ttrain.tracking.client import cannot_be_queried, need_mlflow, tracking_uri
from ttrain.tracking.database import UNWRITABLE, champions_file, database_of, is_missing, open_client
from ttrain.tracking.model_description import add_decision
from ttrain.tracking.model_sets import (
    CHALLENGER,
    CHAMPION,
    DECISION,
    KIND,
    SET,
    ModelSet,
    copy_sets,
    lock_of,
    read_copied_sets,
    set_of,
)
from ttrain.tracking.runs import TrackedRun
from ttrain.tracking.tracker import MlflowStore

log = logging.getLogger("ttrain")
Result = TypeVar("Result")

HISTORY = "ttrain.champions"  # tag of the registered model: versions, the oldest first, the present champion last
HISTORY_KEPT = 200


class Champions:
    """The sets of models of one MLflow. Every method raises TrackingError if MLflow cannot be queried: no answer does not
    mean that there is none."""

    def __init__(self, home: Path) -> None:
        need_mlflow("champions are aliases in")
        self._home = home.resolve()
        self._uri = tracking_uri(self._home)

    def sets(self) -> list[ModelSet]:
        """All sets, newest first; repairs aliases that a kill left behind.

        Reading needs no lock, so that it works in a home that cannot be written.
        """
        snapshot = self._take_snapshot(None)
        if any(self._repairs(name, snapshot) for name in snapshot.names):
            try:
                with self._exclusive():
                    snapshot = self._take_snapshot(None)
                    for name in snapshot.names:
                        self._repair(name, snapshot)
            except OSError as error:
                if error.errno not in UNWRITABLE:
                    raise
        return snapshot.sets

    def champion(self, name: str) -> ModelSet | None:
        """The champion; None if none was promoted."""
        if is_missing(self._uri, self._home):
            return None
        client = self._client
        version, error = attempt(lambda: client.get_model_version_by_alias(name, CHAMPION))
        if error is not None and not is_refusal(error):
            raise self._tracking_error(error)
        chosen = None if version is None or version.tags.get(KIND) != SET else set_of(version, (CHAMPION,))
        self._record({name: chosen})  # by one request: of 400 versions all took 0.8 CPU s
        return chosen

    def find(self, name: str, version: str) -> ModelSet:
        """A set by its version. Raises UsageError that lists the existing sets."""
        return self._take_snapshot(name).chosen(name, version)

    def promote(self, name: str, version: str) -> ModelSet:
        """Make this set the champion; idempotent. Raises UsageError if there is no such set."""
        with self._exclusive():
            snapshot = self._take_snapshot(name)
            chosen, history = snapshot.chosen(name, version), snapshot.history(name)
            if history[-1:] != [version]:
                self.write_history(name, [*history, version])  # first: without the alias, the next repair cuts it back
            if CHAMPION not in chosen.aliases:  # also if a kill left only the history of the very first champion
                self._ask("set_registered_model_alias", name, CHAMPION, version)
            if CHALLENGER in chosen.aliases:
                self._ask("delete_registered_model_alias", name, CHALLENGER)
            return self._repaired_set(name, version)

    def rollback(self, name: str) -> ModelSet:
        """Make the previous champion champion again. Raises UsageError if there is none."""
        with self._exclusive():
            snapshot = self._take_snapshot(name)
            history, registered = snapshot.history(name), {model_set.version for model_set in snapshot.of(name)}
            earlier = [version for version in history[:-1] if version in registered and version != history[-1]]
            if not earlier:
                raise UsageError(f"{name} has no earlier champion to go back to; {_describe_sets(snapshot.of(name))}")
            self._ask("set_registered_model_alias", name, CHAMPION, earlier[-1])
            return self._repaired_set(name, earlier[-1])

    def log_decision(
        self,
        name: str,
        version: str,
        decision: JsonObject,
        table: str,
        *,
        run_id: str | None = None,
        figures: str = "",
        log_more: Callable[[TrackedRun], object] = lambda run: None,
    ) -> None:
        """Log a decision about a set in the tags and the description of its version, and in the tags, metrics and files of
        the run; `figures` in a file alone. Replaces an earlier one, so it can be repeated. `log_more` gets the run."""
        chosen = self.find(name, version)
        text = json.dumps(dict(decision), sort_keys=True)
        word = "promoted" if decision["promote"] else "kept"
        self._ask("set_model_version_tag", name, version, DECISION, text)
        registered = self._ask("get_model_version", name, version)
        self._asked(partial(add_decision, self._client, registered, table))
        if run_id or chosen.run_id:
            store = MlflowStore(self._uri, self._home)
            run = store.run_of(run_id or str(chosen.run_id))
            run.set_tags({"ttrain.decision": word, "ttrain.decision.reason": str(decision["reason"])})
            run.log_summary(decision_metrics(decision))
            run.log_text(json.dumps(dict(decision), indent=1, sort_keys=True), "decision.json")
            run.log_text("\n\n".join(filter(None, (table, figures))), "decision.md")
            log_more(run)
            store.close()

    def _repaired_set(self, name: str, version: str) -> ModelSet:
        """Repair what follows the alias; return the set in its new state."""
        snapshot = self._take_snapshot(name)
        self._repair(name, snapshot)
        return snapshot.chosen(name, version)

    def _repair(self, name: str, snapshot: _Snapshot) -> None:
        """Align the history and the members' aliases with the set's own aliases; writes only what differs."""
        for repair in self._repairs(name, snapshot):
            repair()

    def _repairs(self, name: str, snapshot: _Snapshot) -> list[Callable[[], object]]:
        """The calls that align the history and the members' aliases; [] if nothing differs."""
        repairs: list[Callable[[], object]] = []
        history = snapshot.history(name)
        if history != snapshot.histories.get(name, []):
            repairs.append(partial(self.write_history, name, history))
        champion, challenger = snapshot.holder(name, CHAMPION), snapshot.holder(name, CHALLENGER)
        if challenger is not None and challenger is champion:  # promoted, and killed then
            repairs.append(partial(self._ask, "delete_registered_model_alias", name, CHALLENGER))
            challenger = None
        names = sorted({member.name for model_set in snapshot.of(name) for member in model_set.members.values()})
        for alias, holder in ((CHAMPION, champion), (CHALLENGER, challenger)):
            member_versions = {member.name: member.version for member in holder.members.values()} if holder else {}
            for model in names:
                if snapshot.aliases.get(model, {}).get(alias) != member_versions.get(model):
                    repairs.append(partial(self._move_alias, model, alias, member_versions.get(model)))
        return repairs

    def _move_alias(self, model: str, alias: str, version: str | None) -> None:
        """Move or remove one member's alias; a version that somebody deleted is skipped with a warning."""
        client = self._client
        if version is None:
            _, error = attempt(lambda: client.delete_registered_model_alias(model, alias))
        else:
            _, error = attempt(lambda: client.set_registered_model_alias(model, alias, version))
        if error is not None and not is_refusal(error):
            raise self._tracking_error(error)
        if error is not None:
            log.warning(
                "MLflow has no %s/%s, so the alias %s cannot be set on it: %s", model, version, alias, first_line(error)
            )

    def write_history(self, name: str, versions: Sequence[str]) -> None:
        """Store the newest versions as the model's history of champions."""
        self._ask("set_registered_model_tag", name, HISTORY, " ".join(versions[-HISTORY_KEPT:]))

    def _take_snapshot(self, name: str | None) -> _Snapshot:
        """Read all sets and aliases in two requests: one for each alias took 0.4 s of computing for a promotion."""
        if is_missing(self._uri, self._home):
            return _Snapshot([], {}, {})
        text = f"tags.`{KIND}` = '{SET}'" + (f" and name = '{name}'" if name else "")
        versions = self._asked(partial(all_pages, partial(self._client.search_model_versions, text)))
        prefix = f"name LIKE '{name}%'" if name else None  # also the members, whose names begin with it
        models = self._asked(partial(all_pages, partial(self._client.search_registered_models, prefix)))
        aliases = {model.name: {alias: str(number) for alias, number in model.aliases.items()} for model in models}
        sets = [
            set_of(
                version, (alias for alias, number in aliases.get(version.name, {}).items() if number == str(version.version))
            )
            for version in versions
        ]
        sets.sort(key=lambda version: (version.created, int(version.version)), reverse=True)
        written = ((model.name, model.tags.get(HISTORY, "").split()) for model in models)
        histories = {model: list(filter(str.isdigit, versions)) for model, versions in written}
        snapshot = _Snapshot(sets, aliases, histories)
        names = snapshot.names | ({name} if name else set())
        self._record({model: snapshot.holder(model, CHAMPION) for model in names})
        return snapshot

    def _record(self, champions: Mapping[str, ModelSet | None]) -> None:
        """Keep the keys of the champions in the home, where they are read without MLflow."""
        if self._uri != f"sqlite:///{database_of(self._home)}":
            return
        recorded = read_object(champions_file(self._home))
        entries = {name: chosen for name, chosen in champions.items() if chosen or name in recorded}
        updated = {**recorded, **{name: dict(chosen.keys) if chosen else {} for name, chosen in entries.items()}}
        if updated != recorded:
            with contextlib.suppress(OSError):
                write_json(champions_file(self._home), updated)

    def _asked(self, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except Exception as error:
            raise self._tracking_error(error) from None

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of MLflow's client. Raises TrackingError."""
        return self._asked(partial(getattr(self._client, method), *arguments))

    def _tracking_error(self, error: Exception) -> TrackingError:
        return cannot_be_queried(self._uri, "for the registered models", error)

    @cached_property
    def _client(self) -> Any:
        return self._asked(lambda: open_client(self._uri, self._home))

    def _exclusive(self) -> Any:
        """Lock out other processes of this home; MLflow itself would let their writes interleave."""
        return exclusive(lock_of(self._home))


def champion_keys_here(home: Path, name: str) -> dict[str, str]:
    """Keys of the champion's artifacts by stage, from the home's own database if MLflow is loaded, else from the home's
    record of its champions; {} if none was promoted, if MLflow is elsewhere, or if it cannot be read: callers can do
    without it."""
    if tracking_uri(home) != f"sqlite:///{database_of(home)}" or not database_of(home).exists():
        return {}
    if "mlflow" not in sys.modules:
        return recorded_keys(home, name)
    with contextlib.suppress(TrackingError):
        model_set = Champions(home).champion(name)
        return dict(model_set.keys) if model_set else {}
    return {}


def list_sets(home: Path, name: str | None = None) -> list[ModelSet]:
    """All sets of models, of one pipeline or of all, newest first; repairs aliases that a kill left half written.

    Of the home's own database a copy is read if that has not changed since: importing MLflow takes 3 s.
    """
    database = database_of(home)
    is_local = tracking_uri(home) == f"sqlite:///{database}"
    sets = read_copied_sets(database) if is_local else None
    if sets is None:
        sets = Champions(home).sets()
        if is_local:
            copy_sets(database, sets)
    return [model_set for model_set in sets if name in (None, model_set.name)]


def recorded_keys(home: Path, name: str) -> dict[str, str]:
    """Keys of the champion's artifacts by stage, as MLflow last told them; {} if there is none."""
    return dict(read_object(champions_file(home)).get(name) or {})


def decision_metrics(decision: JsonObject) -> dict[str, float]:
    """The figures of a decision, as metrics of the run whose models it was about."""
    low, high = decision["interval"] or (None, None)
    figures = {key: decision[key] for key in ("challenger", "champion", "difference", "samples")}
    figures |= {"interval_low": low, "interval_high": high, "smallest_difference": decision.get("smallest_difference")}
    return {f"promotion/{key}": value for key, value in figures.items() if value is not None}


@dataclass(frozen=True)
class _Snapshot:
    """The state of MLflow at one time: sets, newest first; aliases and stored histories by name of the model."""

    sets: list[ModelSet]
    aliases: dict[str, dict[str, str]]
    histories: dict[str, list[str]]

    @property
    def names(self) -> set[str]:
        """The names of the sets."""
        return {model_set.name for model_set in self.sets}

    def of(self, name: str) -> list[ModelSet]:
        """The sets of one name."""
        return [model_set for model_set in self.sets if model_set.name == name]

    def chosen(self, name: str, version: str) -> ModelSet:
        """The set of this version. Raises UsageError that lists the existing sets."""
        for model_set in self.of(name):
            if model_set.version == version:
                return model_set
        raise UsageError(f"{name} has no version {version} that is a set of models; {_describe_sets(self.of(name))}")

    def holder(self, name: str, alias: str) -> ModelSet | None:
        """The set that has this alias."""
        return next((model_set for model_set in self.of(name) if alias in model_set.aliases), None)

    def history(self, name: str) -> list[str]:
        """The champions, oldest first, ending with the current one; later entries are stale or were never valid."""
        written, champion = self.histories.get(name, []), self.holder(name, CHAMPION)
        if champion is None:
            return written
        while champion.version in written and written[-1] != champion.version:
            written = written[:-1]
        return written if champion.version in written else [*written, champion.version]


def _describe_sets(sets: Iterable[ModelSet]) -> str:
    names = [f"{model_set.version} ({', '.join([*model_set.aliases, model_set.run])})" for model_set in sets]
    return (
        f"the versions are {', '.join(names)}"
        if names
        else "there are none yet; a run of `ttrain pipeline run full` makes one"
    )
