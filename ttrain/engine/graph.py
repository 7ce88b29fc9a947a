"""The graph of a pipeline, and its plan, as it is shown and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.config import Settings
from ttrain.core import machine
from ttrain.core.html_table import html_table
from ttrain.core.text import first_of
from ttrain.errors import UsageError
from ttrain.store.artifacts import SHOWN_KEY, ArtifactStore
from ttrain.store.differences import Ingredients, library_changes
from ttrain.store.layout import Artifact, Artifacts
from ttrain.tasks import Stage

Source = (
    str | Artifact
)  # of an input: the name of the stage that makes it, or an artifact that is there

COLUMNS = ("stage", "state", "key", "why")


@dataclass(frozen=True)
class Node:
    """A stage of a pipeline and the source of each of its inputs, by name."""

    stage: Stage
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def reads(self) -> frozenset[str]:
        """The stages that make its inputs."""
        return frozenset(source for source in self.sources.values() if isinstance(source, str))

    def inputs(self, artifacts: Mapping[str, Artifact | None]) -> dict[str, Artifact]:
        """Its inputs by name, without those that do not exist."""
        found = {
            name: artifacts.get(of) if isinstance(of, str) else of
            for name, of in self.sources.items()
        }
        return {name: artifact for name, artifact in found.items() if artifact}


class Graph(dict[str, Node]):
    """The stages of a pipeline by name, each after those that it reads."""

    def add(self, stage: Stage, **sources: Source | None) -> str:
        """Add a stage and return its name. An input whose source is None is left out."""
        self[stage.name] = Node(
            stage, {name: source for name, source in sources.items() if source is not None}
        )
        return stage.name

    def replacing(self, replaced: Mapping[str, Source | None]) -> Graph:
        """The graph without these stages; their readers read the given source or nothing."""
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
        return frozenset({name}).union(*map(self.needed_by, self[name].reads))


Pipeline = Callable[[Settings], Graph]


@dataclass(frozen=True)
class PartialRun:
    """A work directory in which a training saved its state at `step`, under another key."""

    stage: str
    key: str
    path: Path
    step: int
    ingredients: Ingredients

    def __str__(self) -> str:
        return f"{self.stage} {self.key[:SHOWN_KEY]} at step {self.step}"


@dataclass(frozen=True, repr=False)
class Planned:
    """What a run would do with one stage.

    state       "cached" or "run"
    why         the reasons
    key         digest of settings, inputs and code; None while an input has yet to be built
    forced      built although its artifact exists
    sources     of its inputs, as in the graph; `inputs`: the artifacts, once all exist
    first_step  where training starts: at a checkpoint of its own work, of `partial_run`
                (--continue) or `start_from` (--extend)
    """

    stage: Stage
    state: str
    why: tuple[str, ...]
    key: str | None = None
    artifact: Artifact | None = None
    ingredients: Ingredients = field(default_factory=dict)
    forced: bool = False
    inputs: Artifacts = field(default_factory=dict)
    first_step: int = 0
    start_from: Path | None = None
    partial_run: PartialRun | None = None
    sources: Mapping[str, Source] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Planned {self.name}: {self.state}, {'; '.join(self.why)}>"

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.why

    @property
    def known_key(self) -> str:
        """The key of a stage whose inputs exist."""
        assert self.key is not None, "the inputs exist, so the key is known"
        return self.key

    @property
    def notes(self) -> list[str]:
        """Which libraries have changed since a cached stage was made."""
        cached = self.artifact if self.state == "cached" else None
        return library_changes(cached.manifest, machine.versions()) if cached else []

    @property
    def row(self) -> tuple[str, str, str, str]:
        """(stage, state, key, why) for a table."""
        return (
            self.name,
            self.state,
            (self.key or "")[:SHOWN_KEY],
            first_of([*self.why, *self.notes], 3, "; "),
        )

    def to_json(self) -> dict[str, Any]:
        """The form that `plan --json` prints."""
        return {
            "name": self.name,
            "state": self.state,
            "key": self.key,
            "path": str(self.artifact.path) if self.artifact else None,
            "why": list(self.why),
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Rerun:
    """What is built although its artifact exists, or continues from other work."""

    force: frozenset[str] = (
        frozenset()
    )  # stages to rebuild; what depends on a forced stage is forced with it
    extend: bool = False  # continue the checkpoint of a run with a smaller budget
    # key, or its beginning, of unfinished work that its stage resumes although something has
    # changed
    resume_key: str = ""


NOTHING_AGAIN = Rerun()


@dataclass(frozen=True)
class Selection:
    """The stages in `only`, or those from `since` to `until`; all of them if none is named.

    `since` brings all that depends on it, `until` all that it depends on.
    """

    only: frozenset[str] = frozenset()
    since: str = ""
    until: str = ""

    def __post_init__(self) -> None:
        if self.only and (self.since or self.until):
            raise UsageError(
                f"--only {','.join(sorted(self.only))} cannot be combined with --from or "
                f"--until; remove one of them"
            )

    def __str__(self) -> str:
        """The options as on the command line."""
        options = [
            ("--only", ",".join(sorted(self.only))),
            ("--from", self.since),
            ("--until", self.until),
        ]
        return " ".join(f"{option} {value}" for option, value in options if value)

    @property
    def names(self) -> list[str]:
        """The stages that the options name."""
        return sorted({*self.only, self.since, self.until} - {""})

    def of(self, graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
        """(stages to build, stages that the store must have). Raises UsageError."""
        until = graph.needed_by(self.until) if self.until else graph
        since = (name for name in until if not self.since or self.since in graph.needed_by(name))
        built = self.only or frozenset(since)
        if not built:
            raise UsageError(
                f"{self} leaves no stage to build: {self.until} does not depend on "
                f"{self.since}; swap them"
            )
        needed = frozenset[str]().union(*map(graph.needed_by, built))
        return built, needed - built


EVERYTHING = Selection()


@dataclass(frozen=True, eq=False)
class Plan(Sequence[Planned]):
    """The stages of a pipeline in order, each with its state, key and reasons."""

    pipeline: str
    settings: Settings
    store: ArtifactStore
    graph: Graph
    stages: list[Planned]
    selection: Selection = EVERYTHING
    rerun: Rerun = NOTHING_AGAIN
    compared_with: str = (
        ""  # the run that the reasons compare with; empty: the most similar artifacts
    )

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, index: Any) -> Any:
        """The stage of a number or a name."""
        return (
            {stage.name: stage for stage in self.stages}[index]
            if isinstance(index, str)
            else self.stages[index]
        )

    def __str__(self) -> str:
        rows = [COLUMNS, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        waiting = sum(stage.state == "run" for stage in self.stages)
        return html_table(
            COLUMNS, self.rows(), f"{self.pipeline}: {waiting} of {len(self)} stages will run"
        )

    @property
    def is_cached(self) -> bool:
        """Whether nothing would run."""
        return all(stage.state == "cached" for stage in self.stages)

    @property
    def results(self) -> dict[str, Mapping[str, Any]]:
        """The results of the stages that are in the store."""
        return {stage.name: stage.artifact.result for stage in self.stages if stage.artifact}

    @property
    def paths(self) -> dict[str, Path]:
        """The directories of the artifacts that are on this machine, by stage."""
        return {
            stage.name: stage.artifact.path
            for stage in self.stages
            if stage.artifact and stage.artifact.path.is_dir()
        }

    @property
    def left_out(self) -> list[str]:
        """The stages of the pipeline that the selection leaves out."""
        planned = {stage.name for stage in self.stages}
        return [name for name in self.graph if name not in planned]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(stage, state, key, why) for a table."""
        return [stage.row for stage in self.stages]

    def to_json(self) -> dict[str, Any]:
        """What `ttrain pipeline plan --json` prints of it."""
        return {
            "pipeline": self.pipeline,
            "stages": [stage.to_json() for stage in self.stages],
            "compared_with": self.compared_with or None,
        }
