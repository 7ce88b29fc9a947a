"""The tokenizer: the same bytes every time, and no text is lost or turns special."""

import os
import random
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import ROOT
from support.shard_sets import write_lines

from ttrain.config import Reading
from ttrain.config import Tokenizer as TokenizerSettings
from ttrain.data import jinja_templates, tokenizer
from ttrain.data.encoder import Encoder
from ttrain.data.records import TextDocument, position
from ttrain.data.tokenizer import sample
from ttrain.tasks.tokenizer import train_directory

SMALL = TokenizerSettings(vocab_size=700, max_bytes=30_000)
WORDS = "the quick brown fox jumps über 日本 don't 42 x_1 <|end|> <|assistant|> 🙂"
TRAIN = """
import sys
from pathlib import Path
from ttrain.config import Reading, Tokenizer
from ttrain.tasks.tokenizer import train_directory
settings = Tokenizer(vocab_size=700, max_bytes=30_000)
train_directory(sys.argv[1:2], Path(sys.argv[2]), settings, Reading())
"""


def write_rows(path: Path, texts: list[str]) -> str:
    return str(write_lines(path, [{"text": text} for text in texts]))


def corpus(count: int = 400) -> list[str]:
    """Many words are equally frequent, so that merges tie."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 7))) for _ in range(400)]
    words += WORDS.split()
    texts = (" ".join(chance.choices(words, k=20)) for _ in range(count))
    return [text + chance.choice(["\n", ".", "!  "]) for text in texts]


@pytest.fixture(scope="module")
def corpus_encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(tokenizer.train(corpus(), 400), path)
    return Encoder(path)


def test_the_same_files_give_the_same_bytes_whatever_the_number_of_threads(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", corpus())
    command = [sys.executable, "-P", "-c", TRAIN, rows, str(tmp_path / "elsewhere")]
    more = {"PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": "2", "PYTHONHASHSEED": "1"}
    subprocess.run(command, env={**os.environ, **more}, timeout=120, check=True)
    train_directory([rows], tmp_path / "here", SMALL, Reading())
    train_directory([rows], tmp_path / "seed", SMALL.model_copy(update={"seed": 2}), Reading())
    files = [tmp_path / name / "tokenizer.json" for name in ("elsewhere", "here", "seed")]
    elsewhere, here, other_seed = (path.read_bytes() for path in files)
    assert elsewhere == here != other_seed


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20))
def test_random_texts_come_back_as_they_went_in(corpus_encoder: Encoder, text: str) -> None:
    (ids,) = corpus_encoder.encode([text])
    assert corpus_encoder.decode(ids) == text
    assert min(ids, default=9) >= len(jinja_templates.SPECIAL_TOKENS["ttrain"])


def test_a_word_without_end_is_cut_for_training_only_and_loses_nothing() -> None:
    word = "".join(chr(0x4E00 + (i * i) % 900) for i in range(1000))
    cut = tokenizer.pieces(f"ab {word} cd\n{word}")
    assert "".join(cut) == f"ab {word} cd\n{word}"
    assert max(map(len, " ".join(cut).split())) == tokenizer.RUN_CHARACTERS
    assert tokenizer.pieces("short words only") == ["short words only"]


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
    """As many as fit of the rows sorted by their keyed hash; the first whatever its size."""
    rows = [f"{number}:".ljust(size, "ü") for number, size in enumerate(sizes)]
    key, total = seed.to_bytes(8, "big"), 0
    lowest = list[str]()
    for row in sorted(rows, key=lambda row: blake2b(row.encode(), digest_size=8, key=key).digest()):
        size = len(row.encode())
        if lowest and (total + size > 20_000 or len(lowest) == documents):
            break
        lowest.append(row)
        total += size
    limits = TokenizerSettings(max_bytes=20_000, max_documents=documents, seed=seed)
    texts, counts = sample(rows, limits)
    assert texts == [row for row in rows if row in lowest], "in the order of the input"
    assert counts == {"documents": len(lowest), "documents_seen": len(rows), "bytes": total}
    shuffled = chance.sample(rows, len(rows))
    assert sample(shuffled, limits)[0] == [row for row in shuffled if row in lowest]


def test_the_result_counts_what_was_read_and_how_well_it_fits_each_file(tmp_path: Path) -> None:
    chinese = ["日本語のテキスト" * 30 + str(number) for number in range(20)]
    paths = [write_rows(tmp_path / "first.jsonl", [*corpus(), "", " "])]
    paths.append(write_rows(tmp_path / "second.jsonl", chinese))
    limits = TokenizerSettings(vocab_size=600, max_documents=300)
    result = train_directory(paths, tmp_path / "out", limits, Reading(heldout_fraction=0.1))
    encoder = Encoder(tmp_path / "out")
    training = [text for text in [*corpus(), *chinese] if position(TextDocument(text)) >= 0.1]
    counts = {"rows": 422, "kept": 420, "skipped": {"empty text": 2}, "rejected": {}}
    expected = {"vocab_size": 600, "documents": 300, "documents_seen": len(training)}
    assert result.items() >= {**expected, "rows": counts}.items() and len(encoder) == 600
    documents = [(file["name"], file["documents"]) for file in result["files"]]
    assert documents == [("first.jsonl", 200), ("second.jsonl", 20)]
    size, tokens = len("".join(chinese).encode()), len(encoder.encode_flat(chinese)[0])
    assert result["files"][1]["bytes_per_token"] == size / tokens
    sampled, _ = sample(training, TokenizerSettings(max_documents=300))
    tokenizer.save(tokenizer.train(sampled, 600), tmp_path / "expected")
    assert Encoder(tmp_path / "expected").digest == encoder.digest, "of the training part alone"


def test_the_head_is_the_first_documents() -> None:
    texts, counts = sample(corpus(), TokenizerSettings(sample="head", max_documents=10))
    assert texts == corpus()[:10] and counts["documents_seen"] == 10
