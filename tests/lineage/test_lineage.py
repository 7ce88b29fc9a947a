"""What a model was made of, from the store or from MLflow alone: every link with its data, code, seed and settings."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.data_commands import in_process
from support.tracked_stores import pushed

from ttrain.config import Settings
from ttrain.core.files import write_json
from ttrain.errors import ArtifactError, UsageError
from ttrain.lineage.lineage import TRACKER, Lineage, lineage_of
from ttrain.lineage.lookup import resolve
from ttrain.reports.model_card import History
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.heldout_shards import heldout_shards
from ttrain.store.layout import Artifact
from ttrain.store.model_files import MODEL
from ttrain.store.registry import Registry
from ttrain.tracking import datasets
from ttrain.tracking.client import own_uri
from ttrain.tracking.mlflow_mirror import prepare

RUN = "full-20261121-160222-1a2b4"
SHA = "5" * 64
FILES = [{"name": "docs.jsonl", "sha256": SHA}]
OWN = {"pretrain.optim.lr": 0.5, "pretrain.seed": 7}  # that differ from the defaults
COUNTED = {"role": "train", "name": "docs.jsonl", "kept": 90, "tokens": 800, "bytes": 3000}
SHARDS = {
    "train": {"rows": 80, "tokens": 700, "bytes": 2700},
    "heldout": {"rows": 10, "tokens": 100, "bytes": 300},
    "files": [COUNTED],
}


def publish(
    home: Path, stage: str, key: str, used: Mapping[str, Artifact] | None = None, **manifest: Any
) -> Artifact:
    """An artifact as a stage leaves it; its key is filled up to its length."""
    store, key = ArtifactStore(home), key.ljust(64, "0")
    output = store.work(stage, key) / "output"
    (output / "model").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", MODEL):
        (output / "model" / name).write_text(key)
    ingredients = {
        "code": {"ttrain.x": key},
        "files": {},
        "settings": {},
        "inputs": {},
        **manifest.pop("ingredients", {}),
    }
    provenance = {
        "ttrain": "0.1.0",
        "commit": "c" * 40,
        "python": "3.11.7",
        "run": RUN,
        "run_id": "1" * 32,
    }
    told = {
        "inputs": {
            name: {"stage": a.stage, "key": a.key, "content": a.content}
            for name, a in (used or {}).items()
        },
        "ingredients": ingredients,
        "provenance": {**provenance, **manifest.pop("provenance", {})},
        "result": {},
        "seconds": 1.0,
    }
    return store.publish(stage, key, output, {**told, **manifest})


def make(home: Path, tokenizer: str = "a1b2c3d") -> dict[str, Artifact]:
    read = {"files": {"train": FILES}, "settings": {"reading.seed": 3, "tokenizer.vocab_size": 400}}
    where = {"files": {"train": ["/data/docs.jsonl"]}}
    made = {"tokenizer": publish(home, "tokenizer", tokenizer, ingredients=read, provenance=where)}
    for dataset in ("pretrain", "sft"):
        key = f"shards-{dataset}"
        made[key] = publish(
            home,
            key,
            f"5{dataset.encode().hex()}",
            {"tokenizer": made["tokenizer"]},
            ingredients=read,
            provenance=where,
            result=SHARDS,
        )
    learnt = {
        "settings": {
            "pretrain.seed": 7,
            "pretrain.optim.lr": 0.5,
            "pretrain.row_length": Settings().pretrain.row_length,
        }
    }
    given = {"tokenizer": made["tokenizer"], "shards": made["shards-pretrain"]}
    how = {"ranks": 2, "threads": 3, "precision": "bf16", "device": "cpu"}
    runtime = {"runtime": {"rows_per_device": 4}}
    made["pretrain"] = publish(
        home, "pretrain", "ba5e", given, ingredients=learnt, result=how, provenance=runtime
    )
    made["sft"] = publish(
        home, "sft", "5f7a00", {"base": made["pretrain"], "shards": made["shards-sft"]}
    )
    stages = [{"name": name, "key": one.key, "outcome": "completed"} for name, one in made.items()]
    record = {
        "run": RUN,
        "pipeline": "full",
        "outcome": "completed",
        "started_unix": 1.0,
        "seconds": 1.0,
        "stages": stages,
    }
    (home / "runs").mkdir(exist_ok=True)
    settings = Settings(name="mine").model_dump(mode="json")
    told = {
        "metrics": {},
        "settings": settings,
        "process": {"pid": 1, "started": 0},
        "model_set": "mine/1",
    }
    write_json(home / "runs" / f"{RUN}.json", {**record, **told})
    registry, names = Registry(home), {"mine-base": "pretrain", "mine-sft": "sft"}
    members = [registry.register_model(name, made[stage], RUN) for name, stage in names.items()]
    registry.register_set("mine", RUN, members, {name: one.key for name, one in made.items()}, {})
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("made") / "home"
    make(home)
    return home


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, add_database: Callable[[Path], None]) -> Path:
    home = tmp_path_factory.mktemp("tracked") / "home"
    add_database(home)
    make(home)
    pushed(home)
    Registry(home).promote("mine", "1")
    return home


@pytest.fixture
def shared(tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(tracked / "mlflow", tmp_path / "shared" / "mlflow")
    prepare(tmp_path / "shared")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own_uri(tmp_path / "shared"))
    return tmp_path / "shared"


def alone(home: Path, to: Path, *parts: str) -> Path:
    for part in parts:
        shutil.copytree(home / part, to / part)
    to.mkdir(exist_ok=True)
    shutil.copy(home / "registry.json", to)
    return to


def chain(found: Lineage) -> list[str]:
    return [artifact.stage for artifact in found.artifacts]


def stages_of(home: Path, text: str) -> list[Any]:
    return list(lineage_of(home, text).to_json()["stages"])


WHOLE = ["tokenizer", "shards-pretrain", "pretrain", "shards-sft", "sft"]


def test_the_store_alone_tells_the_whole_chain_under_every_name(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = made / "store" / "sft" / "5f7a00".ljust(64, "0") / "model"
    monkeypatch.chdir(made.parent)
    (made.parent / "mine" / "1").mkdir(
        parents=True
    )  # a registered model is not hidden by a directory of its name
    names = (
        "sft",
        "5f7a00",
        f"sft/{'5f7a00'.ljust(64, '0')}",
        f"{RUN}:sft",
        "latest:sft",
        RUN,
        "mine/1",
    )
    for text in (*names, str(place), str(place.relative_to(made.parent))):
        found = lineage_of(made, text)
        assert chain(found) == WHOLE, text
    assert chain(lineage_of(made, "ba5e00000000000000")) == WHOLE[:3]
    assert not (made / "mlflow").exists(), "asking makes no database"


def test_a_stage_has_data_with_counts_and_places_code_commit_seed_and_own_settings(
    made: Path,
) -> None:
    tokenizer, shards, base = stages_of(made, "pretrain")
    assert (tokenizer["seed"], base["seed"], base["commit"], base["settings"]) == (
        3,
        7,
        "c" * 40,
        OWN,
    )
    place, counts = (
        {"location": "/data/docs.jsonl"},
        {"documents": 90, "tokens": 800, "bytes": 3000},
    )
    assert shards["data"] == [{"part": "train", **FILES[0], **place, **counts}]
    assert base["inputs"]["shards"] == {"stage": "shards-pretrain", "key": shards["key"]}
    assert (
        base["code"] != shards["code"]
        and base["made_unix"]
        and base["content"] != shards["content"]
    )
    assert {stage["run"] for stage in (tokenizer, shards, base)} == {RUN}


@pytest.mark.usefixtures("shared")
def test_mlflow_alone_tells_what_the_store_told(tracked: Path, made: Path, tmp_path: Path) -> None:
    home = alone(tracked, tmp_path / "home")
    for text in ("mine@champion", "mine-sft/1"):
        assert chain(lineage_of(home, text)) == WHOLE, text
        for stage, same in zip(stages_of(home, text), stages_of(made, "sft"), strict=True):
            assert stage == {**same, "known_from": TRACKER, "made_unix": stage["made_unix"]}
    assert chain(lineage_of(home, "mine-base/1")) == WHOLE[:3]
    assert not (home / "store").exists()


@pytest.mark.usefixtures("shared")
def test_a_registered_name_is_the_stores_own_artifact_else_the_files_that_mlflow_kept(
    tracked: Path, tmp_path: Path
) -> None:
    home = alone(tracked, tmp_path / "home", "store")
    own = ArtifactStore(home).latest("sft").path / "model"
    versions = (
        "mine-sft/1",
        "mine-sft@champion",
        "mine/1",
        "mine@champion",
    )  # a set stands for the last of its models
    for text in (*versions, *(f"models:/{version}" for version in versions)):
        assert resolve(text, home).model == own, text
    there = r"there are mine/1, mine@champion, mine-base/1, mine-base@champion, mine-sft/1, mine-sft@champion"
    for text in ("mine-sft@nope", "mine-sft/7"):
        with pytest.raises(UsageError, match=f"no registered model '{text}'; .*{there}"):
            resolve(text, home)
    weights = (own / MODEL).read_text()
    shutil.rmtree(own.parent)
    kept = resolve("mine-sft@champion", home).model
    assert (kept / MODEL).read_text() == weights


def test_a_manifest_that_is_nowhere_is_named(tracked: Path, shared: Path, tmp_path: Path) -> None:
    home = alone(tracked, tmp_path / "home")
    for manifest in shared.glob("mlflow/artifacts/*/artifacts/sft/manifest.json"):
        manifest.unlink()
    with pytest.raises(
        ArtifactError,
        match=r"the manifest of sft 5f7a00000000 is neither in the store .* nor in MLflow",
    ):
        lineage_of(home, "mine-sft/1")


def test_a_model_that_continues_another_has_both_in_its_lineage(tmp_path: Path) -> None:
    first = make(tmp_path)
    given = {
        "tokenizer": first["tokenizer"],
        "base": first["pretrain"],
        "shards": first["shards-pretrain"],
    }
    continued = [{"key": "0" * 64, "step": 9, "differences": ["module ttrain.x changed"]}]
    publish(tmp_path, "pretrain", "ba5e22", given, continued=continued, extends="step-00000040")
    found = stages_of(tmp_path, "ba5e22")
    assert [stage["key"][:6] for stage in found if stage["stage"] == "pretrain"] == [
        "ba5e00",
        "ba5e22",
    ]
    assert [len(stage["notes"]) for stage in found] == [0, 0, 0, 2]


def test_the_command_prints_the_chain_and_its_json_round_trips(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(made))
    run = in_process(capsys)
    said = " ".join(run("lineage", "mine/1").out.split())
    counts = "90 records, 800 tokens, 3,000 bytes of text"
    words = (
        "mine/1: a set of models, of the run",
        "key ba5e00000000",
        "commit cccccccccccc seed 7",
        counts,
    )
    words += ("docs.jsonl sha256", "at /data/docs.jsonl", "pretrain.optim.lr=0.5", RUN)
    trained = "trained precision bf16, device cpu, ranks 2, threads 3, rows_per_device 4"
    for word in (*words, trained, "with ttrain 0.1.0, python 3.11.7"):
        assert word in said
    told = run("lineage", "mine/1", "--json").json
    assert [stage["stage"] for stage in told["stages"]] == WHOLE and (
        told["kind"],
        told["run"],
    ) == ("set", RUN)
    assert told["stages"][2]["inputs"]["shards"]["key"] == told["stages"][1]["key"]


def test_the_digest_of_a_data_set_is_that_of_its_files_and_how_they_are_read(
    tmp_path: Path,
) -> None:
    first = make(tmp_path / "first")["shards-pretrain"]
    other_tokenizer = make(tmp_path / "second", tokenizer="ffff")["shards-pretrain"]
    train, held_out = datasets.data_of(first)
    assert (train.name, train.tags[datasets.CONTEXT]) == ("pretrain", "training")
    assert json.loads(train.profile) == {"documents": 80, "bytes": 2700}
    assert (held_out.name, held_out.tags) == (
        "pretrain-heldout",
        {datasets.CONTEXT: "validation", "tokens": "100"},
    )
    assert [one.digest for one in datasets.data_of(other_tokenizer)] == [
        train.digest,
        held_out.digest,
    ]
    assert train.digest != held_out.digest
    assert [one.name for one in datasets.read_by({"shards": first}, trains=True)] == ["pretrain"]
    assert [one.name for one in datasets.read_by({"shards": first}, trains=False)] == [
        "pretrain-heldout"
    ]
    others = {"files": {"train": FILES}, "settings": {"reading.seed": 4}}
    changed = publish(
        tmp_path / "reading", "shards-pretrain", "1", ingredients=others, result=SHARDS
    )
    assert datasets.data_of(changed)[0].digest != train.digest
    settings = first.manifest["ingredients"]["settings"]
    renamed = {"files": {"train": [{"name": "x.jsonl", "sha256": SHA}]}, "settings": settings}
    same = publish(tmp_path / "renamed", "shards-pretrain", "1", ingredients=renamed, result=SHARDS)
    assert datasets.data_of(same)[0].digest == train.digest


def test_what_lies_behind_a_model_of_many_nights_is_walked_once(tmp_path: Path) -> None:
    nights: dict[str, Artifact] = {}  # each of which has read all before it
    for number in range(30):
        nights[f"learnt-{number:04}"] = publish(tmp_path, "shards-pretrain", f"{number:02}", nights)
    *_, last = nights.values()
    model = publish(tmp_path, "pretrain", "a1", {"shards": last, **nights})
    store = ArtifactStore(tmp_path)
    assert [*History.of(model, store).artifacts] == [*nights.values(), model]
    assert heldout_shards(model, store)["documents"].key == last.key
    assert lineage_of(tmp_path, model.key).artifacts[-1].key == model.key
