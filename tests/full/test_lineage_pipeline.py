"""Of a whole pipeline: what MLflow lists as its data, models that MLflow opens, lineage without a store, and made again."""

import json
import shutil
from pathlib import Path

import pytest
from support.loadable_models import said_without_ttrain
from support.pipeline_home import Cli

from ttrain.tracking.client import own_uri
from ttrain.tracking.mlflow_mirror import prepare

DATA = {
    "tokenizer": "training",
    "pretrain": "training",
    "pretrain-heldout": "validation",
    "sft": "training",
    "sft-heldout": "validation",
    "lora": "training",
    "lora-heldout": "validation",
}
KINDS = ("tokenizer", "base", "sft", "lora")
STAGES = ["tokenizer", "shards-pretrain", "pretrain", "shards-sft", "sft", "shards-lora", "lora"]
# What someone does who has MLflow, transformers and PEFT, and nothing of ttrain.
PLAIN = """
import json
import sys
import mlflow
from mlflow import MlflowClient
from mlflow.models import get_model_info
from transformers import AutoModelForCausalLM, AutoTokenizer

client, said = MlflowClient(), {}
chat = [{"role": "user", "content": "1 + 2?"}]
for name in ("tiny-test@challenger", "tiny-test-sft/1"):
    pipe = mlflow.transformers.load_model(f"models:/{name}")
    said[name] = pipe(chat, max_new_tokens=6, do_sample=False)[0]["generated_text"][-1]["content"]
for path in sys.argv[1:]:  # the base model, a checkpoint and the SFT model in the store
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer("春江 x", add_special_tokens=False).input_ids) == "春江 x"
    _, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
info = get_model_info("models:/tiny-test@challenger")
assert info.signature and info.metadata["ttrain.stage"] == "lora"
for version in client.search_model_versions():
    place = mlflow.artifacts.download_artifacts(f"models:/{version.name}/{version.version}")
    AutoTokenizer.from_pretrained(place)
    if version.name in ("tiny-test-sft", "tiny-test-base"):
        AutoModelForCausalLM.from_pretrained(place)
assert "ttrain" not in sys.modules
print("SAID", json.dumps(said))
"""


def datasets(cli: Cli, tag: str, value: str) -> dict[str, str]:
    query = """
    SELECT datasets.name, context.value FROM tags JOIN inputs ON inputs.destination_id = tags.run_uuid
    JOIN datasets ON datasets.dataset_uuid = inputs.source_id
    JOIN input_tags AS context ON context.input_uuid = inputs.input_uuid AND context.name = 'mlflow.data.context'
    WHERE tags.key = ? AND tags.value = ?
    """
    return {str(name): str(context) for name, context in cli.rows("mlflow", query, tag, value)}


def test_mlflow_lists_the_data_of_the_pipeline_and_of_each_stage(finished: Cli) -> None:
    assert datasets(finished, "ttrain.pipeline", "full") == DATA
    assert datasets(finished, "ttrain.stage", "sft") == {"sft": "training"}
    assert datasets(finished, "ttrain.stage", "tokenizer") == {"tokenizer": "training"}
    held_out = {name: context for name, context in DATA.items() if context == "validation"}
    assert datasets(finished, "ttrain.stage", "evaluate") == held_out
    both = {name: context for name, context in DATA.items() if name.startswith("pretrain")}
    assert datasets(finished, "ttrain.stage", "shards-pretrain") == both
    [(profile, source)] = finished.rows(
        "mlflow", "SELECT dataset_profile, dataset_source FROM datasets WHERE name = 'pretrain'"
    )
    shards = finished.manifest("shards-pretrain")["result"]["train"]
    assert json.loads(profile) == {"documents": shards["rows"], "bytes": shards["bytes"]}
    places = [file["location"] for file in json.loads(source)["listed"]]
    assert places == [str(finished.data / f"docs-{number}.jsonl") for number in (1, 2)]


def test_every_version_and_every_registered_model_says_what_it_is(finished: Cli) -> None:
    versions = {
        str(name): str(text)
        for name, text in finished.rows("mlflow", "SELECT name, description FROM model_versions")
    }
    models = {
        str(name): str(text)
        for name, text in finished.rows("mlflow", "SELECT name, description FROM registered_models")
    }
    assert (
        versions.keys() == models.keys() == {"tiny-test", *(f"tiny-test-{kind}" for kind in KINDS)}
    )
    assert all("pipeline `tiny-test`" in text for text in models.values())
    assert all(f"ttrain lineage {name}/1" in text for name, text in versions.items())
    judged = {"tiny-test-base": "bits per byte", "tiny-test-sft": "chats loss"}
    judged |= dict.fromkeys(("tiny-test-lora", "tiny-test"), "domain loss")
    for name, metric in judged.items():
        assert versions[name].startswith(f"{metric} **"), (
            "the evaluation came after they were registered"
        )


@pytest.mark.soak
def test_every_registered_model_opens_without_ttrain_and_the_set_is_its_adapter_with_its_base(
    finished: Cli, tmp_path: Path
) -> None:
    """In a copy, since MLflow notes what was opened."""
    home = tmp_path / "home"
    shutil.copytree(finished.home / "mlflow", home / "mlflow")
    prepare(home)  # which points a copied home's places at itself
    base, sft = (finished.home / "store" / name for name in ("pretrain", "sft"))
    paths = [*base.glob("*/model"), max(base.glob("*/checkpoints/step-*")), *sft.glob("*/model")]
    uri = f"sqlite:///{home}/mlflow/mlflow.db"
    opened = said_without_ttrain(PLAIN, *map(str, paths), directory=home, MLFLOW_TRACKING_URI=uri)
    assert opened["tiny-test@challenger"] != opened["tiny-test-sft/1"]


def test_the_evaluation_is_a_table_among_the_files_of_the_run(finished: Cli) -> None:
    [(run_id, listed)] = finished.rows(
        "mlflow", "SELECT run_uuid, value FROM tags WHERE key = 'mlflow.loggedArtifacts'"
    )
    tables = {
        table["path"]: json.loads(
            (
                finished.home / "mlflow" / "artifacts" / run_id / "artifacts" / table["path"]
            ).read_bytes()
        )
        for table in json.loads(listed)
    }
    assert tables["evaluation_table.json"]["data"][0][0] == "bits per byte, base"


def sharing(finished: Cli, tmp_path: Path) -> Cli:
    shutil.copytree(finished.home / "mlflow", tmp_path / "shared" / "mlflow")
    prepare(tmp_path / "shared")
    (tmp_path / "home").mkdir()
    shutil.copy(finished.home / "registry.json", tmp_path / "home")
    cli = Cli(tmp_path / "home", finished.data)
    cli.environment["MLFLOW_TRACKING_URI"] = own_uri(tmp_path / "shared")
    return cli


def test_the_lineage_of_a_registered_version_is_told_without_the_store(
    finished: Cli, tmp_path: Path
) -> None:
    told = json.loads(
        finished.in_process("lineage", "tiny-test@challenger", "--json", settings=False)
    )
    assert [stage["stage"] for stage in told["stages"]] == STAGES
    [run] = {stage["run"] for stage in told["stages"]}
    assert run == told["run"] == finished.runs()[-1]["run"]
    alone = json.loads(
        sharing(finished, tmp_path).in_process("lineage", "tiny-test/1", "--json", settings=False)
    )
    assert {stage.pop("known_from") for stage in alone["stages"]} == {"mlflow"}
    assert {stage.pop("known_from") for stage in told["stages"]} == {"store"}
    assert alone["stages"] == told["stages"]
    for stage in told["stages"]:
        assert stage["code"] and stage["made_unix"] and stage["machine"]["cores"]
        assert (stage["seed"], bool(stage["data"])) == (
            1,
            stage["stage"].startswith(("tokenizer", "shards")),
        )


@pytest.mark.soak
def test_a_registered_set_is_made_again_bit_for_bit_also_from_mlflow_alone(
    finished: Cli, tmp_path: Path
) -> None:
    cli = sharing(finished, tmp_path)
    said = cli.here(
        "reproduce",
        "tiny-test@challenger",
        "--json",
        "--home",
        str(tmp_path / "new"),
        settings=False,
    )
    told = json.loads(said[said.index("\n{") :])  # after what went to standard error
    assert told["equal"] is True and [stage["stage"] for stage in told["stages"]] == STAGES
    for stage in told["stages"]:
        assert stage["content"] == stage["rebuilt_content"] and stage["differences"] == [], stage[
            "stage"
        ]
    weights = "model/model.safetensors"
    [made] = (tmp_path / "new" / "store" / "sft").glob(f"*/{weights}")
    [before] = finished.home.glob(f"store/sft/*/{weights}")
    assert made.read_bytes() == before.read_bytes()
