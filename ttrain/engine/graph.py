"""The graph of a pipeline, and the plan of one of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.config import Settings
from ttrain.engine import resume
from ttrain.errors import UsageError
from ttrain.store.differences import Ingredients
from ttrain.store.layout import Artifact, Artifacts
from ttrain.tasks import Stage

Source = str | Artifact  # of an input: the name of the stage that makes it, or an artifact that is there


@dataclass(frozen=True)
class Node:
    """A stage of a pipeline and where each of its inputs comes from, by the input's name."""

    stage: Stage
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def reads(self) -> frozenset[str]:
        """The stages that make its inputs."""
        return frozenset(source for source in self.sources.values() if isinstance(source, str))

    def __str__(self) -> str:
        sources = (of if isinstance(of, str) else f"{of.stage} {of.key[:12]}" for of in self.sources.values())
        return f"{self.stage.name} <- {', '.join(sources)}" if self.sources else self.stage.name


class Graph(Mapping[str, Node]):
    """The stages of a pipeline by name, each after those that it reads."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}

    def add(self, stage: Stage, **sources: Source | None) -> str:
        """Add a stage and return its name, for those that read it. An input whose source is None is not there."""
        present = {name: source for name, source in sources.items() if source is not None}
        self._nodes[stage.name] = Node(stage, present)
        return stage.name

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __str__(self) -> str:
        """A line for each stage: its name, and what it reads."""
        return "\n".join(map(str, self.values()))

    def replacing(self, replaced: Mapping[str, Source | None]) -> Graph:
        """The graph without these stages: what reads one of them reads the source instead, or nothing where it is None."""
        graph = Graph()
        for name, node in self.items():
            if name not in replaced:
                sources = {
                    of: replaced.get(source, source) if isinstance(source, str) else source
                    for of, source in node.sources.items()
                }
                graph.add(node.stage, **sources)
        return graph

    def needed_by(self, name: str) -> frozenset[str]:
        """The stage and all that it depends on, directly or not."""
        needed: set[str] = set()
        waiting = [name]
        while waiting:
            stage = waiting.pop()
            if stage not in needed:
                needed.add(stage)
                waiting.extend(self[stage].reads)
        return frozenset(needed)


Pipeline = Callable[[Settings], Graph]


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
    partial_run: resume.PartialRun | None = None  # the work that --continue names
    reused: bool = False  # left out by the selection: it must be in the store
    sources: Mapping[str, Source] = field(default_factory=dict)  # of its inputs, as in the graph

    @property
    def known_key(self) -> str:
        """The key of a stage whose inputs exist."""
        assert self.key is not None, "the inputs exist, so the key is known"
        return self.key

    def has_inputs(self, inputs: Artifacts) -> bool:
        """Whether the plan is of these inputs, and knows its key."""
        mine, theirs = ({name: (a.key, a.content) for name, a in of.items()} for of in (self.inputs, inputs))
        return self.key is not None and mine == theirs

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

    def of(self, graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
        """The stages that are built (or cached), and those that must be in the store. Raises UsageError if none is built."""
        until = graph.needed_by(self.until) if self.until else graph
        since = (name for name in until if not self.since or self.since in graph.needed_by(name))
        built = self.only or frozenset(since)
        if not built:
            raise UsageError(f"{self} leaves no stage to build: {self.until} does not depend on {self.since}; swap them")
        needed = frozenset[str]().union(*map(graph.needed_by, built))
        return built, needed - built


EVERYTHING = Selection()
