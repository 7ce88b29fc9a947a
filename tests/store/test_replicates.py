"""Runs that differ in their seeds alone."""

import json
from pathlib import Path

from ttrain.store.replicates import setting_key, values_by_seed
from ttrain.store.runs import REQUIRED

METRIC = "eval/bits_per_byte"


def write_run(home: Path, number: int, seed: int, shards: str, **changes: object) -> None:
    record = {
        **dict.fromkeys(REQUIRED),
        "run": f"full-2026113{number}-120000-12abc",
        "outcome": "completed",
        "settings": {"pretrain": {"seed": seed, **changes}, "runtime": {"threads": number}},
        "metrics": {METRIC: float(number)},
        "stages": [
            {"name": "shards-pretrain", "key": shards},
            {"name": "shards-sft"},  # never begun
            {"name": "pretrain", "key": f"{number}"},
        ],
    }
    (home / "runs").mkdir(exist_ok=True)
    (home / "runs" / f"{record['run']}.json").write_text(json.dumps(record), encoding="utf-8")


def test_the_newest_replicate_of_each_seed_counts(tmp_path: Path) -> None:
    write_run(tmp_path, 1, seed=3, shards="before the text changed")
    write_run(tmp_path, 2, seed=1, shards="now")
    write_run(tmp_path, 3, seed=2, shards="now")
    write_run(tmp_path, 4, seed=1, shards="now")
    write_run(tmp_path, 5, seed=2, shards="now", tokens=7)
    by_setting = values_by_seed(tmp_path, METRIC)
    default = setting_key({"pretrain": {"seed": 9}})
    assert sorted(by_setting[default].values()) == [3.0, 4.0]
    assert len(by_setting) == 2 and values_by_seed(tmp_path, "eval/nothing") == {}
