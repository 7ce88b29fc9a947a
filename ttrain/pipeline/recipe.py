"""A recipe, and the plan of one of its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.config import Settings
from ttrain.errors import UsageError
from ttrain.pipeline import resume
from ttrain.stages import Stage
from ttrain.store.differences import Ingredients
from ttrain.store.layout import Artifact, Artifacts

Recipe = Callable[["Callable[..., Any]", Settings], Any]


@dataclass(frozen=True)
class Planned:
    """What will happen to one stage."""

    stage: Stage
    state: str  # "cached" or "run"
    why: tuple[str, ...]
    key: str | None = None  # None: an input must be built first
    artifact: Artifact | None = None
    ingredients: Ingredients = field(default_factory=dict)
    forced: bool = False
    inputs: Artifacts = field(default_factory=dict)
    start_from: Path | None = None  # a checkpoint of a shorter run, if --extend found one
    waits_for: tuple[str, ...] = ()  # stages that must run first, since it reads their artifacts
    partial_run: resume.PartialRun | None = None  # the work that --continue names
    reused: bool = False  # left out by the selection: it must be in the store

    def has_inputs(self, inputs: Artifacts) -> bool:
        """Whether the plan is of these inputs."""
        mine, theirs = ({name: (a.key, a.content) for name, a in of.items()} for of in (self.inputs, inputs))
        return mine == theirs

    def to_json(self) -> dict[str, Any]:
        """The form that `plan --json` prints."""
        path = str(self.artifact.path) if self.artifact else None
        return {"name": self.stage.name, "state": self.state, "key": self.key, "path": path, "why": list(self.why)}


@dataclass(frozen=True)
class Rerun:
    """What is built although its artifact exists, or goes on from other work. Not for a stage that the store has else."""

    force: frozenset[str] = frozenset()  # stages to rebuild; what depends on a forced stage is forced with it
    extend: bool = False  # continue the checkpoint of a run with a smaller budget
    resume_key: str = ""  # key, or its beginning, of unfinished work that its stage resumes although something has changed


NOTHING_AGAIN = Rerun()

LEFT_OUT = object()  # output of a stage that is not called; None would mean that the recipe has no such stage


@dataclass(frozen=True)
class Selection:
    """The stages in `only`; or those from `since` to `until`; all of them if none is named.

    `since` is built with all that depends on it, `until` with all that it depends on.
    """

    only: frozenset[str] = frozenset()
    since: str = ""
    until: str = ""

    def __post_init__(self) -> None:
        if self.only and (self.since or self.until):
            raise UsageError(
                f"--only {','.join(sorted(self.only))} cannot be combined with --from or --until; remove one of them"
            )

    def __bool__(self) -> bool:
        return bool(self.only or self.since or self.until)

    def __str__(self) -> str:
        """The options as on the command line."""
        options = [("--only", ",".join(sorted(self.only))), ("--from", self.since), ("--until", self.until)]
        return " ".join(f"{option} {value}" for option, value in options if value)

    @property
    def names(self) -> list[str]:
        """The stages that the options name."""
        return sorted({*self.only, self.since, self.until} - {""})

    def of(self, graph: Mapping[str, frozenset[str]]) -> StageParts:
        """Split the stages into built, reused and left out. Raises UsageError if none is built."""
        until = with_dependencies(self.until, graph) if self.until else graph
        since = (name for name in until if not self.since or self.since in with_dependencies(name, graph))
        built = self.only or frozenset(since)
        if not built:
            raise UsageError(f"{self} leaves no stage to build: {self.until} does not depend on {self.since}; swap them")
        needed = frozenset[str]().union(*(with_dependencies(name, graph) for name in built))
        return StageParts(built, needed - built, frozenset(graph) - needed)


@dataclass(frozen=True)
class StageParts:
    """Names of the stages that are built (or cached), that must be in the store, and that are not called."""

    built: frozenset[str]
    reused: frozenset[str]
    left_out: frozenset[str]


def graph_of(recipe: Recipe, settings: Settings) -> dict[str, frozenset[str]]:
    """{stage: stages whose artifacts it reads}, in the order of the recipe."""
    graph: dict[str, frozenset[str]] = {}

    def stage_(stage: Stage, **inputs: Any) -> str:
        graph[stage.name] = frozenset(input_name for input_name in inputs.values() if isinstance(input_name, str))
        return stage.name

    recipe(stage_, settings)
    return graph


def planned_part(recipe: Recipe, stages: list[Planned]) -> Recipe:
    """The recipe with the stages that the plan reuses replaced by their artifacts, and the others left out."""
    artifacts = {p.stage.name: p.artifact for p in stages if p.reused and p.artifact}
    called = {p.stage.name for p in stages if not p.reused}

    def part(stage_: Any, settings: Settings) -> None:
        def chosen(stage: Stage, **inputs: Any) -> Any:
            return stage_(stage, **inputs) if stage.name in called else artifacts.get(stage.name, LEFT_OUT)

        recipe(chosen, settings)

    return part


def with_dependencies(name: str, graph: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The stage and all that it depends on, directly or not."""
    dependencies: set[str] = set()
    waiting = [name]
    while waiting:
        stage = waiting.pop()
        if stage not in dependencies:
            dependencies.add(stage)
            waiting.extend(graph[stage])
    return frozenset(dependencies)
