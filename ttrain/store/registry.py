"""The registry of a home, `registry.json`: models, sets of the models of a run, champions, decisions.

It is the truth about them; what MLflow shows is a copy. A set is the registered models of one run,
under the pipeline's name; its aliases `champion` and `challenger` also hold for its models. Each
change replaces the file under a lock.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ttrain.config.data import LEARNT
from ttrain.config.training import TRAININGS
from ttrain.core.files import (
    PRIVATE_FILE,
    JsonDict,
    JsonObject,
    exclusive,
    need_object,
    write_json,
)
from ttrain.errors import UsageError
from ttrain.store import references, runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.references import Registered

FILE = "registry.json"
CHAMPION, CHALLENGER = "champion", "challenger"
CHAMPIONS_KEPT = 200  # of the list of earlier champions
LISTED = 50  # names in the message about a name of nothing
LAST_FIRST = TRAININGS[::-1]  # which model a set stands for: the first of these that it has

# What cleaning keeps beside the registered models:
INPUTS = ("base", "tokenizer")  # a model is useless without them, but not without its training data
WITH_A_SET = ("evaluate",)  # its metrics are compared with those of the next set
# The files that the champion was trained on, and the held-out rows: the next night needs both.
WITH_A_CHAMPION = tuple(f"shards-{dataset}" for dataset in LEARNT)

SECTIONS = ("models", "sets")  # by name, and by version below it


@dataclass(frozen=True)
class Version:
    """One registered model or tokenizer: the artifact that it is, and the run that made it."""

    name: str
    version: str
    stage: str
    key: str
    content: str
    run: str

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"


@dataclass(frozen=True)
class ModelSet:
    """The registered models of one run by stage, and the keys of all its artifacts by stage."""

    name: str
    version: str
    members: Mapping[str, Version]
    keys: Mapping[str, str]
    run: str  # name of the pipeline's run that registered it first
    created: float  # seconds since 1970
    metrics: Mapping[str, float]  # of its newest evaluation
    decision: JsonObject | None = None  # the last one, as `promotion.Decision.to_json` gives it
    aliases: tuple[str, ...] = ()
    run_id: str | None = None  # MLflow's, of the run
    # Of the decision: "run", whose models it was about; "table" and "figures", its texts in Markdown.
    decided: JsonObject = field(default_factory=dict, repr=False)

    @property
    def last(self) -> Version | None:
        """The model that it stands for: the adapter, else the SFT model, else the base."""
        return next((self.members[stage] for stage in LAST_FIRST if stage in self.members), None)

    @property
    def models(self) -> list[Version]:
        """The tokenizer and the models, in the order of the stages."""
        return [self.members[stage] for stage in ("tokenizer", *TRAININGS) if stage in self.members]

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"

    def to_json(self) -> JsonDict:
        """What `models list --json` prints."""
        return {
            "name": self.name,
            "version": self.version,
            "aliases": list(self.aliases),
            "models": {stage: str(member) for stage, member in sorted(self.members.items())},
            "keys": dict(sorted(self.keys.items())),
            "run": self.run,
            "run_id": self.run_id,
            "created_unix": self.created,
            "metrics": dict(self.metrics),
            "decision": self.decision,
        }


class Registry:
    """The registry of one home; reading takes no lock. Raises UsageError for a damaged file."""

    def __init__(self, home: Path) -> None:
        self._home, self._path = home, home / FILE

    # --- reading

    def sets(self, name: str | None = None) -> list[ModelSet]:
        """All sets, those of one pipeline or of all, the newest first."""
        state = self.read()
        names = state["sets"].keys() if name is None else state["sets"].keys() & {name}
        sets = [self._set(state, of, version) for of in names for version in state["sets"][of]["versions"]]
        return sorted(sets, key=lambda each: (each.created, int(each.version)), reverse=True)

    def champion(self, name: str) -> ModelSet | None:
        """The champion of a pipeline; None if none was promoted."""
        state = self.read()
        version = state["sets"].get(name, {}).get("aliases", {}).get(CHAMPION)
        return None if version is None else self._set(state, name, version)

    def find(self, name: str, version: str) -> ModelSet:
        """A set by its version. Raises UsageError that lists the existing sets."""
        state = self.read()
        _need_set(state, name, version)
        return self._set(state, name, version)

    def only_name(self, name: str | None = None) -> str:
        """The name of all sets. Raises UsageError where there are none, or sets of several names."""
        names = sorted({model_set.name for model_set in self.sets(name)})
        if len(names) == 1:
            return names[0]
        if not names:
            named = f" named {name}" if name else ""
            raise UsageError(
                f"no sets of models{named} are registered; `ttrain pipeline run full` registers one, "
                "`ttrain models list` shows them"
            )
        raise UsageError(f"there are sets of {', '.join(names)}; choose one with --name, for example --name {names[0]}")

    def find_set(self, which: str, name: str | None = None) -> ModelSet:
        """The set of this version or run, whose name may be shortened. Raises UsageError.

        A run whose models were all cached shares the set of the run that made them.
        """
        if which.isdigit():
            return self.find(self.only_name(name), which)
        model_sets = self.sets(name)
        names = [model_set.run for model_set in model_sets]
        run = references.matching(which, [*dict.fromkeys([*names, *runs.names(self._home)])])
        record = runs.read(self._home, run) if run else None
        keys = runs.keys_of(record) if record else {}
        for model_set in model_sets:
            made_by_it = model_set.members and all(keys.get(stage) == model_set.keys[stage] for stage in model_set.members)
            if model_set.run == run or made_by_it:
                return model_set
        also = "; `ttrain models list` shows them" if names else ""
        raise references.unknown("registered set of the run", which, names, also=also)

    def resolve(self, reference: Registered) -> Version | ModelSet:
        """The set or model of this name; a model has the aliases of its set.

        Raises UsageError that lists what there is.
        """
        state, (name, alias, version) = self.read(), reference
        if alias:
            version = _aliases(state).get(name, {}).get(alias)
        if version in state["sets"].get(name, {}).get("versions", {}):
            return self._set(state, name, str(version))
        if version in state["models"].get(name, {}):
            return Version(name, str(version), **state["models"][name][version])
        names, also = list(_names(state)), ""
        if names and alias == CHAMPION:
            also = "; no set of models is champion before `ttrain models promote` or a nightly run promotes one"
        begin = f"nothing is registered in {self._home}: {references.BEGIN}"
        raise references.unknown("registered model", str(reference), names, shown=LISTED, begin=begin, also=also)

    def keys(self) -> frozenset[str]:
        """Keys that cleaning keeps: of models and their inputs, evaluations, the champions' data."""
        state, store, keys = self.read(), ArtifactStore(self._home), set[str]()
        for versions in state["models"].values():
            for model in versions.values():
                artifact = store.read(store.path(model["stage"], model["key"]))
                inputs = artifact.manifest["inputs"] if artifact else {}
                keys |= {model["key"], *(inputs[name]["key"] for name in INPUTS if name in inputs)}
        for sets in state["sets"].values():
            for version, entry in sets["versions"].items():
                is_champion = sets["aliases"].get(CHAMPION) == version
                stages = (*WITH_A_SET, *WITH_A_CHAMPION) if is_champion else WITH_A_SET
                keys |= {entry["keys"][stage] for stage in stages if stage in entry["keys"]}
        return frozenset(keys)

    def models_of(self, run: str) -> Iterator[Version]:
        """The models that a run made, in the order of their names and versions."""
        for name, versions in self.read()["models"].items():
            for version, facts in versions.items():
                if facts["run"] == run:
                    yield Version(name, version, **facts)

    def check_names(self, name: str, models: Iterable[str]) -> None:
        """Raise UsageError where the models of another pipeline already bear one of these names."""
        state = self.read()
        taken = [each for each in models if each in state["sets"]]
        if name in state["models"]:
            taken.append(name)
        if taken:
            raise UsageError(
                f"name is {name}, but {taken[0]} already names models of another pipeline; one name stands "
                f"for sets of models or for single models: set another `name`"
            )

    def read(self) -> JsonDict:
        """The registry as its file has it; empty where there is none. Raises UsageError for a damaged one."""
        try:
            state = need_object(self._path.read_bytes())
        except FileNotFoundError:
            return {name: {} for name in SECTIONS}
        except ValueError as error:
            raise UsageError(
                f"{self._path}, which has the registered models and the champion, is damaged: {error}; restore it from "
                f"a copy, or move it away, register the newest models again with `ttrain pipeline rerun evaluate`, and "
                f"choose the champion with `ttrain models promote`"
            ) from None
        return state

    # --- writing

    def register_model(self, name: str, artifact: Artifact, run: str) -> Version:
        """Register an artifact under this name, once for each key and content.

        `run`: its run, if the artifact does not name one.
        """
        made_by = str(artifact.provenance.get("run") or run)
        model = Version(name, "", artifact.stage, artifact.key, artifact.content, made_by)
        with self._changing() as state:
            return _add_model(state, model)

    def register_set(
        self,
        name: str,
        run: str,
        members: Iterable[Version],
        keys: Mapping[str, str],
        metrics: Mapping[str, float],
    ) -> ModelSet:
        """Register the models of a run as a set; it becomes challenger unless it is the champion.

        The same models are one set, which has the keys and metrics of its newest evaluation.
        """
        newest = {"keys": dict(keys), "metrics": dict(metrics)}
        with self._changing() as state:
            version = _add_set(state, name, members, {**newest, "run": run, "created": time.time()})
            of_name = state["sets"][name]
            of_name["versions"][version] |= newest
            if of_name["aliases"].get(CHAMPION) != version:
                of_name["aliases"][CHALLENGER] = version
            return self._set(state, name, version)

    def promote(self, name: str, version: str) -> ModelSet:
        """Make this set the champion; idempotent. Raises UsageError if there is no such set."""
        with self._changing() as state:
            _need_set(state, name, version)
            _set_alias(state["sets"][name], CHAMPION, version)
            return self._set(state, name, version)

    def rollback(self, name: str) -> ModelSet:
        """Make the previous champion champion again. Raises UsageError if there is none."""
        with self._changing() as state:
            history = state["sets"].get(name, {}).get("champions", [])
            earlier = [version for version in history if version != history[-1]]
            if not earlier:
                raise UsageError(f"{name} has no earlier champion to go back to; {_existing(state, name)}")
            while history[-1] != earlier[-1]:
                history.pop()
            _set_alias(state["sets"][name], CHAMPION, earlier[-1])
            return self._set(state, name, earlier[-1])

    def decide(self, name: str, version: str, decision: JsonObject, *, run: str, table: str, figures: str = "") -> None:
        """Keep a decision about a set, in place of an earlier one.

        `run`: whose models it is about; `table` and `figures`: how it is shown, in Markdown.
        """
        with self._changing() as state:
            entry = _need_set(state, name, version)
            entry["decision"] = dict(decision)
            entry["decided"] = {"run": run, "table": table, "figures": figures}

    @contextlib.contextmanager
    def _changing(self) -> Iterator[JsonDict]:
        """The state, to change under the lock; written at the end of the block if it differs."""
        with exclusive(self._path.with_suffix(".lock"), mode=PRIVATE_FILE):
            before = self.read()
            yield (state := copy.deepcopy(before))
            if state != before:
                write_json(self._path, state, PRIVATE_FILE)

    def _set(self, state: JsonObject, name: str, version: str) -> ModelSet:
        """The set of this version, from the file's form."""
        entry = state["sets"][name]["versions"][version]
        members = {}
        for stage, (model, number) in entry["members"].items():
            members[stage] = Version(model, number, **state["models"][model][number])
        aliases = state["sets"][name]["aliases"]
        record = runs.read(self._home, entry["run"]) or {}
        return ModelSet(
            name=name,
            version=version,
            members=members,
            keys=entry["keys"],
            run=entry["run"],
            created=entry["created"],
            metrics=entry["metrics"],
            decision=entry.get("decision"),
            aliases=tuple(sorted(alias for alias, holder in aliases.items() if holder == version)),
            run_id=(record.get("tracking") or {}).get("run_id") or entry.get("run_id"),
            decided=entry.get("decided", {}),
        )


def _need_set(state: JsonObject, name: str, version: str) -> JsonDict:
    """The entry of a set. Raises UsageError that lists the existing sets."""
    entry: JsonDict | None = state["sets"].get(name, {}).get("versions", {}).get(version)
    if entry is None:
        raise UsageError(f"{name} has no version {version} that is a set of models; {_existing(state, name)}")
    return entry


def _existing(state: JsonObject, name: str) -> str:
    """The sets of a name, the newest first, for a message."""
    of_name = state["sets"].get(name, {"versions": {}, "aliases": {}})
    shown = []
    for version in sorted(of_name["versions"], key=int, reverse=True):
        aliases = sorted(alias for alias, holder in of_name["aliases"].items() if holder == version)
        shown.append(f"{version} ({', '.join([*aliases, of_name['versions'][version]['run']])})")
    if shown:
        return f"the versions are {', '.join(shown)}"
    return "there are none yet; a run of `ttrain pipeline run full` makes one"


def _aliases(state: JsonObject) -> dict[str, dict[str, str]]:
    """The aliases of each name: of the sets, and of their models, which have the same ones."""
    aliases: dict[str, dict[str, str]] = {}
    for name, of_name in state["sets"].items():
        for alias, version in of_name["aliases"].items():
            aliases.setdefault(name, {})[alias] = version
            for model, number in of_name["versions"][version]["members"].values():
                aliases.setdefault(model, {})[alias] = number
    return aliases


def _names(state: JsonObject) -> Iterator[str]:
    """NAME/VERSION of the newest version of each name, and NAME@ALIAS of each alias."""
    versions = {name: of_name["versions"] for name, of_name in state["sets"].items()} | state["models"]
    aliases = _aliases(state)
    for name in sorted(versions):
        yield f"{name}/{max(map(int, versions[name]))}"
        yield from (f"{name}@{alias}" for alias in sorted(aliases.get(name, {})))


def _add_model(state: JsonObject, model: Version) -> Version:
    """The registered version of the same artifact; added if there is none."""
    versions = state["models"].setdefault(model.name, {})
    for number, facts in versions.items():
        if (facts["key"], facts["content"]) == (model.key, model.content):
            return Version(model.name, number, **facts)
    facts = {"stage": model.stage, "key": model.key, "content": model.content, "run": model.run}
    number = _free_number(versions, model.version)
    versions[number] = facts
    return Version(model.name, number, **facts)


def _add_set(state: JsonObject, name: str, members: Iterable[Version], facts: JsonObject, wanted: str = "") -> str:
    """The version of the set of the same models; added with these facts if there is none."""
    of_name = state["sets"].setdefault(name, {"versions": {}, "champions": [], "aliases": {}})
    by_stage = {member.stage: [member.name, member.version] for member in members}
    for number, entry in of_name["versions"].items():
        if entry["members"] == by_stage:
            return str(number)
    number = _free_number(of_name["versions"], wanted)
    of_name["versions"][number] = {**facts, "members": by_stage}
    return number


def _free_number(versions: JsonObject, wanted: str) -> str:
    """The number of a new version: the wanted one if it is free, else the next."""
    return wanted if wanted and wanted not in versions else str(max(map(int, versions), default=0) + 1)


def _set_alias(of_name: JsonDict, alias: str, version: str) -> None:
    """Set an alias of the sets of a name. The champion enters the history, and challenges nobody."""
    of_name["aliases"][alias] = version
    if alias != CHAMPION:
        return
    if of_name["champions"][-1:] != [version]:
        of_name["champions"] = [*of_name["champions"], version][-CHAMPIONS_KEPT:]
    if of_name["aliases"].get(CHALLENGER) == version:
        del of_name["aliases"][CHALLENGER]
