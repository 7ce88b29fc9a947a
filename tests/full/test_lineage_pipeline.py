"""A whole pipeline's data and models in MLflow, its lineage, and that it can be reproduced."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_home import Cli

from ttrain.tracking.client import open_client, own_uri

TRAINED_ON = dict.fromkeys(("tokenizer", "pretrain", "sft", "lora"), "training")
HELD_OUT = dict.fromkeys(("pretrain-heldout", "sft-heldout", "lora-heldout"), "validation")
STAGES = ["tokenizer", "shards-pretrain", "pretrain", "shards-sft", "sft", "shards-lora", "lora"]


def datasets(cli: Cli, tag: str, value: str) -> dict[str, str]:
    query = """
    SELECT datasets.name, context.value
    FROM tags JOIN inputs ON inputs.destination_id = tags.run_uuid
    JOIN datasets ON datasets.dataset_uuid = inputs.source_id
    JOIN input_tags AS context ON context.input_uuid = inputs.input_uuid
    WHERE context.name = 'mlflow.data.context' AND tags.key = ? AND tags.value = ?
    """
    return dict(cli.rows("mlflow", query, tag, value))


def test_mlflow_lists_the_data_of_the_pipeline_and_of_each_stage(finished: Cli) -> None:
    assert datasets(finished, "ttrain.pipeline", "full") == TRAINED_ON | HELD_OUT
    of_shards = {"pretrain": "training", "pretrain-heldout": "validation"}
    for stage, expected in {
        "sft": {"sft": "training"},
        "tokenizer": {"tokenizer": "training"},
        "evaluate": HELD_OUT,
        "shards-pretrain": of_shards,
    }.items():
        assert datasets(finished, "ttrain.stage", stage) == expected
    query = "SELECT dataset_profile, dataset_source FROM datasets WHERE name = 'pretrain'"
    [(profile, source)] = finished.rows("mlflow", query)
    shards = finished.manifest("shards-pretrain")["result"]["train"]
    assert json.loads(profile) == {"documents": shards["rows"], "bytes": shards["bytes"]}
    places = [file["location"] for file in json.loads(source)["listed"]]
    assert places == [str(finished.data / f"docs-{number}.jsonl") for number in (1, 2)]


def sharing(finished: Cli, tmp_path: Path) -> Cli:
    shutil.copytree(finished.home / "mlflow", tmp_path / "shared" / "mlflow")
    open_client(own_uri(tmp_path / "shared"), tmp_path / "shared")
    (tmp_path / "home").mkdir()
    shutil.copy(finished.home / "registry.json", tmp_path / "home")
    cli = Cli(tmp_path / "home", finished.data)
    cli.environment["MLFLOW_TRACKING_URI"] = own_uri(tmp_path / "shared")
    return cli


def lineage(cli: Cli, version: str) -> Any:
    return json.loads(cli.in_process("lineage", version, "--json", settings=False))


def test_the_lineage_of_a_version_needs_no_store(finished: Cli, tmp_path: Path) -> None:
    known = lineage(finished, "tiny-test@challenger")
    assert [stage["stage"] for stage in known["stages"]] == STAGES
    [run] = {stage["run"] for stage in known["stages"]}
    assert run == known["run"] == finished.runs()[-1]["run"]
    alone = lineage(sharing(finished, tmp_path), "tiny-test/1")
    assert {stage.pop("known_from") for stage in alone["stages"]} == {"mlflow"}
    assert {stage.pop("known_from") for stage in known["stages"]} == {"store"}
    assert alone["stages"] == known["stages"]
    for stage in known["stages"]:
        assert stage["code"] and stage["made_unix"] and stage["machine"]["cores"]
        assert stage["seed"] == 1
        assert bool(stage["data"]) == stage["stage"].startswith(("tokenizer", "shards"))


@pytest.mark.soak
def test_a_set_is_made_again_bit_for_bit_from_mlflow_alone(finished: Cli, tmp_path: Path) -> None:
    new = tmp_path / "new"
    words = ("reproduce", "tiny-test@challenger", "--json", "--home", str(new))
    result = json.loads(sharing(finished, tmp_path).in_process(*words, settings=False))
    assert result["equal"] is True and [stage["stage"] for stage in result["stages"]] == STAGES
    for stage in result["stages"]:
        assert stage["content"] == stage["rebuilt_content"], stage["stage"]
        assert stage["differences"] == []
    [made] = new.glob("store/sft/*/model/model.safetensors")
    [before] = finished.home.glob("store/sft/*/model/model.safetensors")
    assert made.read_bytes() == before.read_bytes()
