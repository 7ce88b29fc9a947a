"""What a model was made of, from the store or from MLflow alone: data, code, seed, settings."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support.data_commands import in_process
from support.tracked_stores import pushed

from ttrain.config import Settings
from ttrain.core.files import write_json
from ttrain.errors import UsageError
from ttrain.lineage.lineage import lineage_of
from ttrain.lineage.lookup import resolve
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.model_files import MODEL
from ttrain.store.registry import Registry
from ttrain.tracking import datasets
from ttrain.tracking.client import own_uri

RUN = "full-20261121-160222-1a2b4"
SFT_KEY = "5f7a00".ljust(64, "0")
CHAIN = ["tokenizer", "shards-pretrain", "pretrain", "shards-sft", "sft"]
FILES = [{"name": "docs.jsonl", "sha256": "5" * 64}]
READING = {"reading.seed": 3, "tokenizer.vocab_size": 400}
CHANGED = {"pretrain.optim.lr": 0.5, "pretrain.seed": 7}  # that differ from the defaults
COUNTS = {"tokens": 800, "bytes": 3000}
SHARDS = {
    "train": {"rows": 80, "tokens": 700, "bytes": 2700},
    "heldout": {"rows": 10, "tokens": 100, "bytes": 300},
    "files": [{"role": "train", "name": "docs.jsonl", "kept": 90, **COUNTS}],
}
NOTHING: Mapping[str, Any] = MappingProxyType({})


def publish(
    home: Path,
    stage: str,
    key: str,
    inputs: Mapping[str, Artifact] = NOTHING,
    settings: Mapping[str, Any] = NOTHING,
    files: list[dict[str, str]] | None = None,
    **manifest: Any,
) -> Artifact:
    """An artifact as a stage leaves it; its key is filled up to its length."""
    store, key = ArtifactStore(home), key.ljust(64, "0")
    output = store.work(stage, key) / "output"
    (output / "model").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", MODEL):
        (output / "model" / name).write_text(key)
    places = {"train": [f"/data/{file['name']}" for file in files]} if files else {}
    provenance = {"commit": "c" * 40, "python": "3.11.7", "run": RUN, "files": places}
    known = ("stage", "key", "content")
    used = {name: {field: getattr(one, field) for field in known} for name, one in inputs.items()}
    ingredients = {"code": {"ttrain.x": key}, "settings": dict(settings)}
    ingredients["files"] = {"train": files} if files else {}
    recorded = {"inputs": used, "ingredients": ingredients, "provenance": provenance}
    return store.publish(stage, key, output, {**recorded, "result": {}, **manifest})


def make(home: Path) -> dict[str, Artifact]:
    """A run with its artifacts, its record, and its registered models."""
    tokenizer = publish(home, "tokenizer", "a1b2c3d", settings=READING, files=FILES)
    made = {"tokenizer": tokenizer}
    for name, key in (("shards-pretrain", "5a"), ("shards-sft", "5b")):
        inputs = {"tokenizer": tokenizer}
        made[name] = publish(home, name, key, inputs, READING, FILES, result=SHARDS)
    inputs = {"tokenizer": tokenizer, "shards": made["shards-pretrain"]}
    settings = {**CHANGED, "pretrain.row_length": Settings().pretrain.row_length}
    result = {"ranks": 2, "threads": 3, "precision": "bf16", "device": "cpu"}
    made["pretrain"] = publish(home, "pretrain", "ba5e", inputs, settings, result=result)
    inputs = {"base": made["pretrain"], "shards": made["shards-sft"]}
    made["sft"] = publish(home, "sft", SFT_KEY, inputs)
    stages = [{"name": name, "key": one.key, "outcome": "completed"} for name, one in made.items()]
    record = {"run": RUN, "pipeline": "full", "outcome": "completed", "started_unix": 1.0}
    record |= {"seconds": 1.0, "stages": stages, "metrics": {}, "process": {"pid": 1, "started": 0}}
    record |= {"model_set": "mine/1", "settings": Settings(name="mine").model_dump(mode="json")}
    (home / "runs").mkdir(exist_ok=True)
    write_json(home / "runs" / f"{RUN}.json", record)
    registry, names = Registry(home), {"mine-base": "pretrain", "mine-sft": "sft"}
    members = [registry.register_model(name, made[stage], RUN) for name, stage in names.items()]
    registry.register_set("mine", RUN, members, {name: one.key for name, one in made.items()}, {})
    return made


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("made") / "home"
    make(home)
    return home


def stages_of(home: Path, text: str) -> list[Any]:
    return list(lineage_of(home, text).to_json()["stages"])


def test_every_name_leads_to_the_whole_chain(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = home / "store" / "sft" / SFT_KEY / "model"
    monkeypatch.chdir(home.parent)
    (home.parent / "mine" / "1").mkdir(parents=True)  # hides no registered model
    paths = (str(place), str(place.relative_to(home.parent)))
    names = ("sft", "5f7a00", f"sft/{SFT_KEY}", f"{RUN}:sft", "latest:sft", RUN, "mine/1")
    for text in (*names, *paths):
        assert [stage["stage"] for stage in stages_of(home, text)] == CHAIN, text
    assert not (home / "mlflow").exists(), "a look-up makes no database"


def test_a_stage_has_its_data_counts_places_code_seed_and_settings(home: Path) -> None:
    tokenizer, shards, base = stages_of(home, "pretrain")
    assert (tokenizer["seed"], base["seed"], base["commit"]) == (3, 7, "c" * 40)
    assert base["settings"] == CHANGED
    file = {"part": "train", **FILES[0], "location": "/data/docs.jsonl", "documents": 90, **COUNTS}
    assert shards["data"] == [file]
    assert base["inputs"]["shards"] == {"stage": "shards-pretrain", "key": shards["key"]}
    assert base["code"] != shards["code"] and base["content"] != shards["content"]
    assert {stage["run"] for stage in (tokenizer, shards, base)} == {RUN}


def test_mlflow_has_what_the_store_lacks(
    tmp_path: Path, add_database: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, bare_home = tmp_path / "shared", tmp_path / "home"
    add_database(shared)
    make(shared)
    pushed(shared)
    Registry(shared).promote("mine", "1")
    bare_home.mkdir()
    shutil.copy(shared / "registry.json", bare_home)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own_uri(shared))
    for text in ("mine@champion", "mine-sft/1"):
        for stage, same in zip(stages_of(bare_home, text), stages_of(shared, "sft"), strict=True):
            assert stage == {**same, "known_from": "mlflow"}
    assert not (bare_home / "store").exists()
    # a set stands for the last of its models
    for text in ("mine-sft@champion", "mine-sft/1", "mine/1", "models:/mine@champion"):
        model = resolve(text, bare_home).model
        assert model == bare_home / "store" / "sft" / SFT_KEY / "model", text
        assert (model / MODEL).read_text() == SFT_KEY
    names = "mine/1, mine@champion, mine-base/1, mine-base@champion, mine-sft/1, mine-sft@champion"
    for text in ("mine-sft@nope", "mine-sft/7"):
        with pytest.raises(UsageError, match=f"'{text}'.*{names}"):
            resolve(text, bare_home)


def test_a_model_that_continues_another_has_both_in_its_lineage(tmp_path: Path) -> None:
    first = make(tmp_path)
    inputs = {"base": first["pretrain"], "shards": first["shards-pretrain"]}
    continued = [{"key": "0" * 64, "step": 9, "differences": ["module x changed"]}]
    publish(tmp_path, "pretrain", "ba5e22", inputs, continued=continued, extends="step-00000040")
    stages = stages_of(tmp_path, "ba5e22")
    keys = [stage["key"][:6] for stage in stages if stage["stage"] == "pretrain"]
    assert keys == ["ba5e00", "ba5e22"]
    assert [len(stage["notes"]) for stage in stages] == [0, 0, 0, 2]


def test_the_command_prints_the_chain_and_its_json_round_trips(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(home))
    run = in_process(capsys)
    output = run("lineage", "mine/1").out
    facts = ("ba5e00000000", "cccccccccccc", "800 tokens", "/data/docs.jsonl", RUN, "3.11.7")
    assert [text for text in (*facts, "pretrain.optim.lr=0.5", "bf16") if text not in output] == []
    report = run("lineage", "mine/1", "--json").json
    assert (report["kind"], report["run"]) == ("set", RUN)
    assert report["stages"] == stages_of(home, "mine/1")


def test_the_digest_of_a_data_set_covers_files_and_reading(tmp_path: Path) -> None:
    def digests(home: str, settings: Mapping[str, Any], name: str = "docs.jsonl") -> list[str]:
        files = [{**FILES[0], "name": name}]
        given = (tmp_path / home, "shards-pretrain", "1", {}, settings, files)
        return [data.digest for data in datasets.data_of(publish(*given, result=SHARDS))]

    train, heldout = digests("first", READING)
    assert train != heldout and train != digests("reading", {"reading.seed": 4})[0]
    assert digests("renamed", READING, "x.jsonl") == [train, heldout]
    made = make(tmp_path / "tokenizer")["shards-pretrain"]
    assert [data.digest for data in datasets.data_of(made)] == [train, heldout]
