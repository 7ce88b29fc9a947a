"""The plan of a night: what it reads, and the graph of its stages."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ttrain.config import Settings
from ttrain.config.training import TRAINING_STAGES
from ttrain.engine.graph import Graph, Plan, Planned, Source
from ttrain.engine.planner import plan
from ttrain.errors import NothingNew, UsageError
from ttrain.evaluate import promotion
from ttrain.flows.full import full
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly import records
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import Champion, InputSnapshot, NightRecord, Nights
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.registry import CHAMPION
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
    TAUGHT_BY,
    TEACHER,
)
from ttrain.tracking.registered import take_over_champions

# Inputs of the evaluation: what is held out for each training stage.
HELDOUT_PARTS = frozenset(row.part for row in TRAINING_STAGES.values())
# the input of an evaluation that is its adapter's own base
ADAPTER_BASE = f"{BASE_OF}{TRAINING_STAGES['lora'].model}"


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
    try:
        frozen, reason = choose_inputs(
            settings, store, nights, newest if newest and newest.is_open else None
        )
    except NothingNew as nothing:
        return NightPlan(f"nothing new: {nothing}")
    inputs = night_inputs.inputs_of(frozen, settings, store)
    reason = "; ".join(filter(None, (reason, inputs.note)))
    near = 0.0 if inputs.kept_base else inputs.settings.reading.near_duplicates or 0.0
    return NightPlan(
        reason, frozen, plan_of(inputs, store).stages, near, len(inputs.learnt) if near else 0
    )


def plan_of(inputs: NightInputs, store: ArtifactStore) -> Plan:
    """The plan of a night with these inputs."""
    graph = night_graph(inputs)
    return Plan(NIGHTLY, inputs.settings, store, graph, plan(graph, inputs.settings, store))


def night_graph(inputs: NightInputs) -> Graph:
    """The pipeline `full`, with stages replaced by the champion's artifacts.

    Stages that read new data also get the shards and held-out sets of earlier nights.
    """
    graph = Graph()
    earlier = inputs.earlier_heldout
    replaced: dict[str, Source | None] = {**inputs.replacements}
    if inputs.kept_base:
        replaced |= {EXISTING_MODEL.name: inputs.kept_base, SHARDS_PRETRAIN.name: None}
    for node in full(inputs.settings).replacing(replaced).values():
        stage = node.stage
        if stage is TEACHER:  # after what is replayed, which alone it reads
            continue
        sources: dict[str, Source | None] = {**node.sources}
        if stage.name in inputs.bases:
            sources["base"] = inputs.bases[stage.name]
        if stage is SHARDS_PRETRAIN:
            near = inputs.learnt if inputs.settings.reading.near_duplicates else ()
            sources |= {EARLIER_HELDOUT: earlier, **_learnt_before(near)}
        elif stage is PRETRAIN:
            sources |= {"plateau": inputs.plateau}
            if inputs.learnt and inputs.settings.nightly.replay:
                read: dict[str, Source | None] = {"documents": sources["shards"]}
                read |= _learnt_before(inputs.learnt)
                if earlier:
                    read |= {"tokenizer": sources["tokenizer"], EARLIER_HELDOUT: earlier}
                sources["replay"] = graph.add(REPLAY, **read)
                if TEACHER.name in sources:
                    taught = {name: sources[name] for name in ("tokenizer", "shards", "replay")}
                    base = inputs.champion[TRAINING_STAGES[PRETRAIN.name].model]
                    sources[TEACHER.name] = graph.add(TEACHER, **taught, **{f"{TAUGHT_BY}0": base})
            if "replay" not in sources:
                sources[TEACHER.name] = None
        elif stage is SFT and inputs.replayed_chats:
            sources["replay"] = graph.add(
                REPLAY_SFT, documents=sources["shards"], **_learnt_before(inputs.replayed_chats)
            )
        elif stage is EVALUATE:
            if earlier and not inputs.settings.data.pretrain_heldout:
                new = sources.get("documents")
                both = {"documents": new, EARLIER_HELDOUT: earlier}
                sources["documents"] = graph.add(HELDOUT, **both) if new else earlier
            if inputs.champion:
                data = {name: of for name, of in sources.items() if name in HELDOUT_PARTS}
                data |= {**inputs.champion, ADAPTER_BASE: inputs.adapter_base}
                graph.add(EVALUATE_CHAMPION, **data)
            sources[ADAPTER_BASE] = inputs.bases.get("lora")
        graph.add(stage, **sources)
    return graph


def _learnt_before(artifacts: Sequence[Artifact]) -> dict[str, Artifact]:
    return {f"{LEARNT_BEFORE}{number:04}": artifact for number, artifact in enumerate(artifacts)}


def check(settings: Settings) -> None:
    """Raise UsageError for settings that a night cannot have."""
    promotion.check_metric(settings)
    nightly = settings.nightly
    replays = nightly.replay > 0 and nightly.data == "new"
    teacher = settings.pretrain.teacher
    if teacher and not (teacher == (CHAMPION,) and replays):
        raise UsageError(
            f"pretrain.teacher is {', '.join(teacher)}, nightly.replay is "
            f"{nightly.replay:g} and nightly.data is {nightly.data}, but the teacher of a night "
            f"is the champion, on what is replayed; set pretrain.teacher={CHAMPION}, "
            f"nightly.data=new and a nightly.replay above 0, or leave it out"
        )
    if settings.runtime.nodes > 1:
        raise UsageError(
            f"runtime.nodes is {settings.runtime.nodes}, but a night runs on one machine, with "
            f"runtime.devices ranks; set "
            f"runtime.nodes=1, or train with `ttrain pipeline run full` on each node and "
            f"`ttrain models promote`"
        )


def choose_inputs(
    settings: Settings, store: ArtifactStore, nights: Nights, night: NightRecord | None
) -> tuple[InputSnapshot, str]:
    """The inputs of a night and the reason: those of the unfinished `night`, else new data.

    After a failure the current settings choose again. Raises NothingNew.
    """
    if night is None:
        return _new_inputs(settings, store, nights)
    frozen = night.frozen
    current = night.as_it_is_now()
    ended = night.ended or {
        "outcome": current.outcome,
        "reason": current.data.get("reason") or "in another process",
    }
    reason = f"{night.name} goes on ({ended['outcome']}: {ended['reason']})"
    present = settings.model_dump(mode="json")
    is_changed = night_inputs.with_unfrozen(frozen.settings, present) != present
    if is_changed and ended["outcome"] in (records.FAILED, records.REFUSED):
        reason = f"{reason}; with the current settings"
        with contextlib.suppress(NothingNew):
            chosen, why = _new_inputs(settings, store, nights)
            return chosen, f"{reason}, by which its inputs are chosen again: {why}"
        frozen = replace(frozen, settings=present)
    elif is_changed:
        reason = (
            f"{reason}; with the settings that it began with, changed ones count from the next "
            f"night on"
        )
    files = night_inputs.watched_files(
        night_inputs.settings_of(frozen, settings), store, may_be_gone=True
    )
    frozen, changed = night_inputs.refreshed_snapshot(frozen, files)
    if changed:
        reason = f"{reason}; changed or gone since it began: {records.shortened_names(changed)}"
    return frozen, reason


def _new_inputs(
    settings: Settings, store: ArtifactStore, nights: Nights
) -> tuple[InputSnapshot, str]:
    watched, left_out = night_inputs.without_damaged(
        night_inputs.watched_files(settings, store, may_be_gone=True), nights, settings
    )
    all_read = f"all {sum(map(len, watched.values()))} files have been read by a night before"
    nothing = NothingNew("; ".join(filter(None, (all_read, left_out))))
    read = nights.read()
    present = [file for files in watched.values() for file in files]
    if read and read.issuperset(file["sha256"] for file in present):
        raise nothing  # most nights
    champion = current_champion(settings, store)
    if champion is None:
        night_inputs.watched_files(
            settings, store, may_be_gone=False
        )  # which raises where there are none
    learnt = night_inputs.learnt_by(champion, store)
    in_nights = nights.learnt(champion)
    new = [file["location"] for file in present if file["sha256"] not in read | learnt]
    if not new:
        raise nothing
    files, has_new_chats_alone = night_inputs.select_files(
        settings.nightly,
        watched,
        read | learnt,
        in_nights | learnt,
        has_champion=champion is not None,
    )
    earlier = night_inputs.earlier_heldout(champion, nights.newest_first(), store, settings)
    nightly = settings.nightly
    # Weighted sources are all read again, and have no new part
    are_new = {
        "pretrain": nightly.start_from == "champion" and nightly.data == "new",
        "sft": has_new_chats_alone,
    }
    documents, chats = (
        night_inputs.learnt_shards(stage, champion, nights.newest_first(), store)
        if is_new and not settings.data.weights(stage)
        else ()
        for stage, is_new in are_new.items()
    )
    frozen = InputSnapshot(
        files,
        settings.model_dump(mode="json"),
        champion,
        earlier.reference,
        tuple(sorted(learnt - in_nights)),  # the next champion's own artifacts do not record them
        documents,
        chats,
        heldout_nights=earlier.nights,
    )
    base = f"the champion, version {champion.version}" if champion else "no champion"
    reason = f"{len(new)} new: {records.shortened_names(new)}; {base}"
    return frozen, "; ".join(filter(None, (reason, left_out, earlier.note)))


def current_champion(settings: Settings, store: ArtifactStore) -> Champion | None:
    """The registered champion with its artifacts; None if there is none."""
    champion = take_over_champions(store.root).champion(settings.name)
    if champion is None:
        return None
    return Champion(
        champion.version, {stage: model.key for stage, model in champion.members.items()}
    )
