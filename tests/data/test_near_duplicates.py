"""Duplicates by hash, and near-duplicates by the exact Jaccard, in a set and earlier sets."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

from support.shard_sets import build, digests, texts_in, write_lines

from ttrain.config import Reading
from ttrain.data import near_duplicates
from ttrain.data.blocks import BlockRecipe
from ttrain.data.near_duplicates import FOLDER, NEAR_DUPLICATE, REPORT
from ttrain.data.plain_text import plain
from ttrain.data.pool import Processes

NEAR = Reading(heldout_fraction=0.0, near_duplicates=0.8)
SPLIT = Reading(heldout_fraction=0.1, near_duplicates=0.8)
ENGLISH = ["the", "of", "and", "river", "stone", "bright", "walk", "under", "seven", "lamp"]
CHINESE = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨露结为霜金生丽水"


def text(rng: random.Random, words: int, chinese: bool = False) -> list[str]:
    if chinese:
        return rng.choices(CHINESE, k=4 * words)
    numbers = (rng.randrange(100) if rng.random() < 0.3 else "" for _ in range(words))
    return [f"{rng.choice(ENGLISH)}{number}" for number in numbers]


def edited(rng: random.Random, words: list[str], share: float) -> list[str]:
    count = max(1, round(share * len(words)))
    start = rng.randrange(len(words) - count + 1)
    replaced = [f"x{rng.randrange(1000)}" for _ in range(count)]
    return [*words[:start], *replaced, *words[start + count :]]


def similarity(first: str, second: str) -> float:
    size, sets = near_duplicates.SHINGLE_BYTES, []
    for letters in (plain(first), plain(second)):
        sets.append({letters[at : at + size] for at in range(len(letters) - size + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def planted(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Texts in English and Chinese, and of each a copy with 1 to 20 % of its words replaced."""
    rng = random.Random(seed)
    originals, copies = [], []
    for number in range(count):
        separator = " " if number % 3 else ""
        words = text(rng, rng.randrange(30, 200), chinese=not separator)
        originals.append(separator.join(words))
        share = rng.choice((0.01, 0.02, 0.05, 0.1, 0.2))
        copies.append(separator.join(edited(rng, words, share)))
    return originals, copies


def dropped(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / REPORT).read_bytes().splitlines()]


def rows(texts: list[str]) -> list[dict[str, str]]:
    return [{"text": text} for text in texts]


def test_sketches_do_not_depend_on_what_stands_beside_a_text_nor_change_with_a_version() -> None:
    band_rows = near_duplicates.rows_of_bands(0.8)
    odd = ("the quick brown fox jumps over the lazy dog", "", "short", "x" * 24, "y" * 100_000)
    texts = [*map(plain, (*odd, *planted(20)[0]))]
    together = near_duplicates.sketches_of(texts, band_rows)
    for number, letters in enumerate(texts):
        alone = near_duplicates.sketches_of([letters], band_rows)
        assert (alone[:, 0] == together[:, number]).all()
    # If this fails, raise near_duplicates.FORMAT, since sketches in files have the old values.
    assert together[:3, 0].tolist() == [3029725062, 3324641135, 3708436563]


def test_planted_near_duplicates_are_found(tmp_path: Path, recipe: BlockRecipe) -> None:
    originals, copies = planted(250)
    similarities = list(map(similarity, originals, copies))
    expected = {number for number in range(250) if similarities[number] >= 0.8}
    assert 90 < len(expected) < 200
    path = write_lines(tmp_path / "a.jsonl", rows([*originals, *copies]))
    built = build(tmp_path / "out", [path], recipe, NEAR, block_bytes=1 << 18)
    pairs = {(row["original"]["line"] - 1, row["line"] - 251) for row in dropped(tmp_path / "out")}
    exact = {copy for original, copy in pairs if original == copy}
    assert len(exact & expected) >= 0.99 * len(expected)
    assert len(exact & expected) >= 0.99 * len(pairs)
    tally = built.tallies["train"]
    assert tally.skipped[NEAR_DUPLICATE] == len(pairs)
    assert tally.rows == 500 == built.parts["train"]["rows"] + tally.skipped.total()


def near_files(output: Path) -> dict[Path, bytes]:
    paths = filter(Path.is_file, (output / FOLDER.parent).rglob("*near*"))
    return {path.relative_to(output): path.read_bytes() for path in paths}


def test_nights_and_a_growing_set_keep_what_one_set_of_all_keeps(
    tmp_path: Path, tokenizer: Path, recipe: BlockRecipe
) -> None:
    texts = [*itertools.chain(*planted(80, seed=3))]
    random.Random(1).shuffle(texts)
    size, whole, grown = len(texts) // 3, tmp_path / "whole", tmp_path / "grown"
    files, outputs = list[Path](), list[Path]()
    with Processes(2) as pool:
        for night in range(3):
            night_rows = rows(texts[night * size : (night + 1) * size])
            files.append(write_lines(tmp_path / f"n{night}.jsonl", night_rows))
            build(tmp_path / f"{night}", files[-1:], recipe, SPLIT, earlier=outputs)
            outputs.append(tmp_path / f"{night}")
            built = build(grown, files, recipe, SPLIT, pool=pool)
    build(whole, files, recipe, SPLIT)
    for part in ("train", "heldout"):
        kept = [row for output in outputs for row in texts_in(output, tokenizer, part)]
        assert kept == texts_in(whole, tokenizer, part) and kept
    places = [(row["file"], row["line"]) for output in outputs for row in dropped(output)]
    assert places == [(row["file"], row["line"]) for row in dropped(whole)] and len(places) > 15
    sets = {row["original"].get("set", "") for row in dropped(outputs[2])}
    assert {"/".join(output.parts[-2:]) for output in outputs[:2]} <= sets
    assert built.encoded_blocks < built.blocks
    assert near_files(grown) == near_files(whole) != {}
    assert digests(grown) == digests(whole)


def test_copies_of_held_out_files_go(tmp_path: Path, recipe: BlockRecipe, tokenizer: Path) -> None:
    rng = random.Random(7)
    words, other = text(rng, 100), " ".join(text(rng, 100))
    like, copy = (" ".join(edited(rng, words, 0.02)) for _ in range(2))
    held = write_lines(tmp_path / "held.jsonl", rows([" ".join(words), copy]))
    train = write_lines(tmp_path / "train.jsonl", rows([like, other]))
    build(tmp_path / "out", [train], recipe, NEAR, heldout=[held])
    assert texts_in(tmp_path / "out", tokenizer) == [other]
    assert len(texts_in(tmp_path / "out", tokenizer, "heldout")) == 2
    assert dropped(tmp_path / "out")[0]["original"]["file"] == "held.jsonl"
    # The same held-out files come in each night.
    new = write_lines(tmp_path / "new.jsonl", rows([" ".join(text(rng, 100)), other]))
    build(tmp_path / "next", [new], recipe, NEAR, heldout=[held], earlier=[tmp_path / "out"])
    assert len(texts_in(tmp_path / "next", tokenizer, "heldout")) == 2
    assert [row["line"] for row in dropped(tmp_path / "next")] == [2]
