"""Encoding: the ids of `tokenizers` whatever library makes them, and no text that turns special.

A tokenizer that exists, from a folder or the Hub: its ids stay, what is missing comes after them, nothing vanishes.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastokens
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.chat_templates import CHATML, make
from support.web import COMMIT, FakeHub, cache, use_hub
from tokenizers import Tokenizer, models, pre_tokenizers

from ttrain import config
from ttrain.config import Reading
from ttrain.data import existing, jinja_templates, tokenizer
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import PROBES, Encoder
from ttrain.errors import ArtifactError, UsageError
from ttrain.tasks.tokenizer import train_directory

TEXTS = [
    "the quick brown fox jumps over the lazy dog, don't it? " * 3,
    "über 日本 🙂\n\n  42 x_1 <|end|>",
    "a b  c   d\t\n" * 5,
]
REAL = fastokens.Tokenizer
SPECIALS = jinja_templates.SPECIAL_TOKENS["ttrain"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(tokenizer.train(TEXTS, 320), path)
    return path


@pytest.fixture(scope="module")
def text_encoder(directory: Path) -> Encoder:
    return Encoder(directory)


@functools.cache
def opened(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def reference(directory: Path, texts: list[str]) -> list[list[int]]:
    """What `tokenizers` makes of them when special tokens in the text are text."""
    return [opened(directory).encode(text, add_special_tokens=False).ids for text in texts]


class Wrong:
    """A fast library that makes an extra id of each text with `trigger`, and gives up on `dog`."""

    trigger = "fox"

    def __init__(self, path: str) -> None:
        self._inner = REAL.from_file(path)

    @classmethod
    def from_file(cls, path: str) -> Wrong:
        return cls(path)

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def encode_batch_flat(self, texts: list[str], *flags: bool) -> Any:
        if texts == ["dog"]:
            raise ValueError("match limit exceeded")
        return self._inner.encode_batch_flat(
            [text + "!" * (self.trigger in text) for text in texts], *flags
        )


class Panic(BaseException):
    """As pyo3's: no Exception."""


class Panicking:
    @staticmethod
    def from_file(path: str) -> Any:
        raise Panic("index out of bounds")


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text(max_size=40), max_size=4))
@example(texts=[*TEXTS, *PROBES])
@example(texts=[f"a{token} {token}{token}\n" for token in SPECIALS])
def test_the_fast_ids_are_those_of_tokenizers(
    directory: Path, text_encoder: Encoder, texts: list[str]
) -> None:
    assert text_encoder.kind == "fastokens"
    assert text_encoder.encode(texts) == reference(directory, texts)


@pytest.mark.parametrize("fast", [True, False])
def test_flat_ids_are_the_ids_of_the_texts_one_after_the_other(directory: Path, fast: bool) -> None:
    encoder = Encoder(directory, fast=fast)
    assert encoder.kind == ("fastokens" if fast else "tokenizers")
    for texts in ([], [""], ["", "the fox", "", "日本"], TEXTS):
        ids, offsets = encoder.encode_flat(texts)
        assert (ids.dtype, offsets.dtype, len(offsets)) == (np.uint32, np.int64, len(texts) + 1)
        assert offsets[0] == 0 and offsets[-1] == len(ids)
        parts = [ids[start:end].tolist() for start, end in itertools.pairwise(offsets)]
        assert parts == encoder.encode(texts) == reference(directory, texts)


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (
            SimpleNamespace(Tokenizer=type("WrongOnProbe", (Wrong,), {"trigger": "\u200d"})),
            "make different ids of",
        ),
        (SimpleNamespace(Tokenizer=Panicking), "out of bounds"),
        (None, "not installed"),
    ],
)
def test_without_a_right_fast_library_the_ids_are_the_same(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    library: Any,
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", library)
    with caplog.at_level(logging.INFO, "ttrain"):
        encoder = Encoder(directory)
    assert encoder.kind == "tokenizers" and message in caplog.text
    assert encoder.encode([*TEXTS, *PROBES]) == reference(directory, [*TEXTS, *PROBES])


def test_a_text_on_which_the_fast_library_fails_is_encoded_by_the_other(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fastokens, "Tokenizer", Wrong)
    encoder = Encoder(directory)
    assert encoder.kind == "fastokens"
    with caplog.at_level(logging.INFO, "ttrain"):
        assert encoder.encode(["dog"]) == reference(directory, ["dog"])
    assert encoder.kind == "tokenizers" and "match limit exceeded" in caplog.text


def test_it_is_as_long_as_its_highest_id_needs_also_with_holes(
    directory: Path, tmp_path: Path
) -> None:
    spec = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    last = max(spec["model"]["vocab"], key=lambda token: spec["model"]["vocab"][token])
    spec["model"]["vocab"][last] += 1000
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    assert (len(Encoder(directory)), len(Encoder(tmp_path))) == (320, 1320)


def test_the_special_ids_are_where_the_configuration_says(text_encoder: Encoder) -> None:
    ids = (
        text_encoder.pad_id,
        text_encoder.unk_id,
        text_encoder.bos_id,
        text_encoder.eos_id,
        text_encoder.end_id,
    )
    assert ids == (0, 1, 2, 3, 8)
    assert text_encoder.special_ids() == set(range(9))
    assert text_encoder.special("<|user|>") == 5
    with pytest.raises(ArtifactError, match=r"lacks the special token <\|im_end\|>"):
        text_encoder.special("<|im_end|>")


@pytest.mark.parametrize("fast", [True, False])
def test_markup_knows_special_tokens_and_text_after_it_does_not(
    directory: Path, fast: bool
) -> None:
    encoder = Encoder(directory, fast=fast)
    assert encoder.encode_markup("<|user|>a<|end|>") == [5, *encoder.encode(["a"])[0], 8]
    assert min(encoder.encode(["<|user|>a<|end|>"])[0]) >= len(SPECIALS)


def test_text_stays_text_also_after_markup_that_could_not_be_encoded(directory: Path) -> None:
    encoder = Encoder(directory, fast=False)
    with pytest.raises(TypeError):
        encoder.encode_markup("<|user|>\ud800")
    assert min(encoder.encode(["<|user|>"])[0]) >= len(SPECIALS)


HARM = {
    "tokenizer.json missing": ("tokenizer.json", None),
    "tokenizer.json cut": ("tokenizer.json", lambda data: data[: len(data) // 2]),
    "tokenizer.json another": ("tokenizer.json", lambda data: b'{"a": 1}'),
    "tokenizer.json over which the library panics": (
        "tokenizer.json",
        lambda data: data.replace(
            b'subword_prefix": null', b'subword_prefix": "longer than a token"'
        ),
    ),
    "a special token renamed": ("tokenizer.json", lambda data: data.replace(b"<|end|>", b"<|e|>")),
    "configuration missing": ("tokenizer_config.json", None),
    "configuration without padding": (
        "tokenizer_config.json",
        lambda data: data.replace(b'"pad_token"', b'"pad"'),
    ),
    "template not UTF-8": ("chat_template.jinja", lambda data: b"\xff" + data),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_tokenizer_is_refused_and_left_as_it_is(
    directory: Path, tmp_path: Path, harm: str
) -> None:
    damaged, change = HARM[harm]
    for path in directory.iterdir():
        data = path.read_bytes()
        if path.name != damaged:
            (tmp_path / path.name).write_bytes(data)
        elif change is not None:
            (tmp_path / path.name).write_bytes(change(data))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Encoder(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# --- a tokenizer that exists


SAMPLES = ["the quick brown fox", "über 日本 🙂 <|im_end|><|end|><|pad|>", "  a\n\n b\0", ""]


def take(directory: Path, output: Path, template: str) -> Encoder:
    existing.install(existing.tokenizer_files(str(directory)), output, template)
    return Encoder(output)


@pytest.mark.parametrize(
    ("template", "added", "end"),
    [
        ("ttrain", ["<|pad|>", "<|bos|>", *jinja_templates.ROLE_TOKENS, "<|end|>"], "<|end|>"),
        ("own", ["<|pad|>", "<|bos|>"], "<|im_end|>"),
    ],
)
def test_what_is_missing_comes_after_the_vocabulary(
    tmp_path: Path, template: str, added: list[str], end: str
) -> None:
    """Its own ids stay."""
    source = make(tmp_path / "source", CHATML, pad_token="<|im_end|>")
    before = opened(source)
    encoder = take(source, tmp_path / "out", template)
    size = before.get_vocab_size()
    assert [encoder.special(token) for token in added] == list(range(size, size + len(added)))
    assert len(encoder) == size + len(added)
    assert {token: encoder.special(token) for token in before.get_vocab()} == before.get_vocab()
    assert encoder.encode(SAMPLES) == [
        before.encode(text, add_special_tokens=False).ids for text in SAMPLES
    ]
    assert [encoder.decode(ids) for ids in encoder.encode(SAMPLES)] == SAMPLES
    assert (encoder.pad_id, encoder.bos_id, encoder.eos_id) == (
        size,
        size + 1,
        encoder.special("<|im_end|>"),
    )
    assert encoder.unk_id == -1, "it works on bytes"
    assert (encoder.template, encoder.end_id, encoder.kind) == (
        template,
        encoder.special(end),
        "fastokens",
    )
    ids, live = encode_chat(encoder, (Message("user", "x<|im_end|>"), Message("assistant", "y")))
    assert [number for number, alive in zip(ids, live, strict=True) if alive] == [
        *encoder.encode(["y"])[0],
        encoder.end_id,
    ]


def test_transformers_opens_what_was_taken(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    encoder = take(
        make(tmp_path / "source", CHATML, model_max_length=1234, tokenizer_class="LlamaTokenizer"),
        tmp_path,
        "own",
    )
    opened = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ids = (opened.pad_token_id, opened.bos_token_id, opened.eos_token_id)
    assert ids == (encoder.pad_id, encoder.bos_id, encoder.eos_id) and len(set(ids)) == 3
    assert opened.chat_template == CHATML
    assert opened.model_max_length == 1234
    assert (
        opened("the fox, über", add_special_tokens=False)["input_ids"]
        == encoder.encode(["the fox, über"])[0]
    )
    assert set(opened.all_special_tokens) == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|bos|>",
    }


def test_one_of_ours_is_taken_as_it_is(tmp_path: Path) -> None:
    tokenizer.save(tokenizer.train(SAMPLES, 300), tmp_path / "source")
    assert (
        take(tmp_path / "source", tmp_path / "same", "ttrain").digest
        == Encoder(tmp_path / "source").digest
    )
    again = take(tmp_path / "source", tmp_path / "own", "own")
    assert (again.template, again.digest) == ("ttrain", Encoder(tmp_path / "source").digest)
    assert take(tmp_path / "source", tmp_path / "other", "tinyseek").special("<|im_end|>") == 300


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (
            {
                "bos_token": {"content": "<|endoftext|>"},
                "eos_token": "<|endoftext|>",
                "pad_token": "<|endoftext|>",
            },
            ("<|pad|>", "<|endoftext|>", "<|endoftext|>"),
        ),
        (
            {"pad_token": "<|im_start|>", "unk_token": "<|im_start|>"},
            ("<|pad|>", "<|bos|>", "<|im_end|>"),
        ),
        (
            {"pad_token": "[PAD]", "bos_token": "[B]", "eos_token": None},
            ("[PAD]", "[B]", "<|eos|>"),
        ),
    ],
    ids=["padding is the end", "padding is unknown", "named but not there, or none"],
)
def test_padding_is_not_the_end_nor_unknown(
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
    settings = {
        "chat_template": [
            {"name": "tool_use", "template": "x"},
            {"name": "default", "template": CHATML},
        ]
    }
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    encoder = take(source, tmp_path / "out", "own")
    path = encoder.directory / "tokenizer_config.json"
    named = json.loads(path.read_text())
    named = {
        name: {"content": value} if value == "<|im_start|>" else value
        for name, value in named.items()
    }
    path.write_text(json.dumps(named))
    assert Encoder(encoder.directory).tokens == encoder.tokens, "a token as an object"
    assert (encoder.bos_id, encoder.eos_id) == (
        encoder.special("<|im_start|>"),
        encoder.special("<|endoftext|>"),
    )
    assert encoder.end_id == encoder.special("<|im_end|>")
    (source / "tokenizer_config.json").write_text('{"chat_template": ["x", {"name": "tool_use"}]}')
    with pytest.raises(UsageError, match="has no chat template"):
        take(source, tmp_path / "none", "own")
    (source / "chat_template.jinja").write_bytes(b"\xff")
    assert take(source, tmp_path / "ours", "ttrain").template == "ttrain", "its own is not opened"
    (source / "chat_template.jinja").write_text("\n" + CHATML)
    assert take(source, tmp_path / "file", "own").jinja == "\n" + CHATML


def test_a_vocabulary_from_which_text_would_vanish_is_refused_unless_it_has_an_unknown_token(
    tmp_path: Path,
) -> None:
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
    with pytest.raises(
        UsageError, match=r"has unused ids, so that .* cannot be added: its id 3\d\d is taken"
    ):
        take(source, tmp_path / "out", "ttrain")
    vocabulary[first] += 100
    (source / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    encoder = take(source, tmp_path / "out", "ttrain")
    numbers = [encoder.special(token) for token in opened(tmp_path / "out").get_vocab()]
    assert len(set(numbers)) == len(numbers)
    assert len(encoder) == max(numbers) + 1


def test_what_is_no_tokenizer_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # which takes 0.2 s to import
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.json").write_text("{}")
    for name, reason in (
        (f"{tmp_path}/nowhere", "there is no such folder; name a folder that holds tokenizer.json"),
        (f"{tmp_path}/file.json", "there is no such folder"),
        ("gpt2", "there is no such folder"),
        (f"{tmp_path}/empty", "has no tokenizer.json; AutoTokenizer"),
    ):
        message = ask(name)
        assert f"tokenizer.existing is '{name}'" in message and reason in message
    for name, data in (
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "[1"),
        ("tokenizer_config.json", "\xff"),
    ):
        source = make(tmp_path / "source", None)
        (source / name).write_bytes(data.encode("latin-1"))
        with pytest.raises(UsageError, match=rf"cannot read .*{name}"):
            take(source, tmp_path / "out", "ttrain")
    assert not (tmp_path / "out").exists()


def test_the_stage_takes_it_and_measures_it(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in SAMPLES * 5), encoding="utf-8"
    )
    source = make(tmp_path / "source", CHATML)
    settings = config.Tokenizer(existing=str(source), template="own")
    result = train_directory([str(rows)], tmp_path / "out", settings, Reading())
    assert result["vocab_size"] == opened(source).get_vocab_size() + 1
    assert result["bytes_per_token"] > 1
    assert "documents" not in result, "it learnt from none"
    moved = tmp_path / "moved"
    source.rename(moved)
    again = train_directory(
        [str(rows)],
        tmp_path / "again",
        settings,
        Reading(),
        existing_files=existing.tokenizer_files(str(moved)),
    )
    assert again == result


# --- the Hub


def ask(name: str) -> Any:
    """The paths of the files of a tokenizer, or what is said of it."""
    try:
        return existing.tokenizer_files(name)
    except UsageError as error:
        return str(error)


def test_a_name_on_the_hub_is_read_from_the_cache_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in make(tmp_path / "source", CHATML).iterdir()}
    snapshot = cache(tmp_path / "home", {**files, "model.safetensors": b"x"})
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "home")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("someone/small", f"someone/small@{COMMIT}", "hf://someone/small@main"):
        assert ask(name) == [snapshot / "tokenizer.json", snapshot / "tokenizer_config.json"]


def test_a_name_that_the_cache_lacks_is_fetched_once(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the files that count; a name that cannot be fetched is told with the fix."""
    use_hub(monkeypatch, hub.site.url, tmp_path / "home")
    cache(tmp_path / "home", {"config.json": b"{}"})  # of a model
    found = ask("someone/small")
    assert [path.name for path in found] == ["tokenizer.json", "tokenizer_config.json"]
    assert [path.read_bytes() for path in found] == [
        hub.commits[COMMIT][path.name] for path in found
    ]
    assert not [path for _, path, _ in hub.site.asked if "safetensors" in path]
    hub.site.asked.clear()
    assert ask("someone/small") == found
    assert hub.site.asked == []
    messages = {"someone/else": ask("someone/else")}
    hub.commits[COMMIT] = {"config.json": b"{}"}
    use_hub(monkeypatch, hub.site.url, tmp_path / "another")
    assert "which has no tokenizer.json; AutoTokenizer" in ask("someone/small")
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "away")
    messages["someone/small"] = ask("someone/small")
    for name, message in messages.items():
        assert (
            f"tokenizer.existing is '{name}', which is neither a folder nor in the Hub's cache"
            in message
        )
        assert "name the folder" in message
