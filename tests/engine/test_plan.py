"""Keys and plans: what changes a key and what does not, and why a stage runs, in words."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.planned_homes import AFTER_SFT, EVERYTHING, House, append, running, tokens

from ttrain import api
from ttrain.config.loading import load
from ttrain.core import hashing
from ttrain.core.hashing import canonical_json, sha256_file
from ttrain.data import python_docs
from ttrain.engine.graph import Planned, Rerun
from ttrain.engine.planner import plan, plan_stage, trained_on, without_data
from ttrain.errors import UsageError
from ttrain.flows.full import full
from ttrain.store.layout import Artifact
from ttrain.tasks import EXISTING_MODEL, NEW_MODEL, OF_NIGHTS, PRETRAIN, SFT, STAGES


def test_where_how_fast_and_under_what_name_does_not_change_a_key(built: House) -> None:
    overrides = (
        "runtime.devices=2",
        "runtime.rows_per_device=3",
        "runtime.device=cpu",
        "runtime.compile=true",
        "runtime.threads=1",
        "runtime.retries=5",
        "runtime.timeout_seconds=9",
        "runtime.checkpoint_every_steps=7",
        "runtime.workers=3",
        "runtime.sharding=dask",
        "runtime.dask_address=tcp://127.0.0.1:1",
        "runtime.log_level=debug",
        "tracking.enabled=false",
        "tracking.experiment=other",
        "name=another",
        "python_docs.chat_rows=500",  # nothing is read from there
    )
    stages = built.plan(*overrides)
    assert {planned.state for planned in stages.values()} == {"cached"}
    assert {planned.why for planned in stages.values()} == {("same settings, inputs and code",)}


def weighed(house: House, first: float, second: float) -> str:
    weights = {"documents": first, "more": second}
    entries = [
        f"{{path: {house.data / name}.jsonl, weight: {weight}}}" for name, weight in weights.items()
    ]
    return f"data.pretrain=[{', '.join(entries)}]"


def test_a_weight_belongs_to_the_shards_and_not_to_the_tokenizer(house: House) -> None:
    house.write("more.jsonl", '{"text": "b"}\n')
    house.build(house.settings(weighed(house, 1, 1)))
    assert running(house.plan(weighed(house, 1.0, 1))) == set()
    changed = house.plan(weighed(house, 1, 3))
    assert running(changed) == EVERYTHING - {"tokenizer", "shards-sft", "shards-lora"}
    assert changed["shards-pretrain"].why == ("weight of train file more.jsonl: 1.0 → 3.0",)
    plain = house.plan(
        f"data.pretrain={house.data / 'documents.jsonl'},{house.data / 'more.jsonl'}"
    )
    assert "weight of train file more.jsonl: 1.0 → none" in plain["shards-pretrain"].why


def test_an_existing_tokenizer_counts_by_its_bytes(house: House) -> None:
    first, copy = (house.write(f"{name}/tokenizer.json", "{}").parent for name in ("first", "copy"))
    house.build(house.settings(f"tokenizer.existing={first}"))
    house.write("first/tokenizer.json", '{"other": 1}')
    assert "tokenizer" in running(house.plan(f"tokenizer.existing={first}"))
    house.write("first/tokenizer.json", "{}")
    assert running(house.plan(f"tokenizer.existing={first}")) == set()
    assert running(house.plan(f"tokenizer.existing={copy}")) == set()
    assert running(house.plan()) == EVERYTHING


def test_a_setting_reruns_its_stage_and_what_depends_on_it(built: House) -> None:
    for override, stages in {
        "tokenizer.vocab_size=300": EVERYTHING,
        "reading.heldout_fraction=0.1": EVERYTHING,
        "shards.block_bytes=2048": EVERYTHING - {"tokenizer"},
        "model.layers=2": {"pretrain", *AFTER_SFT},
        "pretrain.precision=fp32": {"pretrain", *AFTER_SFT},
        "sft.optim.lr=2e-4": AFTER_SFT,
        "lora.rank=4": {"lora", "evaluate"},
        "evaluate.stride=64": {"evaluate"},
    }.items():
        assert running(built.plan(override)) == stages, override


def test_pairs_add_a_reference_and_a_tuning_and_another_beta_scores_no_reference_again(
    house: House,
) -> None:
    pairs = f"data.dpo={house.write('pairs.jsonl', '{}')}"
    house.build(house.settings(pairs))
    assert [*house.plan(pairs)][-5:] == ["sft", "reference", "dpo", "lora", "evaluate"]
    assert running(house.plan(pairs, "dpo.beta=0.2")) == {"dpo", "lora", "evaluate"}


def test_files_count_by_their_bytes_not_by_their_names_or_times(built: House) -> None:
    path = built.data / "documents.jsonl"
    os.utime(path, ns=(10**18, 10**18))
    assert running(built.plan()) == set()
    moved = path.rename(built.data / "other name.jsonl")
    assert running(built.plan(f"data.pretrain={moved}")) == set()


def test_one_byte_of_an_input_reruns_what_reads_it_and_what_follows(built: House) -> None:
    for name, stages in {
        "documents": EVERYTHING,
        "chats": {"shards-sft", *AFTER_SFT},
        "domain": {"shards-lora", "lora", "evaluate"},
    }.items():
        path = built.data / f"{name}.jsonl"
        before = path.read_bytes()
        path.write_bytes(before.replace(b": ", b":  ", 1))
        assert running(built.plan()) == stages
        path.write_bytes(before)
    assert running(built.plan()) == set(), "and the other way round finds what was there"


def test_the_order_of_the_files_counts(house: House) -> None:
    one, two = house.write("1.jsonl", "1\n"), house.write("2.jsonl", "2\n")
    house.build(house.settings(f"data.pretrain=[{one}, {two}]"))
    stages = house.plan(f"data.pretrain=[{two}, {one}]")
    assert stages["tokenizer"].why == ("train files come in another order",)
    assert stages["shards-sft"].state == "run"


def test_a_heldout_file_and_a_tokenizer_file_enter_the_keys_of_their_readers(built: House) -> None:
    held = built.write("held.jsonl", "x\n")
    stages = built.plan(f"data.lora_heldout={held}")
    assert running(stages) == {"shards-lora", "lora", "evaluate"}
    assert stages["shards-lora"].why == ("heldout file held.jsonl is new",)
    assert running(built.plan(f"data.tokenizer={held}")) == EVERYTHING


def test_a_stage_rebuilt_to_the_same_bytes_leaves_what_depends_on_it_cached(house: House) -> None:
    house.build(house.settings(), says=lambda stage, key: stage)
    house.build(house.settings("pretrain.seed=2"), says=lambda stage, key: stage)
    stages = house.plan("pretrain.seed=2", "sft.seed=1")
    assert running(stages) == set()
    assert len(house.store.artifacts("pretrain")) == 2
    assert len(house.store.artifacts("sft")) == 1


def test_canonical_json_spells_a_value_in_one_way() -> None:
    assert canonical_json({"b": 1, "a": [1.5, None, "ü"]}) == canonical_json(
        {"a": [1.5, None, "ü"], "b": 1}
    )
    assert canonical_json({"a": 1}) != canonical_json({"a": 1.0})
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json({"a": float("nan")})


def test_a_stages_own_module_changes_its_key_alone(
    built: House, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "PACKAGE_DIRECTORY", copy)
    assert running(built.plan()) == set()
    before = (copy / "tasks" / "sft.py").read_text(encoding="utf-8")
    append(copy / "tasks" / "sft.py", "\nSOMETHING = 1\n")
    stages = built.plan("lora.rank=2")
    assert stages["sft"].why == ("module ttrain.tasks.sft changed",)
    assert {name for name in running(stages) if stages[name].key} == {"sft"}
    assert running(stages) == AFTER_SFT
    (copy / "tasks" / "sft.py").write_text(before, encoding="utf-8")
    assert running(built.plan()) == set(), "a change that is taken back finds what was there"


def test_a_changed_setting_is_explained_with_its_old_and_new_value(built: House) -> None:
    stages = built.plan("sft.optim.lr=2e-4", "sft.epochs=null", "sft.tokens=9000")
    assert stages["sft"].why == (
        'sft.epochs: "auto" → null',
        "sft.optim.lr: 0.001 → 0.0002",
        "sft.tokens: null → 9000",
    )
    assert stages["lora"].why == ("waits for sft",)
    assert stages["evaluate"].why == ("waits for sft, lora",)


def test_a_changed_file_among_two_of_the_same_name_is_not_taken_for_another_order(
    house: House,
) -> None:
    for folder in ("a", "b"):
        house.write(f"{folder}/x.jsonl", folder)
    house.build(house.settings(f"data.sft={house.data}/*/x.jsonl"))
    house.write("a/x.jsonl", "changed")
    assert house.plan(f"data.sft={house.data}/*/x.jsonl")["shards-sft"].why == (
        "train file x.jsonl changed",
    )


def test_a_changed_input_artifact_is_explained(built: House) -> None:
    settings = built.settings()
    inputs = {"base": built.store.latest("pretrain"), "shards": built.store.latest("shards-sft")}
    before = plan_stage(SFT, settings, built.store, inputs)
    inputs["base"] = built.build(built.settings("pretrain.seed=2"))["pretrain"]
    after = plan_stage(SFT, built.settings("sft.seed=9"), built.store, inputs)
    old, new = before.ingredients["inputs"]["base"][:12], after.ingredients["inputs"]["base"][:12]
    other = "sft.seed: 1 → 9"
    assert after.why in ((other,), (other, f"input base: {old} → {new}"))
    assert old != new
    shutil.rmtree(built.store.root / "store" / "sft")
    built.publish(before)
    assert plan_stage(SFT, settings, built.store, inputs).why == (f"input base: {old} → {new}",)


def test_a_first_run_and_a_damaged_artifact_are_told_apart(house: House) -> None:
    stages = house.plan()
    assert stages["tokenizer"].why == ("never run before",) and stages["tokenizer"].key
    for name, waits in {"shards-sft": "tokenizer", "sft": "pretrain, shards-sft"}.items():
        assert (stages[name].key, stages[name].why) == (None, (f"waits for {waits}",))
    built = house.build(house.settings())
    (built["tokenizer"].path / "heldout" / "file").unlink()
    stages = house.plan()
    assert stages["tokenizer"].why == ("its artifact is damaged: heldout/file is missing",)
    assert running(stages) == EVERYTHING


def test_the_most_similar_artifact_is_the_one_compared_with_and_of_several_the_newest(
    built: House,
) -> None:
    built.build(built.settings("evaluate.seed=5", "evaluate.stride=64", "evaluate.new_tokens=1"))
    assert built.plan("evaluate.seed=6")["evaluate"].why == ("evaluate.seed: 1 → 6",)
    near = built.plan("evaluate.seed=5", "evaluate.stride=64", "evaluate.new_tokens=2")
    assert near["evaluate"].why == ("evaluate.new_tokens: 1 → 2",)
    for seed in (2, 3, 4):
        built.build(built.settings(f"evaluate.seed={seed}"))
    assert built.plan("evaluate.seed=9")["evaluate"].why == ("evaluate.seed: 4 → 9",)


def test_force_follows_to_what_depends_on_a_stage_and_nowhere_else(built: House) -> None:
    for force, stages in (
        ({"sft"}, AFTER_SFT),
        ({"shards-lora"}, {"shards-lora", "lora", "evaluate"}),
        ({"tokenizer"}, EVERYTHING),
        ({"evaluate", "shards-sft"}, {"shards-sft", *AFTER_SFT}),
    ):
        planned = built.plan(force=frozenset(force))
        assert (
            running(planned) == {name for name, stage in planned.items() if stage.forced} == stages
        )
        assert {planned[name].why for name in stages} == {("asked to run again",)}


def test_from_python_stages_are_named_by_a_text_or_a_list_and_found_by_their_names(
    house: House,
) -> None:
    planned = api.plan("full", house.settings(), home=house.store.root, force="tokenizer, sft")
    assert planned.rerun.force == {"tokenizer", "sft"} and planned["sft"].name == "sft"
    with pytest.raises(KeyError, match="sfx"):
        planned["sfx"]


def test_forcing_a_stage_that_does_not_exist_names_those_that_do(built: House) -> None:
    with pytest.raises(
        UsageError,
        match=r"there is no stage .sfft.; did you mean sft\? there are tokenizer, .*evaluate",
    ):
        built.plan(force=frozenset({"sfft"}))


def test_the_quickstart_begins_with_its_source_and_own_files_do_without(house: House) -> None:
    settings = load([], environment={}).settings
    quickstart = plan(full(settings), settings, house.store)
    others = {
        EXISTING_MODEL.name,
        NEW_MODEL.name,
    }  # in the place of one of them, where a stage starts from another model
    others |= {
        *OF_NIGHTS,
        "shards-dpo",
        "reference",
        "dpo",
    }  # without pairs there is no preference tuning
    assert [planned.stage.name for planned in quickstart] == [
        name for name in STAGES if name not in others
    ]
    files = quickstart[0].ingredients["files"]
    assert files == {
        "python": [{"name": "python.jsonl.zst", "sha256": sha256_file(python_docs.text_file())}]
    }
    assert "source" not in house.plan()


def test_the_plan_as_json_has_its_shape(built: House) -> None:
    stages = api.plan("full", built.settings("sft.seed=7"), home=built.store.root)
    printed = json.loads(json.dumps(stages.to_json()))
    assert printed["pipeline"] == "full" and [stage["name"] for stage in printed["stages"]] == list(
        stages.graph
    )
    shown = {stage.pop("name"): stage for stage in printed["stages"]}
    place = str(built.store.path("pretrain", shown["pretrain"]["key"]))
    assert (shown["pretrain"]["state"], shown["pretrain"]["path"]) == ("cached", place)
    assert shown["sft"] == {
        **shown["sft"],
        "state": "run",
        "path": None,
        "why": ["sft.seed: 1 → 7"],
    }
    assert shown["lora"] == {
        "state": "run",
        "key": None,
        "path": None,
        "why": ["waits for sft"],
        "notes": [],
    }


def pretrain_planned(house: House, *overrides: str, extend: bool = False) -> Planned:
    store = house.store
    inputs = {"tokenizer": store.latest("tokenizer"), "shards": store.latest("shards-pretrain")}
    return plan_stage(PRETRAIN, house.settings(*overrides), store, inputs, Rerun(extend=extend))


def trained(
    house: House, steps: int, *overrides: str, checkpoints: Any = (10, 25, 50, 75, 100)
) -> Artifact:
    """A finished run of that many steps, with checkpoints."""
    planned = pretrain_planned(house, *tokens(steps), *overrides)
    result = {"rows": {"rows": 1000}, "steps": steps, "tokens": steps * 4096}
    return house.publish(
        planned, str(steps), result, [step for step in checkpoints if step <= steps]
    )


def test_extending_starts_at_the_last_checkpoint_before_either_runs_decay(built: House) -> None:
    half, whole = (
        ("pretrain.schedule.kind=linear", f"pretrain.schedule.decay_fraction={share}")
        for share in (0.5, 1)
    )
    for schedule, new_steps, step in (
        (half, 200, 50),
        (half, 60, 25),
        (whole, 200, 10),
        (("pretrain.schedule.kind=constant",), 200, 100),
        (("pretrain.schedule.kind=constant",), 30, 25),
        (("pretrain.schedule.kind=cosine",), 200, 10),
        (("pretrain.schedule.kind=cosine", "pretrain.schedule.warmup_steps=5"), 200, None),
    ):
        artifact = trained(built, 100, *schedule)
        planned = pretrain_planned(built, *tokens(new_steps), *schedule, extend=True)
        assert planned.state == "run"
        if step is None:
            assert planned.start_from is None and "starts from scratch" in planned.why[0]
        else:
            assert planned.start_from == artifact.path / "checkpoints" / f"step-{step:08d}"
            assert f"step {step}" in planned.why[0]
        assert pretrain_planned(built, *tokens(new_steps), *schedule).start_from is None, (
            "only where it is asked for"
        )


def test_extending_refuses_a_run_that_differs_in_more_than_its_budget(built: House) -> None:
    trained(built, 100)
    assert pretrain_planned(built, *tokens(200), extend=True).start_from
    for other in ("pretrain.optim.lr=0.5", "model.layers=2", "pretrain.schedule.floor=0.1"):
        refused = pretrain_planned(built, *tokens(200), other, extend=True)
        assert refused.start_from is None and "starts from scratch" in refused.why[0]


def test_extending_takes_the_furthest_of_several_runs_and_passes_over_a_damaged_one(
    built: House,
) -> None:
    short, long = trained(built, 100), trained(built, 150, checkpoints=(10, 70))
    assert (
        pretrain_planned(built, *tokens(400), extend=True).start_from
        == long.path / "checkpoints" / "step-00000070"
    )
    (long.path / "heldout" / "file").unlink()
    assert (
        pretrain_planned(built, *tokens(400), extend=True).start_from
        == short.path / "checkpoints" / "step-00000050"
    )


def test_extending_does_not_continue_code_or_inputs_that_changed(
    built: House, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(built, 100)
    monkeypatch.setattr(hashing, "PACKAGE_DIRECTORY", copy)
    assert pretrain_planned(built, *tokens(200), extend=True).start_from
    append(copy / "train" / "optim.py", "\nSOMETHING = 1\n")
    assert pretrain_planned(built, *tokens(200), extend=True).start_from is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("data.sft=FILE", "sft starts from .*data.pretrain=python-docs .*or sft.start_from=MODEL"),
        ("data.lora=FILE", "lora starts from .*or lora.start_from=MODEL"),
        ("data.sft=FILE sft.start_from=none", "no text for a tokenizer; set data.tokenizer=FILE"),
    ],
)
def test_chats_without_documents_are_refused_with_the_fix(
    house: House, given: str, words: str
) -> None:
    overrides = given.replace("FILE", str(house.data / "chats.jsonl")).split()
    settings = load(overrides, environment={}).settings
    with pytest.raises(UsageError, match=f"data.pretrain is none, .*{words}"):
        plan(full(settings), settings, house.store)


def test_the_plan_says_what_each_training_is_trained_on(built: House) -> None:
    settings = built.settings("data.lora=none")
    stages = plan(full(settings), settings, built.store)
    assert [one.stage.name for one in stages if one.state == "run"] == ["evaluate"], (
        "the others are the same"
    )
    lines = trained_on(settings, stages)
    assert lines == {
        "pretrain": str(built.data / "documents.jsonl"),
        "sft": str(built.data / "chats.jsonl"),
    }
    assert without_data(settings) == "no lora: data.lora is none"
    own_text = load(["data.sft=none", "data.lora=none"], environment={}).settings
    planned = plan(full(own_text), own_text, built.store)
    assert trained_on(own_text, planned) == {"pretrain": "python-docs, which ships with ttrain"}
    assert without_data(own_text) == "no sft, lora: data.sft, data.lora are none"
