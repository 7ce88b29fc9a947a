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
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import ROOT

from ttrain import config as config_module
from ttrain.config import Reading
from ttrain.data import jinja_templates, tokenizer
from ttrain.data.encoder import Encoder
from ttrain.data.records import TextDocument, position
from ttrain.data.tokenizer import sample
from ttrain.tasks.tokenizer import train_directory

SPECIAL_TOKENS = jinja_templates.SPECIAL_TOKENS["ttrain"]
config = config_module.Tokenizer
SMALL = config_module.Tokenizer(vocab_size=700, max_bytes=30_000)
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "über",
    "日本",
    "don't",
    "42",
    "x_1",
    "<|end|>",
    "<|assistant|>",
    "🙂",
)
TRAIN = """
import sys
from pathlib import Path
from ttrain.config import Reading, Tokenizer
from ttrain.tasks.tokenizer import train_directory
train_directory(sys.argv[1:2], Path(sys.argv[2]), Tokenizer(vocab_size=700, max_bytes=30_000), Reading())
"""


def write_rows(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def corpus(count: int = 400) -> list[str]:
    """Made-up words beside the real ones; many are equally frequent, so that merges tie."""
    chance = random.Random(1)
    words = [
        *WORDS,
        *("".join(chance.choices("abcdefghijklmno", k=chance.randint(2, 7))) for _ in range(400)),
    ]
    return [
        " ".join(chance.choices(words, k=20)) + chance.choice(["\n", ".", "!  "])
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(tokenizer.train(corpus(), 400), path)
    return path


@pytest.fixture(scope="module")
def corpus_encoder(directory: Path) -> Encoder:
    return Encoder(directory)


def test_the_same_files_give_the_same_bytes_whatever_the_number_of_threads(tmp_path: Path) -> None:
    rows, outputs = (
        tmp_path / "rows.jsonl",
        [tmp_path / name for name in ("there", "here", "another seed")],
    )
    write_rows(rows, corpus())
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAYON_NUM_THREADS": "2",
        "PYTHONHASHSEED": "1",
    }
    subprocess.run(
        [sys.executable, "-P", "-c", TRAIN, str(rows), str(outputs[0])],
        env=environment,
        timeout=120,
        check=True,
    )
    for output, seed in zip(outputs[1:], (SMALL.seed, 2), strict=True):
        train_directory([str(rows)], output, SMALL.model_copy(update={"seed": seed}), Reading())
    there, here, other = ((output / "tokenizer.json").read_bytes() for output in outputs)
    assert there == here != other


def test_random_texts_come_back_as_they_went_in(corpus_encoder: Encoder) -> None:
    chance = random.Random(7)

    def character() -> str:
        top = chance.choice((0x7F, 0x7FF, 0xFFFF, 0x10FFFF))  # of one, two, three and four bytes
        while 0xD800 <= (code := chance.randint(0, top)) <= 0xDFFF:
            pass
        return chr(code)

    texts = ["".join(character() for _ in range(chance.randint(0, 20))) for _ in range(3000)]
    encoded = corpus_encoder.encode(texts)
    assert [corpus_encoder.decode(ids) for ids in encoded] == texts
    assert min(min(ids) for ids in encoded if ids) >= len(SPECIAL_TOKENS), (
        "no id is unknown, or any other special token"
    )


def test_transformers_opens_it_with_all_its_attributes(
    directory: Path, corpus_encoder: Encoder
) -> None:
    from transformers import AutoTokenizer

    opened = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    found = (opened.pad_token, opened.unk_token, opened.bos_token, opened.eos_token)
    assert found == ("<|pad|>", "<|unk|>", "<|bos|>", "<|eos|>")
    assert [opened.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(9))
    assert set(opened.all_special_tokens) == set(SPECIAL_TOKENS)
    assert len(opened) == len(corpus_encoder)
    assert opened.model_max_length == 32768
    assert opened.padding_side == "right"
    assert opened.clean_up_tokenization_spaces is False
    assert opened.chat_template == jinja_templates.JINJA["ttrain"]
    for text in (
        *(text for text in corpus(40) if "<|" not in text),
        " a b ,  c . don't über 日本🙂\n",
    ):
        assert (
            opened(text, add_special_tokens=False)["input_ids"] == corpus_encoder.encode([text])[0]
        )
        assert opened(text)["input_ids"] == [
            corpus_encoder.bos_id,
            *corpus_encoder.encode([text])[0],
        ]
        assert opened.decode(opened(text)["input_ids"], skip_special_tokens=True) == text


def test_a_word_without_end_is_cut_for_learning_only_and_loses_nothing() -> None:
    word = "".join(chr(0x4E00 + (i * i) % 900) for i in range(1000))
    text = f"ab {word} cd\n{word}"
    cut = tokenizer.pieces(text)
    assert (
        "".join(cut) == text
        and max(len(run) for piece in cut for run in piece.split()) == tokenizer.RUN_CHARACTERS
    )
    assert tokenizer.pieces("short words only") == ["short words only"]


# --- the sample that it learns from


def lowest(rows: list[str], settings: config_module.Tokenizer) -> list[str]:
    """By sorting all of them: as many as fit, in the order of their keyed hash; the first whatever its size."""

    def place(row: str) -> bytes:
        return hashlib.blake2b(
            row.encode(), digest_size=8, key=settings.seed.to_bytes(8, "big")
        ).digest()

    kept, size = [], 0
    for row in sorted(rows, key=place):
        size += len(row.encode())
        if kept and (size > settings.max_bytes or len(kept) == settings.max_documents):
            break
        kept.append(row)
        if size > settings.max_bytes:
            break
    return kept


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12_000), min_size=1, max_size=60),
    documents=st.none() | st.integers(1, 40),
    seed=st.integers(0, 3),
    chance=st.randoms(),
)
def test_a_reservoir_holds_lowest_hashes(
    sizes: list[int], documents: int | None, seed: int, chance: random.Random
) -> None:
    rows = [f"{number}:".ljust(size, "ü") for number, size in enumerate(sizes)]
    limits = config(max_bytes=20_000, max_documents=documents, seed=seed)
    expected = lowest(rows, limits)
    texts, counts = sample(rows, limits)
    assert texts == [row for row in rows if row in expected], "in the order of the input"
    size = sum(len(row.encode()) for row in expected)
    assert counts == {"documents": len(expected), "documents_seen": len(rows), "bytes": size}
    shuffled = chance.sample(rows, len(rows))
    assert sample(shuffled, limits)[0] == [row for row in shuffled if row in expected]


# --- from files to a directory


def test_the_result_says_what_was_read_and_how_well_it_fits_each_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    chinese = ["日本語のテキスト" * 30 + str(number) for number in range(20)]
    write_rows(first, [*corpus(), "", " "])
    write_rows(second, chinese)
    paths, reading = [str(first), str(second)], Reading(heldout_fraction=0.1)
    result = train_directory(
        paths, tmp_path / "out", config(vocab_size=600, max_documents=300), reading
    )
    encoder = Encoder(tmp_path / "out")
    training = [text for text in [*corpus(), *chinese] if position(TextDocument(text)) >= 0.1]
    assert result["vocab_size"] == len(encoder) == 600
    assert (result["documents"], result["documents_seen"]) == (300, len(training))
    assert (result["unk_rate"], result["changed_texts"]) == (0.0, 0)
    assert result["rows"] == {
        "rows": 422,
        "kept": 420,
        "skipped": {"empty text": 2},
        "rejected": {},
    }
    assert [(entry["name"], entry["documents"]) for entry in result["files"]] == [
        ("first.jsonl", 200),
        ("second.jsonl", 20),
    ]
    size, tokens = sum(len(text.encode()) for text in chinese), len(encoder.encode_flat(chinese)[0])
    assert result["files"][1]["bytes_per_token"] == size / tokens
    assert result["bytes_per_token"] == sum(e["bytes"] for e in result["files"]) / sum(
        e["tokens"] for e in result["files"]
    )
    tokenizer.save(
        tokenizer.train(sample(training, config(max_documents=300))[0], 600), tmp_path / "expected"
    )
    assert Encoder(tmp_path / "expected").digest == encoder.digest, (
        "it learns from the sample of the training part alone"
    )
    head = train_directory(
        paths, tmp_path / "head", config(vocab_size=400, sample="head", max_documents=10), Reading()
    )
    assert (head["documents"], head["documents_seen"]) == (10, 10)
    assert all(entry["documents"] and entry["bytes_per_token"] >= 1 for entry in head["files"]), (
        "also what it does not reach"
    )
