"""The decision of a night: challenger against champion, recorded, then promoted or kept."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from ttrain.config import Promotion
from ttrain.config.training import BITS_PER_BYTE, DOMAIN_LOSS, TRAINING_STAGES
from ttrain.core.files import finite
from ttrain.engine.execution import REGISTERED, PipelineRun
from ttrain.evaluate import promotion
from ttrain.evaluate.forgetting import BestScore, TextScore
from ttrain.evaluate.task_result import Evaluation
from ttrain.nightly import history
from ttrain.nightly.inputs import NightInputs, find_heldout
from ttrain.nightly.records import COMPLETED, NightRecord, Nights
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.registry import Registry
from ttrain.tasks import EVALUATE, EVALUATE_CHAMPION, SHARDS, SHARDS_PRETRAIN


def decide(
    night: NightRecord, inputs: NightInputs, execution: PipelineRun, say: Callable[[str], object]
) -> promotion.Decision:
    """Compare challenger and champion, record the decision, promote or keep.

    The night, its run and the registry have the decision before the champion changes. If another
    version became champion during the night, nothing is promoted.
    """
    decision, texts = _judge(night, inputs, execution, say)
    made = execution.artifacts
    registry = Registry(execution.store.root)
    name = inputs.settings.name
    version = execution.model_set
    assert version is not None, "a run that came to its end has registered its models"
    champion = registry.champion(name)
    before = night.frozen.champion.version if night.frozen.champion else None
    if champion is not None and champion.version not in (before, version):  # by hand, meanwhile
        other = (
            f"version {champion.version} became champion during the night, so nothing is promoted"
        )
        decision = replace(decision, promote=False, reason=f"{other}; {decision.reason}")
    decided = finite(asdict(decision))
    evaluation = made[EVALUATE.name]
    shards = made.get(SHARDS_PRETRAIN.name)
    chats = None if "sft" in inputs.replacements else made.get(SHARDS["sft"].name)
    night.note(
        version=version,
        keys={stage: artifact.key for stage, artifact in made.items() if stage in REGISTERED},
        decision=decided,
        texts=[finite(asdict(figure)) for figure in texts],
        heldout=heldout_of(evaluation),
        heldout_nights=list(heldout_nights(night, evaluation)),
        documents=f"{shards.stage}/{shards.key}" if shards else None,
        chats=f"{chats.stage}/{chats.key}" if chats else None,
        learnt=history.learnt_of(made, chats),
    )
    execution.record.note(decision=decided)
    # The champion keeps the decision that made it so
    if decision.promote or champion is None or champion.version != version:
        registry.decide(name, version, decided, run=execution.record.run)
    if decision.promote:
        registry.promote(name, version)
    return decision


def _judge(
    night: NightRecord, inputs: NightInputs, execution: PipelineRun, say: Callable[[str], object]
) -> tuple[promotion.Decision, list[TextScore]]:
    store = execution.store
    made = execution.artifacts
    names = (stage.name for stage in (EVALUATE, EVALUATE_CHAMPION) if stage.name in made)
    # The files of a cached one may be in MLflow
    evaluations = [store.complete(made[name], report=say) for name in names]
    evaluation = evaluations[0]
    champion = Evaluation.of(evaluations[1]) if evaluations[1:] else None
    rules = rules_of(inputs, made)
    by_night: dict[str, list[str]] = {}
    if reference := heldout_of(evaluation):
        from ttrain.tasks.heldout import read_nights  # loads what reads shards

        documents = store.complete(
            find_heldout(store, reference, night.name), ("heldout",), report=say
        )
        groups = read_nights(documents.path)  # none for a set of one night alone
        by_night = (
            dict(zip(heldout_nights(night, evaluation), groups, strict=True)) if groups else {}
        )
    best = best_scores(
        Nights(store.root, inputs.settings.name).newest_first(),
        promotion.metric_of_texts(rules.metric),
    )
    return promotion.judge(Evaluation.of(evaluation), champion, rules, by_night, night.name, best)


def heldout_nights(night: NightRecord, evaluation: Artifact) -> tuple[str, ...]:
    """Names of the nights that brought the held-out documents of this evaluation, oldest first."""
    frozen = night.frozen
    is_new = heldout_of(evaluation) not in (None, frozen.heldout)  # else only chats are new
    return (*frozen.heldout_nights, night.name) if is_new else frozen.heldout_nights


def rules_of(inputs: NightInputs, artifacts: Artifacts) -> Promotion:
    """The rules of a decision; `artifacts` are the night's, by stage.

    Without new documents both sides have the same base model, whose metric decides nothing: then it
    is the metric of the first model that both have and that differs.
    """
    rules = inputs.settings.promotion
    if not inputs.kept_base or rules.metric != BITS_PER_BYTE.name:
        return rules
    metric = DOMAIN_LOSS
    for name, row in TRAINING_STAGES.items():
        old = inputs.champion.get(row.model)
        new = artifacts.get(name)
        if row.role != "base" and old and new and old.content != new.content:
            metric = row.metric
            break
    return rules.model_copy(
        update={"metric": metric.name, "higher_is_better": metric.higher_is_better}
    )


def heldout_of(evaluation: Artifact) -> str | None:
    documents = evaluation.manifest["inputs"].get("documents")
    return f"{documents['stage']}/{documents['key']}" if documents else None


def best_scores(nights: Iterable[NightRecord], metric: str) -> dict[str, BestScore]:
    """The best value of any champion on each night's text; `nights` newest first, lower is better.

    Values of another metric, of sources, whose text grows, of several texts together, and of a text
    that has other records by now do not count.
    """
    best: dict[str, BestScore] = {}
    for night in nights:
        decision = night.data.get("decision") or {}
        champion = night.frozen.champion
        if (
            night.outcome not in COMPLETED
            or promotion.metric_of_texts(str(decision.get("metric"))) != metric
        ):
            continue
        for text in night.data.get("texts") or ():
            values = {champion.version: text["champion"]} if champion else {}
            if night.outcome == "promoted":  # its challenger is the champion from then on
                values = {night.data["version"]: text["challenger"], **values}
            for version, value in values.items():
                known = best.get(text["name"])
                is_best = known is None or (
                    known.records == text["records"] and known.value > value
                )
                if text["kind"] == "night" and value is not None and is_best:
                    best[text["name"]] = BestScore(value, f"version {version}", text["records"])
    return best
