"""The tokenizer: the same bytes every time, nothing lost on the way there and back, and no text that turns special."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from ttrain.data import chat, tokenizer
from ttrain.data.sources import Document
from ttrain.data.tokenizer import Encoder
from ttrain.errors import ArtifactError

ROOT = Path(__file__).parents[1]
WORDS = ("the", "quick", "brown", "fox", "jumps", "über", "日本", "don't", "42", "x_1", "<|end|>", "<|assistant|>", "🙂")
TRAIN = """
import hashlib, json, sys
from pathlib import Path
from ttrain.data import tokenizer
texts = json.loads(Path(sys.argv[1]).read_text())
tokenizer.save(tokenizer.train(texts, 700), Path(sys.argv[2]))
print(hashlib.sha256(Path(sys.argv[2], "tokenizer.json").read_bytes()).hexdigest())
"""


def corpus(count: int = 400) -> list[str]:
    """Made-up words beside the real ones; many are equally frequent, so that merges tie."""
    chance = random.Random(1)
    words = [*WORDS, *("".join(chance.choices("abcdefghijklmno", k=chance.randint(2, 7))) for _ in range(400))]
    return [" ".join(chance.choices(words, k=20)) + chance.choice(["\n", ".", "!  "]) for _ in range(count)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(tokenizer.train(corpus(), 400), path)
    return path


@pytest.fixture(scope="module")
def encoder(directory: Path) -> Encoder:
    return Encoder(directory)


def test_the_same_texts_give_the_same_bytes_whatever_the_number_of_threads(tmp_path: Path) -> None:
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps(corpus()))
    digests = []
    for number, threads in enumerate(("1", "2", "2")):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": str(number)}
        command = [sys.executable, "-P", "-c", TRAIN, str(texts), str(tmp_path / f"out-{number}")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        digests.append(done.stdout.strip())
    here = tmp_path / "here"
    tokenizer.save(tokenizer.train(corpus(), 700), here)
    digests.append(hashlib.sha256((here / "tokenizer.json").read_bytes()).hexdigest())
    assert len(set(digests)) == 1


def test_the_vocabulary_has_the_size_that_was_asked_for_when_the_text_suffices(encoder: Encoder) -> None:
    assert len(encoder) == 400


def test_the_special_tokens_come_first_and_apart(encoder: Encoder) -> None:
    assert [encoder.special(token) for token in chat.SPECIAL_TOKENS] == list(range(9))
    assert len({encoder.special(token) for token in (chat.PAD, chat.UNK, chat.BOS, chat.EOS)}) == 4


def test_every_byte_has_a_token_also_when_the_text_never_showed_it(directory: Path) -> None:
    vocabulary = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert len(alphabet) == 256
    assert set(alphabet) <= set(vocabulary)


@settings(max_examples=2000, deadline=None)
@given(text=st.text(max_size=30))
@example(text="<|end|><|assistant|><|bos|>")
@example(text="e\u0301 \u202e\ufeff\0 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0010ffff")
@example(text="  leading, trailing  \r\n\t ")
@example(text="")
def test_any_text_comes_back_as_it_went_in(encoder: Encoder, text: str) -> None:
    (ids,) = encoder.encode([text])
    assert encoder.decode(ids) == text
    assert not [number for number in ids if number < len(chat.SPECIAL_TOKENS)]


@pytest.mark.parametrize("token", chat.SPECIAL_TOKENS)
def test_the_name_of_a_special_token_in_a_text_stays_text(encoder: Encoder, token: str) -> None:
    for text in (token, f"a{token}b", f" {token} ", token * 3, f"{token}\n{token}"):
        (ids,) = encoder.encode([text])
        assert min(ids) >= len(chat.SPECIAL_TOKENS)
        assert encoder.decode(ids) == text


def test_a_document_lies_between_the_tokens_that_begin_and_end_it(encoder: Encoder) -> None:
    ids = encoder.document(encoder.encode(["the fox"])[0])
    assert (ids[0], ids[-1]) == (encoder.special(chat.BOS), encoder.special(chat.EOS))
    assert encoder.decode(ids) == "the fox"


def test_a_batch_is_encoded_as_each_text_alone(encoder: Encoder) -> None:
    texts = [*corpus(20), "", "x" * 3000]
    assert encoder.encode(texts) == [encoder.encode([text])[0] for text in texts]
    assert encoder.encode([]) == []


def test_transformers_opens_it_with_all_its_attributes(directory: Path, encoder: Encoder) -> None:
    from transformers import AutoTokenizer

    opened = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert (opened.bos_token, opened.eos_token, opened.pad_token, opened.unk_token) == (
        chat.BOS,
        chat.EOS,
        chat.PAD,
        chat.UNK,
    )
    assert [opened.convert_tokens_to_ids(token) for token in chat.SPECIAL_TOKENS] == list(range(9))
    assert set(opened.all_special_tokens) == set(chat.SPECIAL_TOKENS)
    assert len(opened) == len(encoder)
    assert opened.model_max_length == tokenizer.MODEL_MAX_LENGTH
    assert opened.padding_side == "right"
    assert opened.clean_up_tokenization_spaces is False
    assert opened.chat_template == chat.TEMPLATE
    for text in (*(text for text in corpus(40) if "<|" not in text), " a b ,  c . don't über 日本🙂\n"):
        assert opened(text, add_special_tokens=False)["input_ids"] == encoder.encode([text])[0]
        assert opened(text)["input_ids"] == [encoder.special(chat.BOS), *encoder.encode([text])[0]]
        assert opened.decode(opened(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize("harm", ["missing", "empty", "cut", "other json", "no specials"])
def test_a_corrupt_tokenizer_is_refused_and_never_trained_anew(directory: Path, tmp_path: Path, harm: str) -> None:
    data = (directory / "tokenizer.json").read_text(encoding="utf-8")
    path = tmp_path / "tokenizer.json"
    half, renamed = data[: len(data) // 2], data.replace("<|end|>", "<|e|>")
    broken = {"empty": "", "cut": half, "other json": '{"a": 1}', "no specials": renamed}
    if harm != "missing":
        path.write_text(broken[harm], encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Encoder(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_another_tokenizer_has_another_digest(encoder: Encoder, tmp_path: Path) -> None:
    tokenizer.save(tokenizer.train(corpus(), 401), tmp_path)
    assert Encoder(tmp_path).digest != encoder.digest


# --- the sample that it learns from


def documents(count: int, size: int = 100) -> list[Document]:
    return [Document(f"{number:06d}".ljust(size, ".")) for number in range(count)]


def test_a_small_input_is_taken_whole_and_in_order() -> None:
    rows = documents(50)
    assert tokenizer.sample(rows, 5000) == rows
    assert tokenizer.sample([], 5000) == []


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=60), limit=st.integers(50, 3000), chance=st.randoms(),
)  # fmt: skip
def test_a_sample_keeps_to_its_limit_whatever_the_order(sizes: list[int], limit: int, chance: random.Random) -> None:
    rows = [Document(f"{number}:".ljust(size, "x")) for number, size in enumerate(sizes)]
    kept = tokenizer.sample(rows, limit)
    assert kept
    assert len(kept) == 1 or sum(len(row.content()) for row in kept) <= limit
    shuffled = chance.sample(rows, len(rows))
    assert set(tokenizer.sample(shuffled, limit)) == set(kept)


def test_a_sample_is_spread_over_the_whole_input_and_uses_at_least_half_its_room() -> None:
    rows = documents(20_000)
    kept = tokenizer.sample(rows, 200_000)
    assert 0.4 * 200_000 < sum(len(row.content()) for row in kept) <= 200_000
    tenths = [0] * 10
    for row in kept:
        tenths[int(row.text[:6]) // 2000] += 1
    expected = len(kept) / 10
    assert all(abs(tenth - expected) < 4 * expected**0.5 for tenth in tenths)


def test_the_limit_counts_bytes_not_letters() -> None:
    rows = [Document(f"{number:04d}" + "日" * 100) for number in range(100)]
    assert sum(len(row.text.encode()) for row in tokenizer.sample(rows, 3040)) <= 3040


def test_a_word_without_end_is_cut_for_learning_only_and_loses_nothing() -> None:
    word = "".join(chr(0x4E00 + (i * i) % 900) for i in range(1000))
    text = f"ab {word} cd\n{word}"
    cut = tokenizer.pieces(text)
    assert "".join(cut) == text and max(len(run) for piece in cut for run in piece.split()) == tokenizer.RUN_CHARACTERS
    assert tokenizer.pieces("short words only") == ["short words only"]
