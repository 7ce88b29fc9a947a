"""How a model came about: the artifacts behind it, the evaluation that scored it, the public places that it began from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ttrain import runs
from ttrain.data.existing import ON_HUB
from ttrain.store import Artifact, Store

BASE_MODEL = "base-model"  # the stage that takes a model in


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
        stages = {one.key: one.stage for one in found}
        return cls(found, next(scored, None), _public_locations(stages, home.root), _started_from(stages, home.root))


def _behind(artifact: Artifact, home: Store) -> Iterator[Artifact]:
    for used in artifact.manifest["inputs"].values():
        found = home.read(home.path(used["stage"], used["key"]))
        if found:
            yield from _behind(found, home)
    yield artifact


def _public_locations(stages: Mapping[str, str], home: Path) -> dict[str, tuple[str, ...]]:
    """Where each data set was read from, by the newest run that used it; paths on the user's disk stay private.

    `stages`: the stage of each key.
    """
    found: dict[str, tuple[str, ...]] = {}
    for run in runs.history(home):
        for stage in run["stages"]:
            dataset = stages.get(stage.get("key") or "", "").partition("shards-")[2]
            if dataset and dataset not in found:
                named = run["settings"].get("data", {}).get(dataset)
                entries = [named] if isinstance(named, str) else named or []
                words = [entry["path"] if isinstance(entry, dict) else str(entry) for entry in entries]
                found[dataset] = tuple(word for word in words if "://" in word and not word.startswith("file:"))
    return found


def _started_from(stages: Mapping[str, str], home: Path) -> str | None:
    """The name on the Hub of the model that was taken in, by the newest run that did it; a path stays private."""
    keys = {key for key, stage in stages.items() if stage == BASE_MODEL}
    for run in runs.history(home):
        if keys & {stage.get("key") for stage in run["stages"]}:
            named = [run["settings"].get(stage, {}).get("start_from") or "" for stage in ("pretrain", "sft", "lora")]
            matches = [found[1] for name in named if (found := ON_HUB.fullmatch(name)) and not Path(name).is_dir()]
            return matches[0] if matches else None
    return None
