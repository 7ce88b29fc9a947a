"""What a sweep compares, by which metric, in which stages, and what it refuses before it runs."""

import json
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
from ttrain.flows.full import full
from ttrain.store import sweeps as records
from ttrain.store.artifacts import ArtifactStore

LR = "pretrain.optim.lr=1e-3,2e-3"


def asked(*overrides: str, files: tuple[Path, ...] = (), **options: Any) -> Request:
    return request_of(full, layers(overrides), Options(**options), files)


def names(request: Request) -> list[str]:
    return [change.name for change in request.changes]


@pytest.mark.parametrize(
    ("overrides", "metric", "own"),
    [
        ([LR], "eval/bits_per_byte", ["pretrain", "evaluate"]),
        ([LR, "sft.epochs=1,2"], "eval/chat_loss_sft", ["pretrain", "sft", "evaluate"]),
        (
            ["data.sft=choice(a.jsonl,b.jsonl)"],
            "eval/chat_loss_sft",
            ["shards-sft", "sft", "evaluate"],
        ),
        (["lora.rank=4,8"], "eval/domain_loss_lora", ["lora", "evaluate"]),
        (
            ["tokenizer.vocab_size=512,1024"],
            "eval/bits_per_byte",
            ["tokenizer", "shards-pretrain", "pretrain", "evaluate"],
        ),
    ],
)
def test_the_metric_is_that_of_the_last_model_that_is_trained_and_only_what_it_needs_is_run(
    overrides: list[str], metric: str, own: list[str]
) -> None:
    found = asked(*overrides)
    once, by_seed, of_trials = found.stages()
    assert found.measure.metric == metric and of_trials == own
    assert not {*once, *by_seed} & {*own}


def test_a_stage_that_no_seed_changes_runs_once_and_one_that_no_change_touches_once_a_seed() -> (
    None
):
    assert asked("sft.epochs=1,2").stages()[:2] == (
        ["source", "tokenizer", "shards-pretrain", "shards-sft"],
        ["pretrain"],
    )


def test_more_is_better_where_the_metric_says_so_or_the_user() -> None:
    assert not asked(LR).measure.maximize
    assert asked(LR, metric="pretrain/tokens_per_second").measure.maximize
    assert asked(LR, maximize=True).measure.maximize
    beta = ("dpo.beta=0.1,0.2", "data.dpo=pairs.jsonl", "lora.start_from=dpo")
    assert (
        asked(*beta).measure.metric == "eval/preference_accuracy/dpo"
        and asked(*beta).measure.maximize
    )


def test_the_present_settings_are_the_baseline_and_no_change_of_their_own() -> None:
    assert names(asked("sft.optim.lr=1e-3,2e-3,4e-3")) == [
        "baseline",
        "sft.optim.lr=0.002",
        "sft.optim.lr=0.004",
    ]
    assert names(asked("sft.optim.lr=2e-3,4e-3", "sft.epochs=2"))[1:] == [
        "sft.optim.lr=0.002",
        "sft.optim.lr=0.004",
    ]
    assert len(asked("pretrain.optim.lr=log(1e-4,1e-2)", trials=5).changes) == 6


def test_what_the_command_line_sets_is_one_change_where_nothing_varies() -> None:
    found = asked("sft.epochs=3", "sft.optim.lr=2e-3", "data.sft=chats.jsonl")
    assert names(found) == ["baseline", "sft.epochs=3 sft.optim.lr=0.002"]
    assert found.baseline.sft.epochs != 3 and found.baseline.data.sft == ("chats.jsonl",)


def test_the_baseline_is_what_files_set_below_the_values_that_vary(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("sft: {epochs: 3, optim: {lr: 5e-4}}\n", encoding="utf-8")
    for words in (
        ["sft.optim.lr=1e-3,2e-3"],
        ["sft.optim.lr=1e-3"],
        ["sft.epochs=2", "runtime.threads=1"],
    ):
        found = request_of(full, layers(words, [file]), Options())
        assert (found.baseline.sft.epochs, found.baseline.sft.optim.lr) == (3, 5e-4)
    assert found.baseline.runtime.threads == 1 and names(found) == ["baseline", "sft.epochs=2"]
    assert found.settings(found.changes[1]).sft.optim.lr == 5e-4


def test_a_named_change_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "changes.yaml"
    file.write_text("more: {sft.epochs: 2}\nsame: {sft.epochs: 2}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"same\b.*\bmore;"):
        asked(files=(file,))


def test_changes_are_named_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "changes.yaml"
    file.write_text(
        "no-decay: {pretrain.optim.weight_decay: 0}\nwide: {model: {hidden_size: 192}}\n",
        encoding="utf-8",
    )
    found = asked(files=(file,))
    assert names(found) == ["baseline", "no-decay", "wide"]
    assert found.settings(found.changes[2], 7).model.hidden_size == 192
    file.write_text("no-decay: 3\n", encoding="utf-8")
    with pytest.raises(UsageError, match="no-decay"):
        asked(files=(file,))


def test_all_trainings_of_a_trial_have_its_seed() -> None:
    found = asked(LR)
    trial = found.settings(found.changes[1], 7)
    assert {trial.pretrain.seed, trial.sft.seed, trial.dpo.seed, trial.lora.seed} == {7}
    assert trial.pretrain.optim.lr == 1e-3


def test_what_is_given_beside_a_preset_wins_over_it() -> None:
    found = asked("model.preset=choice(5m,10m)", "model.layers=3")
    model = found.settings(found.changes[2]).model
    assert (model.hidden_size, model.layers) == (320, 3)


@pytest.mark.parametrize(
    ("overrides", "options", "said"),
    [
        ([], {}, "a sweep needs settings to compare"),
        (["runtime.threads=1,2"], {}, "nothing to compare|runtime.threads changes no result"),
        ([LR, "runtime.nodes=2", "runtime.rendezvous=a:1"], {}, "runtime.nodes is 2"),
        ([LR, "sft.seed=1,2"], {}, "sft.seed varies"),
        (
            ["lr=log(1e-5,1e-3)"],
            {},
            "did you mean 'pretrain.optim.lr' or 'sft.optim.lr' or 'dpo.optim.lr' or",
        ),
        (["lora.rank=uniform(4,9)"], {}, r"the sweep cannot try lora.rank=\d"),
        (["sft.epochs=3"], {"sampler": "tpe"}, "--sampler tpe needs ranges"),
        (["data.pretrain=docs.jsonl"], {}, "a sweep needs settings to compare"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    overrides: list[str], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        asked(*overrides, **options)


def test_a_plan_tells_what_is_tried_and_leaves_nothing_and_needs_no_name_of_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    remember_modules(tmp_path / "home")
    options = ["tokenizer.vocab_size=1024,2048,4096", "--plan", "--json"]
    with_it, without = (
        CliRunner().invoke(app, ["sweep", *name, *options]) for name in (["full"], [])
    )
    assert without.exit_code == 0, without.output
    told = json.loads(without.stdout)
    assert told == json.loads(with_it.stdout) and told["metric"] == "eval/bits_per_byte"
    assert told["once"] == ["source"] and told["noise"] is None
    assert [setting["values"] for setting in told["settings"][1:]] == [
        {"tokenizer.vocab_size": size} for size in (1024, 4096)
    ]
    assert not (tmp_path / "home" / "sweeps").exists() and not (tmp_path / "home" / "runs").exists()


def test_the_same_command_is_the_same_sweep_until_a_question_the_data_or_the_code_is_another(
    tmp_path: Path,
) -> None:
    docs = tmp_path / "docs.jsonl"
    docs.write_text(json.dumps({"text": "one"}) + "\n", encoding="utf-8")
    remember_modules(tmp_path / "home")
    store, data = ArtifactStore(tmp_path / "home"), f"data.pretrain={docs}"
    begun = asked(LR, data).experiment(store)
    for same in (asked(LR, data, seeds=20), asked(data, LR, "runtime.threads=1")):
        assert same.experiment(store).name == begun.name
    for other in (
        asked(LR, data, rounds=False),
        asked(LR, data, "pretrain.tokens=5000"),
        asked(f"{LR},3e-3", data),
    ):
        assert records.find_same(store.root, other.identity(store)) is None
    docs.write_text(json.dumps({"text": "another"}) + "\n", encoding="utf-8")
    assert records.find_same(store.root, asked(LR, data).identity(store)) is None


def test_a_sweep_is_named_by_a_part_of_its_name_and_each_trial_has_one_process(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="'latest'"):
        records.find_experiment(tmp_path)
    facts = {"changes": [{"name": "baseline", "values": {}}], "seeds": 3}
    first, second, again = (
        records.find_or_begin(tmp_path, {"identity": name, **facts}) for name in "aba"
    )
    assert again.name == first.name
    assert records.find_experiment(tmp_path, first.name[-5:]).name == first.name
    assert records.find_experiment(tmp_path).name == second.name
    other = records.find_experiment(tmp_path, first.name)
    with (
        first.claimed((0, 1)) as mine,
        other.claimed((0, 1)) as theirs,
        other.claimed((0, 2)) as next_one,
    ):
        assert mine == records.Trial(0, 1) and theirs is None and next_one == records.Trial(0, 2)
        first.put(records.Trial(0, 1, records.COMPLETED, 1.5))
        other.put(
            records.Trial(0, 2, records.COMPLETED, 1.6)
        )  # what the other has noted meanwhile stays
    assert [trial.value for trial in records.find_experiment(tmp_path, first.name).trials] == [
        1.5,
        1.6,
    ]
    with other.claimed((0, 1)) as ended:
        assert ended is None


def test_a_sampler_that_learns_draws_what_was_not_tried_and_again_the_same() -> None:
    space = asked("pretrain.optim.lr=log(1e-5,1e-1)", sampler="tpe").space
    changes = [Change("baseline"), *map(Change.of, space.spread(4))]
    values = {
        number: abs(float(change.values["pretrain.optim.lr"]) - 3e-3)
        for number, change in enumerate(changes[1:], 1)
    }
    drawn = sampler.draw(space, changes, values)
    assert drawn == sampler.draw(space, changes, values) and drawn not in changes
    found = asked("sft.epochs=2,3,4,5,6,7", sampler="tpe")
    assert (len(found.changes), found.draws) == (5, 2)
    few = asked("sft.epochs=2,3", sampler="tpe").space
    with pytest.raises(UsageError, match="values left"):
        sampler.draw(
            few, [Change("baseline"), *map(Change.of, few.combinations(2))], {1: 1.0, 2: 2.0}
        )
