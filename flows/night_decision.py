"""The decision of a night: challenger and champion compared, the decision recorded and obeyed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ttrain import tracking
from ttrain.config import Promotion, Settings
from ttrain.config.training import BITS_PER_BYTE, CHAT_LOSS, DOMAIN_LOSS, TRAINING_STAGES
from ttrain.errors import TrackingError
from ttrain.evaluate import forgetting, promotion
from ttrain.evaluate.forgetting import TextFigure
from ttrain.evaluate.scores import scores_of, source_records
from ttrain.nightly import heldout
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import NightRecord
from ttrain.pipeline.execution import PipelineRun
from ttrain.reports import summary
from ttrain.stages import EVALUATE, EVALUATE_CHAMPION
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact


@dataclass(frozen=True)
class NightDecision:
    """A decision with the figures on the held-out text of each night and source."""

    decision: promotion.Decision
    texts: tuple[TextFigure, ...] = ()

    def table(self) -> str:
        """The decision in Markdown."""
        return summary.markdown(self.decision.rows(), ("name", "value"))

    def texts_table(self) -> str:
        """The figures in Markdown; empty where there are none."""
        return summary.markdown(forgetting.rows(self.texts), forgetting.HEADER) if self.texts else ""


def decide(
    night: NightRecord,
    inputs: NightInputs,
    execution: PipelineRun,
    settings: Settings,
    store: ArtifactStore,
    say: Callable[[str], object],
) -> NightDecision:
    """Compare the evaluations, record the decision in the night and in MLflow. Promotes nothing yet."""
    made = compared(night, inputs, execution, settings, store, say)
    decision = made.decision
    home, name, version = store.root, settings.name, execution.model_set
    if version is None:
        raise TrackingError(f"{night.name} cannot be decided: its models are not registered in MLflow (see above)")
    now = tracking.champion(home, name)
    previous_version = night.frozen.champion.version if night.frozen.champion else None
    if now is not None and now.version not in (previous_version, version):  # by hand, while the night went on
        reason = f"version {now.version} became champion during the night, so nothing is promoted; {decision.reason}"
        made = replace(made, decision=replace(decision, promote=False, reason=reason))
        decision = made.decision
    texts = [figure.to_json() for figure in made.texts]
    night.note(version=version, run=execution.record.run, decision=decision.to_json(), texts=texts)
    if decision.promote or now is None or now.version != version:  # the champion keeps the decision that made it so
        run_id, figures = execution.tracked_run, made.texts_table()
        tracking.log_decision(home, name, version, decision.to_json(), made.table(), run_id=run_id, figures=figures)
    return made


def compared(
    night: NightRecord,
    inputs: NightInputs,
    execution: PipelineRun,
    settings: Settings,
    store: ArtifactStore,
    say: Callable[[str], object],
) -> NightDecision:
    """Compare the evaluations of challenger and champion."""
    rules = _rules(settings, inputs, execution)

    def complete(stage: str) -> Artifact | None:
        evaluation = execution.artifacts.get(stage)
        return store.complete(evaluation, report=say) if evaluation else None  # the files of a cached one may be in MLflow

    evaluation, of_champion = complete(EVALUATE.name), complete(EVALUATE_CHAMPION.name)
    assert evaluation is not None, "a run that came to its end has evaluated"
    challenger, champion = (scores_of(e, rules.metric) if e else None for e in (evaluation, of_champion))
    assert challenger is not None, "the challenger is evaluated"
    texts = _texts(night, evaluation, of_champion, rules, store, say)
    baseline = promotion.baseline_of(evaluation.result["metrics"], challenger, rules)
    return NightDecision(promotion.decide(challenger, champion, rules, baseline=baseline, texts=texts), texts)


def _texts(
    night: NightRecord,
    evaluation: Artifact,
    of_champion: Artifact | None,
    rules: Promotion,
    store: ArtifactStore,
    say: Callable[[str], object],
) -> tuple[TextFigure, ...]:
    """The figures of challenger and champion on the held-out text of each night and source: of `promotion.metric` where that
    is over documents, else of the base model's bits per byte."""
    of_documents = {BITS_PER_BYTE.of(row.model) for row in TRAINING_STAGES.values()}
    metric = rules.metric if rules.metric in of_documents else BITS_PER_BYTE.name
    if metric not in evaluation.result["metrics"]:
        return ()
    challenger, champion = (scores_of(e, metric) if e else None for e in (evaluation, of_champion))
    assert challenger is not None, "the challenger is evaluated"
    sources = source_records(evaluation, metric)
    texts = forgetting.heldout_texts(challenger.records, _nights(night, evaluation, store, say), sources, night.name)
    return tuple(forgetting.figures(challenger, champion, texts, rules.model_copy(update={"higher_is_better": False})))


def _nights(
    night: NightRecord, evaluation: Artifact, store: ArtifactStore, say: Callable[[str], object]
) -> Mapping[str, list[str]]:
    """What identifies the held-out records of each night."""
    reference = heldout_of(evaluation)
    if reference is None:
        return {}
    found = heldout.find_heldout(store, reference, night.name)
    return heldout.names_by_night(store.complete(found, ("heldout",), report=say), heldout_nights(night, evaluation))


def heldout_nights(night: NightRecord, evaluation: Artifact) -> tuple[str, ...]:
    """Names of the nights that brought the held-out documents of this evaluation, the oldest first."""
    reference, frozen = heldout_of(evaluation), night.frozen
    if reference is None or reference == frozen.heldout:  # only chats are new
        return frozen.heldout_nights
    return (*frozen.heldout_nights, night.name)


def _rules(settings: Settings, inputs: NightInputs, execution: PipelineRun) -> Promotion:
    """The rules of the night's decision. Without new documents both have the same base model, whose metric says nothing:
    then the first model that differs counts, on the chats that are held out for it."""
    rules = settings.promotion
    if not inputs.keeps_base or rules.metric != BITS_PER_BYTE.name:
        return rules
    same_sft = inputs.champion["sft"].content == execution.artifacts["sft"].content if "sft" in inputs.champion else False
    metric = DOMAIN_LOSS if same_sft else CHAT_LOSS
    return rules.model_copy(update={"metric": metric.name, "higher_is_better": metric.higher_is_better})


def heldout_of(evaluation: Artifact) -> str | None:
    """Reference ("stage/key") of the held-out documents of an evaluation."""
    documents = evaluation.manifest["inputs"].get("documents")
    return f"{documents['stage']}/{documents['key']}" if documents else None
