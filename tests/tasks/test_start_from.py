"""Starting from a model that exists: which stages run, and what enters the keys."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.planned_homes import House, running
from support.web import COMMIT, FakeHub, use_hub

from ttrain.config.loading import load
from ttrain.data import existing
from ttrain.errors import UsageError

OTHERS = {"base-model", "sft", "lora", "evaluate"}


def folder(house: House, positions: int = 1024) -> Path:
    """A folder like a model's, to those who only look at its files."""
    house.write("mine/config.json", json.dumps({"max_position_embeddings": positions}))
    house.write("mine/model.safetensors", "weights")
    return house.write("mine/tokenizer.json", "{}").parent


def test_each_result_feeds_the_stage_that_starts_from_it(house: House) -> None:
    here = folder(house)
    usual = {"pretrain": "base-model", "sft": "pretrain", "lora": "sft", "evaluate": "pretrain"}
    wanted = {
        f"pretrain.start_from={here}": usual,
        f"sft.start_from={here}": {"sft": "base-model", "lora": "sft", "evaluate": "base-model"},
        "lora.start_from=pretrain": {"lora": "pretrain", "evaluate": "pretrain"},
    }
    for override, bases in wanted.items():
        house.build(house.settings(override))
        stages = house.plan(override)
        assert {stage: stages[stage].inputs["base"].stage for stage in bases} == bases
        assert running(stages) == set()


def test_an_existing_model_counts_by_the_bytes_that_are_read(house: House) -> None:
    here = folder(house)
    house.build(house.settings(f"sft.start_from={here}"))
    moved = shutil.copytree(here, house.data / "moved" / "elsewhere")
    house.write("moved/elsewhere/README.md", "not read")
    house.write("moved/elsewhere/model-00001-of-00002.safetensors", "not read either")
    assert running(house.plan(f"sft.start_from={moved}")) == set()
    house.write("moved/elsewhere/model.safetensors", "weightS")
    stages = house.plan(f"sft.start_from={moved}")
    assert running(stages) == OTHERS
    assert stages["base-model"].why == ("weights file model.safetensors changed",)


def test_sizes_are_not_in_the_key_of_an_existing_model(house: House) -> None:
    start = f"pretrain.start_from={folder(house)}"
    house.build(house.settings(start))
    sizes = house.write("sizes.yaml", "model: {layers: 2, max_length: 64}")
    assert running(house.plan(start, files=[sizes])) == set()
    head = house.plan(start, "model.multi_token.weight=0.5")
    assert running(head) == OTHERS - {"base-model"} | {"pretrain"}


def test_a_start_that_makes_no_sense_is_refused() -> None:
    for overrides, message in (
        ("sft.start_from=a lora.start_from=b", "sft.start_from is a, lora.start_from is b"),
        ("sft.start_from=sft", r"it takes .*\./sft"),
        ("lora.start_from=a tokenizer.existing=null tokenizer.template=ttrain", "whose emb"),
    ):
        with pytest.raises(UsageError, match=message):
            load(overrides.split(), environment={})


def test_sizes_given_beside_a_model_that_exists_are_refused_by_name(tmp_path: Path) -> None:
    path, start = tmp_path / "settings.yaml", "sft.start_from=a"
    path.write_text("model: {layers: 2}")
    load([start], files=[path], environment={})
    with pytest.raises(UsageError, match=r"^model.layers .*sft\.start_from"):
        load([start, "model.layers=2"], environment={})


def test_a_folder_without_a_model_is_refused_with_what_it_lacks(house: House) -> None:
    mine = folder(house)
    (mine / "tokenizer.json").unlink()
    house.write("adapter/adapter_config.json", "{}")
    house.write("pickled/config.json", "{}")
    house.write("pickled/pytorch_model.bin", "")
    for name, message in {
        "mine": "tokenizer.existing is '.*mine', .*tokenizer.json",
        "adapter": "`ttrain export .*adapter --merge",
        "pickled": "pickles may run code",
        "nowhere": "'.*nowhere'",
    }.items():
        with pytest.raises(UsageError, match=message):
            house.plan(f"sft.start_from={house.data / name}")


def test_rows_longer_than_the_model_takes_are_refused(house: House) -> None:
    here = folder(house, positions=128)
    with pytest.raises(UsageError, match=r"lora.row_length.*sft.start_from.*128"):
        house.plan(f"sft.start_from={here}", "sft.row_length=128")


def test_a_model_of_the_hub_is_fetched_once(tmp_path: Path, hub: FakeHub, monkeypatch: Any) -> None:
    use_hub(monkeypatch, hub.site.url, tmp_path / "home")
    hub.commits[COMMIT] |= {"config.json": b"{}", "README.md": b"", "pytorch_model.bin": b""}
    files = existing.model_files("someone/small", "sft.start_from")
    names = [path.name for paths in files.values() for path in paths]
    assert sorted(names) == ["config.json", "model.safetensors", "tokenizer.json"]
    fetched = [path for _, path, _ in hub.site.asked if "resolve" in path]
    assert not [path for path in fetched if path.endswith((".md", ".bin"))]
    hub.site.asked.clear()
    assert existing.model_files(f"someone/small@{COMMIT}", "sft.start_from") == files
    assert hub.site.asked == []
