"""What a sweep compares by and which stages it runs, from the settings that vary; what is refused before anything runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.planned_homes import remember_modules
from typer.testing import CliRunner

from ttrain.cli.main import app
from ttrain.config import Runtime
from ttrain.config.loading import layers, settings_of
from ttrain.errors import UsageError
from ttrain.experiments import records, request
from ttrain.flows.full import full
from ttrain.lineage import lookup
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore

LR = "pretrain.optim.lr=log(1e-4,3e-3)"


def asked(*overrides: str, **options: Any) -> request.SweepRequest:
    return request.sweep_request(full, layers(overrides), **options)


@pytest.mark.parametrize(
    ("overrides", "metric", "own"),
    [
        ([LR, "sft.epochs=choice(1,2)"], "sft/validation_loss", ["pretrain", "sft"]),
        (["data.sft=choice(a.jsonl,b.jsonl)"], "sft/validation_loss", ["shards-sft", "sft"]),
    ],
)
def test_the_metric_is_that_of_the_last_training_and_only_what_it_needs_is_run(
    overrides: list[str], metric: str, own: list[str]
) -> None:
    found = asked(*overrides)
    assert found.measure.metric == metric
    assert found.stages()[1] == own
    assert not {"lora", "evaluate"} & {*found.stages()[0]}


def test_stages_up_to_the_metric_run_and_bits_per_byte_need_no_model_but_the_base() -> None:
    assert asked(LR).stages() == (["source", "tokenizer", "shards-pretrain"], ["pretrain"])
    assert asked(LR, metric="eval/bits_per_byte").stages()[1] == ["pretrain", "evaluate"]
    assert asked(LR, metric="eval/chat_loss_sft").stages()[1] == ["pretrain", "sft", "lora", "evaluate"]


def test_more_is_better_where_the_metric_says_so_or_the_user() -> None:
    assert not asked(LR).measure.maximize
    assert asked(LR, metric="pretrain/tokens_per_second").measure.maximize
    assert asked(LR, maximize=True).measure.maximize
    beta = ("dpo.beta=choice(0.1,0.2)", "data.dpo=pairs.jsonl", "lora.start_from=dpo")
    by_default = asked(*beta).measure
    assert by_default == asked(*beta, metric="eval/preference_accuracy/dpo").measure and by_default.maximize


@pytest.mark.parametrize(
    ("overrides", "options", "said"),
    [
        (["runtime.threads=int(1,4)"], {}, "runtime.threads changes no result"),
        ([LR, "runtime.nodes=2", "runtime.rendezvous=a:1"], {}, "runtime.nodes is 2, but a sweep runs on one machine"),
        ([LR], {"sampler": "grid"}, "add a count: log(1e-4,3e-3,5)"),
        (["lr=log(1e-5,1e-3)"], {}, "did you mean 'pretrain.optim.lr' or 'sft.optim.lr' or 'dpo.optim.lr' or"),
        (["lora.rank=uniform(4,9)"], {}, "the sweep cannot try lora.rank=6.5"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(overrides: list[str], options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        asked(*overrides, **options)
    assert said in str(error.value)


def test_a_dry_run_tells_what_is_tried_and_leaves_nothing_and_needs_no_name_of_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    remember_modules(tmp_path / "home")
    options = ["tokenizer.vocab_size=choice(1024,2048,4096)", "--sampler", "grid", "-n", "2", "--dry-run", "--json"]
    with_it, without = (CliRunner().invoke(app, ["sweep", *name, *options]) for name in (["full"], []))
    assert without.exit_code == 0, without.output
    told = json.loads(without.stdout)
    assert told == json.loads(with_it.stdout) and told["metric"] == "eval/bits_per_byte"
    assert (told["once"], told["each"]) == (["source"], ["tokenizer", "shards-pretrain", "pretrain", "evaluate"])
    assert [trial["values"] for trial in told["trials"]] == [{"tokenizer.vocab_size": size} for size in (1024, 2048)]
    assert not (tmp_path / "home" / "sweeps").exists() and not (tmp_path / "home" / "runs").exists()


def test_a_grid_is_all_of_its_combinations_and_no_sweep_is_larger_than_its_space() -> None:
    grid = ["pretrain.optim.lr=log(1e-4,1e-2,3)", "pretrain.seed=int(1,2)"]
    assert asked(*grid, sampler="grid").trials == 6
    assert asked(*grid, trials=50).trials == 6
    assert asked(LR).trials == request.TRIALS


def test_the_same_command_is_the_same_sweep_until_a_question_the_data_or_the_code_is_another(tmp_path: Path) -> None:
    docs = tmp_path / "docs.jsonl"
    docs.write_text(json.dumps({"text": "one"}) + "\n", encoding="utf-8")
    remember_modules(tmp_path / "home")
    store, data = ArtifactStore(tmp_path / "home"), f"data.pretrain={docs}"
    begun = request.find_or_begin(asked(LR, data), store)
    for same in (asked(LR, data, trials=20), asked(LR, data, parallel=2), asked(data, LR, "runtime.threads=1")):
        assert request.find_or_begin(same, store).name == begun.name
    for other in (asked(LR, data, seed=2), asked(LR, data, "pretrain.tokens=5000"), asked(LR, data, sampler="random")):
        assert records.find_same(store.root, other.identity(store)) is None
    docs.write_text(json.dumps({"text": "another"}) + "\n", encoding="utf-8")
    assert records.find_same(store.root, asked(LR, data).identity(store)) is None


def test_a_sweep_is_named_by_a_part_of_its_name_and_one_process_has_it(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"there is no sweep 'latest'; there is none yet in .*, begin with `ttrain sweep full"
    ):
        records.find_sweep(tmp_path)
    found = asked(LR)
    first, second = (records.begin(tmp_path, found.identity(ArtifactStore(tmp_path))) for _ in range(2))
    assert records.find_sweep(tmp_path, first.name[-5:]).name == first.name
    assert records.find_sweep(tmp_path).name == second.name
    with first.lock(), pytest.raises(UsageError, match=f"{first.name} is running in process"):
        with records.find_sweep(tmp_path, first.name).lock():
            raise AssertionError("two have it")
    records.find_sweep(tmp_path, first.name).note(arguments=["a"])
    with first.lock():
        assert first["arguments"] == ["a"]  # what another process noted meanwhile
    assert records.find_sweep(tmp_path, first.name).measure == found.measure
    assert records.find_sweep(tmp_path, first.name).space == found.space


def test_trials_share_the_gpus_or_the_cores(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    pairs = Runtime(devices=2)
    found = request.assigned_gpus(pairs, devices=tmp_path)
    assert found == [0, 1, 2, 3] and request.parallel_trials(pairs, found) == 2
    devices = [request.trial_device(pairs, found, slot, 3) for slot in range(3)]
    assert devices == [{"runtime.gpus": gpus} for gpus in ([0, 1], [2, 3], [0, 1])]
    assert request.assigned_gpus(pairs, devices=tmp_path, chosen="2,3") == [2, 3]
    assert request.assigned_gpus(Runtime(device="cpu"), devices=tmp_path) == []
    assert request.trial_device(Runtime(), [], 0, 10_000) == {"runtime.threads": 1}


def test_a_rerun_takes_the_settings_of_no_trial(tmp_path: Path) -> None:
    settings = settings_of([]).settings.model_dump(mode="json")
    whole = runs.RunRecord(tmp_path, "full", ["pretrain"], settings)
    runs.RunRecord(tmp_path, "full", ["pretrain"], settings).note(sweep={"name": "sweep-1", "trial": 1})
    assert lookup.newest_with(tmp_path, "pretrain")["run"] == whole.run
