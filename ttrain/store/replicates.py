"""Runs of a home that differ only in their seeds."""

import math
from collections.abc import Mapping
from pathlib import Path

from ttrain.config import SHAPE_NO_RESULT, flatten
from ttrain.config.training import SEEDS
from ttrain.core.files import JsonObject
from ttrain.core.hashing import digest_of
from ttrain.store import runs


def setting_key(settings: JsonObject) -> str:
    """Digest of the recorded settings that shape a result, without seeds: equal in replicates."""
    apart = {*SEEDS, "name"}
    leaves = {name: value for name, value in flatten(settings) if name not in apart}
    return digest_of(
        {
            name: value
            for name, value in leaves.items()
            if name.partition(".")[0] not in SHAPE_NO_RESULT
        }
    )


def values_by_seed(home: Path, metric: str) -> Mapping[str, Mapping[str, float]]:
    """The metric of the home's runs, by the key of their setting and the seeds of their trainings.

    Of runs on other shards than the newest of its setting none counts: other text has another loss.
    """
    values: dict[str, dict[str, float]] = {}
    newest: dict[str, dict[str, str]] = {}
    for run in runs.history(home):
        value = run["metrics"].get(metric)
        if value is None or not math.isfinite(value):
            continue
        key = setting_key(run["settings"])
        shards = {
            stage["name"]: stage["key"]
            for stage in run["stages"]
            if stage["name"].startswith("shards-") and stage.get("key")
        }
        known = newest.setdefault(key, {})
        if any(known.setdefault(name, own) != own for name, own in shards.items()):
            continue
        leaves = dict(flatten(run["settings"]))
        seeds = str([leaves.get(name) for name in SEEDS])
        values.setdefault(key, {}).setdefault(seeds, value)
    return values
