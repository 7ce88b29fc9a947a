"""What a sweep varies and compares, in which stages, and what it refuses before it runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.planned_homes import remember_modules
from typer.testing import CliRunner

from ttrain.cli.main import app
from ttrain.config.loading import layers
from ttrain.errors import UsageError
from ttrain.experiments import sampler
from ttrain.experiments.changes import Change
from ttrain.experiments.request import Options, Request, request_of
from ttrain.experiments.space import Interval, Space, ValueList, parse, parse_space
from ttrain.flows.full import full
from ttrain.store import sweeps as records
from ttrain.store.artifacts import ArtifactStore

RATE = "pretrain.optim.lr"
LR = f"{RATE}=1e-3,2e-3"


def asked(*overrides: str, files: tuple[Path, ...] = (), **options: Any) -> Request:
    return request_of(full, layers(overrides), Options(**options), files)


def names(request: Request) -> list[str]:
    return [change.name for change in request.changes]


@pytest.mark.parametrize(
    ("overrides", "metric", "own"),
    [
        ([LR], "eval/bits_per_byte", ["pretrain", "evaluate"]),
        ([LR, "sft.epochs=1,2"], "eval/chat_loss_sft", ["pretrain", "sft", "evaluate"]),
        (["data.sft=choice(a,b)"], "eval/chat_loss_sft", ["shards-sft", "sft", "evaluate"]),
        (["lora.rank=4,8"], "eval/domain_loss_lora", ["lora", "evaluate"]),
    ],
)
def test_metric_and_stages(overrides: list[str], metric: str, own: list[str]) -> None:
    request = asked(*overrides)
    once, by_seed, of_trials = request.stages()
    assert request.measure.metric == metric and of_trials == own
    assert not {*once, *by_seed} & {*own}


def test_more_is_better_where_the_metric_says_so_or_the_user() -> None:
    assert not asked(LR).measure.maximize
    assert asked(LR, maximize=True).measure.maximize
    beta = asked("dpo.beta=0.1,0.2", "data.dpo=pairs.jsonl", "lora.start_from=dpo").measure
    assert beta.metric == "eval/preference_accuracy/dpo" and beta.maximize


def test_the_present_settings_are_the_baseline_and_no_change_of_their_own() -> None:
    rates = ["sft.optim.lr=0.002", "sft.optim.lr=0.004"]
    assert names(asked("sft.optim.lr=1e-3,2e-3,4e-3")) == ["baseline", *rates]
    assert len(asked(f"{RATE}=log(1e-4,1e-2)", trials=5).changes) == 6
    request = asked("sft.epochs=3", "sft.optim.lr=2e-3", "data.sft=chats.jsonl")
    assert names(request) == ["baseline", "sft.epochs=3 sft.optim.lr=0.002"], "nothing varies"
    assert request.baseline.sft.epochs != 3 and request.baseline.data.sft == ("chats.jsonl",)


def test_the_baseline_is_what_files_set_below_the_values_that_vary(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("sft: {epochs: 3, optim: {lr: 5e-4}}\n")
    for words in (["sft.optim.lr=1e-3,2e-3"], ["sft.epochs=2", "runtime.threads=1"]):
        request = request_of(full, layers(words, [file]), Options())
        assert (request.baseline.sft.epochs, request.baseline.sft.optim.lr) == (3, 5e-4)
    assert request.baseline.runtime.threads == 1 and names(request) == ["baseline", "sft.epochs=2"]


def test_changes_are_named_in_a_file_and_each_changes_something(tmp_path: Path) -> None:
    file = tmp_path / "changes.yaml"
    file.write_text("decay: {pretrain.optim.weight_decay: 0}\nwide: {model: {hidden_size: 192}}\n")
    request = asked(files=(file,))
    assert names(request) == ["baseline", "decay", "wide"]
    trial = request.settings(request.changes[2], 7)
    assert trial.model.hidden_size == 192
    seeds = {trial.pretrain.seed, trial.sft.seed, trial.dpo.seed, trial.lora.seed}
    assert seeds == {7}, "of all trainings"
    more = "more: {sft.epochs: 2}\nsame: {sft.epochs: 2}\n"
    for text, message in (("decay: 3\n", "decay"), (more, r"same\b.*\bmore;")):
        file.write_text(text)
        with pytest.raises(UsageError, match=message):
            asked(files=(file,))


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ([], {}, "needs settings"),
        (["runtime.threads=1,2"], {}, "runtime.threads changes"),
        ([LR, "runtime.nodes=2", "runtime.rendezvous=a:1"], {}, "runtime.nodes"),
        ([LR, "sft.seed=1,2"], {}, "sft.seed"),
        (["lr=log(1e-5,1e-3)"], {}, "'pretrain.optim.lr' or 'sft.optim.lr' or"),
        (["lora.rank=uniform(4,9)"], {}, r"lora.rank=\d"),
        (["sft.epochs=3"], {"sampler": "tpe"}, "--sampler tpe"),
    ],
)
def test_mistakes_are_refused(overrides: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        asked(*overrides, **options)


def test_a_plan_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    remember_modules(tmp_path / "home")
    command = ["sweep", "tokenizer.vocab_size=1024,2048,4096", "--plan", "--json"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    plan = json.loads(shown.stdout)
    assert (plan["metric"], plan["once"], plan["noise"]) == ("eval/bits_per_byte", ["source"], None)
    sizes = [setting["values"] for setting in plan["settings"][1:]]
    assert sizes == [{"tokenizer.vocab_size": size} for size in (1024, 4096)]
    assert not (tmp_path / "home" / "sweeps").exists()


def test_the_same_command_is_the_same_sweep(tmp_path: Path) -> None:
    docs = tmp_path / "docs.jsonl"
    docs.write_text(json.dumps({"text": "one"}))
    remember_modules(tmp_path / "home")
    store, data = ArtifactStore(tmp_path / "home"), f"data.pretrain={docs}"
    begun = asked(LR, data).experiment(store)
    for same in (asked(LR, data, seeds=20), asked(data, LR, "runtime.threads=1")):
        assert same.experiment(store).name == begun.name
    no_rounds, more = asked(LR, data, rounds=False), asked(f"{LR},3e-3", data)
    for other in (no_rounds, more, asked(LR, data, "pretrain.tokens=5000")):
        assert records.find_same(store.root, other.identity(store)) is None
    docs.write_text(json.dumps({"text": "another"}))
    assert records.find_same(store.root, asked(LR, data).identity(store)) is None


def test_a_trial_has_one_process_and_a_sweep_a_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'latest'"):
        records.find_experiment(tmp_path)
    facts = {"changes": [{"name": "baseline", "values": {}}], "seeds": 3}
    first = records.find_or_begin(tmp_path, {"identity": "a", **facts})
    second = records.find_or_begin(tmp_path, {"identity": "b", **facts})
    assert records.find_or_begin(tmp_path, {"identity": "a", **facts}).name == first.name
    assert records.find_experiment(tmp_path).name == second.name
    other = records.find_experiment(tmp_path, first.name[-5:])
    with first.claimed((0, 1)) as mine, other.claimed((0, 1)) as taken:
        assert (mine, taken) == (records.Trial(0, 1), None)
        first.put(records.Trial(0, 1, records.COMPLETED, 1.5))
        other.put(records.Trial(0, 2, records.COMPLETED, 1.6))
    trials = records.find_experiment(tmp_path, first.name).trials
    assert [trial.value for trial in trials] == [1.5, 1.6], "what both noted"


def test_a_sampler_that_learns_draws_what_was_not_tried_and_again_the_same() -> None:
    space = asked(f"{RATE}=log(1e-5,1e-1)", sampler="tpe").space
    changes = [Change("baseline"), *map(Change.of, space.spread(4))]
    rates = [float(change.values[RATE]) for change in changes[1:]]
    values = {number: abs(rate - 3e-3) for number, rate in enumerate(rates, 1)}
    drawn = sampler.draw(space, changes, values)
    assert drawn == sampler.draw(space, changes, values) and drawn not in changes
    request = asked("sft.epochs=2,3,4,5,6,7", sampler="tpe")
    assert (len(request.changes), request.draws) == (5, 2)


@pytest.mark.parametrize(
    ("key", "text", "dimension"),
    [
        (RATE, "log(1e-4,3e-3)", Interval(1e-4, 3e-3, log=True)),
        ("lora.dropout", "uniform(0,0.2)", Interval(0.0, 0.2)),
        (RATE, "1e-3, 2e-3,4e-3", ValueList((1e-3, 2e-3, 4e-3))),
        ("model.tie_embeddings", "true,false", ValueList((True, False))),
        ("pretrain.optim.betas", "choice([0.9,1],[0,1])", ValueList(([0.9, 1], [0, 1]))),
        ("data.pretrain", "choice(2026-11-21, 0123, no)", ValueList(("2026-11-21", "0123", "no"))),
        ("sft.optim.clip", "choice(1, 2e-3, null)", ValueList((1, 2e-3, None))),
    ],
)
def test_values_have_the_type_of_the_setting(key: str, text: str, dimension: Any) -> None:
    assert parse_space(layers([f"{key}={text}"])).dimensions == {key: dimension}


def test_one_value_does_not_vary() -> None:
    plain = ["data.pretrain=a.jsonl,b.jsonl", "pretrain.optim.betas=0.9,0.95", f"{RATE}=1e-3"]
    assert parse_space(layers(plain)).dimensions == {}


RULES = {"log(0,1)": "above 0", "log(1,2,3)": "two numbers", "uniform(2,1)": "lower first"}


@pytest.mark.parametrize("text", RULES)
def test_a_range_that_means_nothing_is_refused_with_setting_value_and_rule(text: str) -> None:
    with pytest.raises(UsageError, match=f"^{RATE} is '{re.escape(text)}'.*{RULES[text]}"):
        parse_space(layers([f"{RATE}={text}"]))


def test_ranges_stand_in_files_too_and_a_stronger_value_takes_one_away(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("pretrain: {optim: {lr: 'log(1e-4,1e-2)', kind: 'muon,adamw'}}")
    assert list(parse_space(layers([], [file])).dimensions) == [RATE, "pretrain.optim.kind"]
    assert list(parse_space(layers([f"{RATE}=1e-3"], [file])).dimensions) == ["pretrain.optim.kind"]


def test_what_can_be_listed_is_listed_the_last_setting_fastest_and_the_rest_is_spread() -> None:
    space = Space({"a": ValueList((1, 2)), "b": ValueList(("x", "y", "z"))})
    assert space.size == 6
    assert space.combinations(6) == [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y", "z")]
    endless = Space({"a": ValueList((1, 2)), "b": Interval(0.0, 1.0)})
    assert endless.size is None
    drawn = endless.combinations(4)
    assert sorted(values["a"] for values in drawn) == [1, 1, 2, 2]
    assert sorted(values["b"] for values in drawn) == [0.125, 0.375, 0.625, 0.875]


def test_a_secret_is_not_put_on_record() -> None:
    with pytest.raises(UsageError, match="secrets"):
        parse("data.pretrain", "choice(https://me:secret@host/a.jsonl,b.jsonl)")
