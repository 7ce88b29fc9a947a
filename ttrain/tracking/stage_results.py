"""What the result of a stage is in the tracker: figures and data sets of its artifact, the status of its run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ttrain.config import flatten
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tracking.datasets import data_of

if TYPE_CHECKING:
    from ttrain.tracking.runs import AnyRun


RUN, STAGE, KEY = "ttrain.run", "ttrain.stage", "ttrain.key"  # tags of a stage's run
FINISHED: Final = "FINISHED"


def status_of(outcome: str) -> str:
    """MLflow's status of a run or a stage that ended with this outcome."""
    return FINISHED if outcome in (*runs.BUILT, runs.NOTHING_NEW) else "FAILED" if outcome == "failed" else "KILLED"


FIT: Final = ("bytes_per_token", "unk_rate")  # metrics of a tokenizer, by which tokenizers are compared


def log_result(run: AnyRun, artifact: Artifact) -> None:
    """Log the figures of a finished stage, and its data sets."""
    run.log_params({**group_params(artifact.result), **_figures(artifact.result)})
    fit = {f"tok/{name}": float(artifact.result[name]) for name in FIT if name in artifact.result}
    run.log_summary(fit)
    run.log_inputs(data_of(artifact))


def artifact_of(home: Path, tags: Mapping[str, str]) -> Artifact | None:
    """The whole artifact that the run with these tags published; None if another run made it, or there is none."""
    stage, key, name = (str(tags.get(tag, "")) for tag in (STAGE, KEY, RUN))
    artifact = ArtifactStore(home).find(stage, key) if stage and key else None
    made_by = artifact.provenance.get("run") if artifact else None
    return artifact if name and made_by == name else None


def group_params(result: Mapping[str, Any]) -> dict[str, object]:
    """What each optimizer group holds, as parameters: {"optim.groups.0.weight_decay": 0.1}."""
    groups = enumerate(result.get("optimizer_groups", ()))
    return {f"optim.groups.{number}.{name}": value for number, group in groups for name, value in group.items()}


def _figures(result: Mapping[str, Any]) -> dict[str, object]:
    """The figures of a result as parameters: {"result.rows.fill": 0.98}. As metrics each would be a chart of one point, and
    MLflow would show these charts before the curves."""
    return {
        f"result.{name}": value
        for name, value in flatten({key: value for key, value in result.items() if key != "samples"})
        if isinstance(value, int | float)
    }
