"""The decision of a night: challenger and champion compared, the decision recorded and obeyed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ttrain.config import Promotion, Settings
from ttrain.config.training import BITS_PER_BYTE, DOMAIN_LOSS, TRAINING_STAGES
from ttrain.engine.execution import REGISTERED, PipelineRun
from ttrain.evaluate import promotion
from ttrain.evaluate.promotion import Judged
from ttrain.evaluate.scores import Evaluation
from ttrain.nightly import heldout
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import NightRecord, Nights
from ttrain.reports import summary
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.registry import Registry
from ttrain.tasks import EVALUATE, EVALUATE_CHAMPION, Stage


def judge(
    night: NightRecord,
    inputs: NightInputs,
    execution: PipelineRun,
    settings: Settings,
    store: ArtifactStore,
    say: Callable[[str], object],
) -> Judged:
    """Compare the evaluations of challenger and champion. `settings`: the present ones, whose rules count."""

    def complete(stage: Stage) -> Artifact | None:
        evaluation = execution.artifacts.get(stage.name)
        return store.complete(evaluation, report=say) if evaluation else None  # the files of a cached one may be in MLflow

    evaluation, of_champion = complete(EVALUATE), complete(EVALUATE_CHAMPION)
    assert evaluation is not None, "a run that came to its end has evaluated"
    champion = Evaluation.of(of_champion) if of_champion else None
    rules, nights = _rules(settings, inputs, execution), dict[str, list[str]]()
    if reference := heldout_of(evaluation):
        documents = store.complete(heldout.find_heldout(store, reference, night.name), ("heldout",), report=say)
        nights = heldout.names_by_night(documents, heldout_nights(night, evaluation))
    best = heldout.best_figures(Nights(store.root, settings.name).newest_first(), promotion.metric_of_texts(rules.metric))
    return promotion.judge(Evaluation.of(evaluation), champion, rules, nights, night.name, best)


def record(night: NightRecord, execution: PipelineRun, home: Path, name: str, judged: Judged) -> Judged:
    """Record the decision in the night, its run and the registry; return it. Promotes nothing yet. `name`: of the pipeline.

    Where another version became champion during the night, it is a decision not to promote.
    """
    decision, version = judged.decision, execution.model_set
    assert version is not None, "a run that came to its end has registered its models"
    registry = Registry(home)
    now = registry.champion(name)
    previous_version = night.frozen.champion.version if night.frozen.champion else None
    if now is not None and now.version not in (previous_version, version):  # by hand, while the night went on
        reason = f"version {now.version} became champion during the night, so nothing is promoted; {decision.reason}"
        decision = replace(decision, promote=False, reason=reason)
        judged = replace(judged, decision=decision)
    texts = [figure.to_json() for figure in judged.texts]
    run = execution.record.run
    keys = {stage: artifact.key for stage, artifact in execution.artifacts.items() if stage in REGISTERED}
    night.note(version=version, keys=keys, run=run, decision=decision.to_json(), texts=texts)
    execution.record.note(decision=decision.to_json())
    if decision.promote or now is None or now.version != version:  # the champion keeps the decision that made it so
        table, *figures = tables(judged)
        registry.decide(name, version, decision.to_json(), run=run, table=table, figures="\n\n".join(figures))
    return judged


def tables(judged: Judged) -> list[str]:
    """The decision in Markdown, and the figures by text where there are some."""
    return [summary.markdown(rows, header) for rows, header in promotion.tables(judged)]


def heldout_nights(night: NightRecord, evaluation: Artifact) -> tuple[str, ...]:
    """Names of the nights that brought the held-out documents of this evaluation, the oldest first."""
    reference, frozen = heldout_of(evaluation), night.frozen
    if reference is None or reference == frozen.heldout:  # only chats are new
        return frozen.heldout_nights
    return (*frozen.heldout_nights, night.name)


def _rules(settings: Settings, inputs: NightInputs, execution: PipelineRun) -> Promotion:
    """The rules of the night's decision. Without new documents both have the same base model, whose metric says nothing:
    then the first model counts that both have and that differs, on what is held out for it."""
    rules = settings.promotion
    if not inputs.keeps_base or rules.metric != BITS_PER_BYTE.name:
        return rules
    metric = DOMAIN_LOSS
    for name, row in TRAINING_STAGES.items():
        old, new = inputs.champion.get(row.model), execution.artifacts.get(name)
        if row.role != "base" and row.metric and old and new and old.content != new.content:
            metric = row.metric
            break
    return rules.model_copy(update={"metric": metric.name, "higher_is_better": metric.higher_is_better})


def heldout_of(evaluation: Artifact) -> str | None:
    """Reference ("stage/key") of the held-out documents of an evaluation."""
    documents = evaluation.manifest["inputs"].get("documents")
    return f"{documents['stage']}/{documents['key']}" if documents else None
