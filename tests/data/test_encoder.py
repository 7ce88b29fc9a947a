"""Encoding, whatever library makes the ids; existing tokenizers from a folder or the Hub."""

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
SAMPLES = ["the quick brown fox", "über 日本 🙂 <|im_end|><|end|><|pad|>", "  a\n\n b\0", ""]
REAL = fastokens.Tokenizer
SPECIALS = jinja_templates.SPECIAL_TOKENS["ttrain"]


PREFIX = b'subword_prefix": '  # with a long one the library panics
DAMAGES: dict[str, tuple[str, Any]] = {
    "missing": ("tokenizer.json", lambda data: None),
    "cut": ("tokenizer.json", lambda data: data[: len(data) // 2]),
    "another": ("tokenizer.json", lambda data: b'{"a": 1}'),
    "panic": (
        "tokenizer.json",
        lambda data: data.replace(PREFIX + b"null", PREFIX + b'"a long one"'),
    ),
    "renamed": ("tokenizer.json", lambda data: data.replace(b"<|end|>", b"<|e|>")),
    "unconfigured": ("tokenizer_config.json", lambda data: None),
    "no padding": ("tokenizer_config.json", lambda data: data.replace(b'"pad_token"', b'"pad"')),
    "no UTF-8": ("chat_template.jinja", lambda data: b"\xff" + data),
}


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


def spec_of(directory: Path) -> Any:
    return json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))


def write_spec(directory: Path, spec: Any) -> None:
    (directory / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")


class Wrong:
    """A fast library that makes an extra id of each text with `trigger`, and gives up on `dog`."""

    trigger = "fox"

    def __init__(self, path: str) -> None:
        self._inner = REAL.from_file(path)

    @classmethod
    def from_file(cls, path: str) -> "Wrong":
        return cls(path)

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def encode_batch_flat(self, texts: list[str], *flags: bool) -> Any:
        if texts == ["dog"]:
            raise ValueError("match limit exceeded")
        wrong = [text + "!" * (self.trigger in text) for text in texts]
        return self._inner.encode_batch_flat(wrong, *flags)


class WrongOnProbe(Wrong):
    trigger = "\u200d"


class Panicking:
    @staticmethod
    def from_file(path: str) -> Any:
        raise BaseException("index out of bounds")  # as pyo3's


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text(max_size=40), max_size=4))
@example(texts=[*TEXTS, *PROBES])
@example(texts=[f"a{token} {token}{token}\n" for token in SPECIALS])
def test_fast_ids_are_the_same(directory: Path, text_encoder: Encoder, texts: list[str]) -> None:
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


def test_without_a_right_fast_library_the_ids_are_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, panicking = (SimpleNamespace(Tokenizer=library) for library in (WrongOnProbe, Panicking))
    caplog.set_level(logging.INFO, "ttrain")
    messages = ("make different ids of", "out of bounds", "not installed")
    for library, message in zip((wrong, panicking, None), messages, strict=True):
        monkeypatch.setitem(sys.modules, "fastokens", library)
        encoder = Encoder(directory)
        assert encoder.kind == "tokenizers" and message in caplog.messages[-1]
        assert encoder.encode([*TEXTS, *PROBES]) == reference(directory, [*TEXTS, *PROBES])


def test_a_text_on_which_the_fast_library_fails_is_encoded_by_the_other(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fastokens, "Tokenizer", Wrong)
    encoder = Encoder(directory)
    assert encoder.kind == "fastokens"
    with caplog.at_level(logging.INFO, "ttrain"):
        assert encoder.encode(["dog"]) == reference(directory, ["dog"])
    assert encoder.kind == "tokenizers" and "limit exceeded" in caplog.text


def test_its_length_is_its_highest_id_plus_one(directory: Path, tmp_path: Path) -> None:
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    spec = spec_of(directory)
    vocabulary = spec["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.__getitem__)] += 1000
    write_spec(tmp_path, spec)
    assert (len(Encoder(directory)), len(Encoder(tmp_path))) == (320, 1320)


def test_the_special_ids_are_where_the_configuration_says(text_encoder: Encoder) -> None:
    names = ("pad_id", "unk_id", "bos_id", "eos_id", "end_id")
    assert [getattr(text_encoder, name) for name in names] == [0, 1, 2, 3, 8]
    assert text_encoder.special_ids() == set(range(9))
    assert text_encoder.special("<|user|>") == 5
    with pytest.raises(ArtifactError, match=r"<\|im_end\|>"):
        text_encoder.special("<|im_end|>")


@pytest.mark.parametrize("fast", [True, False])
def test_markup_knows_special_tokens_and_text_does_not(directory: Path, fast: bool) -> None:
    encoder = Encoder(directory, fast=fast)
    assert encoder.encode_markup("<|user|>a<|end|>") == [5, *encoder.encode(["a"])[0], 8]
    assert min(encoder.encode(["<|user|>a<|end|>"])[0]) >= len(SPECIALS)
    if not fast:
        with pytest.raises(TypeError):
            encoder.encode_markup("<|user|>\ud800")
        assert min(encoder.encode(["<|user|>"])[0]) >= len(SPECIALS), "also after an error"


@pytest.mark.parametrize(("damaged", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_refused(directory: Path, tmp_path: Path, damaged: str, damage: Any) -> None:
    files: dict[str, Any] = {path.name: path.read_bytes() for path in directory.iterdir()}
    files[damaged] = damage(files[damaged])
    before = {name: data for name, data in files.items() if data is not None}
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Encoder(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# --- an existing tokenizer


def take(source: Path, output: Path, template: str = "ttrain") -> Encoder:
    existing.install(existing.tokenizer_files(str(source)), output, template)
    return Encoder(output)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make(tmp_path / "source", None)


ROLES_AND_END = [*jinja_templates.ROLE_TOKENS, "<|end|>"]


@pytest.mark.parametrize(("template", "more"), [("ttrain", ROLES_AND_END), ("own", [])])
def test_new_tokens_come_last(tmp_path: Path, template: str, more: list[str]) -> None:
    added = ["<|pad|>", "<|bos|>", *more]
    source = make(tmp_path / "source", CHATML, pad_token="<|im_end|>")
    before = opened(source)
    encoder = take(source, tmp_path / "out", template)
    size = before.get_vocab_size()
    assert [encoder.special(token) for token in added] == list(range(size, size + len(added)))
    assert len(encoder) == size + len(added)
    assert {token: encoder.special(token) for token in before.get_vocab()} == before.get_vocab()
    assert encoder.encode(SAMPLES) == reference(source, SAMPLES)
    assert [encoder.decode(ids) for ids in encoder.encode(SAMPLES)] == SAMPLES
    ids = [encoder.pad_id, encoder.bos_id, encoder.eos_id, encoder.unk_id]
    assert ids == [size, size + 1, encoder.special("<|im_end|>"), -1]
    assert (encoder.template, encoder.kind) == (template, "fastokens")
    assert encoder.end_id == encoder.special("<|end|>" if more else "<|im_end|>")
    turns = (Message("user", "x<|im_end|>"), Message("assistant", "y"))
    trained_on = list(itertools.compress(*encode_chat(encoder, turns)))
    assert trained_on == [*encoder.encode(["y"])[0], encoder.end_id]


def test_transformers_opens_what_was_taken(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    options = {"model_max_length": 1234, "tokenizer_class": "LlamaTokenizer"}
    encoder = take(make(tmp_path / "source", CHATML, **options), tmp_path, "own")
    opened = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ids = (opened.pad_token_id, opened.bos_token_id, opened.eos_token_id)
    assert ids == (encoder.pad_id, encoder.bos_id, encoder.eos_id) and len(set(ids)) == 3
    assert (opened.chat_template, opened.model_max_length) == (CHATML, 1234)
    text_ids = opened("the fox, über", add_special_tokens=False)["input_ids"]
    assert [text_ids] == encoder.encode(["the fox, über"])
    tokens = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>"}
    assert set(opened.all_special_tokens) == tokens


def test_one_of_ours_is_taken_as_it_is(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tokenizer.save(tokenizer.train(SAMPLES, 300), source)
    for template in ("ttrain", "own"):
        taken = take(source, tmp_path / template, template)
        assert (taken.template, taken.digest) == ("ttrain", Encoder(source).digest)
    assert take(source, tmp_path / "other", "tinyseek").special("<|im_end|>") == 300


END_OF_TEXT = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>"}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({**END_OF_TEXT, "pad_token": "<|endoftext|>"}, "<|pad|> <|endoftext|> <|endoftext|>"),
        (dict.fromkeys(["pad_token", "unk_token"], "<|im_start|>"), "<|pad|> <|bos|> <|im_end|>"),
        ({"pad_token": "[PAD]", "bos_token": "[B]", "eos_token": None}, "[PAD] [B] <|eos|>"),
    ],
)
def test_padding_is_apart(tmp_path: Path, config: Any, tokens: str) -> None:
    encoder = take(make(tmp_path / "source", None, **config), tmp_path / "out")
    ids = [encoder.pad_id, encoder.bos_id, encoder.eos_id]
    assert ids == [*map(encoder.special, tokens.split())]
    assert encoder.pad_id not in (encoder.eos_id, encoder.unk_id)
    for token in tokens.split():
        assert encoder.special(token) not in encoder.encode([token])[0]


def test_older_folders_keep_their_tokens_elsewhere(tmp_path: Path, source: Path) -> None:
    tokens = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|endoftext|>"}
    (source / "special_tokens_map.json").write_text(json.dumps(tokens))
    templates = {"tool_use": "x", "default": CHATML}
    named = [{"name": name, "template": template} for name, template in templates.items()]
    config = source / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named}))
    encoder = take(source, tmp_path / "out", "own")
    taken = encoder.directory / "tokenizer_config.json"
    settings = json.loads(taken.read_text())
    taken.write_text(json.dumps({**settings, "bos_token": {"content": settings["bos_token"]}}))
    assert Encoder(encoder.directory).tokens == encoder.tokens, "a token as an object"
    ids = [encoder.bos_id, encoder.eos_id, encoder.end_id]
    assert ids == [*map(encoder.special, ("<|im_start|>", "<|endoftext|>", "<|im_end|>"))]
    config.write_text('{"chat_template": ["x", {"name": "tool_use"}]}')
    with pytest.raises(UsageError, match="no chat"):
        take(source, tmp_path / "none", "own")
    (source / "chat_template.jinja").write_bytes(b"\xff")
    assert take(source, tmp_path / "ours").template == "ttrain", "its own is not opened"
    (source / "chat_template.jinja").write_text("\n" + CHATML)
    assert take(source, tmp_path / "file", "own").jinja == "\n" + CHATML


def test_a_vocabulary_that_loses_text_is_refused(tmp_path: Path, source: Path) -> None:
    spec = spec_of(source)
    del spec["model"]["vocab"]["é"]
    spec["model"]["merges"] = []
    write_spec(source, spec)
    with pytest.raises(UsageError, match=r"\b1 of"):
        take(source, tmp_path / "out")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "fox": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").unlink()
    encoder = take(source, tmp_path / "out")
    assert (encoder.unk_id, encoder.encode(["the cat"])) == (0, [[1, 0]])
    assert tokenizer.measure(encoder, ["the cat", "fox"])["unk_rate"] == 1 / 3


def test_an_id_that_is_taken_is_not_given_twice(tmp_path: Path, source: Path) -> None:
    spec = spec_of(source)
    vocabulary = spec["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary[last] += 1
    write_spec(source, spec)
    with pytest.raises(UsageError, match=r"id 3\d\d"):
        take(source, tmp_path / "out")
    vocabulary[last] += 100
    write_spec(source, spec)
    encoder = take(source, tmp_path / "out")
    ids = [encoder.special(token) for token in opened(tmp_path / "out").get_vocab()]
    assert len(set(ids)) == len(ids)
    assert len(encoder) == max(ids) + 1


def error_of(name: str) -> str:
    with pytest.raises(UsageError) as refused:
        existing.tokenizer_files(name)
    return str(refused.value)


def test_another_folder_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # which takes 0.2 s to import
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.json").write_text("{}")
    missing = "there is no such folder; name a folder that holds tokenizer.json"
    names = dict.fromkeys((f"{tmp_path}/nowhere", f"{tmp_path}/file.json", "gpt2"), missing)
    names[f"{tmp_path}/empty"] = "has no tokenizer.json; AutoTokenizer"
    for name, reason in names.items():
        message = error_of(name)
        assert f"tokenizer.existing is '{name}'" in message and reason in message


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer_config.json", b"[1"),
        ("tokenizer_config.json", b"\xff"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, source: Path, name: str, data: bytes) -> None:
    (source / name).write_bytes(data)
    with pytest.raises(UsageError, match=name):
        take(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_stage_takes_it_and_measures_it(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in SAMPLES * 5), "utf-8")
    source = make(tmp_path / "source", CHATML)
    settings = config.Tokenizer(existing=str(source), template="own")
    result = train_directory([str(rows)], tmp_path / "out", settings, Reading())
    assert result["vocab_size"] == opened(source).get_vocab_size() + 1
    assert result["bytes_per_token"] > 1
    assert "documents" not in result, "it was trained on none"
    files = existing.tokenizer_files(str(source.rename(tmp_path / "moved")))
    directory = tmp_path / "again"
    moved = train_directory([str(rows)], directory, settings, Reading(), existing_files=files)
    assert moved == result


# --- the Hub


def test_the_cache_is_read_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.name: path.read_bytes() for path in make(tmp_path / "source", CHATML).iterdir()}
    snapshot = cache(tmp_path / "home", {**files, "model.safetensors": b"x"})
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "home")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    expected = [snapshot / "tokenizer.json", snapshot / "tokenizer_config.json"]
    for name in ("someone/small", f"someone/small@{COMMIT}", "hf://someone/small@main"):
        assert existing.tokenizer_files(name) == expected


def test_a_name_that_the_cache_lacks_is_fetched_once_and_only_the_files_that_count(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, hub.site.url, tmp_path / "home")
    cache(tmp_path / "home", {"config.json": b"{}"})  # of a model
    paths, files = existing.tokenizer_files("someone/small"), hub.commits[COMMIT]
    assert [path.name for path in paths] == ["tokenizer.json", "tokenizer_config.json"]
    assert [path.read_bytes() for path in paths] == [files[path.name] for path in paths]
    assert not [path for _, path, _ in hub.site.asked if "safetensors" in path]
    hub.site.asked.clear()
    assert existing.tokenizer_files("someone/small") == paths
    assert hub.site.asked == []
    missing = {"someone/else": error_of("someone/else")}
    hub.commits[COMMIT] = {"config.json": b"{}"}
    use_hub(monkeypatch, hub.site.url, tmp_path / "another")
    assert "no tokenizer.json" in error_of("someone/small")
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "away")
    missing["someone/small"] = error_of("someone/small")
    for name, message in missing.items():
        assert f"tokenizer.existing is '{name}', which is neither a folder nor in" in message
        assert "name the folder" in message
