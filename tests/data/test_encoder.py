"""Encoding: the ids of `tokenizers` whatever library makes them, and no text that turns special."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import fastokens
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ttrain.data import jinja_templates, tokenizer
from ttrain.data.encoder import PROBES, Encoder, EncoderDiffers
from ttrain.errors import ArtifactError

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
    """A fast library that makes an extra id of every text that contains `trigger`."""

    trigger = "fox"

    def __init__(self, path: str) -> None:
        self._inner = REAL.from_file(path)

    @classmethod
    def from_file(cls, path: str) -> Wrong:
        return cls(path)

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def encode_batch_flat(self, texts: list[str], *flags: bool) -> tuple[bytes, bytes]:
        return self._inner.encode_batch_flat([text + "!" * (self.trigger in text) for text in texts], *flags)


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text(max_size=40), max_size=4))
@example(texts=[*TEXTS, *PROBES])
@example(texts=[f"a{token} {token}{token}\n" for token in SPECIALS])
def test_the_fast_ids_are_those_of_tokenizers(directory: Path, text_encoder: Encoder, texts: list[str]) -> None:
    assert text_encoder.kind == "fastokens"
    assert text_encoder.encode(texts) == reference(directory, texts)
    text_encoder.check(texts)


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


def test_a_wrong_fast_library_is_noticed_on_the_awkward_texts_and_replaced(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Wrong, "trigger", "\u200d")
    monkeypatch.setattr(fastokens, "Tokenizer", Wrong)
    with caplog.at_level(logging.INFO, "ttrain"):
        encoder = Encoder(directory)
    assert encoder.kind == "tokenizers"
    assert "make different ids of" in caplog.text
    assert encoder.encode([*TEXTS, *PROBES]) == reference(directory, [*TEXTS, *PROBES])


def test_a_library_that_is_wrong_on_the_data_only_is_noticed_by_check(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastokens, "Tokenizer", Wrong)
    encoder = Encoder(directory)
    assert encoder.kind == "fastokens"
    assert encoder.encode(["the fox"]) != reference(directory, ["the fox"])
    encoder.check(["the dog", ""])
    with pytest.raises(EncoderDiffers, match="'the fox'"):
        encoder.check(["the dog", "the fox"])
    sure = Encoder(directory, fast=False)
    sure.check(["the fox"])
    assert sure.encode(["the fox"]) == reference(directory, ["the fox"])


class Shifted(Wrong):
    """A fast library whose border after one text is wrong."""

    trigger = "\0nowhere"

    def encode_batch_flat(self, texts: list[str], *flags: bool) -> tuple[bytes, bytes]:
        ids, offsets = super().encode_batch_flat(texts, *flags)
        places = np.frombuffer(offsets, "<u8").copy()
        places[1] -= texts[0] == "shift"
        return ids, places.tobytes()


def test_borders_between_texts_are_compared_too(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastokens, "Tokenizer", Shifted)
    encoder = Encoder(directory)
    encoder.check(["shifts", "a"])
    with pytest.raises(EncoderDiffers):
        encoder.check(["shift", "a"])


def test_a_library_that_gives_up_on_a_text_is_replaced_without_loss(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fragile(Wrong):
        trigger = "\0nowhere"

        def encode_batch_flat(self, texts: list[str], *flags: bool) -> tuple[bytes, bytes]:
            if "the dog" in texts:
                raise ValueError("match limit exceeded")
            return super().encode_batch_flat(texts, *flags)

    monkeypatch.setattr(fastokens, "Tokenizer", Fragile)
    encoder = Encoder(directory)
    assert encoder.kind == "fastokens"
    with caplog.at_level(logging.INFO, "ttrain"):
        assert encoder.encode(["the dog"]) == reference(directory, ["the dog"])
    assert encoder.kind == "tokenizers"
    assert "match limit exceeded" in caplog.text


@pytest.mark.parametrize("how", ["not installed", "panics"])
def test_without_the_fast_library_the_ids_are_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    class Panic(BaseException):
        """As pyo3's: no Exception."""

    def refuse(path: str) -> Any:
        raise Panic("index out of bounds")

    if how == "not installed":
        monkeypatch.setitem(sys.modules, "fastokens", None)
    else:
        monkeypatch.setattr(fastokens, "Tokenizer", type("Refusing", (), {"from_file": staticmethod(refuse)}))
    with caplog.at_level(logging.INFO, "ttrain"):
        encoder = Encoder(directory)
    assert encoder.kind == "tokenizers"
    assert {"not installed": "not installed", "panics": "out of bounds"}[how] in caplog.text
    assert encoder.encode(TEXTS) == reference(directory, TEXTS)


def test_it_is_as_long_as_its_highest_id_needs_also_with_holes(directory: Path, tmp_path: Path) -> None:
    spec = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    last = max(spec["model"]["vocab"], key=lambda token: spec["model"]["vocab"][token])
    spec["model"]["vocab"][last] += 1000
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    assert (len(Encoder(directory)), len(Encoder(tmp_path))) == (320, 1320)


def test_the_special_ids_are_where_the_configuration_says(text_encoder: Encoder) -> None:
    ids = (text_encoder.pad_id, text_encoder.unk_id, text_encoder.bos_id, text_encoder.eos_id, text_encoder.end_id)
    assert ids == (0, 1, 2, 3, 8)
    assert text_encoder.special_ids() == set(range(9))
    assert text_encoder.special("<|user|>") == 5
    with pytest.raises(ArtifactError, match=r"lacks the special token <\|im_end\|>"):
        text_encoder.special("<|im_end|>")


@pytest.mark.parametrize("fast", [True, False])
def test_markup_knows_special_tokens_and_text_after_it_does_not(directory: Path, fast: bool) -> None:
    encoder = Encoder(directory, fast=fast)
    assert encoder.encode_markup("<|user|>a<|end|>") == [5, *encoder.encode(["a"])[0], 8]
    assert min(encoder.encode(["<|user|>a<|end|>"])[0]) >= len(SPECIALS)
    encoder.check(["<|user|>"])


HARM = {
    "tokenizer.json missing": ("tokenizer.json", None),
    "tokenizer.json cut": ("tokenizer.json", lambda data: data[: len(data) // 2]),
    "tokenizer.json another": ("tokenizer.json", lambda data: b'{"a": 1}'),
    "tokenizer.json over which the library panics": (
        "tokenizer.json", lambda data: data.replace(b'subword_prefix": null', b'subword_prefix": "longer than a token"'),
    ),
    "a special token renamed": ("tokenizer.json", lambda data: data.replace(b"<|end|>", b"<|e|>")),
    "configuration missing": ("tokenizer_config.json", None),
    "configuration without padding": ("tokenizer_config.json", lambda data: data.replace(b'"pad_token"', b'"pad"')),
    "template not UTF-8": ("chat_template.jinja", lambda data: b"\xff" + data),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_tokenizer_is_refused_and_left_as_it_is(directory: Path, tmp_path: Path, harm: str) -> None:
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
