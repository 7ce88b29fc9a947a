"""The registry of a home, `registry.json`: models, sets of models, champions, decisions.

A set is the registered models of one run, under the pipeline's name; its aliases `champion` and
`challenger` also hold for its models. Each change replaces the file under a lock.
"""

import contextlib
import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ttrain.config.training import TRAININGS
from ttrain.core.files import PRIVATE_FILE, JsonDict, JsonObject, exclusive, need_object, write_json
from ttrain.errors import UsageError
from ttrain.store import name_syntax, runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

FILE = "registry.json"
CHAMPION = "champion"
CHALLENGER = "challenger"
LISTED = 50  # names in the message about a name of nothing

# What cleaning keeps beside the registered models:
INPUTS = ("base", "tokenizer")  # a model is useless without them, but not without its training data
WITH_A_SET = ("evaluate",)  # its metrics are compared with those of the next set
# The files that the champion was trained on, and the held-out rows: the next night needs both.
WITH_A_CHAMPION = (*WITH_A_SET, *(f"shards-{dataset}" for dataset in TRAININGS))


@dataclass(frozen=True)
class Version:
    """One registered model or tokenizer: its artifact, and the run that made it."""

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
    # Of the decision: "run", whose models it was about
    decided: JsonObject = field(default_factory=dict, repr=False)

    @property
    def last(self) -> Version | None:
        """The model that stands for the set: the adapter, else the SFT model, else the base."""
        return next((one for one in reversed(self.models) if one.stage in TRAININGS), None)

    @property
    def models(self) -> list[Version]:
        """The tokenizer and the models, in the order of the stages."""
        return [self.members[one] for one in ("tokenizer", *TRAININGS) if one in self.members]

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"

    def to_json(self) -> JsonDict:
        return {
            "name": self.name,
            "version": self.version,
            "aliases": list(self.aliases),
            "models": {stage: str(member) for stage, member in sorted(self.members.items())},
            "keys": dict(sorted(self.keys.items())),
            "run": self.run,
            "created_unix": self.created,
            "metrics": dict(self.metrics),
            "decision": self.decision,
        }


class Registry:
    """The registry of one home; reading takes no lock. Raises UsageError for a damaged file."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._path = home / FILE

    # --- reading

    def sets(self, name: str | None = None) -> list[ModelSet]:
        """The sets of one pipeline or of all, newest first."""
        state = self.read()
        sets = [
            _set(state, each, version)
            for each, of_name in state["sets"].items()
            if name in (None, each)
            for version in of_name["versions"]
        ]
        return sorted(sets, key=lambda each: (each.created, int(each.version)), reverse=True)

    def champion(self, name: str) -> ModelSet | None:
        return next((one for one in self.sets(name) if CHAMPION in one.aliases), None)

    def find(self, name: str, version: str) -> ModelSet:
        sets = {one.version: one for one in self.sets(name)}
        if version in sets:
            return sets[version]
        labels = ((one.version, ", ".join([*one.aliases, one.run])) for one in sets.values())
        existing = [f"{number} ({label})" for number, label in labels]
        raise name_syntax.unknown(
            "set of models", version, existing, owner=name if existing else ""
        )

    def only_name(self, name: str | None = None) -> str:
        """The name of all sets. Raises UsageError if there are none, or several names."""
        names = sorted({one.name for one in self.sets(name)})
        if len(names) == 1:
            return names[0]
        if names:
            raise UsageError(
                f"there are sets of {', '.join(names)}; choose one with --name {names[0]}"
            )
        named = f" named {name}" if name else ""
        raise UsageError(
            f"no sets of models{named} are registered; `ttrain pipeline run full` registers one"
        )

    def find_set(self, which: str, name: str | None = None) -> ModelSet:
        """The set of a version, NAME/VERSION, NAME@ALIAS or (shortened) run. Raises UsageError.

        A run whose models were all cached shares the set of the run that made them.
        """
        if which.isdigit():
            return self.find(self.only_name(name), which)
        sets = self.sets(name)
        if (named := self.versions().get(which)) in sets:
            return named
        names = [one.run for one in sets]
        run = name_syntax.matching(which, [*dict.fromkeys([*names, *runs.names(self._home)])])
        keys = runs.keys_of((runs.read(self._home, run) if run else None) or {"stages": ()})
        for one in sets:
            its_keys = {stage: one.keys[stage] for stage in one.members}
            if one.run == run or (its_keys and its_keys.items() <= keys.items()):
                return one
        raise name_syntax.unknown("registered set of the run", which, names)

    def versions(self) -> dict[str, Version | ModelSet]:
        """All sets and models by NAME/VERSION and NAME@ALIAS, newest sets first."""
        named: dict[str, Version | ModelSet] = {}
        for model_set in self.sets():
            of_set: list[Version | ModelSet] = [model_set, *model_set.models]
            for version in of_set:
                named.setdefault(str(version), version)
                named |= {f"{version.name}@{alias}": version for alias in model_set.aliases}
        for model in self._models():
            named.setdefault(str(model), model)
        return named

    def resolve(self, reference: name_syntax.Registered) -> Version | ModelSet:
        """The set or model of this name. Raises UsageError."""
        versions = self.versions()
        also = ""
        if str(reference) in versions:
            return versions[str(reference)]
        if versions and reference.alias == CHAMPION:
            also = (
                "; no set of models is champion before `ttrain models promote` or a nightly run "
                "promotes one"
            )
        raise name_syntax.unknown(
            "registered model",
            str(reference),
            versions,
            shown=LISTED,
            begin=f"nothing is registered in {self._home}: {name_syntax.BEGIN}",
            also=also,
        )

    def keys(self) -> frozenset[str]:
        """Keys that cleaning keeps: models, their inputs, evaluations, the champions' data."""
        store = ArtifactStore(self._home)
        keys = set[str]()
        for model in self._models():
            artifact = store.at(store.path(model.stage, model.key))
            inputs = artifact.manifest["inputs"] if artifact else {}
            keys |= {model.key, *(inputs[name]["key"] for name in INPUTS if name in inputs)}
        for one in self.sets():
            stages = WITH_A_CHAMPION if CHAMPION in one.aliases else WITH_A_SET
            keys |= {one.keys[stage] for stage in stages if stage in one.keys}
        return frozenset(keys)

    def models_of(self, run: str) -> list[Version]:
        return [model for model in self._models() if model.run == run]

    def _models(self) -> Iterator[Version]:
        for name, versions in self.read()["models"].items():
            for version, facts in versions.items():
                yield Version(name, version, **facts)

    def check_names(self, name: str, models: Iterable[str]) -> None:
        """Raise UsageError if another pipeline's models already have one of these names."""
        state = self.read()
        taken = [each for each in models if each in state["sets"]]
        taken += [name] if name in state["models"] else []
        if taken:
            raise UsageError(
                f"name is {name}, but {taken[0]} already names models of another pipeline; "
                "one name stands for sets of models or for single models: set another `name`"
            )

    def read(self) -> JsonDict:
        """The content of the file; empty if there is none. Raises UsageError if it is damaged."""
        try:
            return need_object(self._path.read_bytes())
        except FileNotFoundError:
            return {"models": {}, "sets": {}}
        except ValueError as error:
            raise UsageError(
                f"{self._path}, which has the registered models and the champion, is damaged: "
                f"{error}; restore it from a copy, or move it away, register the newest models "
                "again with `ttrain pipeline rerun evaluate`, and choose the champion with "
                "`ttrain models promote`"
            ) from None

    # --- writing

    def register_model(self, name: str, artifact: Artifact, run: str) -> Version:
        """Register an artifact under this name, once for each key and content.

        `run`: its run, if the artifact does not name one.
        """
        made_by = str(artifact.provenance.get("run") or run)
        identity = {"stage": artifact.stage, "key": artifact.key, "content": artifact.content}
        with self._changing() as state:
            versions = state["models"].setdefault(name, {})
            same = (each for each, facts in versions.items() if identity.items() <= facts.items())
            number = next(same, _next_number(versions))
            facts = versions.setdefault(number, {**identity, "run": made_by})
            return Version(name, number, **facts)

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
        by_stage = {member.stage: [member.name, member.version] for member in members}
        with self._changing() as state:
            empty: JsonDict = {"versions": {}, "champions": [], "aliases": {}}
            of_name = state["sets"].setdefault(name, empty)
            versions = of_name["versions"]
            aliases = of_name["aliases"]
            same = (each for each, entry in versions.items() if entry["members"] == by_stage)
            number = next(same, _next_number(versions))
            entry = versions.setdefault(
                number, {"run": run, "created": time.time(), "members": by_stage}
            )
            entry.update(keys=dict(keys), metrics=dict(metrics))
            if aliases.get(CHAMPION) != number:
                aliases[CHALLENGER] = number
        return self.find(name, number)

    def promote(self, name: str, version: str) -> ModelSet:
        """Make this set the champion; idempotent. Raises UsageError if there is no such set."""
        self.find(name, version)
        with self._changing() as state:
            champions = state["sets"][name]["champions"]
            if champions[-1:] != [version]:
                champions.append(version)
            _crown(state["sets"][name], version)
        return self.find(name, version)

    def rollback(self, name: str) -> ModelSet:
        """Make the previous champion champion again. Raises UsageError if there is none."""
        with self._changing() as state:
            champions = state["sets"].get(name, {}).get("champions", [])
            earlier = [version for version in champions if version != champions[-1]]
            if not earlier:
                raise UsageError(
                    f"{name} has no earlier champion to go back to; `ttrain models list` shows "
                    "its sets"
                )
            while champions[-1] != earlier[-1]:
                champions.pop()
            _crown(state["sets"][name], earlier[-1])
        return self.find(name, earlier[-1])

    def decide(self, name: str, version: str, decision: JsonObject, *, run: str) -> None:
        """Record a decision about a set, replacing an earlier one."""
        self.find(name, version)
        with self._changing() as state:
            entry = state["sets"][name]["versions"][version]
            entry["decision"] = dict(decision)
            entry["decided"] = {"run": run}

    @contextlib.contextmanager
    def _changing(self) -> Iterator[JsonDict]:
        with exclusive(self._path.with_suffix(".lock")):
            before = self.read()
            yield (state := copy.deepcopy(before))
            if state != before:
                write_json(self._path, state, PRIVATE_FILE)


def _set(state: JsonObject, name: str, version: str) -> ModelSet:
    of_name = state["sets"][name]
    entry = of_name["versions"][version]
    members = {
        stage: Version(model, number, **state["models"][model][number])
        for stage, (model, number) in entry["members"].items()
    }
    aliases = sorted(alias for alias, holder in of_name["aliases"].items() if holder == version)
    facts = {**entry, "members": members}
    return ModelSet(name=name, version=version, aliases=tuple(aliases), **facts)


def _next_number(versions: JsonObject) -> str:
    # After the highest: earlier numbers may have gaps
    return str(max(map(int, versions), default=0) + 1)


def _crown(of_name: JsonDict, version: str) -> None:
    of_name["aliases"][CHAMPION] = version
    if of_name["aliases"].get(CHALLENGER) == version:
        del of_name["aliases"][CHALLENGER]
