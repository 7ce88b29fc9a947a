"""Makes a model again from its raw data, in a home of its own, and compares what comes out, stage by stage.

Everything is taken from the manifests behind the model: settings, the commits of remote data, seed, threads, ranks,
micro-batches, kernels. On a CPU the same code and libraries give the same bits; where they are others, or the machine is,
the report says which.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.core.files import read_json, write_json
from ttrain.core.hashing import differences
from ttrain.core.signals import catching_signals
from ttrain.errors import Interrupted, UsageError
from ttrain.pipeline import launch
from ttrain.pipeline.lineage import Lineage
from ttrain.pipeline.progress_display import Screen
from ttrain.pipeline.reproduce_recipes import Recipe
from ttrain.stages import Stage
from ttrain.store.artifacts import Store
from ttrain.store.layout import Artifact

MARK = "reproduces.json"  # in the home that a reproduction was given: an interrupted one goes on there


@dataclass(frozen=True)
class Rebuilt:
    """One stage made again."""

    stage: str
    key: str
    content: str  # as recorded
    rebuilt_key: str
    rebuilt_content: str
    seconds: float
    differences: tuple[str, ...]  # of what went in: code, libraries, machine
    files: tuple[str, ...]  # those that came out otherwise

    @property
    def is_equal(self) -> bool:
        """Whether the same bytes came out."""
        return self.content == self.rebuilt_content

    def to_json(self) -> dict[str, Any]:
        """What `reproduce --json` prints of it."""
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "equal": self.is_equal}


@dataclass(frozen=True)
class Reproduction:
    """What came of it. `left` are the stages that were not made, since one before them came out otherwise."""

    lineage: Lineage
    home: Path
    stages: tuple[Rebuilt, ...]
    left: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether every stage gave the same bytes."""
        return not self.left and all(stage.is_equal for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """What `reproduce --json` prints."""
        return {
            "asked": self.lineage.named.text,
            "name": self.lineage.named.name,
            "equal": self.is_equal,
            "home": str(self.home),
            "stages": [stage.to_json() for stage in self.stages],
            "left": list(self.left),
        }


def reproduce(lineage: Lineage, recipes: Sequence[Recipe], home: Path, screen: Screen) -> Reproduction:
    """Build all stages in `home`, and compare. It ends with the first stage that differs: what follows reads its output.

    Raises what a stage raised, or Interrupted once its state is saved.
    """
    store, observer = Store(home), _Observer(screen)
    made: dict[str, Artifact] = {}
    done: list[Rebuilt] = []
    with catching_signals(observer.ask_to_stop):
        for recipe in recipes:
            if observer.signum:
                raise Interrupted(f"stopped before stage {recipe.stage.name}", observer.signum)
            inputs = {name: made[key] for name, (_, key) in recipe.link.inputs.items()}
            outcome = launch.build(recipe.stage, recipe.settings, store, inputs, observer)
            made[recipe.link.key] = outcome.artifact
            done.append(_compared(recipe, outcome.artifact, outcome.seconds))
            screen.ended(recipe.stage.name, "equal" if done[-1].is_equal else "different", outcome.seconds, "")
            if not done[-1].is_equal:
                break
    store.cache.save()
    left = tuple(recipe.stage.name for recipe in recipes[len(done) :])
    return Reproduction(lineage, home, tuple(done), left)


@contextmanager
def home_for(given: Path | None, name: str) -> Iterator[Path]:
    """The directory to build in: the given one, which stays, or one that is removed.

    Raises UsageError where the given one holds anything but an interrupted reproduction of the same.
    """
    if given is None:
        with tempfile.TemporaryDirectory(prefix="ttrain-reproduce-") as folder:
            yield Path(folder)
        return
    home = given.expanduser().absolute()
    mark = read_json(home / MARK)
    if home.exists() and not home.is_dir():
        raise UsageError(f"--home is {home}, which is a file; name a directory that is new or empty")
    if home.is_dir() and any(home.iterdir()) and mark != {"name": name}:
        what = f"a reproduction of {mark['name']}" if isinstance(mark, dict) and "name" in mark else "other files"
        raise UsageError(f"--home is {home}, which holds {what}; name a directory that is new or empty")
    home.mkdir(parents=True, exist_ok=True)
    write_json(home / MARK, {"name": name})
    yield home


def _compared(recipe: Recipe, artifact: Artifact, seconds: float) -> Rebuilt:
    link, recorded = recipe.link, recipe.link.manifest["files"]
    before = Artifact(link.stage, link.key, artifact.path, link.manifest)
    names = sorted({*before.files_of(()), *artifact.files_of(())})
    new = artifact.manifest["files"]
    other = [name for name in names if recorded.get(name, {}).get("sha256") != new.get(name, {}).get("sha256")]
    changed = differences(link.manifest["ingredients"], artifact.manifest["ingredients"])
    return Rebuilt(
        stage=link.stage,
        key=link.key,
        content=before.content,
        rebuilt_key=artifact.key,
        rebuilt_content=artifact.content,
        seconds=round(seconds, 2),
        differences=(*changed, *recipe.remarks),
        files=tuple(other),
    )


class _Observer:
    """Passes on to the screen what a stage tells, and to the stage that it is to stop."""

    def __init__(self, screen: Screen) -> None:
        self._screen, self.signum = screen, 0

    def ask_to_stop(self, signum: int) -> None:
        self.signum = signum
        self._screen.say("[yellow]stopping: the stage saves its state (again to end at once)[/]")

    def started(self, stage: Stage, planned: Any, work: Path) -> None:
        self._screen.started(stage.name, "is made again")

    def prepared(self, stage: Stage, work: Path) -> None:
        """Nothing is to be added."""

    def waiting(self, stage: Stage, who: str) -> None:
        self._screen.say(f"  {stage.name}: {who} is building it; waiting for that one")

    def fetching(self, stage: Stage, line: str) -> None:
        self._screen.say(f"  {stage.name}: {line}")

    def progressed(self, stage: Stage, progress: Mapping[str, Any]) -> None:
        self._screen.progressed(stage.name, progress)

    def logged(self, stage: Stage, line: str) -> None:
        """The log of the stage has it."""

    def process_ended(self, stage: Stage) -> None:
        """Nothing follows it."""

    def stop_signal(self) -> int:
        return self.signum

    def at_once(self) -> bool:
        return False
