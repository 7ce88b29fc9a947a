"""A tokenizer that exists, from a folder or the Hub: its ids stay, what is missing comes after them, nothing vanishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHATML, make
from support.hub import COMMIT, Hub, cache, use_hub
from tokenizers import Tokenizer, models, pre_tokenizers

from ttrain import config
from ttrain.config import Reading
from ttrain.data import existing, jinja_templates, tokenizer
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.errors import UsageError
from ttrain.stages.tokenizer import train_directory

TEXTS = ["the quick brown fox", "über 日本 🙂 <|im_end|><|end|><|pad|>", "  a\n\n b\0", ""]


def take(directory: Path, output: Path, template: str) -> Encoder:
    existing.install(existing.tokenizer_files(str(directory)), output, template)
    return Encoder(output)


def original(directory: Path) -> Tokenizer:
    opened = Tokenizer.from_file(str(directory / "tokenizer.json"))
    opened.encode_special_tokens = True
    return opened


@pytest.mark.parametrize(
    ("template", "added"),
    [
        ("ttrain", ["<|pad|>", "<|bos|>", *jinja_templates.ROLE_TOKENS, "<|end|>"]),
        ("own", ["<|pad|>", "<|bos|>"]),
    ],
)
def test_what_is_missing_comes_after_the_vocabulary_and_its_own_ids_stay(
    tmp_path: Path, template: str, added: list[str]
) -> None:
    source = make(tmp_path / "source", CHATML, pad_token="<|im_end|>")
    before = original(source)
    encoder = take(source, tmp_path / "out", template)
    size = before.get_vocab_size()
    assert [encoder.special(token) for token in added] == list(range(size, size + len(added)))
    assert len(encoder) == size + len(added)
    assert {token: encoder.special(token) for token in before.get_vocab()} == before.get_vocab()
    assert encoder.encode(TEXTS) == [before.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert [encoder.decode(ids) for ids in encoder.encode(TEXTS)] == TEXTS
    assert (encoder.pad_id, encoder.bos_id, encoder.eos_id) == (size, size + 1, encoder.special("<|im_end|>"))
    assert encoder.unk_id == -1, "it works on bytes"
    assert encoder.template == template
    assert encoder.end_id == encoder.special("<|end|>" if template == "ttrain" else "<|im_end|>")
    ids, live = encode_chat(encoder, (Message("user", "x<|im_end|>"), Message("assistant", "y")))
    assert [number for number, alive in zip(ids, live, strict=True) if alive] == [*encoder.encode(["y"])[0], encoder.end_id]
    assert encoder.kind == "fastokens"


def test_transformers_opens_what_was_taken(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    encoder = take(
        make(tmp_path / "source", CHATML, model_max_length=1234, tokenizer_class="LlamaTokenizer"), tmp_path, "own"
    )
    opened = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ids = (opened.pad_token_id, opened.bos_token_id, opened.eos_token_id)
    assert ids == (encoder.pad_id, encoder.bos_id, encoder.eos_id) and len(set(ids)) == 3
    assert opened.chat_template == CHATML
    assert opened.model_max_length == 1234
    assert opened("the fox, über", add_special_tokens=False)["input_ids"] == encoder.encode(["the fox, über"])[0]
    assert set(opened.all_special_tokens) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>"}


def test_one_of_ours_is_taken_as_it_is(tmp_path: Path) -> None:
    tokenizer.save(tokenizer.train(TEXTS, 300), tmp_path / "source")
    assert take(tmp_path / "source", tmp_path / "same", "ttrain").digest == Encoder(tmp_path / "source").digest
    again = take(tmp_path / "source", tmp_path / "own", "own")
    assert (again.template, again.digest) == ("ttrain", Encoder(tmp_path / "source").digest)
    assert take(tmp_path / "source", tmp_path / "other", "tinyseek").special("<|im_end|>") == 300


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
         ("<|pad|>", "<|endoftext|>", "<|endoftext|>")),
        ({"pad_token": "<|im_start|>", "unk_token": "<|im_start|>"}, ("<|pad|>", "<|bos|>", "<|im_end|>")),
        ({"pad_token": "[PAD]", "bos_token": "[B]", "eos_token": None}, ("[PAD]", "[B]", "<|eos|>")),
    ],
    ids=["padding is the end", "padding is unknown", "named but not there, or none"],
)  # fmt: skip
def test_padding_is_neither_the_end_of_a_document_nor_unknown(
    tmp_path: Path, config: dict[str, Any], tokens: tuple[str, str, str]
) -> None:
    encoder = take(make(tmp_path / "source", None, **config), tmp_path / "out", "ttrain")
    assert (encoder.pad_id, encoder.bos_id, encoder.eos_id) == tuple(map(encoder.special, tokens))
    assert encoder.pad_id not in (encoder.eos_id, encoder.unk_id)
    for token in tokens:
        assert encoder.special(token) not in encoder.encode([token])[0]


def test_older_folders_keep_their_tokens_and_templates_elsewhere(tmp_path: Path) -> None:
    source = make(tmp_path / "source", None)
    (source / "special_tokens_map.json").write_text(
        '{"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|endoftext|>"}'
    )
    settings = {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    encoder = take(source, tmp_path / "out", "own")
    assert (encoder.bos_id, encoder.eos_id) == (encoder.special("<|im_start|>"), encoder.special("<|endoftext|>"))
    assert encoder.end_id == encoder.special("<|im_end|>")
    (source / "chat_template.jinja").write_text("\n" + CHATML)
    assert take(source, tmp_path / "file", "own").jinja == "\n" + CHATML


def test_a_vocabulary_from_which_text_would_vanish_is_refused_unless_it_has_an_unknown_token(tmp_path: Path) -> None:
    spec = json.loads((make(tmp_path, None) / "tokenizer.json").read_text(encoding="utf-8"))
    del spec["model"]["vocab"]["é"]
    spec["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(UsageError, match="no token for 1 of the 256 bytes"):
        take(tmp_path, tmp_path / "out", "ttrain")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "fox": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    encoder = take(tmp_path, tmp_path / "out", "ttrain")
    assert (encoder.unk_id, encoder.encode(["the cat"])) == (0, [[1, 0]])
    assert tokenizer.measure(encoder, ["the cat", "fox"])["unk_rate"] == 1 / 3


def test_an_id_that_is_taken_is_not_given_twice(tmp_path: Path) -> None:
    source = make(tmp_path / "source", None)
    spec = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = spec["model"]["vocab"]
    first = max(vocabulary, key=lambda token: vocabulary[token])
    vocabulary[first] += 1
    (source / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(UsageError, match=r"has unused ids, so that .* cannot be added: its id 3\d\d is taken"):
        take(source, tmp_path / "out", "ttrain")
    vocabulary[first] += 100
    (source / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    encoder = take(source, tmp_path / "out", "ttrain")
    numbers = [encoder.special(token) for token in original(tmp_path / "out").get_vocab()]
    assert len(set(numbers)) == len(numbers)
    assert len(encoder) == max(numbers) + 1


def test_what_is_no_tokenizer_is_refused_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.json").write_text("{}")
    for name, reason in (
        (str(tmp_path / "nowhere"), "there is no such folder; name a folder that holds tokenizer.json"),
        (str(tmp_path / "file.json"), "there is no such folder"),
        ("gpt2", "there is no such folder"),
        (str(tmp_path / "empty"), r"has no tokenizer\.json; AutoTokenizer"),
    ):
        with pytest.raises(UsageError, match=rf"tokenizer\.existing is '{name}'.*{reason}"):
            existing.tokenizer_files(name)
    for name, data in (("tokenizer.json", "{"), ("tokenizer_config.json", "[1"), ("tokenizer_config.json", "\xff")):
        source = make(tmp_path / "source", None)
        (source / name).write_bytes(data.encode("latin-1"))
        with pytest.raises(UsageError, match=rf"cannot read .*{name}"):
            take(source, tmp_path / "out", "ttrain")
    assert not (tmp_path / "out").exists()


def test_the_stage_takes_it_and_measures_it(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 5), encoding="utf-8")
    source = make(tmp_path / "source", CHATML)
    settings = config.Tokenizer(existing=str(source), template="own")
    result = train_directory([str(rows)], tmp_path / "out", settings, Reading())
    assert result["vocab_size"] == original(source).get_vocab_size() + 1
    assert result["bytes_per_token"] > 1
    assert "documents" not in result, "it learnt from none"
    moved = tmp_path / "moved"
    source.rename(moved)
    again = train_directory(
        [str(rows)], tmp_path / "again", settings, Reading(), existing_files=existing.tokenizer_files(str(moved))
    )
    assert again == result


# --- the Hub


def ask(name: str) -> Any:
    """The paths of the files of a tokenizer, or what is said of it."""
    try:
        return existing.tokenizer_files(name)
    except UsageError as error:
        return str(error)


def test_a_name_on_the_hub_is_taken_from_its_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in make(tmp_path / "source", CHATML).iterdir()}
    snapshot = cache(tmp_path / "home", {**files, "model.safetensors": b"x"})
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "home")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("someone/small", f"someone/small@{COMMIT}", "hf://someone/small@main"):
        assert ask(name) == [snapshot / "tokenizer.json", snapshot / "tokenizer_config.json"]


def test_a_name_that_the_cache_lacks_is_fetched_once_and_only_what_counts(
    tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, hub, tmp_path / "home")
    cache(tmp_path / "home", {"config.json": b"{}"})  # of a model
    found = ask("someone/small")
    assert [path.name for path in found] == ["tokenizer.json", "tokenizer_config.json"]
    assert [path.read_bytes() for path in found] == [Hub.files[path.name] for path in found]
    assert not [path for path in Hub.asked if "safetensors" in path]
    Hub.asked.clear()
    assert ask("someone/small") == found
    assert Hub.asked == []


def test_a_name_that_cannot_be_fetched_is_told_with_the_cure(
    tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub.files = {"config.json": b"{}"}
    use_hub(monkeypatch, hub, tmp_path / "home")
    unknown, empty = ask("someone/else"), ask("someone/small")
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "away")
    silent = ask("someone/small")
    for name, message in (("someone/else", unknown), ("someone/small", silent)):
        assert f"tokenizer.existing is '{name}', which is neither a folder nor in the Hub's cache" in message
        assert "name the folder" in message
    assert "which has no tokenizer.json; AutoTokenizer" in empty
