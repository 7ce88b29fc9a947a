"""Models that training starts from: their weights, and the stages that continue them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chat_templates import CHATML, make
from support.comparing import same
from support.tiny_stages import Home, stage_settings
from support.tiny_trainers import tiny_model
from transformers import AutoTokenizer

from ttrain.data import existing
from ttrain.data.encoder import Encoder
from ttrain.errors import ArtifactError
from ttrain.model import factory
from ttrain.tasks import new_model, pretrain
from ttrain.tasks.base_model import prepare_base_model


def llama(vocab: int, **settings: Any) -> Any:
    return tiny_model(vocab=vocab, hidden_size=16, init_std=0.3, **settings)


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


def size_of(directory: Path) -> int:
    make(directory, None)
    return len(json.loads((directory / "tokenizer.json").read_bytes())["model"]["vocab"])


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_begin_as_the_mean_of_their_words(tmp_path: Path, tied: bool) -> None:
    size = size_of(tmp_path / "x")
    model = llama(size, tie_embeddings=tied)
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


def test_its_chat_template_is_kept_and_given_where_it_has_none(tmp_path: Path) -> None:
    model = llama(size_of(tmp_path / "x"))
    for template, kept in ((CHATML, "own"), (None, "ttrain")):
        encoder, figures = taken(save(model, tmp_path / kept / "source", template), tmp_path / kept)
        assert encoder.template == kept
        opened = AutoTokenizer.from_pretrained(tmp_path / kept / "model", local_files_only=True)
        assert opened.chat_template == encoder.jinja
        assert ("<|end|>" in figures["added_tokens"]) == (kept == "ttrain")
        config = factory.load(tmp_path / kept / "model").generation_config
        assert (config.pad_token_id, config.bos_token_id) == (encoder.pad_id, encoder.bos_id)
        assert config.eos_token_id[:1] == [encoder.eos_id] and encoder.end_id in config.eos_token_id


def test_shards_in_half_precision_are_the_same_model_in_one_file_in_fp32(tmp_path: Path) -> None:
    model = llama(size_of(tmp_path / "x")).to(torch.bfloat16)
    source = save(model, tmp_path / "source", max_shard_size="10KB")
    assert len(list(source.glob("model-*.safetensors"))) > 2
    taken(source, tmp_path)
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    for name, tensor in factory.state(model).items():
        assert torch.equal(after[name][: len(tensor)], tensor.float())


def test_weights_that_do_not_fit_their_config_are_all_listed(tmp_path: Path) -> None:
    source = save(llama(size_of(tmp_path / "x")), tmp_path / "source")
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors["extra.weight"] = torch.zeros(3)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(5)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ArtifactError) as refused:
        taken(source, tmp_path)
    for words in ("mlp.up_proj.weight", "extra.weight", "model.norm.weight", str(source)):
        assert words in str(refused.value)
    assert not (tmp_path / "model").exists()


def test_a_padded_vocabulary_is_not_grown(tmp_path: Path) -> None:
    size = size_of(tmp_path / "x")
    model = llama(size + 20)
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
