"""Starting from a model that exists: which stages run, what enters the keys, and its weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.chat_templates import CHATML, make
from support.comparing import same
from support.planned_homes import House, running
from support.tiny_stages import Home, stage_settings
from support.tiny_trainers import tiny_model
from support.web import COMMIT, FakeHub, use_hub
from transformers import AutoTokenizer

from ttrain.config.loading import load
from ttrain.data import existing
from ttrain.data.encoder import Encoder
from ttrain.errors import UsageError
from ttrain.model import factory
from ttrain.tasks import new_model, pretrain
from ttrain.tasks.base_model import prepare_base_model

OTHERS = {"base-model", "sft", "lora", "evaluate"}


def folder(house: House) -> Path:
    """A folder like a model's, to those who only look at its files."""
    house.write("mine/config.json", json.dumps({"max_position_embeddings": 1024}))
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


def test_a_start_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    sizes = tmp_path / "settings.yaml"
    sizes.write_text("model: {layers: 2}")
    load(["sft.start_from=a"], files=[sizes], environment={})
    for overrides, message in (
        ("sft.start_from=a lora.start_from=b", "sft.start_from is a, lora.start_from is b"),
        ("sft.start_from=sft", r"it takes .*\./sft"),
        ("lora.start_from=a tokenizer.existing=null tokenizer.template=ttrain", "whose emb"),
        ("sft.start_from=a model.layers=2", r"^model.layers .*sft\.start_from"),
    ):
        with pytest.raises(UsageError, match=message):
            load(overrides.split(), files=[sizes], environment={})


def test_a_folder_without_a_fitting_model_is_refused(house: House) -> None:
    mine = folder(house)
    with pytest.raises(UsageError, match=r"lora.row_length.*sft.start_from.*1024"):
        house.plan(f"sft.start_from={mine}", "lora.row_length=1025", "sft.row_length=1024")
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


def save(model: Any, directory: Path, template: str | None = None, **options: Any) -> Path:
    """A folder as `save_pretrained` leaves it, with a foreign tokenizer of 320 tokens at most."""
    make(directory, template)
    model.save_pretrained(directory, **options)
    return directory


def taken(directory: Path, output: Path) -> tuple[Encoder, dict[str, Any]]:
    """The tokenizer and the figures, as the two stages make them."""
    tokenizer, files = output / "tokenizer", existing.model_files(str(directory), "sft.start_from")
    existing.install(existing.tokenizer_files(str(directory)), tokenizer, "auto")
    figures = prepare_base_model(files, tokenizer, output / "model")
    return Encoder(tokenizer), figures


@pytest.fixture
def size(tmp_path: Path) -> int:
    """The vocabulary of the foreign tokenizer."""
    make(tmp_path, None)
    return len(json.loads((tmp_path / "tokenizer.json").read_bytes())["model"]["vocab"])


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_begin_as_the_mean_of_their_words(tmp_path: Path, size: int, tied: bool) -> None:
    model = tiny_model(vocab=size, init_std=0.3, tie_embeddings=tied)
    encoder, figures = taken(save(model, tmp_path / "source"), tmp_path)
    grown = factory.load(tmp_path / "model")
    added = ["<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
    assert figures["added_tokens"] == sorted(added)
    assert (figures["vocab_size_before"], figures["vocab_size"]) == (size, size + 6)
    assert len(encoder) == size + 6
    before, after = factory.state(model), factory.state(grown)
    tables = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    for name, table in {name: after.pop(name) for name in tables}.items():
        old = before.pop(name)
        assert torch.equal(table[:size], old)
        assert len(torch.unique(table[size:], dim=0)) == 6, "an adapter has to tell them apart"
        for token in added:
            pieces = encoder.encode([token.strip("<|>")])[0]
            torch.testing.assert_close(table[encoder.special(token)], old[pieces].mean(dim=0))
    assert same(before, after)
    ids = torch.randint(0, size, (2, 9), generator=torch.Generator().manual_seed(1))
    assert torch.equal(grown(ids).logits[..., :size], model.eval()(ids).logits)


def test_its_chat_template_is_kept_or_given(tmp_path: Path, size: int) -> None:
    model = tiny_model(vocab=size)
    for template, kept in ((CHATML, "own"), (None, "ttrain")):
        encoder, figures = taken(save(model, tmp_path / kept / "source", template), tmp_path / kept)
        assert encoder.template == kept
        opened = AutoTokenizer.from_pretrained(tmp_path / kept / "model", local_files_only=True)
        assert opened.chat_template == encoder.jinja
        assert ("<|end|>" in figures["added_tokens"]) == (kept == "ttrain")
        config = factory.load(tmp_path / kept / "model").generation_config
        assert (config.pad_token_id, config.bos_token_id) == (encoder.pad_id, encoder.bos_id)
        assert config.eos_token_id[:1] == [encoder.eos_id] and encoder.end_id in config.eos_token_id


def test_shards_in_half_precision_become_one_file_in_fp32(tmp_path: Path, size: int) -> None:
    model = tiny_model(vocab=size).to(torch.bfloat16)
    source = save(model, tmp_path / "source", max_shard_size="10KB")
    assert len(list(source.glob("model-*.safetensors"))) > 2
    taken(source, tmp_path)
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    for name, tensor in factory.state(model).items():
        assert torch.equal(after[name][: len(tensor)], tensor.float())


def test_a_padded_vocabulary_is_not_grown(tmp_path: Path, size: int) -> None:
    model = tiny_model(vocab=size + 20)
    source = save(model, tmp_path / "source")
    # `from_pretrained` would load this adapter, and its base from anywhere
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "no/where", "r": 1}
    (source / "adapter_config.json").write_text(json.dumps(adapter))
    encoder, figures = taken(source, tmp_path / "same")
    before = model.get_input_embeddings().weight
    after = factory.load(tmp_path / "same" / "model").get_input_embeddings().weight
    assert figures["vocab_size"] == figures["vocab_size_before"] == size + 20
    assert len(encoder) == size + 6
    changed = (after != before).any(dim=1).nonzero()[:, 0].tolist()
    assert changed == list(range(size, size + 6)), "unused rows"


def test_pretraining_from_a_base_begins_with_its_weights(tmp_path: Path) -> None:
    home, settings, base = Home.make(tmp_path / "home"), stage_settings(steps=2), tmp_path / "base"
    encoder = Encoder(home.tokenizer.path)
    model = new_model.new(settings.model.model_copy(update={"layers": 1}), encoder, seed=9)
    new_model.write(model, home.tokenizer.path, base / "model")
    trained = pretrain.prepare(settings, {**home.paths, "base": base}, encoder)
    assert same(trained.state(), load_file(base / "model" / "model.safetensors"))
    result = home.pretrain(settings, tmp_path / "out", {"base": base})
    after = factory.load(tmp_path / "out" / "model")
    assert result["steps"] == 2 and after.config.num_hidden_layers == 1, "model.layers is 2"
    assert not same(factory.state(after), load_file(base / "model" / "model.safetensors"))
