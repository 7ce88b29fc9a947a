"""What nights hold out, and what they read again: samples of known documents, their share."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.shard_sets import build, write_lines
from support.tiny_data import make_tokenizer
from support.tiny_stages import Home, run_here, stage_settings

from ttrain.config import Pretrain, Reading, Runtime, Settings
from ttrain.config.evaluate import Evaluate
from ttrain.core.files import write_json
from ttrain.data.encoder import Encoder
from ttrain.data.packing import MixedRows
from ttrain.data.record_rows import SeparateDocumentRows
from ttrain.data.shards import Column, ShardSet, write_index, write_shard
from ttrain.evaluate.task_result import record_name
from ttrain.tasks import evaluate, heldout, new_model, replay, sft
from ttrain.tasks.common import rows
from ttrain.tasks.shards import heldout_records, recipe_of, scored_documents

VOCAB = 300


def documents(first: int, count: int) -> list[list[int]]:
    """Documents of 5 to 24 tokens, no two alike."""
    numbers = range(first, first + count)
    return [[100, n % 256, n // 256, *range(2 + n % 20)] for n in numbers]


def write(directory: Path, sources: Any, held: Any, weights: tuple[float, ...] = ()) -> Path:
    """Shards of documents, each source a group, and of held-out ones."""
    for part, groups in (("train", sources), ("heldout", [held])):
        (directory / part).mkdir(parents=True)
        entries = []
        for group, records in enumerate(groups):
            tokens = np.concatenate(records).astype(np.uint16)
            column = Column(tokens, np.cumsum([0, *map(len, records)]))
            entry = write_shard(directory / part / f"{group}.arrow", column, VOCAB)
            entries.append({**entry, "bytes": 0, "group": group})
        index: dict[str, Any] = {"weights": weights} if weights and part == "train" else {}
        index |= {"kind": "documents", "vocab_size": VOCAB, "tokenizer": "mine"}
        write_index(directory / part, shards=entries, **index)
    return directory


def token_count(records: list[list[int]]) -> int:
    return sum(map(len, records))


@pytest.fixture
def nights(tmp_path: Path) -> dict[str, Path]:
    """Two nights, and tonight, which holds out a document of the first."""
    sources = [documents(1000, 200), documents(2000, 100)]
    return {
        "learnt-0000": write(tmp_path / "a", [documents(0, 400)], documents(5000, 1)),
        "learnt-0001": write(tmp_path / "b", sources, documents(6000, 1), (1.0, 2.0)),
        "documents": write(tmp_path / "c", [documents(3000, 200)], documents(7, 1)),
    }


def run(nights: dict[str, Path], output: Path, share: float, **budget: Any) -> Any:
    """The result of the stage `replay`, and the documents that it sampled."""
    pretrain = Pretrain(**{"tokens": None, "epochs": 1.0, **budget})
    config = Settings.model_validate({"nightly": {"replay": share}, "pretrain": pretrain})
    result = replay.run(config, SimpleNamespace(inputs=nights, output=output))  # type: ignore[arg-type]
    shards = ShardSet(output / "train")
    return result, [shards.row(number)[0].tolist() for number in range(len(shards))]


def heldout_set(directory: Path, texts: Iterable[str]) -> Path:
    """A set of shards with these held-out documents."""
    part = directory / "heldout"
    part.mkdir(parents=True)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (part / "r.jsonl").write_text("".join(lines), encoding="utf-8")
    shard = {"records": "r.jsonl", "rows": len(lines), "tokens": 9}
    write_json(part / "index.json", {"format": 2, "shards": [shard]})
    return directory


def hold_out(output: Path, earlier: Path, documents: Path, max_bytes: int = 10**6) -> Any:
    """Run the stage `heldout`; its result."""
    settings = Settings.model_validate({"evaluate": {"max_bytes": max_bytes}})
    inputs = {"earlier": earlier, "documents": documents}
    return run_here(heldout, settings, output, inputs, Runtime())


def test_a_sample_has_the_share_of_each_night_and_source(
    nights: dict[str, Path], tmp_path: Path
) -> None:
    result, sample = run(nights, tmp_path / "out", 0.2)
    wanted = 0.2 * token_count(documents(3000, 200)) / 0.8
    assert wanted <= result["tokens"] <= wanted + 3 * 24 and result["nights"] == 2
    assert result["records"] == len(sample) == len(set(map(tuple, sample)))
    sources = [documents(0, 400), documents(1000, 200), documents(2000, 100)]
    total = sum(map(token_count, sources))
    for source in sources:
        taken = token_count([record for record in sample if record in source])
        assert taken == pytest.approx(wanted * token_count(source) / total, abs=24)
    result, sample = run(nights, tmp_path / "all", 0.9)
    assert result["records"] == 699 and documents(7, 1)[0] not in sample
    # As where the held-out share was another once: the first night learnt what the second held out
    second = write(tmp_path / "e", [documents(1000, 200)], documents(11, 1))
    _, sample = run({**nights, "learnt-0001": second}, tmp_path / "once", 0.9)
    assert documents(11, 1)[0] not in sample and documents(12, 1)[0] in sample
    budget, _ = run(nights, tmp_path / "budget", 0.5, tokens=1000, epochs=None)
    assert 500 <= budget["tokens"] <= 500 + 3 * 24, "a budget in tokens has its share, too"


def test_long_documents_are_sampled_by_windows_as_long_as_rows(tmp_path: Path) -> None:
    """Two documents of 1,000 tokens: a whole one would be five times what is asked."""
    long = [[100 * number + 100 + place % 90 for place in range(1000)] for number in range(2)]
    night = {
        "learnt-0000": write(tmp_path / "a", [long], documents(9, 1)),
        "documents": write(tmp_path / "b", [documents(0, 200)], long[1:]),
    }
    share = 200 / (200 + token_count(documents(0, 200)))
    _, parts = run(night, tmp_path / "out", share, row_length=64)
    windows = [long[0][first : first + 65] for first in range(0, 999, 64)]
    assert parts and all(part in windows for part in parts), "rows of the document not held out"
    assert len(parts) == len(set(map(tuple, parts)))


def test_documents_with_masked_regions_are_sampled_whole(tmp_path: Path) -> None:
    masked = [100, 101, 7, *range(20, 100), *range(20, 100), 8, *range(102, 140)]
    night = {
        "learnt-0000": write(tmp_path / "a", [[masked] * 2], documents(9, 1)),
        "documents": write(tmp_path / "b", [documents(0, 200)], documents(9, 1)),
    }
    _, sample = run(night, tmp_path / "out", 0.05, row_length=64, mask_intervals=[[7, 8]])
    assert sample == [masked]


def test_what_earlier_nights_hold_out_is_not_sampled(tmp_path: Path) -> None:
    """Trained on all files at once, where another row is the lowest; nights hold out texts."""
    encoder = make_tokenizer(tmp_path / "tokenizer")
    reading = Reading(heldout_fraction=1e-9)
    recipe = recipe_of(reading, tmp_path / "tokenizer", "documents")
    texts = [{"text": f"{number} the river, 日本 and a stone {number}"} for number in range(40)]
    files = [write_lines(tmp_path / f"{first}.jsonl", texts[first::4]) for first in range(4)]
    sets = {"a": files[:1], "b": files[1:2], "all": files[:3], "tonight": files[3:]}
    for name, set_files in sets.items():
        build(tmp_path / name, set_files, recipe, reading)
    hold_out(tmp_path / "ab", tmp_path / "a", tmp_path / "b")
    held = {record["text"] for record in heldout_records(tmp_path / "ab")}
    inputs = {"documents": tmp_path / "tonight", "learnt-0000": tmp_path / "all"}

    _, everything = run(inputs, tmp_path / "without", 0.9)
    earlier = {"tokenizer": tmp_path / "tokenizer", "earlier": tmp_path / "ab"}
    _, sample = run(inputs | earlier, tmp_path / "with", 0.9)
    texts_of_all, texts_left = ({*map(encoder.decode, each)} for each in (everything, sample))
    assert len(held) == 2 and held & texts_of_all, "all files together hold out at most one of them"
    assert texts_left == texts_of_all - held


def test_chats_are_sampled_with_their_masks_and_sft_learns_them(tmp_path: Path) -> None:
    home, settings = Home.make(tmp_path / "home"), stage_settings(4)
    chats = {"documents": home.chats.path, "learnt-0000": home.chats.path}
    config = settings.replaced({"nightly": {"replay": 0.25}})
    result = replay.run(config, SimpleNamespace(inputs=chats, output=tmp_path / "replay"))  # type: ignore[arg-type]
    whole, sample = (ShardSet(path / "train") for path in (home.chats.path, tmp_path / "replay"))
    assert sample.index["kind"] == "chats" and 0 < result["records"] < len(whole)

    def records(shards: ShardSet) -> list[tuple[bytes, bytes]]:
        """The ids and the mask of each chat."""
        rows = map(shards.row, range(len(shards)))
        return [(ids.tobytes(), live.tobytes()) for ids, live in rows if live is not None]

    assert len(records(sample)) == len(sample) and {*records(sample)} <= {*records(whole)}
    base = new_model.new(settings.model, Encoder(home.tokenizer.path), seed=1)
    new_model.write(base, home.tokenizer.path, tmp_path / "base" / "model")
    inputs = {"base": tmp_path / "base", "shards": home.chats.path, "replay": tmp_path / "replay"}
    figures = run_here(sft, settings, tmp_path / "sft", inputs, settings.runtime)
    assert figures["rows"]["epoch"] == round(figures["rows"]["rows_of_source_0"] / 0.75)


def test_a_night_reads_its_exact_share_of_old_rows(nights: dict[str, Path], tmp_path: Path) -> None:
    run(nights, tmp_path / "out", 0.25)
    config = Pretrain(tokens=None, epochs=1.0, tokens_per_step=256, row_length=32)
    encoder: Any = SimpleNamespace(digest="mine", pad_id=0)
    new = SeparateDocumentRows(ShardSet(nights["documents"] / "train"), 32, 0, packed=True)
    mixed = rows.with_replay(new, tmp_path / "out" / "train", encoder, config)
    assert isinstance(mixed, MixedRows)
    assert mixed.counts()["epoch"] == mixed.epoch == round(len(new) / 0.75)
    order = rows.order_of(config, mixed)
    read_rows = np.concatenate([order.step_rows(step) for step in range(order.steps)]).tolist()
    assert sorted(row for row in read_rows if row < len(new)) == list(range(len(new)))
    assert len({row for row in read_rows if row >= len(new)}) == mixed.epoch - len(new)


def test_the_set_has_every_record_once_in_an_order_that_mixes_old_and_new(tmp_path: Path) -> None:
    old, new = ([f"{age} {number}" for number in range(40)] for age in ("old", "new"))
    output = tmp_path / "output"
    inputs = (heldout_set(tmp_path / "a", old), heldout_set(tmp_path / "b", [*new, "old 3"]))
    result = hold_out(output, *inputs)
    assert result == {"records": 80, "new": 40, "unscored": 0, "nights": [40, 40]}
    texts = [record["text"] for record in heldout_records(output)]
    assert sorted(texts) == sorted([*old, *new])
    assert 8 <= sum(text.startswith("old") for text in texts[:40]) <= 32
    nights = heldout.read_nights(output)
    assert nights == [sorted(map(record_name, texts)) for texts in (old, new)]
    later = hold_out(tmp_path / "third", output, heldout_set(tmp_path / "c", ["newer", "new 3"]))
    assert later["nights"] == [40, 40, 1]
    assert heldout.read_nights(tmp_path / "third")[:2] == nights


def test_the_scored_documents_of_a_night_are_bounded_and_stay_the_same(tmp_path: Path) -> None:
    last = heldout_set(tmp_path / "0", (f"before {number:03}" for number in range(100)))
    for night in range(1, 11):
        texts = (f"night {night:02} {number:03}" for number in range(100))
        documents, output = heldout_set(tmp_path / f"new-{night}", texts), tmp_path / str(night)
        result = hold_out(output, last, documents, max_bytes=5000)
        before, nights = heldout.read_nights(last), heldout.read_nights(output)
        assert nights[: len(before)] == before and len(nights) == night + 1
        # 500 bytes of 12 each
        assert (result["nights"][-1], result["unscored"]) == (41, 59)
        last = output
    [scored] = evaluate.heldout_items({"documents": last}, Evaluate(max_bytes=5000))
    assert len(scored.items) == sum(result["nights"]) > 10 * 41, "of each night all that it brought"


def test_too_long_documents_are_skipped() -> None:
    for sizes, expected in (
        ([10, 10, 90, 30, 40], [10, 10, 30, 40]),
        ([10, 51, 50, 41, 20], [10, 51]),
        ([60, 60, 60, 1], [60]),
        ([300, 200, 250], [200]),
        ([], []),
    ):
        scored = scored_documents([{"text": "x" * size} for size in sizes], 100)
        assert [len(document["text"]) for document in scored] == expected
