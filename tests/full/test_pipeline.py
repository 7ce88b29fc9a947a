"""The whole pipeline on the user's own files, through a real Prefect server and a real MLflow."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_home import Cli, load_stages
from transformers import AutoTokenizer

from ttrain.reports import facts

CliFactory = Callable[..., Any]
SHARDS = ["shards-pretrain", "shards-sft", "shards-lora"]
STAGES = ["tokenizer", *SHARDS, "pretrain", "sft", "lora", "evaluate"]
EVALUATED = [
    *(f"eval/bits_per_byte{suffix}" for suffix in ("", "_zlib", "_xz", "_order0")),
    *(f"eval/chat_loss_{model}" for model in ("base", "sft")),
    *(f"eval/domain_loss_{model}" for model in ("sft", "lora")),
]
SECTIONS = {"", "Curves", "eval", "lora", "pretrain", "sft", "system", "tok", "total"}
MODELS = {"tiny-test", *(f"tiny-test-{kind}" for kind in ("tokenizer", "base", "sft", "lora"))}
WEIGHTS = {
    "pretrain": "model/model.safetensors",
    "sft": "model/model.safetensors",
    "lora": "adapter/adapter_model.safetensors",
}


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def test_raw_files_become_an_evaluated_model(finished: Any) -> None:
    run = finished.runs()[-1]
    assert [stage["name"] for stage in run["stages"]] == STAGES
    assert {stage["outcome"] for stage in run["stages"]} == {"completed"}
    assert run["outcome"] == "completed" and run["pipeline"] == "full"
    assert all(run["metrics"][name] > 0 for name in EVALUATED)
    assert run["metrics"]["eval/domain_loss_lora"] < run["metrics"]["eval/domain_loss_sft"]
    assert "bits per byte" in finished.first_output and "next:" in finished.first_output
    assert "Traceback" not in finished.first_output
    result = finished.manifest("pretrain")["result"]
    assert result["steps"] == 40 and result["tokens"] == 20480 and result["resumed_from_step"] == 0
    assert result["stop_reason"] == "completed"
    assert result["validation_loss"] > 0 and result["loss"] > 0
    for stage, lines in zip(SHARDS, (300, 150, 120), strict=True):
        result = finished.manifest(stage)["result"]
        assert result["train"]["rows"] + result["heldout"]["rows"] == lines, "no row is lost"
        assert result["heldout"]["rows"] >= 1


def test_the_flow_run_has_the_names_of_the_settings_and_the_run(finished: Any) -> None:
    run = finished.runs()[-1]["run"]
    assert (f"tiny-test: {run}",) in finished.rows("prefect", "SELECT name FROM flow_run")


def test_no_stage_logs_what_a_library_is_about_to_drop(finished: Any) -> None:
    log = (finished.home / "runs" / f"{finished.runs()[-1]['run']}.log").read_text(encoding="utf-8")
    assert "{'" not in log, "sentences, no dictionaries"
    assert all(f" {stage}: started" in log for stage in STAGES)
    assert "FutureWarning" not in log


def test_what_a_stage_leaves_is_its_last_checkpoint_with_the_tokenizer(finished: Any) -> None:
    plan = {name: Path(stage["path"]) for name, stage in finished.plan().items()}
    tokenizer = (plan["tokenizer"] / "tokenizer.json").read_bytes()
    for name, file in WEIGHTS.items():
        last = max((plan[name] / "checkpoints").glob("step-*"))
        weights = plan[name] / file
        assert weights.read_bytes() == (last / weights.name).read_bytes()
        assert (weights.parent / "tokenizer.json").read_bytes() == tokenizer
        opened = AutoTokenizer.from_pretrained(last)
        chat = [{"role": "user", "content": "x"}]
        assert opened.apply_chat_template(chat, tokenize=False) == "<|bos|><|user|>x<|end|>"


def test_mlflow_holds_one_parent_with_a_child_per_stage(finished: Any) -> None:
    mlflow = partial(finished.rows, "mlflow")
    runs = dict(mlflow("select run_uuid, name from runs where lifecycle_stage = 'active'"))
    query = "select run_uuid, value from tags where key = 'mlflow.parentRunId'"
    parents = dict(mlflow(query))
    [parent] = set(runs) - set(parents)
    # The end of its name, so that MLflow's legends tell the stages of two runs apart
    end = runs[parent].rpartition("-")[2]
    assert set(parents.values()) == {parent}
    assert sorted(runs[child] for child in parents) == sorted(f"{stage} {end}" for stage in STAGES)
    assert set(mlflow("select status from runs")) == {("FINISHED",)}
    measured = dict(mlflow("select key, value from latest_metrics where run_uuid = ?", parent))
    recorded = finished.runs()[-1]["metrics"]
    assert {name: measured[name] for name in recorded} == pytest.approx(recorded)
    [pretrain] = [child for child in parents if runs[child] == f"pretrain {end}"]
    results = dict(mlflow("select key, value from params where run_uuid = ?", pretrain))
    assert float(results["result.rows.target_multiplicity"]) == 1
    assert results["result.rows.dropped_tokens"] == "0"
    assert results["result.compiled"] == "False" and float(results["result.loss"]) > 0
    keys = [key for (key,) in mlflow("select distinct key from latest_metrics")]
    assert {key.rpartition("/")[0] for key in keys} == SECTIONS
    assert measured["tok/unk_rate"] == 0 and measured["tok/bytes_per_token"] > 1
    curve = "select step from metrics where run_uuid = ? and key = ? order by step"
    logged = [*range(5, 41, 5)]
    for name in ("loss", "logits_loss", "aux_loss", "lr", "epoch_time", "grad_norm"):
        assert mlflow(curve, pretrain, name) == [(step,) for step in logged], name
    by_tokens = mlflow(curve, parent, "Curves/pretrain loss")
    assert by_tokens == [(512 * step,) for step in logged]
    params = dict(mlflow("select key, value from params where run_uuid = ?", parent))
    assert params["pretrain.tokens"] == "20480" and params["sft.optim.lr"] == "0.001"
    shown = json.loads(finished.in_process("config", "show", "--json"))
    settings = {name: entry["value"] for name, entry in shown.items()}
    assert set(params) == set(facts.parameters(settings))  # nothing that is another one each time
    tag = "select value from tags where run_uuid = ? and key = 'ttrain.parent.shards'"
    content = finished.manifest("pretrain")["inputs"]["shards"]["content"]
    assert mlflow(tag, pretrain) == [(f"shards-pretrain {content}",)]
    assert {name for (name,) in mlflow("select name from registered_models")} == MODELS
    sources = dict(mlflow("select name, source from model_versions"))
    # The set opens as the last of its models
    assert sources.pop("tiny-test") == "models:/tiny-test-lora/1"
    for source in sources.values():
        assert list(Path(source.removeprefix("file://")).glob("*.json")), f"{source} holds no model"


def test_a_run_with_one_change_is_compared_in_mlflow(finished: Any, copy_of: CliFactory) -> None:
    cli = Cli(copy_of().home, finished.data)
    mlflow = partial(cli.rows, "mlflow")
    original = [finished.home / "store", finished.home / "mlflow" / "artifacts"]
    before = [snapshot(directory) for directory in original]
    assert cli.to_run() == []
    cli.here("pipeline", "run", "full", "lora.optim.lr=1e-3", "--engine", "none")
    built = [name for name, outcome in cli.outcomes().items() if outcome == "completed"]
    assert built == ["lora", "evaluate"]
    assert [snapshot(directory) for directory in original] == before

    first = finished.runs()[-1]
    params = []
    metrics = []
    for run in (first, cli.runs()[0]):
        [(id_, status)] = mlflow("select run_uuid, status from runs where name = ?", run["run"])
        assert (id_, status) == (run["tracking"]["run_id"], "FINISHED")
        params.append(dict(mlflow("select key, value from params where run_uuid = ?", id_)))
        query = "select key, value from latest_metrics where run_uuid = ?"
        metrics.append(dict(mlflow(query, id_)))
    assert {name for name in params[0] if params[0][name] != params[1][name]} == {"lora.optim.lr"}
    assert {*first["metrics"]} <= metrics[0].keys() & metrics[1].keys()
    changed = {name for name in EVALUATED if metrics[0][name] != metrics[1][name]}
    assert changed == {"eval/domain_loss_lora"}, "the others are of models that both runs share"


def test_a_failed_stage_is_rerun_with_what_follows_alone(copy_of: CliFactory) -> None:
    load_stages()
    cli = copy_of()
    domain = cli.data / "domain.jsonl"
    good = domain.read_text(encoding="utf-8").replace("plus", "and")
    domain.write_text("not JSON\n" * 20 + good, encoding="utf-8")
    said = cli.here("pipeline", "run", "full", "sft.seed=2", "--engine", "none", code=1)
    assert said.count("domain.jsonl:1") == 1
    assert "reading.rejected_fraction" in said and "Traceback" not in said
    run = cli.runs()[0]
    outcomes = cli.outcomes()
    assert run["outcome"] == "failed" and outcomes["shards-lora"] == "failed"
    assert outcomes["sft"] == outcomes["lora"] == "pending", "all shards come before all training"
    logs = {path: path.stat().st_mtime_ns for path in cli.home.glob("store/*/*/run/log.txt")}
    domain.write_text(good, encoding="utf-8")
    rerun = ("pipeline", "rerun", "lora", "--run", run["run"], "sft.seed=1", "--engine", "none")
    said = cli.here(*rerun, settings=False)
    assert f"settings of {run['run']}, apart from the defaults: " in said
    assert 'name="tiny-test"' in said
    outcomes = cli.outcomes()
    built = [name for name, outcome in outcomes.items() if outcome == "completed"]
    assert built == ["shards-lora", "lora", "evaluate"]
    assert {outcomes[name] for name in STAGES if name not in built} == {"cached"}
    assert logs == {path: path.stat().st_mtime_ns for path in logs}, "no finished stage ran again"
    assert cli.to_run() == []


def test_what_cannot_be_run_or_used_is_told_without_a_traceback(finished: Any) -> None:
    missing = finished.here("stage", "run", "lora", "sft.optim.lr=3e-4", code=2)
    assert "waits for sft" in missing and "Traceback" not in missing
    assert "`ttrain stage run sft`" in missing
    assert "`ttrain stage run pretrain`" not in missing, "that one is there"
    for name, value, words in (
        ("PREFECT_API_URL", "http://127.0.0.1:9/api", "no Prefect server answers there"),
        ("TTRAIN_HOME", "/proc/nope", "cannot be written"),
    ):
        cli = Cli(finished.home, finished.data)
        cli.environment[name] = value
        said = cli.here("pipeline", "run", "full", "sft.optim.lr=0.5", code=2)
        assert words in said and "Traceback" not in said
