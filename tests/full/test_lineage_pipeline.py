"""A whole pipeline is reproduced from what MLflow knows about it."""

import json
import shutil
from pathlib import Path

import pytest
from support.pipeline_home import Cli

from ttrain.tracking.client import open_client, own_uri

STAGES = ["tokenizer", "shards-pretrain", "pretrain", "shards-sft", "sft", "shards-lora", "lora"]


@pytest.mark.soak
def test_a_set_is_made_again_bit_for_bit_from_mlflow_alone(finished: Cli, tmp_path: Path) -> None:
    shutil.copytree(finished.home / "mlflow", tmp_path / "shared" / "mlflow")
    open_client(own_uri(tmp_path / "shared"), tmp_path / "shared")
    (tmp_path / "home").mkdir()
    shutil.copy(finished.home / "registry.json", tmp_path / "home")
    cli = Cli(tmp_path / "home", finished.data)
    cli.environment["MLFLOW_TRACKING_URI"] = own_uri(tmp_path / "shared")
    new = tmp_path / "new"
    words = ("reproduce", "tiny-test@challenger", "--json", "--home", str(new))
    result = json.loads(cli.in_process(*words, settings=False))
    assert result["equal"] is True and [stage["stage"] for stage in result["stages"]] == STAGES
    assert all(stage["content"] == stage["rebuilt_content"] for stage in result["stages"])
    [made] = new.glob("store/sft/*/model/model.safetensors")
    [before] = finished.home.glob("store/sft/*/model/model.safetensors")
    assert made.read_bytes() == before.read_bytes()
