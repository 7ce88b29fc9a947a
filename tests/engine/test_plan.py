"""Keys and plans: what changes a key, what reruns, and the reasons that are shown."""

import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.planned_homes import AFTER_SFT, EVERYTHING, House, append, running, tokens

from ttrain import api
from ttrain.config.loading import load
from ttrain.core import hashing, machine
from ttrain.core.hashing import canonical_json, sha256_file
from ttrain.data import python_docs
from ttrain.engine.graph import Planned, Rerun
from ttrain.engine.planner import plan, plan_stage, trained_on, without_data
from ttrain.errors import UsageError
from ttrain.flows.full import full
from ttrain.store.layout import Artifact
from ttrain.tasks import EXISTING_MODEL, NEW_MODEL, OF_NIGHTS, PRETRAIN, SFT, STAGES

LORA_ON = {"lora", "evaluate"}
STEPS = (10, 25, 50, 75, 100)
NO_IDENTITY = """
runtime.devices=2 runtime.rows_per_device=3 runtime.device=cpu runtime.compile=true
runtime.threads=1 runtime.retries=5 runtime.timeout_seconds=9 runtime.checkpoint_every_steps=7
runtime.workers=3 runtime.sharding=dask runtime.dask_address=tcp://127.0.0.1:1
runtime.log_level=debug tracking.enabled=false tracking.experiment=other name=another
python_docs.chat_rows=500
"""  # python_docs is not read here


def test_place_speed_and_name_change_no_key(built: House) -> None:
    reasons = {(stage.state, stage.why) for stage in built.plan(*NO_IDENTITY.split()).values()}
    assert reasons == {("cached", ("same settings, inputs and code",))}


def test_a_weight_belongs_to_the_shards_and_not_to_the_tokenizer(house: House) -> None:
    paths = [house.data / "documents.jsonl", house.write("more.jsonl", '{"text": "b"}\n')]

    def weighted(*weights: float) -> str:
        entries = (f"{{path: {path}, weight: {weights[n]}}}" for n, path in enumerate(paths))
        return f"data.pretrain=[{', '.join(entries)}]"

    house.build(house.settings(weighted(1, 1)))
    assert running(house.plan(weighted(1.0, 1))) == set()
    changed = house.plan(weighted(1, 3))
    assert running(changed) == EVERYTHING - {"tokenizer", "shards-sft", "shards-lora"}
    assert changed["shards-pretrain"].why == ("weight of train file more.jsonl: 1.0 → 3.0",)
    plain = house.plan(f"data.pretrain={paths[0]},{paths[1]}")
    assert "weight of train file more.jsonl: 1.0 → none" in plain["shards-pretrain"].why


def test_an_existing_tokenizer_counts_by_its_bytes(house: House) -> None:
    first, copy = (house.write(f"{name}/tokenizer.json", "{}").parent for name in ("first", "copy"))
    house.build(house.settings(f"tokenizer.existing={first}"))
    house.write("first/tokenizer.json", '{"other": 1}')
    assert "tokenizer" in running(house.plan(f"tokenizer.existing={first}"))
    house.write("first/tokenizer.json", "{}")
    for same in (first, copy):
        assert running(house.plan(f"tokenizer.existing={same}")) == set()
    assert running(house.plan()) == EVERYTHING


def test_a_setting_reruns_its_stage_and_what_depends_on_it(built: House) -> None:
    for override, stages in {
        "tokenizer.vocab_size=300": EVERYTHING,
        "reading.heldout_fraction=0.1": EVERYTHING,
        "shards.block_bytes=2048": EVERYTHING - {"tokenizer"},
        "model.layers=2": {"pretrain", *AFTER_SFT},
        "pretrain.precision=fp32": {"pretrain", *AFTER_SFT},
        "sft.optim.lr=2e-4": AFTER_SFT,
        "lora.rank=4": LORA_ON,
        "evaluate.stride=64": {"evaluate"},
    }.items():
        assert running(built.plan(override)) == stages, override


def test_pairs_add_a_reference_and_a_tuning(house: House) -> None:
    pairs = f"data.dpo={house.write('pairs.jsonl', '{}')}"
    house.build(house.settings(pairs))
    assert [*house.plan(pairs)][-5:] == ["sft", "reference", "dpo", "lora", "evaluate"]
    assert running(house.plan(pairs, "dpo.beta=0.2")) == {"dpo", *LORA_ON}


def test_files_count_by_their_bytes_not_by_their_names_or_times(built: House) -> None:
    path = built.data / "documents.jsonl"
    os.utime(path, ns=(10**18, 10**18))
    assert running(built.plan()) == set()
    moved = path.rename(built.data / "other name.jsonl")
    assert running(built.plan(f"data.pretrain={moved}")) == set()


def test_one_byte_of_an_input_reruns_what_reads_it_and_what_follows(built: House) -> None:
    readers = {"chats": {"shards-sft", *AFTER_SFT}, "domain": {"shards-lora", *LORA_ON}}
    for name, stages in {"documents": EVERYTHING, **readers}.items():
        path = built.data / f"{name}.jsonl"
        original = path.read_bytes()
        path.write_bytes(original.replace(b": ", b":  ", 1))
        assert running(built.plan()) == stages
        path.write_bytes(original)
    assert running(built.plan()) == set(), "the original bytes have their artifacts"


def test_the_order_of_the_files_counts(house: House) -> None:
    first, second = house.write("1.jsonl", "1\n"), house.write("2.jsonl", "2\n")
    house.build(house.settings(f"data.pretrain=[{first}, {second}]"))
    stages = house.plan(f"data.pretrain=[{second}, {first}]")
    assert stages["tokenizer"].why == ("train files come in another order",)
    assert stages["shards-sft"].state == "run"


def test_a_heldout_file_and_a_tokenizer_file_enter_the_keys_of_their_readers(built: House) -> None:
    held = built.write("held.jsonl", "x\n")
    stages = built.plan(f"data.lora_heldout={held}")
    assert running(stages) == {"shards-lora", *LORA_ON}
    assert stages["shards-lora"].why == ("heldout file held.jsonl is new",)
    assert running(built.plan(f"data.tokenizer={held}")) == EVERYTHING


def test_a_stage_rebuilt_to_the_same_bytes_leaves_what_depends_on_it_cached(house: House) -> None:
    for override in ("pretrain.seed=1", "pretrain.seed=2"):
        house.build(house.settings(override), says=lambda stage, key: stage)
    assert running(house.plan("pretrain.seed=2", "sft.seed=1")) == set()
    assert len(house.store.artifacts("pretrain")) == 2
    assert len(house.store.artifacts("sft")) == 1


def test_canonical_json_spells_a_value_in_one_way() -> None:
    reordered = {"a": [1.5, None, "ü"], "b": 1}
    assert canonical_json({"b": 1, "a": [1.5, None, "ü"]}) == canonical_json(reordered)
    assert canonical_json({"a": 1}) != canonical_json({"a": 1.0})
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json({"a": float("nan")})


def test_a_stages_module_changes_its_key_alone(built: House, copy: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(hashing, "PACKAGE_DIRECTORY", copy)
    assert running(built.plan()) == set()
    module = copy / "tasks" / "sft.py"
    original = module.read_text(encoding="utf-8")
    append(module, "\nSOMETHING = 1\n")
    stages = built.plan("lora.rank=2")
    assert stages["sft"].why == ("module ttrain.tasks.sft changed",)
    assert {name for name in running(stages) if stages[name].key} == {"sft"}
    assert running(stages) == AFTER_SFT
    module.write_text(original, encoding="utf-8")
    assert running(built.plan()) == set(), "the original code has its artifacts"


def test_a_changed_setting_is_explained_with_its_old_and_new_value(built: House) -> None:
    stages = built.plan("sft.optim.lr=2e-4", "sft.epochs=null", "sft.tokens=9000")
    epochs, tokens = 'sft.epochs: "auto" → null', "sft.tokens: null → 9000"
    assert stages["sft"].why == (epochs, "sft.optim.lr: 0.001 → 0.0002", tokens)
    assert stages["lora"].why == ("waits for sft",)
    assert stages["evaluate"].why == ("waits for sft, lora",)


def test_a_changed_file_among_two_of_one_name_is_not_another_order(house: House) -> None:
    chats = f"data.sft={house.data}/*/x.jsonl"
    for folder in ("a", "b"):
        house.write(f"{folder}/x.jsonl", folder)
    house.build(house.settings(chats))
    house.write("a/x.jsonl", "changed")
    assert house.plan(chats)["shards-sft"].why == ("train file x.jsonl changed",)


def test_a_changed_input_artifact_is_explained(built: House) -> None:
    settings = built.settings()
    inputs = {"base": built.store.latest("pretrain"), "shards": built.store.latest("shards-sft")}
    before = plan_stage(SFT, settings, built.store, inputs)
    inputs["base"] = built.build(built.settings("pretrain.seed=2"))["pretrain"]
    after = plan_stage(SFT, built.settings("sft.seed=9"), built.store, inputs)
    old, new = (each.ingredients["inputs"]["base"][:12] for each in (before, after))
    seed, base = "sft.seed: 1 → 9", f"input base: {old} → {new}"
    assert after.why in ((seed,), (seed, base))
    assert old != new
    shutil.rmtree(built.store.root / "store" / "sft")
    built.publish(before)
    assert plan_stage(SFT, settings, built.store, inputs).why == (base,)


def test_a_first_run_and_a_damaged_artifact_are_told_apart(house: House) -> None:
    stages = house.plan()
    assert stages["tokenizer"].why == ("never run before",) and stages["tokenizer"].key
    for name, sources in {"shards-sft": "tokenizer", "sft": "pretrain, shards-sft"}.items():
        assert (stages[name].key, stages[name].why) == (None, (f"waits for {sources}",))
    artifacts = house.build(house.settings())
    (artifacts["tokenizer"].path / "heldout" / "file").unlink()
    stages = house.plan()
    assert stages["tokenizer"].why == ("its artifact is damaged: heldout/file is missing",)
    assert running(stages) == EVERYTHING


def test_the_most_similar_and_then_the_newest_artifact_is_compared_with(built: House) -> None:
    built.build(built.settings("evaluate.seed=5", "evaluate.stride=64", "evaluate.new_tokens=1"))
    assert built.plan("evaluate.seed=6")["evaluate"].why == ("evaluate.seed: 1 → 6",)
    near = built.plan("evaluate.seed=5", "evaluate.stride=64", "evaluate.new_tokens=2")
    assert near["evaluate"].why == ("evaluate.new_tokens: 1 → 2",)
    for seed in (2, 3, 4):
        built.build(built.settings(f"evaluate.seed={seed}"))
    assert built.plan("evaluate.seed=9")["evaluate"].why == ("evaluate.seed: 4 → 9",)


def test_force_follows_to_what_depends_on_a_stage_and_nowhere_else(built: House) -> None:
    for force, stages in {
        "sft": AFTER_SFT,
        "shards-lora": {"shards-lora", *LORA_ON},
        "tokenizer": EVERYTHING,
        "evaluate shards-sft": {"shards-sft", *AFTER_SFT},
    }.items():
        planned = built.plan(force=frozenset(force.split()))
        assert running(planned) == stages
        assert {name for name, stage in planned.items() if stage.forced} == stages
        assert {planned[name].why for name in stages} == {("asked to run again",)}


def test_stages_are_named_by_a_text_or_a_list_and_found_by_their_names(house: House) -> None:
    planned = api.plan("full", house.settings(), home=house.store.root, force="tokenizer, sft")
    assert planned.rerun.force == {"tokenizer", "sft"} and planned["sft"].name == "sft"
    with pytest.raises(KeyError, match="sfx"):
        planned["sfx"]
    with pytest.raises(UsageError, match=r"'sfft'; .*sft\?.*tokenizer,.*evaluate"):
        house.plan(force=frozenset({"sfft"}))


def test_the_quickstart_begins_with_its_source_and_own_files_do_without(house: House) -> None:
    settings = load([], environment={}).settings
    quickstart = plan(full(settings), settings, house.store)
    starts = {EXISTING_MODEL.name, NEW_MODEL.name}  # instead of pretraining
    others = {*starts, *OF_NIGHTS, "shards-dpo", "reference", "dpo", "teacher"}  # no pairs
    assert [planned.name for planned in quickstart] == [n for n in STAGES if n not in others]
    shipped = {"name": "python.jsonl.zst", "sha256": sha256_file(python_docs.text_file())}
    assert quickstart[0].ingredients["files"] == {"python": [shipped]}
    assert "source" not in house.plan()


def test_the_plan_as_json_has_its_shape(built: House) -> None:
    stages = api.plan("full", built.settings("sft.seed=7"), home=built.store.root)
    printed = json.loads(json.dumps(stages.to_json()))
    shown = {stage.pop("name"): stage for stage in printed["stages"]}
    assert len(shown) == len(printed["stages"])
    assert (printed["pipeline"], [*shown]) == ("full", [*stages.graph])
    path = str(built.store.path("pretrain", shown["pretrain"]["key"]))
    assert (shown["pretrain"]["state"], shown["pretrain"]["path"]) == ("cached", path)
    why = ["sft.seed: 1 → 7"]
    assert shown["sft"] == {**shown["sft"], "state": "run", "path": None, "why": why}
    unknown = {"state": "run", "key": None, "path": None, "notes": []}
    assert shown["lora"] == {**unknown, "why": ["waits for sft"]}


def pretrain_planned(house: House, *overrides: str, extend: bool = False) -> Planned:
    store = house.store
    inputs = {"tokenizer": store.latest("tokenizer"), "shards": store.latest("shards-pretrain")}
    return plan_stage(PRETRAIN, house.settings(*overrides), store, inputs, Rerun(extend=extend))


def trained(house: House, steps: int, *overrides: str, kept: Any = STEPS) -> Artifact:
    """A finished run of that many steps, with checkpoints."""
    planned = pretrain_planned(house, *tokens(steps), *overrides)
    result = {"rows": {"rows": 1000}, "steps": steps, "tokens": steps * 4096}
    return house.publish(planned, str(steps), result, [step for step in kept if step <= steps])


@pytest.mark.parametrize(
    ("schedule", "new_steps", "step"),
    [
        ("kind=linear decay_fraction=0.5", 200, 50),
        ("kind=linear decay_fraction=0.5", 60, 25),
        ("kind=linear decay_fraction=1", 200, 10),
        ("kind=constant", 200, 100),
        ("kind=constant", 30, 25),
        ("kind=cosine", 200, 10),
        ("kind=cosine warmup_steps=5", 200, None),
    ],
)
def test_extending_precedes_a_decay(built: House, schedule: str, new_steps: int, step: Any) -> None:
    overrides = [f"pretrain.schedule.{word}" for word in schedule.split()]
    artifact = trained(built, 100, *overrides)
    planned = pretrain_planned(built, *tokens(new_steps), *overrides, extend=True)
    start = step and artifact.path / "checkpoints" / f"step-{step:08d}"
    assert (planned.state, planned.start_from) == ("run", start)
    assert (f"step {step}" if step else "starts from scratch") in planned.why[0]
    assert pretrain_planned(built, *tokens(new_steps), *overrides).start_from is None


def test_extending_refuses_a_run_that_differs_in_more_than_its_budget(built: House) -> None:
    trained(built, 100)
    assert pretrain_planned(built, *tokens(200), extend=True).start_from
    for other in ("pretrain.optim.lr=0.5", "model.layers=2", "pretrain.schedule.floor=0.1"):
        refused = pretrain_planned(built, *tokens(200), other, extend=True)
        assert refused.start_from is None and "starts from scratch" in refused.why[0]


def test_extending_takes_the_furthest_run_that_is_undamaged(built: House) -> None:
    def start() -> Path | None:
        return pretrain_planned(built, *tokens(400), extend=True).start_from

    trained(built, 200, "pretrain.schedule.floor=0.1")  # further, but of another schedule
    short, long = trained(built, 100), trained(built, 150, kept=(10, 70))
    assert start() == long.path / "checkpoints" / "step-00000070"
    (long.path / "heldout" / "file").unlink()
    assert start() == short.path / "checkpoints" / "step-00000050"


def test_extending_continues_no_changed_code(built: House, copy: Path, monkeypatch: Any) -> None:
    trained(built, 100)
    monkeypatch.setattr(hashing, "PACKAGE_DIRECTORY", copy)
    assert pretrain_planned(built, *tokens(200), extend=True).start_from
    append(copy / "train" / "optim.py", "\nSOMETHING = 1\n")
    assert pretrain_planned(built, *tokens(200), extend=True).start_from is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("data.sft=FILE", "sft starts from .*data.pretrain=python-docs .*or sft.start_from=MODEL"),
        ("data.lora=FILE", "lora starts from .*or lora.start_from=MODEL"),
        ("data.sft=FILE sft.start_from=none", "no text for a tokenizer; set data.tokenizer=FILE"),
    ],
)
def test_chats_without_documents_are_refused(house: House, overrides: str, words: str) -> None:
    arguments = overrides.replace("FILE", str(house.data / "chats.jsonl")).split()
    settings = load(arguments, environment={}).settings
    with pytest.raises(UsageError, match=f"data.pretrain is none, .*{words}"):
        plan(full(settings), settings, house.store)


def test_the_plan_shows_what_each_training_is_trained_on(built: House) -> None:
    settings = built.settings("data.lora=none")
    stages = plan(full(settings), settings, built.store)
    assert [planned.name for planned in stages if planned.state == "run"] == ["evaluate"]
    files = {"pretrain": "documents", "sft": "chats"}
    lines = {stage: str(built.data / f"{name}.jsonl") for stage, name in files.items()}
    assert trained_on(settings, stages) == lines
    assert without_data(settings) == "no lora: data.lora is none"
    quickstart = load(["data.sft=none", "data.lora=none"], environment={}).settings
    planned = plan(full(quickstart), quickstart, built.store)
    assert trained_on(quickstart, planned) == {"pretrain": "python-docs, which ships with ttrain"}
    assert without_data(quickstart) == "no sft, lora: data.sft, data.lora are none"


def test_an_existing_model_instead_of_a_new_one_is_one_change_both_ways(built: House) -> None:
    """Not a change for each size of the new model; other changes are listed as always."""
    store, rate = built.store, "pretrain.optim.lr=0.5"
    inputs = {"tokenizer": store.latest("tokenizer"), "shards": store.latest("shards-pretrain")}
    night = built.settings(f"pretrain.start_from={built.data}", rate)
    planned = plan_stage(PRETRAIN, night, store, {**inputs, "base": store.latest("sft")})
    assert planned.why == (
        "starts from an existing model instead of a new one",
        "pretrain.optim.betas: [0.5, 0.95] → [0.9, 0.95]",
        "pretrain.optim.embedding_lr: 0.04 → null",
        "pretrain.optim.head_lr: 0.004 → null",
        "pretrain.optim.lr: 0.004 → 0.5",
    )
    shutil.rmtree(store.latest("pretrain").path)
    built.publish(planned)
    again = plan_stage(PRETRAIN, built.settings(rate), store, inputs)
    assert again.why[0] == "starts from a new model instead of an existing one"
    changed = {line.partition(": ")[0] for line in again.why[1:]}
    assert changed == {f"pretrain.optim.{name}" for name in ("embedding_lr", "head_lr", "betas")}


def test_other_versions_rerun_nothing_and_are_noted(built: House) -> None:
    planned = built.plan()["sft"]
    shutil.rmtree(built.store.latest("sft").path)
    provenance = {"libraries": {"torch": "2.12.0", "of long ago": "1"}, "python": "3.10.1"}
    built.publish(planned, planned.known_key, provenance=provenance)
    stages = built.plan()
    here = f"here is torch {machine.versions()['torch']}, Python {platform.python_version()}"
    note = f"made with torch 2.12.0, Python 3.10.1, {here}"
    assert running(stages) == set()
    assert {name: stage.notes for name, stage in stages.items() if stage.notes} == {"sft": [note]}
    assert stages["sft"].row[3] == f"same settings, inputs and code; {note}"
    assert not any(stage.notes for stage in built.plan("sft.seed=2").values())


def test_a_long_explanation_is_short_on_the_terminal_and_complete_in_json(built: House) -> None:
    names = ("seed=7", "optim.lr=0.5", "epochs=3.0", "stride=8", "dropped_fraction=0.5")
    sft = built.plan(*(f"sft.{name}" for name in names))["sft"]
    assert sft.row[3] == f"{'; '.join(sft.why[:3])} and 2 more"
    assert sft.to_json()["why"] == list(sft.why) and len(sft.why) == 5


def test_mistakes_in_several_data_sets_are_listed_together(house: House) -> None:
    home, settings = house.store.root, house.settings("data.lora=gone")
    assert len(api.plan("full", settings, until="shards-sft", home=home)) == 2
    house.write("documents.jsonl", '{"question": "q", "answer": "a"}\n')
    with pytest.raises(UsageError, match=r"^data\.pretrain needs .*\ndata\.lora is 'gone'"):
        api.plan("full", settings, home=home)
    with pytest.raises(UsageError, match=r"^data\.pretrain needs"):
        api.plan("full", settings, only="tokenizer", home=home)
    own_text = house.settings(f"data.tokenizer={settings.data.pretrain[0]}")
    with pytest.raises(UsageError, match=r"^data\.tokenizer needs"):
        api.plan("full", own_text, only="tokenizer", home=home)
