"""Which stages of a pipeline a command means: `--only`, `--from`, `--until`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ttrain.errors import UsageError

if TYPE_CHECKING:
    from ttrain.config import Settings
    from ttrain.pipeline.planned import Planned, Recipe
    from ttrain.stages import Stage
    from ttrain.store.layout import Artifact


LEFT_OUT = object()  # what a stage that is not called gives: not None, by which a recipe knows that it has no such stage


@dataclass(frozen=True)
class Selection:
    """The stages named in `only`; or `since`, `until` and what lies on the ways between them; all, where none is named.

    What `since` names is built with all that depends on it, what `until` names with all that it depends on.
    """

    only: frozenset[str] = frozenset()
    since: str = ""
    until: str = ""

    def __post_init__(self) -> None:
        if self.only and (self.since or self.until):
            raise UsageError(f"--only {','.join(sorted(self.only))} goes with neither --from nor --until; leave out the one")

    def __bool__(self) -> bool:
        return bool(self.only or self.since or self.until)

    def __str__(self) -> str:
        """As it was asked for on the command line."""
        named = [("--only", ",".join(sorted(self.only))), ("--from", self.since), ("--until", self.until)]
        return " ".join(f"{option} {value}" for option, value in named if value)

    @property
    def names(self) -> list[str]:
        """The stages that it names."""
        return sorted({*self.only, self.since, self.until} - {""})

    def of(self, graph: Mapping[str, frozenset[str]]) -> Parts:
        """Which stages are built, which are taken as they are, which are left out. Raises UsageError where none is built."""
        built = self._built(graph)
        if not built:
            raise UsageError(f"{self} leaves no stage to build: {self.until} does not depend on {self.since}; swap them")
        needed = frozenset[str]().union(*(_with_all_before(name, graph) for name in built))
        return Parts(built, needed - built, frozenset(graph) - needed)

    def _built(self, graph: Mapping[str, frozenset[str]]) -> frozenset[str]:
        if self.only:
            return self.only
        until = _with_all_before(self.until, graph) if self.until else frozenset(graph)
        return frozenset(name for name in until if not self.since or self.since in _with_all_before(name, graph))


@dataclass(frozen=True)
class Parts:
    """Names of the stages that are built (or cached), of those that must be in the store, of those that are not called."""

    built: frozenset[str]
    taken: frozenset[str]
    left_out: frozenset[str]


def graph_of(recipe: Recipe, settings: Settings) -> dict[str, frozenset[str]]:
    """The stages that the recipe calls, in its order, each with those whose artifacts it reads."""
    graph: dict[str, frozenset[str]] = {}

    def stage_(stage: Stage, **inputs: Any) -> str:
        graph[stage.name] = frozenset(given for given in inputs.values() if isinstance(given, str))
        return stage.name

    recipe(stage_, settings)
    return graph


def planned_part(recipe: Recipe, stages: list[Planned]) -> Recipe:
    """The recipe, in which what the plan takes from the store is there already and what it leaves out is not called."""
    there: dict[str, Artifact] = {p.stage.name: p.artifact for p in stages if p.taken and p.artifact}
    called = {p.stage.name for p in stages if not p.taken}

    def part(stage_: Any, settings: Settings) -> None:
        def chosen(stage: Stage, **inputs: Any) -> Any:
            return stage_(stage, **inputs) if stage.name in called else there.get(stage.name, LEFT_OUT)

        recipe(chosen, settings)

    return part


def _with_all_before(name: str, graph: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The stage and all that it depends on, directly or not."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        stage = waiting.pop()
        if stage not in found:
            found.add(stage)
            waiting.extend(graph[stage])
    return frozenset(found)
