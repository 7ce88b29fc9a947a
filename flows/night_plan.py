"""The plan of a night: what it reads, and the graph of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ttrain.config import Settings
from ttrain.config.training import TRAINING_STAGES
from ttrain.engine.execution import REGISTERED
from ttrain.engine.graph import Graph, Node, Planned, Source
from ttrain.engine.plan import Plan
from ttrain.engine.planner import plan
from ttrain.errors import UsageError
from ttrain.evaluate import promotion
from ttrain.flows.full import full
from ttrain.nightly import heldout, records
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly.inputs import UNFROZEN_OF_NIGHTLY, NightInputs
from ttrain.nightly.records import Champion, InputSnapshot, NightRecord, Nights
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.registry import Registry
from ttrain.store.runs import NIGHTLY
from ttrain.tasks import (
    BASE_OF,
    EARLIER_HELDOUT,
    EVALUATE,
    EVALUATE_CHAMPION,
    EXISTING_MODEL,
    HELDOUT,
    LEARNT_BEFORE,
    PRETRAIN,
    REPLAY,
    REPLAY_SFT,
    SFT,
    SHARDS_PRETRAIN,
    Stage,
)
from ttrain.tracking.registered import take_over_champions

# Inputs of the evaluation: what is held out for each training stage.
HELDOUT_PARTS = frozenset(row.part for row in TRAINING_STAGES.values() if row.part)


@dataclass(frozen=True)
class NightPlan:
    """The plan of a night that would begin now."""

    reason: str
    frozen: InputSnapshot | None = None  # None: there is nothing to read
    stages: Sequence[Planned] = ()
    near_duplicates: float = 0.0  # similarity from which a new document is left out; 0: never
    earlier_sets: int = 0  # of documents, with which new ones are compared


def plan_night(settings: Settings, store: ArtifactStore) -> NightPlan:
    """Plan a night that would begin now. Changes nothing."""
    check(settings)
    nights = Nights(store.root, settings.name)
    newest = nights.newest()
    frozen, reason = choose_inputs(settings, store, nights, newest if newest and newest.is_open else None)
    if frozen is None:
        return NightPlan(reason)
    inputs = night_inputs.inputs_of(frozen, settings, store)
    reason = "; ".join(filter(None, (reason, inputs.note)))
    near = 0.0 if inputs.keeps_base else inputs.settings.reading.near_duplicates or 0.0
    return NightPlan(reason, frozen, plan_of(inputs, store).stages, near, len(inputs.learnt) if near else 0)


def plan_of(inputs: NightInputs, store: ArtifactStore) -> Plan:
    """The plan of a night with these inputs."""
    graph = night_graph(inputs)
    return Plan(NIGHTLY, inputs.settings, store, graph, plan(graph, inputs.settings, store))


def night_graph(inputs: NightInputs) -> Graph:
    """The pipeline `full`, with stages replaced by the champion's artifacts, and the champion evaluated as well."""
    graph = Graph()
    for node in full(inputs.settings).replacing(_replaced(inputs)).values():
        graph.add(node.stage, **{**node.sources, **_night_sources(inputs, node, graph)})
    return graph


def _replaced(inputs: NightInputs) -> dict[str, Source | None]:
    """What the stages that a night does not run are replaced by."""
    replaced: dict[str, Source | None] = {**inputs.replacements}
    if inputs.kept_base:
        replaced |= {PRETRAIN.name: inputs.kept_base, EXISTING_MODEL.name: inputs.kept_base}
    if inputs.keeps_base:
        replaced[SHARDS_PRETRAIN.name] = None
    return replaced


def _night_sources(inputs: NightInputs, node: Node, graph: Graph) -> dict[str, Source | None]:
    """The inputs that a stage has in a night, in addition to its own; adds the stages that make them to the graph."""
    base = {"base": inputs.bases.get(node.stage.name, node.sources.get("base"))}
    if node.stage is SHARDS_PRETRAIN:
        near = inputs.learnt if inputs.settings.reading.near_duplicates else ()
        return {EARLIER_HELDOUT: inputs.earlier_heldout, **_learnt_before(near)}
    if node.stage is PRETRAIN:
        earlier = {"tokenizer": node.sources["tokenizer"], EARLIER_HELDOUT: inputs.earlier_heldout}
        replay = _replay(graph, REPLAY, node, inputs.replayed, **(earlier if inputs.earlier_heldout else {}))
        return {"replay": replay, "plateau": inputs.plateau}
    if node.stage is SFT:
        return {"replay": _replay(graph, REPLAY_SFT, node, inputs.replayed_chats), **base}
    if node.stage is EVALUATE:
        return _evaluation_sources(inputs, node, graph)
    return base


def _replay(graph: Graph, stage: Stage, training: Node, learnt: Sequence[Artifact], **sources: Source | None) -> str | None:
    """Add the stage that samples what was learnt before, if there is any, for a training."""
    if not learnt:
        return None
    return graph.add(stage, documents=training.sources["shards"], **_learnt_before(learnt), **sources)


def _evaluation_sources(inputs: NightInputs, node: Node, graph: Graph) -> dict[str, Source | None]:
    """The held-out documents of all nights, and the bases of adapters.

    Adds the evaluation of the champion on the same data.
    """
    documents, earlier = node.sources.get("documents"), inputs.earlier_heldout
    if earlier and inputs.measures_earlier:
        documents = graph.add(HELDOUT, documents=documents, **{EARLIER_HELDOUT: earlier}) if documents else earlier
    if inputs.champion:
        sources = {**node.sources, "documents": documents}
        data = {name: source for name, source in sources.items() if name in HELDOUT_PARTS}
        graph.add(EVALUATE_CHAMPION, **data, **inputs.champion, **_adapter_bases(inputs.champion_bases))
    return {"documents": documents, **_adapter_bases(inputs.bases)}


def _learnt_before(artifacts: Sequence[Artifact]) -> dict[str, Artifact]:
    """Documents of earlier nights as inputs of a stage, the oldest first."""
    return {f"{LEARNT_BEFORE}{number:04}": artifact for number, artifact in enumerate(artifacts)}


def _adapter_bases(bases: Artifacts) -> dict[str, Artifact]:
    """The bases of adapters, by stage, as inputs of an evaluation."""
    models = {row.name: row.model for row in TRAINING_STAGES.values() if row.role == "adapter"}
    return {f"{BASE_OF}{models[name]}": base for name, base in bases.items() if name in models}


def check(settings: Settings) -> None:
    """Raise UsageError for settings that a night cannot have."""
    promotion.check_metric(settings)
    if settings.runtime.nodes > 1:
        raise UsageError(
            f"runtime.nodes is {settings.runtime.nodes}, but a night runs on one machine, with runtime.devices ranks; set "
            f"runtime.nodes=1, or train with `ttrain pipeline run full` on each node and `ttrain models promote`"
        )
    _check_orders(settings)


def _check_orders(settings: Settings) -> None:
    """Raise UsageError for an order of rows that the sample of learnt documents or chats rules out.

    The first night, which has nothing to sample, would learn with it, and each later one be refused by its training.
    """
    nightly = settings.nightly
    replays = {
        "pretrain": (_continues_on_new(settings), "documents", "nightly.replay=0"),
        "sft": (_learns_new_chats(settings), "chats", "nightly.replay=0, or nightly.chats=all"),
    }
    for section, (replay, what, cure) in replays.items():
        order = getattr(settings, section).order
        if nightly.replay > 0 and replay and section in settings.trainings and order != "shuffled":
            raise UsageError(
                f"{section}.order is {order}, but nightly.replay is {nightly.replay:g}: a night mixes new {what} with a "
                f"sample of learnt ones, and mixed rows are read in the order shuffled; set {section}.order=shuffled, or "
                f"{cure}"
            )


def _continues_on_new(settings: Settings) -> bool:
    """Whether pretraining continues the champion on new documents alone; weighted sources are all read again."""
    continues = settings.nightly.start_from == "champion" and settings.nightly.data == "new"
    return continues and not settings.data.weights("pretrain")


def _learns_new_chats(settings: Settings) -> bool:
    """The same of the chats of SFT."""
    return settings.nightly.chats == "new" and not settings.data.weights("sft")


def choose_inputs(
    settings: Settings, store: ArtifactStore, nights: Nights, night: NightRecord | None
) -> tuple[InputSnapshot | None, str]:
    """The inputs of a night, or None, and the reason: those of an unfinished night, else what is new."""
    return _new_inputs(settings, store, nights) if night is None else _resumed_inputs(settings, store, nights, night)


def _new_inputs(settings: Settings, store: ArtifactStore, nights: Nights) -> tuple[InputSnapshot | None, str]:
    """What is new, or None, and the reason."""
    watched, left_out = night_inputs.without_damaged(
        night_inputs.watched_files(settings, store, may_be_gone=True), nights, settings
    )
    all_read = f"nothing new: all {sum(map(len, watched.values()))} files have been read by a night before"
    nothing = "; ".join(filter(None, (all_read, left_out)))
    read = nights.read()
    if read.issuperset(file["sha256"] for files in watched.values() for file in files) and read:
        return None, nothing  # most nights
    champion = current_champion(settings, store)
    if champion is None:
        night_inputs.watched_files(settings, store, may_be_gone=False)  # which raises where there are none
    learnt, in_nights = night_inputs.learnt_by(champion, store), nights.learnt(champion)
    chosen = night_inputs.select_files(
        settings.nightly, watched, read | learnt, in_nights | learnt, has_champion=champion is not None
    )
    if not chosen.new:
        return None, nothing
    earlier = heldout.earlier_heldout(champion, nights.newest_first(), store, settings)
    learnt_before = tuple(sorted(learnt - in_nights))  # the next champion's own artifacts will not record them
    documents: tuple[str, ...] = ()
    replay = 0.0
    if _continues_on_new(settings):
        documents = night_inputs.learnt_shards("pretrain", champion, nights.newest_first(), store)
        replay = settings.nightly.replay if documents and chosen.files.get("pretrain") else 0.0
    replays_chats = chosen.has_new_chats_alone and _learns_new_chats(settings)
    chats = night_inputs.learnt_shards("sft", champion, nights.newest_first(), store) if replays_chats else ()
    frozen = InputSnapshot(
        chosen.files, settings.model_dump(mode="json"), champion, earlier.reference, learnt_before, documents, chats, replay,
        heldout_nights=earlier.nights,
    )  # fmt: skip
    base = f"the champion, version {champion.version}" if champion else "no champion yet"
    if champion is None and (last := nights.last_champion()):
        base = (
            f"no champion any more, so that it begins from scratch; `ttrain models promote {last} --name {settings.name}` "
            f"makes the last one champion again"
        )
    reason = f"{len(chosen.new)} new: {records.shortened_names(chosen.new)}; {base}"
    return frozen, "; ".join(filter(None, (reason, left_out, earlier.note)))


def current_champion(settings: Settings, store: ArtifactStore) -> Champion | None:
    """The registered champion with the artifacts of its models; None if there is none."""
    take_over_champions(store.root, settings.name)
    champion = Registry(store.root).champion(settings.name)
    if champion is None:
        return None
    return Champion(champion.version, {stage: key for stage, key in champion.keys.items() if stage in REGISTERED})


def _resumed_inputs(
    settings: Settings, store: ArtifactStore, nights: Nights, night: NightRecord
) -> tuple[InputSnapshot, str]:
    """The inputs of an unfinished night, with its files as they are now; after a failure with the current settings, which
    may choose other inputs."""
    frozen = night.frozen
    current = night.as_it_is_now()
    ended = night.ended or {"outcome": current.outcome, "reason": current.data.get("reason") or "in another process"}
    reason = f"{night.name} goes on ({ended['outcome']}: {ended['reason']})"
    if ended["outcome"] in (records.FAILED, records.REFUSED):
        if frozen.settings != (now := settings.model_dump(mode="json")):
            reason = f"{reason}; with the current settings"
            if _choosing(frozen.settings) != _choosing(now):
                chosen, why = _new_inputs(settings, store, nights)
                if chosen is not None:
                    return chosen, f"{reason}, by which its inputs are chosen anew: {why}"
            frozen = replace(frozen, settings=now)
    elif night_inputs.settings_of(frozen, settings) != settings:
        reason = f"{reason}; with the settings that it began with, changed ones count from the next night on"
    current_files = night_inputs.watched_files(night_inputs.settings_of(frozen, settings), store, may_be_gone=True)
    changed, shards = night_inputs.changed_files(frozen, current_files), {}
    if changed:
        shards = night_inputs.built_shards(night, store) if frozen.settings == night.frozen.settings else {}
        reason = f"{reason}; changed or gone since it began: {records.shortened_names(changed)}"
    return night_inputs.refreshed_snapshot(frozen, current_files, shards), reason


def _choosing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings by which the inputs of a night are chosen."""
    sections = {name: dict(settings.get(name, {})) for name in ("data", "reading", "nightly")}
    return {**sections, "nightly": {k: v for k, v in sections["nightly"].items() if k not in UNFROZEN_OF_NIGHTLY}}
