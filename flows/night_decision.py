"""The decision of a night: challenger and champion compared, the decision recorded and obeyed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ttrain import tracking
from ttrain.config import Promotion, Settings
from ttrain.config.training import BITS_PER_BYTE, CHAT_LOSS, DOMAIN_LOSS
from ttrain.errors import TrackingError
from ttrain.evaluate import promotion
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import NightRecord
from ttrain.pipeline.execution import PipelineRun
from ttrain.reports import summary
from ttrain.stages import EVALUATE, EVALUATE_CHAMPION
from ttrain.store.artifacts import ArtifactStore


def decide(
    night: NightRecord,
    inputs: NightInputs,
    execution: PipelineRun,
    settings: Settings,
    store: ArtifactStore,
    say: Callable[[str], object],
) -> promotion.Decision:
    """Compare the evaluations, record the decision in the night and in MLflow. Promotes nothing yet."""
    decision = compared(inputs, execution, settings, store, say)
    home, name, version = store.root, settings.name, execution.model_set
    if version is None:
        raise TrackingError(f"{night.name} cannot be decided: its models are not registered in MLflow (see above)")
    now = tracking.champion(home, name)
    previous_version = night.frozen.champion.version if night.frozen.champion else None
    if now is not None and now.version not in (previous_version, version):  # by hand, while the night went on
        reason = f"version {now.version} became champion during the night, so nothing is promoted; {decision.reason}"
        decision = replace(decision, promote=False, reason=reason)
    night.note(version=version, run=execution.record.run, decision=decision.to_json())
    if decision.promote or now is None or now.version != version:  # the champion keeps the decision that made it so
        tracking.log_decision(home, name, version, decision.to_json(), table(decision), run_id=execution.tracked_run)
    return decision


def table(decision: promotion.Decision) -> str:
    """The decision as a table in Markdown."""
    return summary.markdown(decision.rows(), ("name", "value"))


def compared(
    inputs: NightInputs, execution: PipelineRun, settings: Settings, store: ArtifactStore, say: Callable[[str], object]
) -> promotion.Decision:
    """Compare the evaluations of challenger and champion."""
    evaluations = [execution.artifacts.get(stage.name) for stage in (EVALUATE, EVALUATE_CHAMPION)]
    rules = _rules(settings, inputs, execution)
    # The files of a cached evaluation may be in MLflow
    complete_evaluations = [store.complete(e, report=say) if e else None for e in evaluations]
    challenger, champion = (promotion.scores_of(e, rules.metric) if e else None for e in complete_evaluations)
    assert challenger is not None, "a run that came to its end has evaluated"
    return promotion.decide(challenger, champion, rules)


def _rules(settings: Settings, inputs: NightInputs, execution: PipelineRun) -> Promotion:
    """The rules of the night's decision. Without new documents both have the same base model, whose metric says nothing:
    then the first model that differs counts, on the chats that are held out for it."""
    rules = settings.promotion
    if not inputs.keeps_base or rules.metric != BITS_PER_BYTE.name:
        return rules
    same_sft = inputs.champion["sft"].content == execution.artifacts["sft"].content if "sft" in inputs.champion else False
    metric = DOMAIN_LOSS if same_sft else CHAT_LOSS
    return rules.model_copy(update={"metric": metric.name, "higher_is_better": metric.higher_is_better})


def heldout_of(execution: PipelineRun) -> str | None:
    """Stage and key of the held-out documents that this night's models were measured on."""
    documents = execution.artifacts[EVALUATE.name].manifest["inputs"].get("documents")
    return f"{documents['stage']}/{documents['key']}" if documents else None
