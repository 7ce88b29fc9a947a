"""How a model came about: the artifacts behind it, the evaluation that scored it, the public places that it began from.

`lineage_of` answers for anything that has a name, from the store's manifests, or from MLflow's where the store is gone.
`History` is what a model card tells of an artifact that is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ttrain.data.existing_tokenizer import ON_HUB
from ttrain.pipeline import lineage_names
from ttrain.pipeline.lineage_links import STORE, TRACKER, Link, link_of, link_of_tags
from ttrain.pipeline.lineage_names import Named
from ttrain.stages import STAGES
from ttrain.store import runs
from ttrain.store.artifacts import Store
from ttrain.store.layout import Artifact
from ttrain.tracking.model_sets import KEY

BASE_MODEL = "base-model"  # the stage that takes a model in
DONE = ("completed", "equal", "different")  # outcomes of a stage that a run built


@dataclass(frozen=True)
class Lineage:
    """Everything behind what was asked for: `links`, inputs first."""

    named: Named
    links: tuple[Link, ...]
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """What `lineage --json` prints."""
        return {
            "asked": self.named.text,
            "kind": self.named.kind,
            "name": self.named.name,
            "run": self.named.run,
            "stages": [link.to_json() for link in self.links],
            "notes": list(self.notes),
        }


def lineage_of(home: Path, text: str) -> Lineage:
    """The lineage of a registered model, a run, a stage's newest artifact or an artifact by its key.

    Raises UsageError where the text names nothing.
    """
    named = lineage_names.named(home, text)
    return lineage_behind(home, named)


def lineage_behind(home: Path, named: Named) -> Lineage:
    """The lineage of what a name stands for."""
    walk = _Walk(home, named)
    for stage, key in sorted(named.roots, key=_models_first):
        walk.visit(stage, key)
    return Lineage(named, tuple(walk.links.values()), named.notes)


class _Walk:
    """From the roots to what they were made of; each artifact once, after its inputs."""

    def __init__(self, home: Path, named: Named) -> None:
        self._home, self._store, self._named = home, Store(home), named
        self.links: dict[str, Link] = {}

    def visit(self, stage: str, key: str) -> None:
        if key in self.links:
            return
        link = self._link(stage, key)
        for input_stage, input_key in sorted(link.inputs.values(), key=_models_first):
            self.visit(input_stage or self._stages.get(input_key, ""), input_key)
        self.links[key] = link

    def _link(self, stage: str, key: str) -> Link:
        here = self._store.at(self._store.path(stage, key)) if stage else None
        if here:
            return self._told(here, STORE)
        recorded = self._tracked.recorded(stage, key) if stage else None
        if recorded:
            return self._told(Artifact(stage, key, self._store.path(stage, key), recorded), TRACKER)
        asked = self._named.tags.get("ttrain.key") == key
        tags = self._named.tags if asked else {"ttrain.stage": stage, "ttrain.key": key}
        return link_of_tags(tags, self._named.run_id if asked else None)

    def _told(self, artifact: Artifact, known_from: str) -> Link:
        """By its manifest; only one of an earlier ttrain needs the records of the runs."""
        says_its_run = artifact.manifest.get("provenance", {}).get("run")
        return link_of(artifact, known_from, {} if says_its_run else self._runs)

    @cached_property
    def _tracked(self) -> Any:
        from ttrain.tracking.artifact_source import Tracked

        return Tracked(self._home)

    @cached_property
    def _stages(self) -> Mapping[str, str]:
        """The stage of each key that a set's tags name."""
        return {key: tag.removeprefix(KEY) for tag, key in self._named.tags.items() if tag.startswith(KEY)}

    @cached_property
    def _runs(self) -> Mapping[str, str]:
        """The newest run on record that built each key."""
        found: dict[str, str] = {}
        for run in runs.newest_first(self._home):
            for stage in run["stages"]:
                if stage.get("key") and stage["outcome"] in DONE:
                    found.setdefault(stage["key"], run["run"])
        return found


def _models_first(artifact: tuple[str, str]) -> tuple[bool, int]:
    """Of (stage, key): the chain of models first, so that the data of each stands right before it."""
    names, stage = list(STAGES), artifact[0]
    return stage.startswith("shards-"), names.index(stage) if stage in names else -1


@dataclass(frozen=True)
class History:
    """How a model came about: the artifacts behind it, inputs first, itself last, and the evaluation that scored it."""

    artifacts: tuple[Artifact, ...]
    evaluation: Artifact | None
    locations: Mapping[str, tuple[str, ...]]  # the public places (URLs, the Hub) of each data set
    base: str | None = None  # the Hub's name of the model that it started from

    @classmethod
    def of(cls, artifact: Artifact | None, home: Store) -> History:
        """From the manifests in a home; an input that is no longer there is left out."""
        if artifact is None:
            return cls((), None, {})
        found = tuple({(one.stage, one.key): one for one in _behind(artifact, home)}.values())
        scored = (
            one
            for one in home.artifacts("evaluate")
            if any(
                (used["stage"], used["key"]) == (artifact.stage, artifact.key) for used in one.manifest["inputs"].values()
            )
        )
        told = {one.key: _settings_of(one) for one in found}
        if None in told.values():  # made before manifests had the settings of their run
            told = {**_settings_on_record(told.keys(), home.root), **{key: given for key, given in told.items() if given}}
        stages = [(one.stage, told.get(one.key) or {}) for one in found]
        return cls(found, next(scored, None), _public_locations(stages), _started_from(stages))


def _behind(artifact: Artifact, home: Store) -> Iterator[Artifact]:
    for used in artifact.manifest["inputs"].values():
        found = home.read(home.path(used["stage"], used["key"]))
        if found:
            yield from _behind(found, home)
    yield artifact


def _settings_of(artifact: Artifact) -> Mapping[str, Any] | None:
    """All settings of the run that made it, where its manifest has them."""
    settings: Mapping[str, Any] | None = artifact.manifest.get("provenance", {}).get("settings")
    return settings


def _settings_on_record(keys: Iterable[str], home: Path) -> dict[str, Mapping[str, Any]]:
    """The settings of the newest run on record that has each of these keys."""
    wanted, found = set(keys), dict[str, Mapping[str, Any]]()
    for run in runs.newest_first(home):
        for stage in run["stages"]:
            if stage.get("key") in wanted:
                found.setdefault(stage["key"], run["settings"])
    return found


def _public_locations(stages: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, tuple[str, ...]]:
    """Where each data set was read from; paths on the user's disk stay private. `stages`: with the settings of each."""
    found: dict[str, tuple[str, ...]] = {}
    for stage, settings in stages:
        if dataset := stage.partition("shards-")[2]:
            named = settings.get("data", {}).get(dataset)
            entries = [named] if isinstance(named, str) else named or []
            words = [entry["path"] if isinstance(entry, dict) else str(entry) for entry in entries]
            found[dataset] = tuple(word for word in words if "://" in word and not word.startswith("file:"))
    return found


def _started_from(stages: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
    """The name on the Hub of the model that was taken in; a path stays private."""
    for stage, settings in stages:
        if stage == BASE_MODEL:
            named = [settings.get(training, {}).get("start_from") or "" for training in ("pretrain", "sft", "lora")]
            matches = [found[1] for name in named if (found := ON_HUB.fullmatch(name)) and not Path(name).is_dir()]
            return matches[0] if matches else None
    return None
