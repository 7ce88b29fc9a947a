"""An experiment before and at its beginning: what would run, and how many seeds a difference needs."""

from dataclasses import asdict

from ttrain.core.files import JsonDict
from ttrain.core.text import counted, format_duration
from ttrain.engine.provenance import with_absolute_paths
from ttrain.evaluate import noise
from ttrain.evaluate.noise import Noise
from ttrain.experiments import records
from ttrain.experiments.measure import changes_heldout
from ttrain.experiments.records import Experiment
from ttrain.experiments.request import Request
from ttrain.store.artifacts import ArtifactStore

DIFFERENCES = (0.1, 0.03, 0.01)  # of which the plan says how many seeds they need


def known_noise(request: Request, store: ArtifactStore) -> Noise | None:
    """The noise of the baseline, as earlier runs of the home show it."""
    recorded = with_absolute_paths(request.baseline).model_dump(mode="json")
    return noise.noise_of(store.root, request.measure.metric, recorded)


def find_or_begin(request: Request, store: ArtifactStore) -> Experiment:
    """The requested experiment: one to continue, or a new one."""
    identity = request.identity(store)
    known = known_noise(request, store)
    return records.find_same(store.root, identity) or records.begin(
        store.root,
        {
            "identity": identity,
            "measure": asdict(request.measure),
            "changes": [asdict(change) for change in request.changes],
            "rounds": request.options.rounds,
            "seeds": request.options.seeds,
            "noise": asdict(known) if known else None,  # as it was: the same trials give the same verdict
        },
    )


def opening(request: Request, experiment: Experiment) -> list[str]:
    """The lines that announce the experiment."""
    once, by_seed, own = request.stages()
    settings = counted(len(experiment.changes) - 1 or request.draws, "setting")
    lines = [
        f"{experiment.name}: {settings} against the baseline, {counted(request.options.seeds, 'seed')}, "
        f"to {request.measure.direction} {request.measure.metric}",
        f"  once: {', '.join(once) or 'nothing'}; for each seed: {', '.join(by_seed) or 'nothing'}; "
        f"in each trial: {', '.join(own)}",
    ]
    if heldout := changes_heldout(sorted(request.varied), request.graph()):
        lines.append(
            f"  warning: {', '.join(heldout)} may change which records are held out, and losses are then of other text"
        )
    return lines


def plan(request: Request, store: ArtifactStore) -> JsonDict:
    """What `sweep --plan --json` prints."""
    once, by_seed, own = request.stages()
    known = known_noise(request, store)
    first = request.plan(request.changes[-1], 1, store)
    seconds = first.estimate.seconds
    needs = {} if known is None else {str(size): known.seeds_for(size) for size in DIFFERENCES}
    return {
        "metric": request.measure.metric,
        "direction": request.measure.direction,
        "settings": [{"name": change.name, "values": dict(change.values)} for change in request.changes],
        "drawn_later": request.draws,
        "seeds": request.options.seeds,
        "once": once,
        "for_each_seed": by_seed,
        "in_each_trial": own,
        "seconds_of_a_trial": seconds,
        "noise": asdict(known) if known else None,
        "seeds_for_difference": needs,
    }


def lines_of(planned: JsonDict) -> list[str]:
    """The plan for a person."""
    seconds, noise_of_seeds = planned["seconds_of_a_trial"], planned["noise"]
    each = f", about {format_duration(seconds)} each" if seconds else ""
    lines = [
        f"once: {', '.join(planned['once']) or 'nothing'}; "
        f"for each seed: {', '.join(planned['for_each_seed']) or 'nothing'}; "
        f"in each trial{each}: {', '.join(planned['in_each_trial'])}",
        f"compared by: {planned['metric']} ({planned['direction']})",
    ]
    if noise_of_seeds is None:
        return [*lines, "how much seeds of the baseline differ is not known yet: the first rounds measure it"]
    lines.append(f"seeds of the baseline differ by ± {noise_of_seeds['spread']:.3g} (one standard deviation) in this home")
    for difference, seeds in planned["seeds_for_difference"].items():
        time = f", about {format_duration(2 * seeds * seconds)}" if seeds and seconds else ""
        lines.append(f"  a difference of {difference} takes {f'{seeds:,} seeds{time}' if seeds else 'over 1,000 seeds'}")
    return lines
